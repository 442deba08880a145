"""Optimizers and scalers of ours beside torch's in float64, and how far results may lie apart.

Torch's side starts every step from the very numbers of ours, so one step's rounding is all that
may lie between them; and between steps nothing may: each bit of our side is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness.edge_shapes import BF16, F16, F32, F64
from harness.list_operations import DESCRIBED
from harness.number_codes import (
    GROUP,
    OFFSET,
    WIDEST_CODE,
    decode_q8h,
    dequantize_blockwise,
    join,
    root_of,
    root_of_q8s,
    unit_below,
)
from harness.optimizer_cases import OPTIMIZERS, counts_steps, ours, taken, theirs
from harness.reference import TOLERANCES, refreshed_master
from harness.scaler_cases import WithCopiedFlag
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

import amp_ext

Optimizer = torch.optim.Optimizer
READY = torch.amp.grad_scaler.OptState.READY
STEPPED = torch.amp.grad_scaler.OptState.STEPPED
UNSCALED = torch.amp.grad_scaler.OptState.UNSCALED
ROWS = {row.id: row.values for row in OPTIMIZERS}
OWN_OPTIONS = (
    "master_weights",
    "state_dtype",
    "rounding",
    "max_grad_norm",
    "clip_value",
    "write_back_grads",
)
SECOND_MOMENTS = [b.name for one in DESCRIBED for b in one.buffers if b.role == "second moment"]
# Half of the distance of two neighbours below the normal numbers, and a little more.
SUBNORMAL = {F16: 2.0**-24, BF16: 1e-40, F32: 1e-44, F64: 0.0}


def error_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return error
    return None


def doubled(tensor: Tensor) -> Tensor:
    return tensor.detach().to(F64, copy=True)


def assert_exact(actual: Tensor, expected: Tensor, what: str) -> None:
    """Asserts that a tensor holds these numbers, rounded to its dtype."""
    actual, rounded = actual.detach(), expected.detach().to(actual.dtype)
    if torch.equal(actual, rounded):  # in a tenth of the time that the rest takes
        return
    torch.testing.assert_close(
        actual, rounded, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def decoded(param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state with its master and its moments as numbers under torch's names."""
    numbers = dict(state)
    root = None
    for second in SECOND_MOMENTS:
        if second in state:
            root = root_of(state[second])
        elif f"{second}_q8s" in state:
            root = root_of_q8s(state[f"{second}_q8s"], state[f"{second}_exp"])
            numbers[second] = root.square()
    for name, value in state.items():
        if name.endswith("_q8h"):
            numbers[name.removesuffix("_q8h")] = decode_q8h(value, root)
        elif name.endswith("_q8m"):
            name = name.removesuffix("_q8m")
            numbers[name] = dequantize_blockwise(value, state[f"{name}_exp"], "q8m")
        elif name.startswith("master_low"):
            numbers["master_param"] = join(param.detach(), value)
    return numbers


def second_moment(numbers: dict[str, Any]) -> Tensor | None:
    """Returns the second moment of a state, if there is one."""
    return next((numbers[name] for name in SECOND_MOMENTS if name in numbers), None)


def distance_of_codes(name: str, value: Tensor, state: dict[str, Any], numbers: Any) -> Tensor:
    """Returns how far a moment in 8 bits may lie from its number, 0 for any other.

    Args:
        name: Of the moment.
        value: Its number.
        state: As it is kept.
        numbers: The state as numbers.
    """
    if f"{name}_q8h" in state:  # a code, and what is limited to the largest
        unit = doubled(unit_below(second_moment(numbers).float().sqrt()))
        code = WIDEST_CODE * (value.abs() / unit + OFFSET).square() * unit
        return code + (value.abs() - 15 * unit).clamp(min=0.0)
    if f"{name}_exp" not in state:
        return torch.zeros_like(value)
    bits, size = (6, value.sqrt()) if f"{name}_q8s" in state else (5, value.abs())
    largest = size.view(-1, GROUP).amax(-1, keepdim=True).expand(-1, GROUP).reshape(size.shape)
    # An octave has 2^bits codes, and what is above the largest is less than four times as large.
    code = size * 2.0**-bits + largest * 2.0 ** (-bits - 1)
    return code * (2 * size + code) if bits == 6 else code


def assert_near(
    actual: Tensor,
    expected: Tensor,
    size: Tensor,
    what: str,
    tolerance_dtype: torch.dtype,
    more: Tensor | float = 0.0,
) -> None:
    """Asserts that two numbers agree to the rounding of numbers as large as ``size``."""
    relative = TOLERANCES[tolerance_dtype]["rtol"] + TOLERANCES[F32]["rtol"] * (
        actual.dtype not in (F32, F64)
    )
    expected = expected.detach().to(actual.dtype).double()
    actual = doubled(actual)
    bound = relative * torch.maximum(size, expected.abs()) + SUBNORMAL[tolerance_dtype] + more
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    # A code that is no number, or whose neighbour in a group is none, decodes to NaN.
    near = same | ((actual - expected).abs() <= bound) | ~torch.as_tensor(more).isfinite()
    far = [tensor.expand_as(near)[~near].tolist()[:4] for tensor in (actual, expected, size, bound)]
    assert near.all(), "{}: {} instead of {}, size {}, bound {}".format(what, *far)


def written(grad: Tensor) -> tuple[Any, ...]:
    """Returns what changes when a gradient is written or replaced; keeps its place, not it."""
    return StorageWeakRef(grad.untyped_storage()), grad.storage_offset(), grad._version


def is_split(group: dict[str, Any]) -> bool:
    return isinstance(group["master_weights"], str)


@dataclasses.dataclass(eq=False)
class Pair:
    """A parameter of ours and its twin in float64, which holds the number behind it.

    Attributes:
        is_out_of_date: Whether the parameter was written, so that the next step refreshes its
            master.
        left_behind: This master.
        is_converted: Whether its dtype was changed, so that the next step casts its state.
        restarts: How often a step began it anew, since something in it was inf or NaN.
    """

    mine: Parameter
    twin: Parameter
    is_out_of_date: bool = False
    left_behind: Tensor | None = None
    is_converted: bool = False
    restarts: int = 0

    @classmethod
    def of(cls, mine: Parameter) -> Pair:
        return cls(mine, Parameter(doubled(mine)))

    def take_grad(self) -> None:
        """Gives the twin the gradient that our side has."""
        self.twin.grad = None if self.mine.grad is None else doubled(self.mine.grad)


class Sides:
    """An optimizer of ours and torch's loop over twins of its parameters.

    Attributes:
        pairs: Parameters by group.
        wrapper: An object around our optimizer.
        scaler: Number of the scaler that it is used with.
        noted: The gradients when a loss was scaled after ``unscale_``; None if none was.
        scaled: The gradients that the last step with a scale took, as :func:`written` tells them.
        released_by: The scaler with which gradients are released, if they are; None without one.
        hooked: The parameters whose gradients the present release has met.
    """

    def __init__(self, row: str, groups: list[list[Parameter]], scaler: int, **own: Any) -> None:
        self.name, self.options = ROWS[row]
        self.own, self.scaler = own, scaler
        self.noted: dict[Pair, Any] | None = None
        self.pairs = [[Pair.of(param) for param in params] for params in groups]
        self.mine = self.new_of_ours()
        twins = [{"params": [pair.twin for pair in pairs]} for pairs in self.pairs]
        switches = taken(self.name, {"foreach": False, "fused": False})
        self.twin = theirs(self.name)(twins, **switches, **self.options)

    def new_of_ours(self) -> Optimizer:
        groups = [{"params": [pair.mine for pair in pairs]} for pairs in self.pairs]
        return ours(self.name)(groups, **self.options, **self.own)

    @property
    def mine(self) -> Optimizer:
        return self._mine

    @mine.setter
    def mine(self, optimizer: Optimizer) -> None:
        assert optimizer.gradient_release is None  # copies have none
        if hasattr(self, "_mine"):
            self.remove_release()
        self._mine = optimizer
        self.released_by: Scalers | None = None
        self.hooked: set[Parameter] = set()
        self.scaled: dict[Pair, Any] = {}
        self.wrapper = WithCopiedFlag(optimizer)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Pair]]:
        for group, pairs in zip(self.mine.param_groups, self.pairs, strict=True):
            for pair in pairs:
                yield group, pair

    def remove_release(self) -> None:
        if self.mine.gradient_release is not None:
            self.mine.gradient_release.remove()
        self.hooked.clear()

    def with_grads(self) -> list[tuple[dict[str, Any], Pair]]:
        return [(group, pair) for group, pair in self if pair.mine.grad is not None]

    def has_finite_grads(self) -> bool:
        return all(pair.mine.grad.isfinite().all() for _, pair in self.with_grads())

    def pair(self, number: int) -> tuple[dict[str, Any], Pair]:
        pairs = list(self)
        return pairs[number % len(pairs)]

    def state(self, pair: Pair) -> dict[str, Any]:
        return self.mine.state.get(pair.mine, {})

    def master(self, group: dict[str, Any], pair: Pair) -> Tensor | None:
        if pair.mine.dtype in (F16, BF16) and group["master_weights"]:
            return self.numbers(pair).get("master_param")
        return None

    def numbers(self, pair: Pair) -> dict[str, Any]:
        """Returns the state of our side as numbers, whatever its form."""
        return decoded(pair.mine, self.state(pair))

    def buffer_dtype(self, group: dict[str, Any], pair: Pair) -> torch.dtype:
        keeps = group["state_dtype"] is None or pair.mine.dtype == F64
        return pair.mine.dtype if keeps else getattr(torch, group["state_dtype"], BF16)

    def has_codes(self) -> bool:
        """Returns whether a part of a number may be kept in integers."""
        groups = self.mine.param_groups
        return any(is_split(g) or str(g["state_dtype"]).startswith("8bit") for g in groups)

    def has_stepped(self, pair: Pair) -> bool:
        return bool(self.twin.state.get(pair.twin))

    def buffers(self, pair: Pair) -> dict[str, Tensor]:
        """Returns the state of torch's side without its counter."""
        state = self.twin.state.get(pair.twin, {})
        return {name: t for name, t in state.items() if name != "step" and t is not None}

    # What happens between steps.

    def wrote(self, group: dict[str, Any], pair: Pair) -> None:
        """Takes over what was written into a parameter of ours, behind its master if it has one."""
        value = doubled(pair.mine)
        master = self.master(group, pair)
        if is_split(group) and master is not None:
            value = doubled(master)  # what is below the parameter stays
        elif master is not None:
            if not pair.is_out_of_date:
                pair.left_behind = pair.twin.detach().float()
            value = refreshed_master(pair.left_behind, pair.mine.detach()).double()
            pair.is_out_of_date = True
        else:
            pair.is_out_of_date = False  # of the parameter a master will be made
        pair.twin.data.copy_(value)

    def assert_as_known(self) -> None:
        """Asserts that nothing but a step has moved a bit of our side."""
        for number, (group, pair) in enumerate(self):
            value, state, master = pair.twin.detach(), self.state(pair), self.master(group, pair)
            what = f"param {number} of {self.name}"
            if master is None or not is_split(group):
                assert_exact(pair.mine, value, what)
            if master is None:
                assert_exact(doubled(pair.mine), value, what)
            elif not pair.is_out_of_date and not pair.is_converted:
                assert master.dtype == F32
                assert_exact(doubled(master), value, f"master of {what}")
            if pair.mine.grad is not None:
                assert_exact(doubled(pair.mine.grad), pair.twin.grad, f"grad of {what}")
            else:
                assert pair.twin.grad is None
            self._assert_state(group, pair, state, what)

    def _assert_state(
        self, group: dict[str, Any], pair: Pair, state: dict[str, Any], what: str
    ) -> None:
        expected, dtype = self.twin.state.get(pair.twin, {}), self.buffer_dtype(group, pair)
        if not expected:
            # Without a moment torch keeps nothing, and ours counts the steps that it dithers, also
            # where a group has lost its momentum since.
            ignored = () if counts_steps(self.name, {}) else ("step",)
            # The exponents of zeros are 1.
            others = {
                name: t
                for name, t in state.items()
                if name not in ignored and not name.startswith("master") and name[-4:] != "_exp"
            }
            assert not any(t.any() for t in others.values()), f"{what} has not stepped: {others}"
        numbers = decoded(pair.mine, state)
        for name, value in self.buffers(pair).items():
            assert name in numbers, f"{name} of {what} is gone"
            if pair.is_converted:
                assert_exact(state[name].to(dtype), value, f"{name} of {what}")
            else:
                kept = state.get(name)
                # A step converts what it uses, and a group may have lost its momentum for a while.
                is_used = kept is not None and name != "momentum_buffer"
                assert not is_used or kept.dtype == dtype, f"{name} of {what} is {kept.dtype}"
                assert_exact(doubled(numbers[name]), value, f"{name} of {what}")
        if "step" in expected:
            assert state["step"].item() == expected["step"].item(), f"step of {what}"


class Scalers:
    """A scaler that steps optimizers of ours, and torch's beside it.

    Args:
        kind: "amp_ext" or "torch", by which our optimizers are stepped; "limited" is ours with
            limits of the scale, "disabled" ours without a scale.
        options: Of both constructors.
    """

    def __init__(self, kind: str, **options: Any) -> None:
        self.kind, self.options = kind, {"enabled": kind != "disabled", **options}
        self.limits = {"min_scale": 0.25, "max_scale": 2.0**17} if kind == "limited" else {}
        self.mine = self.new_of_ours()
        self.twin = self.new_of_torchs()

    def new_of_torchs(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", **self.options)

    def new_of_ours(self) -> torch.amp.GradScaler:
        if self.kind == "torch":
            return torch.amp.GradScaler("cpu", **self.options)
        return amp_ext.GradScaler("cpu", **self.options, **self.limits)

    @property
    def enabled(self) -> bool:
        return self.kind != "disabled"

    def states(self) -> list[dict[str, Any]]:
        return list(self.twin._per_optimizer_states.values()) if self.enabled else []

    def state_of(self, sides: Sides) -> dict[str, Any] | None:
        """Returns what torch's scaler knows of its optimizer; does not make it up."""
        return self.twin._per_optimizer_states.get(id(sides.twin)) if self.enabled else None

    def knows(self, sides: Sides) -> dict[str, Any]:
        """Makes an entry, as a call does on our side that torch's is spared."""
        return self.twin._per_optimizer_states[id(sides.twin)]

    def is_ready(self, sides: Sides) -> bool:
        """Returns whether neither ``unscale_`` nor a step came since the last update."""
        state = self.state_of(sides)
        return state is None or state["stage"] is READY

    def flags_of(self, sides: Sides) -> dict[Any, Tensor]:
        state = self.state_of(sides)
        return {} if state is None else state["found_inf_per_device"]

    def factor(self, inference: bool = False) -> float:
        """Scales a loss of 1 on both sides."""
        with torch.inference_mode(inference):
            mine = self.mine.scale(torch.ones(()))
        twin = self.twin.scale(torch.ones(()))
        assert_exact(mine, twin, "the scaled loss")
        return mine.item()

    def inverse(self) -> float:
        """Returns what gradients are multiplied by to unscale them."""
        return torch.tensor(1.0 / self.twin.get_scale(), dtype=F64).float().item()

    def assert_same_error(self, mine: BaseException | None, twin: BaseException | None) -> None:
        """Asserts that both sides raised, or that none did; by its class if the scaler is ours."""
        if mine is None or twin is None or self.kind != "torch":
            assert type(mine) is type(twin), f"ours: {mine!r}, torch: {twin!r}"

    def forget_counted(self) -> None:
        """Lets torch's scaler forget the unscaled gradients that an update has counted, as ours."""
        if self.enabled:
            states = self.twin._per_optimizer_states
            for key in [k for k, s in states.items() if s["stage"] is UNSCALED and "counted" in s]:
                del states[key]

    def update(self, new_scale: float | None, sides: Sides | None = None) -> bool:
        unscaled = {}
        if self.enabled and self.kind != "torch" and new_scale is None:
            unscaled = {
                key: state
                for key, state in self.twin._per_optimizer_states.items()
                if state["stage"] is UNSCALED and state["found_inf_per_device"]
            }
        self.forget_counted()
        # Read before: torch adds the flags of all optimizers to that of the first.
        flags = [] if sides is None else [flag > 0 for flag in self.flags_of(sides).values()]
        skipped = [
            any(flag > 0 for flag in s["found_inf_per_device"].values()) for s in self.states()
        ]
        errors = [error_of(lambda s=s: s.update(new_scale)) for s in (self.mine, self.twin)]
        self.assert_same_error(*errors)
        if errors[0] is not None:
            return False
        for key, state in unscaled.items():
            state["counted"] = True
            self.twin._per_optimizer_states[key] = state
        if self.limits:
            self.twin._scale.clamp_(self.limits["min_scale"], self.limits["max_scale"])
        if self.enabled and self.kind != "torch" and skipped and new_scale is None:
            assert self.mine.last_step_skipped(wait=True) == any(skipped)
            if sides is not None and flags:
                assert self.mine.last_step_skipped(sides.mine, wait=True) == any(flags)
        if not 2.0**-8 <= self.twin.get_scale() <= 2.0**20:
            for scaler in (self.mine, self.twin):
                scaler.update(1024.0)
        return True

    def assert_as_known(self) -> None:
        assert self.mine.state_dict() == self.twin.state_dict()
