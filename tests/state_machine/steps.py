"""One step of both sides, and whether what came of it is the same."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from harness.edge_shapes import F16, F32, F64
from harness.list_operations import SQUARES
from harness.optimizer_cases import formula_of
from torch import Tensor

from state_machine.sides import (
    READY,
    STEPPED,
    UNSCALED,
    Pair,
    Scalers,
    Sides,
    assert_exact,
    assert_near,
    distance_of_codes,
    doubled,
    error_of,
    is_split,
    second_moment,
    written,
)


class SkippedError(Exception):
    """Ends a step of torch's side that ours skips."""


class Interruption(KeyboardInterrupt):
    """What a hook of the machine raises."""


# Ways in which a step hook writes gradients; factors are powers of two, so that no bit is lost.
HOOKS = {
    "in place": lambda param: param.grad.mul_(64.0),
    "through .data": lambda param: param.grad.data.mul_(64.0),
    "less, through .data": lambda param: param.grad.data.mul_(2.0**-6),
    "another tensor": lambda param: setattr(param, "grad", param.grad * 0.5),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a step is taken.

    Attributes:
        scalers: By which scaler, None for ``optimizer.step()``.
        hook: How a hook before the step writes gradients, if one does.
        interrupted: Whether the hook before the step raises.
        preset: A scale of their own that gradients carry, told by ``optimizer.grad_scale``.
        wrapped: Steps an object around the optimizer, before which our scaler unscales.
    """

    scalers: Scalers | None = None
    hook: str | None = None
    interrupted: bool = False
    preset: float | None = None
    wrapped: bool = False


@dataclasses.dataclass
class Before:
    """What is known of a parameter of ours before its step."""

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]


class Step:
    """Takes one step on our side, then on torch's, and compares."""

    def __init__(self, sides: Sides, plan: Plan, differs: Callable[[str], None]) -> None:
        self.sides, self.plan, self.differs = sides, plan, differs
        scalers = plan.scalers
        self.scalers = scalers if scalers is not None and scalers.enabled else None
        self.with_grads = sides.with_grads()
        self.grads_then = {pair: written(pair.mine.grad) for _, pair in self.with_grads}
        self.is_skipped = False
        self.stepped_grads: dict[Pair, Tensor] = {}
        self.old: dict[Pair, tuple[Tensor, dict[str, Tensor], Tensor | None]] = {}
        self.norm: Tensor | None = None
        self.norms: list[Tensor] = []  # of all parameters
        self.clips = False

    def take(self) -> str:
        """Returns what came of it: "stepped", "skipped", "refused" or "interrupted"."""
        self._prepare()
        self.grads_then = {pair: written(pair.mine.grad) for _, pair in self.with_grads}
        state = None if self.scalers is None else self.scalers.state_of(self.sides)
        self.stage = READY if state is None else state["stage"]
        self.was_ready = self.stage is READY
        self.inverse = 1.0 / (self.plan.preset or 1.0)
        self.has_scale = self.plan.preset is not None or (
            self.scalers is not None and self.was_ready
        )
        if self.scalers is not None and self.was_ready and self.scalers.twin._scale is not None:
            self.inverse *= self.scalers.inverse()
        error = self._step_ours()
        expected = self._unscale_torchs() if self.plan.wrapped and self.was_ready else None
        if expected is None:
            expected = self._step_torchs(error)
        result = self._result(error, expected)
        landed = None if self.plan.wrapped else self.sides.mine.step_applied
        if landed is not None and result in ("stepped", "skipped"):
            assert landed.item() == (result == "stepped" and bool(self.with_grads)), result
        if self.has_scale and result in ("stepped", "skipped"):
            self._remember_scaled_grads()
        if result == "stepped":
            self._compare()
        else:
            self._assert_untouched()
        for _, pair in self.with_grads:
            pair.take_grad()
        return result

    # Gradients that a step left as they were, with their scale.

    def _remember_scaled_grads(self) -> None:
        for group, pair in self.with_grads:
            self.sides.scaled.pop(pair, None)
            if not group["write_back_grads"]:
                self.sides.scaled[pair] = written(pair.mine.grad)

    def _meets_scaled_grads(self) -> bool:
        """Returns whether our side refuses this step, which neither has a scale nor a scaler."""
        if self.scalers is not None or self.has_scale or self.plan.interrupted:
            return False
        scaled = self.sides.scaled
        return any(scaled.get(pair) == written(pair.mine.grad) for _, pair in self.with_grads)

    # Our side.

    def _prepare(self) -> None:
        self.before = {}
        for _, pair in self.with_grads:
            if self.plan.preset is not None:
                pair.mine.grad.mul_(self.plan.preset)
            self.before[pair] = Before(
                pair.mine.detach().clone(),
                pair.mine.grad.clone(),
                {name: t.clone() for name, t in self.sides.state(pair).items()},
            )

    def _step_ours(self) -> BaseException | None:
        sides, plan = self.sides, self.plan
        self.hook_was_called = False

        def before_step(*_: Any) -> None:
            self.hook_was_called = True
            if plan.hook is not None:
                with torch.no_grad():
                    for _, pair in self.with_grads:
                        HOOKS[plan.hook](pair.mine)
                        self.before[pair].grad = pair.mine.grad.clone()
            if plan.interrupted:
                raise Interruption

        hooks = []
        if plan.hook is not None or plan.interrupted:
            hooks.append(sides.mine.register_step_pre_hook(before_step))
        if plan.preset is not None:
            sides.mine.grad_scale = torch.tensor(plan.preset)
        try:
            if plan.scalers is None:
                return error_of(sides.mine.step)
            handle = sides.wrapper if plan.wrapped else sides.mine
            return error_of(lambda: plan.scalers.mine.step(handle))
        finally:
            for hook in hooks:
                hook.remove()
            if plan.preset is not None:
                with contextlib.suppress(AttributeError):
                    del sides.mine.grad_scale

    # Torch's side.

    def _unscale_torchs(self) -> BaseException | None:
        """Lets torch's scaler unscale, as ours has done; returns what ours must raise instead."""
        sides, scalers = self.sides, self.scalers
        self.differs(
            "a wrapper that exposes `_step_supports_amp_scaling` of a fused optimizer, "
            "in `scaler.step`"
        )
        if scalers.twin._scale is None:
            return None
        if any(pair.mine.grad.dtype == F16 for _, pair in self.with_grads):
            scalers.knows(sides)
            return ValueError("Attempting to unscale FP16 gradients.")
        scalers.twin.unscale_(sides.twin)
        sides.noted = None
        for _, pair in self.with_grads:
            expected = pair.twin.grad
            assert_near(pair.mine.grad, expected, expected.abs(), "unscaled", pair.mine.dtype)
            self.before[pair].grad = pair.mine.grad.clone()
            pair.take_grad()
        self.grads_then = {pair: written(pair.mine.grad) for _, pair in self.with_grads}
        self.inverse, self.was_ready, self.has_scale = 1.0, False, False
        return None

    def _step_torchs(self, error: BaseException | None) -> BaseException | None:
        sides, scalers = self.sides, self.scalers
        if self._meets_scaled_grads():
            self.differs("`optimizer.step()` after `scaler.step(optimizer)`")
            return RuntimeError("refused by our side alone")
        if scalers is not None and not self.with_grads and not isinstance(error, Exception):
            state = scalers.state_of(sides)
            stage = READY if state is None else state["stage"]
            may_step = scalers.twin._scale is not None and stage is not STEPPED
            if may_step and (stage is READY or not scalers.flags_of(sides)):
                self.differs("a step of an optimizer without gradients")
                scalers.knows(sides)["found_inf_per_device"] = {}
                scalers.knows(sides)["stage"] = STEPPED if error is None else stage
                return error
        sees_late = scalers is not None and scalers.kind != "torch" and scalers.flags_of(sides)
        if sees_late and self.has_late_grads():
            self.differs("a gradient that is added between `unscale_` and `step`")
            return RuntimeError("refused by our side alone")
        if scalers is not None and "counted" in (scalers.state_of(sides) or {}):
            self.differs("`unscale_` of two optimizers, then `update` between their steps")
        hook = sides.twin.register_step_pre_hook(self._before_torchs_step)
        try:
            if scalers is None:
                expected = error_of(sides.twin.step)
                return None if isinstance(expected, SkippedError) else expected
            expected = error_of(lambda: scalers.twin.step(sides.twin))
        finally:
            hook.remove()
        if any(flag > 0 for flag in scalers.flags_of(sides).values()) and expected is None:
            self.is_skipped = True
            if self.hook_was_called:
                self.differs("step hooks when a step is skipped")
        if isinstance(expected, SkippedError):
            self.differs("inf and NaN that appear after the scaler's check")
            scalers.knows(sides)["stage"] = STEPPED
            if self.plan.hook is not None and self.was_ready and scalers.kind != "torch":
                for flag in scalers.flags_of(sides).values():
                    flag.fill_(1.0)  # our scaler is told
            return None
        return expected

    def has_late_grads(self) -> bool:
        """Returns whether a gradient came, or was written, after unscale_ and a later loss.

        Our side can't tell who wrote it.
        """
        state = None if self.scalers is None else self.scalers.state_of(self.sides)
        noted = self.sides.noted
        if state is None or state["stage"] is not UNSCALED or noted is None:
            return False
        return any(noted.get(pair) != self.grads_then[pair] for _, pair in self.with_grads)

    def _sees_late_overflow(self) -> bool:
        """Returns whether gradients became inf or NaN after the scaler's look, and ours sees it."""
        mine = self.sides.mine
        scans_again = mine.norm_guard is not None
        if self.scalers is not None:
            scans_again |= mine.param_groups[0]["max_grad_norm"] is not None
            scans_again |= self.was_ready and self.scalers.kind != "torch"
        return scans_again and not all(b.grad.isfinite().all() for b in self.before.values())

    def _before_torchs_step(self, *_: Any) -> None:
        """Gives torch's step the gradients that ours takes: those of the hook, clipped."""
        if self.plan.interrupted:
            raise Interruption
        if self.plan.hook is not None:
            for _, pair in self.with_grads:
                pair.twin.grad = doubled(self.before[pair].grad) * self.inverse
        if self._sees_late_overflow():
            self.is_skipped = True
            raise SkippedError
        twins = [pair.twin for _, pair in self.with_grads]
        mine = self.sides.mine
        group = mine.param_groups[0]
        nan = torch.tensor(torch.nan)
        grads = [pair.twin.grad for _, pair in self.sides]
        self.norms = [nan if grad is None else grad.norm() for grad in grads]
        self.clips = group["max_grad_norm"] is not None
        if self.clips and twins:
            self.norm = torch.nn.utils.clip_grad_norm_(twins, group["max_grad_norm"], foreach=False)
        elif twins and (mine.track_grad_norms or mine.norm_guard is not None):
            self.norm = torch.nn.utils.get_total_norm([twin.grad for twin in twins], foreach=False)
        for group, pair in self.with_grads:
            if group["clip_value"] is not None:
                pair.twin.grad.clamp_(-group["clip_value"], group["clip_value"])
            if pair.is_converted:
                dtype = self.sides.buffer_dtype(group, pair)
                for buffer in self.sides.buffers(pair).values():
                    buffer.copy_(buffer.to(dtype))
            self._remember(group, pair)

    def _remember(self, group: dict[str, Any], pair: Pair) -> None:
        buffers = {name: t.clone() for name, t in self.sides.buffers(pair).items()}
        new = formula_of(self.sides.name)(pair.twin.detach(), pair.twin.grad, buffers, **group)
        doubt = new.get("doubt")
        self.old[pair] = (pair.twin.detach().clone(), buffers, doubt)
        self.stepped_grads[pair] = pair.twin.grad.clone()

    # What came of it.

    def _result(self, error: BaseException | None, expected: BaseException | None) -> str:
        sides, scalers, plan = self.sides, self.scalers, self.plan
        refused = expected is not None and not isinstance(expected, Interruption)
        if refused or not plan.interrupted:
            (plan.scalers or Scalers("amp_ext")).assert_same_error(error, expected)
            if refused:
                return "refused"
            return "skipped" if self.is_skipped else "stepped"
        assert isinstance(error, Interruption), f"{error!r} instead of an interruption"
        if scalers is not None and plan.interrupted and self.stage is not STEPPED:
            self.differs("`scaler.step` raises, or is interrupted, in a fused optimizer")
            scalers.knows(sides)["stage"] = self.stage
        return "interrupted"

    def _assert_untouched(self) -> None:
        for _, pair in self.with_grads:
            assert_exact(pair.mine.grad, self.before[pair].grad, "a gradient after no step")
            self._assert_untouched_pair(pair)

    def _assert_untouched_pair(self, pair: Pair) -> None:
        before, state = self.before[pair], self.sides.state(pair)
        assert_exact(pair.mine, before.param, "a parameter after no step")
        # SGD counts from the buffer that was made for this step, which only the device skips.
        made = state.keys() - before.state.keys()
        counts_anew = any(name.startswith("momentum_buffer") for name in made)
        for name, value in before.state.items():
            if not pair.is_converted and not (counts_anew and name == "step"):
                assert_exact(state[name], value, f"{name} after no step")

    def _compare(self) -> None:
        sides, clips = self.sides, self.clips
        if self.norm is not None:
            norm = sides.mine.grad_norm
            assert_near(norm, self.norm, self.norm, "grad_norm", F32)
        if sides.mine.track_grad_norms and self.norms:
            for norm, expected in zip(sides.mine.grad_norms, self.norms, strict=True):
                assert_near(norm, expected, expected, "a norm of grad_norms", F32)
        for group, pair in self.with_grads:
            self._compare_pair(group, pair, clips)
            if not group["write_back_grads"]:
                if self.scalers is not None:
                    self.differs("`.grad` after a fused step under the scaler")
                assert_exact(pair.mine.grad, self.before[pair].grad, "a gradient after its step")
            else:
                grad = self.stepped_grads[pair]
                dtype = F32 if clips and pair.mine.dtype == F64 else pair.mine.dtype
                assert_near(pair.mine.grad, grad, grad.abs(), "a gradient written back", dtype)

    def _compare_pair(self, group: dict[str, Any], pair: Pair, clips: bool) -> None:
        sides = self.sides
        master, state = sides.master(group, pair), sides.state(pair)
        old, old_buffers, doubt = self.old[pair]
        wants_master = group["master_weights"] and pair.mine.dtype.itemsize == 2
        assert (master is not None) == wants_master
        if wants_master:
            self.differs("16-bit parameters")
            if is_split(group):
                value = doubled(pair.mine)
                assert_near(master, value, value.abs(), "a master", pair.mine.dtype)
            else:
                assert_exact(pair.mine, master, "a parameter beside its master")
        actual, new = pair.mine if master is None else master, pair.twin.detach()
        lr, coarse = float(group["lr"]), F32 if clips else F64
        grad = self.stepped_grads[pair].abs() + float(group["weight_decay"]) * old.abs()

        def dtype_of(tensor: Tensor) -> torch.dtype:
            return coarse if tensor.dtype == F64 else tensor.dtype

        # Adam divides by a root that may be a tenth of what cancels in its first moment, or where a
        # gradient and its decay cancel, far less.
        parts = torch.full_like(old, 10.0)
        second = second_moment(sides.buffers(pair))
        if second is not None:
            if "betas" in group:
                steps = sides.twin.state[pair.twin]["step"].item()
                second = second / (1.0 - group["betas"][1] ** steps)
            parts = torch.maximum(parts, grad / (second.sqrt() + group["eps"]))
        if "momentum" in group:
            parts = grad if second is None else parts
            parts = parts + old_buffers.get("momentum_buffer", torch.zeros_like(old)).abs()
        size = torch.stack([old.abs(), new.abs(), lr * parts]).amax(0)
        if doubt is not None:
            keep = doubled(actual)
            off = lr * (2.1 + float(group["weight_decay"]) * old.abs())
            assert ((keep - new).abs() <= off)[doubt].all()
            new[doubt] = keep[doubt]
        more = 0.0
        if is_split(group) and master is not None:
            if pair.mine.dtype == F16:
                new, more = new.clamp(-65519.875, 65519.875), 2.0**-40
            if group["master_weights"] == "split8":
                more = 2.0**-15 * new.abs() + (pair.mine.dtype == F16) * 2.0**-32
        what = f"param of {sides.name} after its step"
        assert_near(actual, new, size, what, dtype_of(actual), more)
        numbers = sides.numbers(pair)
        for name, value in sides.buffers(pair).items():
            before, power = (
                old_buffers.get(name, torch.zeros_like(value)),
                2 if f"{name}s" in SQUARES else 1,
            )
            size = torch.stack([before.abs(), value.abs(), grad**power]).amax(0)
            if name == "momentum_buffer":  # which adds what RMSprop divides by a root
                size = torch.maximum(size, parts)
            more = distance_of_codes(name, value, state, numbers)
            kept = numbers[name]
            assert_near(kept, value, size, f"{name} of {sides.name}", dtype_of(kept), more)
        self._start_anew(pair, actual)

    def _start_anew(self, pair: Pair, actual: Tensor) -> None:
        """Gives torch's side the numbers of ours, so that roundings do not add up."""
        numbers = self.sides.numbers(pair)
        pair.twin.data.copy_(actual.detach())
        for name, value in self.sides.buffers(pair).items():
            value.copy_(numbers[name])
        pair.is_out_of_date = pair.is_converted = False
        buffers = self.sides.buffers(pair)
        if not all(tensor.isfinite().all() for tensor in (pair.twin, pair.mine, *buffers.values())):
            # It would stay inf or NaN and hide all that follows.
            pair.restarts += 1
            for side, param in ((self.sides.mine, pair.mine), (self.sides.twin, pair.twin)):
                param.data.fill_(0.5)
                side.state.pop(param, None)


class ReleasedStep(Step):
    """The step of an optimizer whose gradients are released, made before the backward pass."""

    def __init__(self, sides: Sides, differs: Callable[[str], None]) -> None:
        super().__init__(sides, Plan(), differs)
        self.before = {
            pair: Before(
                pair.mine.detach().clone(),
                torch.empty(0),
                {name: t.clone() for name, t in sides.state(pair).items()},
            )
            for _, pair in sides
        }

    def compare(self, totals: dict[Pair, Tensor], inverse: float) -> str:
        """Steps the twins of the parameters whose own gradients are finite, and compares.

        Args:
            totals: The gradients that our side had, with their scale.
            inverse: What gradients are multiplied by to unscale them.
        """
        sides = self.sides
        finite = {pair for pair, grad in totals.items() if grad.isfinite().all()}
        self.with_grads = [(group, pair) for group, pair in sides if pair in finite]
        for _, pair in sides:
            pair.twin.grad = doubled(totals[pair]) * inverse if pair in finite else None
        hook = sides.twin.register_step_pre_hook(self._before_torchs_step)
        sides.twin.step()
        hook.remove()
        for group, pair in self.with_grads:
            self._compare_pair(group, pair, clips=False)
        for _, pair in sides:
            assert pair.mine.grad is None
            pair.take_grad()
            if pair not in finite:
                self._assert_untouched_pair(pair)
        if len(finite) == len(totals):
            return "stepped"
        self.differs("an overflow while gradients are released")
        return "skipped some" if finite else "skipped all"
