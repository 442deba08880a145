"""The state machine: what programs do with scalers and optimizers, in any order, on both sides."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import torch
from harness.edge_shapes import F32
from harness.optimizer_cases import IN_TORCH, counts_steps, swapping, through_a_file
from harness.transports import DelayedTransport
from hypothesis import strategies as st
from hypothesis.stateful import rule
from torch import Tensor
from torch.nn import Parameter, ParameterList

from amp_ext.optim import (
    float32_state_dict,
    offload_states,
)
from state_machine.loops import DTYPES, draws, dtypes, new_params, number, seeds
from state_machine.releasing import Releasing
from state_machine.sides import (
    OWN_OPTIONS,
    Pair,
    Sides,
    assert_near,
    distance_of_codes,
    error_of,
)

# What a program changes in a group between two steps.
CHANGES = {
    "lr": 0.01,
    "lr as a tensor": torch.tensor(0.03125),
    "lr of numpy": np.float64(0.125),
    "weight_decay": 0.25,
    "weight_decay of numpy": np.float32(0.5),
    "maximize": True,
    "momentum": 0.5,
    "no momentum": 0.0,
    "max_grad_norm": 0.25,
    "no max_grad_norm": None,
    "clip_value": 0.5,
    "write_back_grads": True,
}

# Options that decide which state a parameter has.
OF_STATE = ("master_weights", "state_dtype", "rounding", "amsgrad", "momentum", "dampening")


class Machine(Releasing):
    """Loops in which parameters, groups and options change, and all is copied, saved and loaded."""

    # Parameters.

    @rule(which=number, numbered=number, frozen=st.booleans())
    def freeze(self, which: int, numbered: int, frozen: bool) -> None:
        _, pair = self.sides(which).pair(numbered)
        for param in (pair.mine, pair.twin):
            param.requires_grad_(not frozen)
            param.grad = None
        self.did("freeze")

    @rule(
        which=number,
        numbered=number,
        how=st.sampled_from(["copy_", "mul_", "data", "new data"]),
        seed=seeds,
    )
    @torch.no_grad()
    def write_param(self, which: int, numbered: int, how: str, seed: int) -> None:
        sides = self.sides(which)
        group, pair = sides.pair(numbered)
        param = pair.mine
        value = torch.randn(param.shape, generator=draws(2000 + seed)).to(param.dtype)
        if how == "copy_":
            param.copy_(value)
        elif how == "mul_":
            param.mul_(0.75)
        elif how == "data":
            param.data.copy_(value)
        else:
            param.data = value
        sides.wrote(group, pair)
        if "data" in how:
            self.refresh_masters(sides)
        self.did("write_param")

    @rule(
        which=number,
        seed=seeds,
        bad=st.sampled_from([None, None, "inf"]),
        numbered=number,
        how=st.sampled_from(["copy_", "mul_", "data", "new data"]),
        is_released=st.booleans(),
    )
    def offloaded_iterations(
        self, which: int, seed: int, bad: str | None, numbered: int, how: str, is_released: bool
    ) -> None:
        """Keeps the states in host memory for two steps, with a write between them."""
        sides = self.sides(which)
        sides.remove_release()
        if any(group["write_back_grads"] for group in sides.mine.param_groups):
            return
        error = error_of(lambda: offload_states(sides.mine, transport=DelayedTransport(delay=0.0)))
        if error is not None:
            assert "offload_states: param of group" in str(error), repr(error)
            self.did("offloaded_iterations refused")
            return
        sides.mine.offload._chunk_bytes = 64  # several chunks
        for is_first in (True, False):
            if is_released:
                self.released_iteration(which, seed, 1, "all", (), True, "step")
            else:
                # Gradients that are unscaled already are not scanned again: inf would be stepped.
                is_scanned = self.scalers_of(sides).is_ready(sides)
                self.iterate(which, seed, bad if is_first and is_scanned else None)
            if is_first:
                self.write_param(which, numbered, how, seed)
        sides.remove_release()
        sides.mine.offload.remove()
        self.did("offloaded_iterations")

    def refresh_masters(self, sides: Sides) -> None:
        sides.mine.refresh_masters()
        for _, pair in sides:
            pair.is_out_of_date = False

    @rule(
        which=number,
        numbered=number,
        dtype=dtypes,
        how=st.sampled_from(["module.to", "swapped", "data"]),
    )
    def convert(self, which: int, numbered: int, dtype: str, how: str) -> None:
        sides = self.sides(which)
        group, pair = sides.pair(numbered)
        before = pair.mine.dtype
        if pair.is_converted or sides.has_codes():
            return  # what becomes of its state shows at the next step
        if how == "data":
            pair.mine.grad = None
            pair.mine.data = pair.mine.data.to(DTYPES[dtype])
        else:
            if how == "swapped":
                sides.remove_release()  # the hook would go to the other tensor
            with swapping(how == "swapped"):
                ParameterList([pair.mine]).to(DTYPES[dtype])
        if pair.mine.dtype != before:
            pair.is_converted = True
            sides.wrote(group, pair)
            if before.itemsize > 2:  # it had no master
                pair.twin.data.copy_(pair.mine.detach())
        pair.take_grad()
        self.did(f"convert {how}")

    @rule(which=number, numbered=number, seed=seeds, keep_state=st.booleans())
    def replace_param(self, which: int, numbered: int, seed: int, keep_state: bool) -> None:
        sides = self.sides(which)
        group, pair = sides.pair(numbered)
        value = torch.randn(pair.mine.shape, generator=draws(3000 + seed)).to(pair.mine.dtype)
        new = dataclasses.replace(pair, mine=Parameter(value))
        for members in (*(group["params"] for group in sides.mine.param_groups), *sides.pairs):
            for old, param in ((pair.mine, new.mine), (pair, new)):
                members[:] = [param if member is old else member for member in members]
        state = sides.mine.state.pop(pair.mine, None)
        if not keep_state:
            sides.twin.state.pop(pair.twin, None)
        elif state is not None:
            sides.mine.state[new.mine] = state
        pair.twin.requires_grad_(True)
        sides.wrote(group, new)
        new.take_grad()
        self.did("replace_param")

    # Groups, options and states.

    @rule(which=number, dtype=dtypes, lr=st.sampled_from([0.05, 0.25]), seed=seeds)
    def add_group(self, which: int, dtype: str, lr: float, seed: int) -> None:
        sides = self.sides(which)
        if len(sides.pairs) >= 3:
            return
        pairs = [Pair.of(param) for param in new_params("separate", DTYPES[dtype], seed)]
        norm = {"max_grad_norm": sides.mine.param_groups[0]["max_grad_norm"]}
        mine, twins = [pair.mine for pair in pairs], [pair.twin for pair in pairs]
        sides.mine.add_param_group({"params": mine, "lr": lr, **norm})
        sides.twin.add_param_group({"params": twins, "lr": lr})
        sides.pairs.append(pairs)
        self.did("add_group")

    @rule(which=number, numbered=number)
    def remove_group(self, which: int, numbered: int) -> None:
        sides = self.sides(which)
        if len(sides.pairs) < 2:
            return
        index = numbered % len(sides.pairs)
        for pair in sides.pairs.pop(index):
            sides.mine.state.pop(pair.mine, None)
            sides.twin.state.pop(pair.twin, None)
        del sides.mine.param_groups[index], sides.twin.param_groups[index]
        self.did("remove_group")

    @rule(which=number, numbered=number)
    def move_param(self, which: int, numbered: int) -> None:
        """Moves a parameter to the next group, so that all of them stay in their order."""
        sides = self.sides(which)
        index = numbered % len(sides.pairs)
        if index + 1 == len(sides.pairs) or len(sides.pairs[index]) < 2:
            return
        ours = sides.mine.param_groups[index : index + 2]
        first, second = ([group.get(name) for name in OF_STATE] for group in ours)
        if first != second:
            return  # its state would have to be another
        for groups in (sides.mine.param_groups, sides.twin.param_groups):
            *stay, moved = groups[index]["params"]
            groups[index]["params"] = stay
            groups[index + 1]["params"].insert(0, moved)
        sides.pairs[index + 1].insert(0, sides.pairs[index].pop())
        self.did("move_param")

    @rule(which=number, numbered=number, change=st.sampled_from(sorted(CHANGES)))
    def change_option(self, which: int, numbered: int, change: str) -> None:
        sides, value = self.sides(which), CHANGES[change]
        index = numbered % len(sides.pairs)
        name = change.removeprefix("no ").split()[0]
        group, others = sides.mine.param_groups[index], sides.twin.param_groups[index]
        if name == "max_grad_norm":
            for each in sides.mine.param_groups:
                each[name] = value
        # torch's RMSprop makes the buffer of its momentum at the first step only.
        elif name in group and not (name == "momentum" and group.get("nesterov", True)):
            group[name] = value
            if name not in OWN_OPTIONS:  # torch computes with a tensor in its dtype
                others[name] = value.double() if isinstance(value, Tensor) else value
            if isinstance(value, np.generic):
                self.differs("numpy numbers in groups, in `state_dict`")
                others[name] = value.item()
        self.did("change_option")

    @rule(which=number, numbered=number, how=st.sampled_from(["in place", "replaced"]))
    def write_state(self, which: int, numbered: int, how: str) -> None:
        sides = self.sides(which)
        _, pair = sides.pair(numbered)
        state = sides.state(pair)
        for name in sides.buffers(pair).keys() & state.keys():
            if how == "in place":
                state[name].mul_(0.5)
            else:
                state[name] = state[name] * 0.5
            self.did("write_state")
        numbers = sides.numbers(pair)
        for name, buffer in sides.buffers(pair).items():
            buffer.copy_(numbers[name])  # a ratio is to a second moment that was written

    # Copies and files.

    @rule(how=st.sampled_from(["deepcopy", "pickle"]))
    def copy_all(self, how: str) -> None:
        def copied(value: Any) -> Any:
            return copy.deepcopy(value) if how == "deepcopy" else pickle.loads(pickle.dumps(value))

        for scalers in self.scalers:
            error = error_of(lambda s=scalers: copied(s.mine))
            assert type(error) is type(error_of(lambda s=scalers: copied(s.twin)))
            if error is not None:
                return
        params = [[pair.mine for _, pair in sides] for sides in self.all]
        optimizers, scalers = [s.mine for s in self.all], [s.mine for s in self.scalers]
        params, optimizers, scalers = copied((params, optimizers, scalers))
        for sides, mine, optimizer in zip(self.all, params, optimizers, strict=True):
            for (_, pair), param in zip(list(sides), mine, strict=True):
                pair.mine = param
                pair.take_grad()
            sides.mine = optimizer
        for each, scaler in zip(self.scalers, scalers, strict=True):
            each.mine, each.twin = scaler, copied(each.twin)
        self.did("copy_all")

    @rule(
        which=number,
        how=st.sampled_from(["ours into ours", "by name", "ours into torch", "torch into ours"]),
        inference=st.booleans(),
    )
    def save_and_load(self, which: int, how: str, inference: bool) -> None:
        sides = self.sides(which)
        is_amid = self.scalers_of(sides).state_of(sides) is not None
        if any(pair.is_converted for _, pair in sides) or (
            is_amid and how in ("ours into ours", "by name")
        ):
            return  # a new optimizer is another one to its scaler
        if how in ("ours into ours", "by name"):
            self._into_ours(sides, how == "by name", inference)
        elif how == "ours into torch":
            self._into_torch(sides)
        elif sides.name in IN_TORCH:
            self._from_torch(sides, inference)
        self.differs("`load_state_dict` of an optimizer")
        self.did(f"save_and_load {how}")

    def _into_ours(self, sides: Sides, by_name: bool, inference: bool) -> None:
        file, old = through_a_file(sides.mine.state_dict()), sides.mine
        if by_name:
            self.differs("a named parameter at another position in the file")
            # Of a model that declares its layers in the other order, behind DDP
            for number, saved in enumerate(file["param_groups"]):
                saved["param_names"] = [f"module.{number}.{i}" for i in range(len(saved["params"]))]
            sides.pairs = [pairs[::-1] for pairs in sides.pairs]
            for group in sides.twin.param_groups:
                group["params"] = [*group["params"]][::-1]
        sides.mine = sides.new_of_ours()
        groups = zip(sides.mine.param_groups, old.param_groups, strict=True)
        for number, (group, before) in enumerate(groups):
            group.update({name: before[name] for name in OWN_OPTIONS})
            if by_name:
                group["param_names"] = [f"{number}.{i}" for i in range(len(group["params"]))][::-1]
        with torch.inference_mode(inference):
            sides.mine.load_state_dict(file)
        for number, group in enumerate(sides.mine.param_groups):
            names = group.pop("param_names", [])
            assert names == [f"{number}.{i}" for i in range(len(names))][::-1], "names of a group"

    def _into_torch(self, sides: Sides) -> None:
        has_codes = sides.has_codes()
        saved = float32_state_dict(sides.mine) if has_codes else sides.mine.state_dict()
        file = through_a_file(saved)
        for key, (_, pair) in enumerate(sides):
            if not sides.has_stepped(pair):
                file["state"].pop(key, None)
            for name in ("master_param", *([] if counts_steps(sides.name, {}) else ["step"])):
                file["state"].get(key, {}).pop(name, None)  # torch keeps what it does not know
        for group in file["param_groups"]:
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].double()
        sides.twin.load_state_dict(file)

    def _from_torch(self, sides: Sides, inference: bool) -> None:
        file = through_a_file(sides.twin.state_dict())
        with torch.inference_mode(inference):
            sides.mine.load_state_dict(file)
        for _, pair in sides:  # such a file has no masters
            pair.twin.data.copy_(pair.mine.detach())
            numbers, state = sides.numbers(pair), sides.state(pair)
            for name, buffer in sides.buffers(pair).items():
                more = distance_of_codes(name, buffer, state, numbers)
                if more.any():
                    assert_near(numbers[name], buffer, buffer.abs(), f"loaded {name}", F32, more)
                    buffer.copy_(numbers[name])
            pair.is_out_of_date = False

    # What always holds.

    def check_invariants(self, *_: Any) -> None:
        """Holds after each rule; not an invariant by name, which would fill the printed program."""
        for sides in self.all:
            sides.assert_as_known()
        for scalers in self.scalers:
            scalers.assert_as_known()
