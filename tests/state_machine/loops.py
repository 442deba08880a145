"""The rules of training loops: gradients, steps and scales, in any order, on both sides."""

from __future__ import annotations

import collections
from typing import ClassVar

import torch
from harness.edge_shapes import BF16, F16, F32, F64
from harness.optimizer_cases import AS_TORCH
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor
from torch.nn import Parameter

import amp_ext
from state_machine.differences import MODELLED
from state_machine.sides import (
    ROWS,
    UNSCALED,
    Pair,
    Scalers,
    Sides,
    assert_near,
    error_of,
    written,
)
from state_machine.steps import HOOKS, Plan, Step

DTYPES = {"float32": F32, "float64": F64, "float16": F16, "bfloat16": BF16}
OWN_OF = {
    "nothing": {},
    "as torch": AS_TORCH,
    "bfloat16 states": {"state_dtype": BF16},
    "dithered": {"master_weights": False, "state_dtype": BF16},
    "to nearest": {"master_weights": False, "rounding": "nearest"},
    "norm": {"max_grad_norm": 0.5},
    "value": {"clip_value": 0.25},
    "split": {"master_weights": "split"},
    "8 bits, split": {"master_weights": "split8", "state_dtype": "8bit"},
    "8 bits to nearest": {"state_dtype": "8bit", "rounding": "nearest"},
    "8 bits beside bfloat16": {"state_dtype": "8bit-bf16"},
    "norm written back": {"max_grad_norm": 1.0, "clip_value": 0.5, "write_back_grads": True},
}
number = st.integers(0, 3)
seeds = st.integers(0, 99)
dtypes = st.sampled_from(sorted(DTYPES))


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def new_params(layout: str, dtype: torch.dtype, seed: int) -> list[Parameter]:
    """Returns three or more parameters, each as a module might have it."""
    draw = draws(seed)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    if layout == "views of one buffer":
        flat = values(13)
        return [Parameter(flat[first : first + 4]) for first in (1, 5, 9)]
    if layout == "strided":
        wide = values(4, 3)
        return [Parameter(values(3, 2).t()), Parameter(wide[:, 1]), Parameter(values(2))]
    if layout == "large":  # enough for moments in groups
        return [Parameter(values(64, 64)), Parameter(values(3))]
    shapes: list[tuple[int, ...]] = [(2, 2), (), (0,)]
    # The first begins after the beginning of its memory, so that a gradient can lie over it partly.
    return [Parameter(values(4)[1:]), *(Parameter(values(*shape)) for shape in shapes)]


class Loops(RuleBasedStateMachine):
    """Training loops over one or two scalers and up to three optimizers."""

    #: How often each rule, and each difference, did something; kept over all examples.
    done: ClassVar[collections.Counter[str]] = collections.Counter()
    met: ClassVar[collections.Counter[str]] = collections.Counter()

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Sides] = []
        self.scalers: list[Scalers] = []
        self.done["examples"] += 1

    def did(self, what: str) -> None:
        self.done[what] += 1

    def differs(self, name: str) -> None:
        """Marks a place where our side is expected to differ from torch's."""
        assert name in MODELLED, name
        self.met[name] += 1

    def sides(self, which: int) -> Sides:
        return self.all[which % len(self.all)]

    def scalers_of(self, sides: Sides) -> Scalers:
        return self.scalers[sides.scaler % len(self.scalers)]

    # Parts of a program.

    @initialize(
        kind=st.sampled_from(["amp_ext", "torch", "limited"]),
        scale=st.sampled_from([2.0**16, 1024.0, 1.0, 1000.0]),
        growth_interval=st.integers(1, 3),
        row=st.sampled_from(sorted(ROWS)),
        dtype=dtypes,
        layout=st.sampled_from(["separate", "large"]),
        own=st.sampled_from(sorted(OWN_OF)),
    )
    def begin(
        self,
        kind: str,
        scale: float,
        growth_interval: int,
        row: str,
        dtype: str,
        layout: str,
        own: str,
    ) -> None:
        self.add_scaler(kind, scale, growth_interval, False)
        self.add_optimizer(row, [dtype], layout, own, 0, 0, True)

    @precondition(lambda self: len(self.scalers) < 2)
    @rule(
        kind=st.sampled_from(["amp_ext", "torch", "limited", "disabled"]),
        scale=st.sampled_from([2.0**16, 8.0]),
        growth_interval=st.integers(1, 3),
        inference=st.booleans(),
    )
    def add_scaler(self, kind: str, scale: float, growth_interval: int, inference: bool) -> None:
        options = {"init_scale": scale, "growth_interval": growth_interval}
        self.scalers.append(Scalers(kind, **options))
        if inference and kind != "torch":
            self.scalers[-1].factor(inference=True)
        self.did("add_scaler")

    @precondition(lambda self: len(self.all) < 3)
    @rule(
        row=st.sampled_from(sorted(ROWS)),
        dtypes=st.lists(dtypes, min_size=1, max_size=2),
        layout=st.sampled_from(["separate", "views of one buffer", "strided", "large"]),
        own=st.sampled_from(sorted(OWN_OF)),
        scaler=number,
        seed=seeds,
        stepped=st.booleans(),
    )
    def add_optimizer(
        self,
        row: str,
        dtypes: list[str],
        layout: str,
        own: str,
        scaler: int,
        seed: int,
        stepped: bool,
    ) -> None:
        if ROWS[row][1].get("amsgrad") and own.startswith("8 bits"):
            own = "bfloat16 states"  # its maximum has no code
        groups = [
            new_params(layout, DTYPES[dtype], seed + index) for index, dtype in enumerate(dtypes)
        ]
        # Of one scaler for good: scalers that come later do not change which.
        chosen = scaler % len(self.scalers)
        self.all.append(Sides(row, groups, chosen, **OWN_OF[own]))
        self.did("add_optimizer")
        if stepped:
            self.iteration(len(self.all) - 1, seed, None, False)

    # Gradients.

    @rule(
        which=number,
        seed=seeds,
        some=st.sampled_from(["all", "all", "all", "even", "odd"]),
        bad=st.sampled_from([None, None, None, "inf", "nan"]),
        layout=st.sampled_from(["dense", "strided", "in a bucket"]),
        scaled=st.sampled_from([True, True, True, False]),
        accumulated=st.booleans(),
    )
    def backward(
        self,
        which: int,
        seed: int,
        some: str,
        bad: str | None,
        layout: str,
        scaled: bool,
        accumulated: bool,
    ) -> None:
        sides, draw = self.sides(which), draws(1000 + seed)
        factor = self.scale_a_loss(self.scalers_of(sides)) if scaled else 1.0
        bucket: list[Tensor] = []
        for index, (_, pair) in enumerate(sides):
            if not pair.mine.requires_grad or some == ["even", "odd"][index % 2 - 1]:
                continue
            value = torch.randn(pair.mine.shape, generator=draw, dtype=F64) * factor
            if bad is not None and value.numel():
                value.view(-1)[0], bad = float(bad), None
            self.give_grad(pair, value.to(pair.mine.dtype), layout, accumulated, bucket)
        self.did("backward")

    def scale_a_loss(self, scalers: Scalers) -> float:
        scalers.forget_counted()
        for sides in self.all:
            state = scalers.state_of(sides) if self.scalers_of(sides) is scalers else None
            if state is not None and state["stage"] is UNSCALED and sides.noted is None:
                sides.noted = {pair: written(pair.mine.grad) for _, pair in sides.with_grads()}
        return scalers.factor()

    def give_grad(
        self, pair: Pair, grad: Tensor, layout: str, accumulated: bool, bucket: list[Tensor]
    ) -> None:
        mine = pair.mine
        if accumulated and mine.grad is not None:
            mine.grad.add_(grad)
        elif layout == "strided":
            mine.grad = torch.stack([grad, grad], -1)[..., 0]
        elif layout == "in a bucket":
            flat = torch.zeros(grad.numel() + 1, dtype=grad.dtype)
            mine.grad = flat[1:].view(grad.shape).copy_(grad)
            bucket.append(flat)
        else:
            mine.grad = grad
        pair.take_grad()

    @rule(which=number, to_none=st.booleans())
    def zero_grad(self, which: int, to_none: bool) -> None:
        sides = self.sides(which)
        sides.mine.zero_grad(set_to_none=to_none)
        sides.twin.zero_grad(set_to_none=to_none)
        self.did("zero_grad")

    @rule(which=number, wrapped=st.booleans())
    def unscale(self, which: int, wrapped: bool) -> None:
        sides = self.sides(which)
        handle = sides.mine
        if wrapped and self.scalers_of(sides).kind != "torch":
            self.differs(
                "`unscale_` of a wrapper and `step` of the optimizer inside, or the reverse"
            )
            handle = sides.wrapper
        sides.remove_release()
        scalers, grads = self.scalers_of(sides), [p.mine.grad for _, p in sides.with_grads()]
        error = error_of(lambda: scalers.mine.unscale_(handle))
        is_ready = scalers.enabled and scalers.twin._scale is not None and scalers.is_ready(sides)
        if is_ready and any(grad.dtype == F16 for grad in grads):
            self.differs("fp16 gradients in `scaler.step`")
            assert isinstance(error, ValueError), repr(error)
            scalers.knows(sides)
        else:
            scalers.assert_same_error(error, error_of(lambda: scalers.twin.unscale_(sides.twin)))
        if error is None:
            sides.noted = None
        for _, pair in sides.with_grads():
            expected = pair.twin.grad
            assert_near(pair.mine.grad, expected, expected.abs(), "unscale_", pair.mine.dtype)
            pair.take_grad()
        self.did("unscale")

    @rule(which=number, max_norm=st.sampled_from([0.0, 0.5, 1e4]))
    def clip_grad_norm(self, which: int, max_norm: float) -> None:
        sides = self.sides(which)
        pairs = [pair for _, pair in sides.with_grads()]
        doubles = all(pair.mine.dtype == F64 for pair in pairs)
        if not pairs:
            return
        norm = amp_ext.clip_grad_norm_([pair.mine for pair in pairs], max_norm)
        expected = torch.nn.utils.clip_grad_norm_(
            [pair.twin for pair in pairs], max_norm, foreach=False
        )
        coarse = F64 if doubles else F32
        assert_near(norm, expected, expected.double(), "norm", coarse)
        for pair in pairs:
            grad, dtype = pair.twin.grad, pair.mine.dtype
            dtype = coarse if dtype == F64 else dtype
            assert_near(pair.mine.grad, grad, grad.abs(), "clipped gradient", dtype)
            pair.take_grad()
        self.did("clip_grad_norm")

    # Steps.

    def take_step(self, sides: Sides, plan: Plan) -> str:
        sides.remove_release()
        return Step(sides, plan, self.differs).take()

    def hook(self, sides: Sides, hook: str | None) -> str | None:
        """Returns the hook, unless gradients are so large that their squares may leave float32."""
        grads = [pair.mine.grad for _, pair in sides.with_grads()]
        if any(((grad.abs() > 2.0**50) & grad.isfinite()).any() for grad in grads):
            return None  # torch's side keeps them in float64
        return hook

    @rule(
        which=number,
        hook=st.sampled_from([None, None, None, *HOOKS]),
        preset=st.sampled_from([None, None, None, 4.0]),
        then_update=st.booleans(),
    )
    def scaler_step(
        self, which: int, hook: str | None, preset: float | None, then_update: bool
    ) -> None:
        sides = self.sides(which)
        grads = [pair.mine.grad for _, pair in sides.with_grads()]
        if preset and any((grad * preset).isinf().any() for grad in grads):
            preset = None  # torch's side does not see it
        plan = Plan(self.scalers_of(sides), self.hook(sides, hook), preset=preset)
        self.did(f"scaler_step {self.take_step(sides, plan)}")
        if then_update:
            self.scalers_of(sides).update(None)

    @rule(which=number)
    def wrapper_step(self, which: int) -> None:
        """Steps an object that derives from torch's class and has copied the optimizer's flag."""
        sides = self.sides(which)
        scalers = self.scalers_of(sides)
        is_watched = sides.mine.norm_guard is not None or sides.mine.step_applied is not None
        writes_back = any(group["write_back_grads"] for group in sides.mine.param_groups)
        if scalers.kind in ("torch", "disabled") or is_watched or writes_back:
            return
        if scalers.twin.get_scale() == 1.0 and sides.scaled:
            return  # gradients that a step took are not written when they are unscaled by 1
        self.did(f"wrapper_step {self.take_step(sides, Plan(scalers, wrapped=True))}")

    @rule(which=number, hook=st.sampled_from([None, None, *HOOKS]))
    def plain_step(self, which: int, hook: str | None) -> None:
        sides = self.sides(which)
        if sides.has_finite_grads():
            self.did(f"plain_step {self.take_step(sides, Plan(hook=self.hook(sides, hook)))}")

    @rule(
        which=number,
        seed=seeds,
        bad=st.sampled_from([None, None, None, "inf"]),
        direct=st.sampled_from([False, False, False, True]),
    )
    def iteration(self, which: int, seed: int, bad: str | None, direct: bool) -> None:
        """What most programs do all the time."""
        sides = self.sides(which)
        self.did(f"iteration {self.iterate(which, seed, bad)}")
        if direct and sides.has_finite_grads():
            self.did(f"direct step {self.take_step(sides, Plan())}")

    def iterate(self, which: int, seed: int, bad: str | None) -> str:
        sides = self.sides(which)
        scalers = self.scalers_of(sides)
        sides.mine.zero_grad()
        sides.twin.zero_grad()
        self.backward(which, seed, "all", bad, "dense", True, False)
        result = self.take_step(sides, Plan(scalers))
        scalers.update(None, sides)
        return result

    @rule(which=number, scaled=st.booleans())
    def interrupted_step(self, which: int, scaled: bool) -> None:
        sides = self.sides(which)
        scalers = self.scalers_of(sides)
        if scaled and not scalers.is_ready(sides) and not scalers.flags_of(sides):
            return  # torch's scaler refuses the step before its hooks run
        if scaled or sides.has_finite_grads():
            plan = Plan(scalers if scaled else None, interrupted=True)
            self.did(f"interrupted_step {self.take_step(sides, plan)}")

    # The scale.

    @rule(which=number, new_scale=st.sampled_from([None, None, None, 4.0, 2.0**15]))
    def update(self, which: int, new_scale: float | None) -> None:
        if self.scalers[which % len(self.scalers)].update(new_scale):
            self.did("update")

    @rule(
        which=number,
        name=st.sampled_from(["growth_interval", "growth_factor", "backoff_factor"]),
        value=st.sampled_from([1, 3]),
    )
    def set_scaler(self, which: int, name: str, value: int) -> None:
        scalers = self.scalers[which % len(self.scalers)]
        if not scalers.enabled:
            return
        factor = {"growth_interval": 1, "growth_factor": 1.5, "backoff_factor": 0.25}[name]
        for scaler in (scalers.mine, scalers.twin):
            getattr(scaler, f"set_{name}")(value * factor)
        self.did("set_scaler")
