"""The rules of released gradients, with which a backward pass steps each parameter by itself."""

from __future__ import annotations

import contextlib
import warnings

import torch
from harness.edge_shapes import F32, F64
from hypothesis import strategies as st
from hypothesis.stateful import rule
from torch import Tensor

from amp_ext.optim import release_gradients
from state_machine.loops import draws, number, seeds
from state_machine.sides import STEPPED, Pair, Scalers, Sides, assert_near, doubled, error_of
from state_machine.steps import ReleasedStep
from state_machine.watching import Watching

ENDS = ["step", "step", "step", "step", "give up", "remove", "again"]


class Releasing(Watching):
    """Loops in which some optimizers release their gradients for a while.

    A rule that takes another step, or replaces an optimizer or a scaler, removes the release.
    """

    @rule(which=number)
    def remove_release(self, which: int) -> None:
        self.sides(which).remove_release()
        self.did("remove_release")

    @rule(
        which=number,
        seed=seeds,
        passes=st.integers(1, 3),
        some=st.sampled_from(["all", "all", "even", "odd"]),
        bad=st.sampled_from([(), (), (), (0,), (1, 2), (3,)]),
        scaled=st.sampled_from([True, True, False]),
        end=st.sampled_from(ENDS),
    )
    def released_iteration(
        self,
        which: int,
        seed: int,
        passes: int,
        some: str,
        bad: tuple[int, ...],
        scaled: bool,
        end: str,
    ) -> None:
        """Runs backward passes, all but the last of them paused, and ends the iteration."""
        sides = self.sides(which)
        scalers = self.scalers_of(sides) if scaled else None
        if scalers is not None and (scalers.kind == "torch" or not scalers.is_ready(sides)):
            return
        for optimizer in (sides.mine, sides.twin):
            optimizer.zero_grad()
        if not self.release(sides, scalers):
            self.did("released_iteration refused")
            return
        if scalers is not None and not scalers.enabled:
            scalers = None
        factor = 1.0 if scalers is None else self.scale_a_loss(scalers)
        step = ReleasedStep(sides, self.differs)
        grads = self.grads_of(sides, draws(5000 + seed), passes, some, factor)
        for index in bad if scalers is not None and grads[-1] else ():
            grad = [*grads[-1].values()][index % len(grads[-1])]
            grad.view(-1)[:1] = torch.inf
        totals = self.run_backward(sides, grads)
        if not totals:
            return
        if end == "step":
            self.did(f"released_iteration {self.end_by_step(sides, scalers, step, totals)}")
            sides.hooked.update(pair.mine for pair in totals)
            return
        stepped = {pair: totals[pair] for pair in grads[-1] if pair.mine.grad is None}
        self.end_otherwise(sides, end, stepped)
        step.compare(stepped, 1.0 if scalers is None else scalers.inverse())
        self.did(f"released_iteration {end}")

    def release(self, sides: Sides, scalers: Scalers | None) -> bool:
        """Releases the gradients, unless they are already; returns False if that was refused."""
        mine = sides.mine
        needs_all = mine.norm_guard is not None or any(
            group["max_grad_norm"] is not None or group["write_back_grads"]
            for group in mine.param_groups
        )
        if mine.gradient_release is not None and sides.released_by is not scalers:
            sides.remove_release()
        if mine.gradient_release is not None:
            pairs = [pair for _, pair in sides if pair.mine.requires_grad]
            if not needs_all:
                return True
            if pairs:
                params = [pair.mine for pair in pairs]
                grads = [torch.ones_like(param) for param in params]
                error = error_of(lambda: torch.autograd.backward(params, grads))
                assert "gradients can't be released with" in str(error), repr(error)
                sides.mine.zero_grad()
            return False
        scaler = None if scalers is None else scalers.mine
        error = error_of(lambda: release_gradients(mine, scaler))
        if needs_all:
            assert "gradients can't be released with" in str(error), repr(error)
            return False
        assert error is None, repr(error)
        sides.released_by = scalers
        return True

    @staticmethod
    def grads_of(
        sides: Sides, draw: torch.Generator, passes: int, some: str, factor: float
    ) -> list[dict[Pair, Tensor]]:
        """Returns the gradients of each pass; the last one may leave parameters out."""
        grads: list[dict[Pair, Tensor]] = []
        for number_of_pass in range(passes):
            kept = some if number_of_pass == passes - 1 else "all"
            grads.append({})
            for index, (_, pair) in enumerate(sides):
                if pair.mine.requires_grad and kept != ["even", "odd"][index % 2 - 1]:
                    value = torch.randn(pair.mine.shape, generator=draw, dtype=F64) * factor
                    grads[-1][pair] = value.to(pair.mine.dtype)
        return grads

    @staticmethod
    def run_backward(sides: Sides, grads: list[dict[Pair, Tensor]]) -> dict[Pair, Tensor]:
        """Runs the backward passes; returns the gradients of the iteration."""
        release, totals = sides.mine.gradient_release, {}
        for each in grads:
            is_last = each is grads[-1]
            with contextlib.nullcontext() if is_last else release.paused():
                if each:
                    params = [pair.mine for pair in each]
                    torch.autograd.backward(params, [grad.clone() for grad in each.values()])
            for pair, grad in each.items():
                totals[pair] = totals[pair] + grad if pair in totals else grad
                # step() gives a parameter its hook if it is new or was swapped.
                is_released = pair.mine.grad is None
                assert is_released == is_last or (is_last and pair.mine not in sides.hooked)
        return totals

    def end_by_step(
        self,
        sides: Sides,
        scalers: Scalers | None,
        step: ReleasedStep,
        totals: dict[Pair, Tensor],
    ) -> str:
        if scalers is None:
            sides.mine.step()
            result = step.compare(totals, 1.0)
            self.compare_outputs(sides, step, result)
            return result
        before = 0
        if scalers.mine.stats(wait=True) is not None:
            before = scalers.mine.stats(wait=True).skipped_tensors
        scalers.mine.step(sides.mine)
        for pair, grad in totals.items():
            pair.twin.grad = doubled(grad)
        scalers.twin.unscale_(sides.twin)
        scalers.knows(sides)["stage"] = STEPPED
        result = step.compare(totals, scalers.inverse())
        self.compare_outputs(sides, step, result)
        scalers.update(None, sides)
        skipped = sum(not grad.isfinite().all() for grad in totals.values())
        assert scalers.mine.stats(wait=True).skipped_tensors == before + skipped
        return result

    @staticmethod
    def compare_outputs(sides: Sides, step: ReleasedStep, result: str) -> None:
        applied = sides.mine.step_applied
        assert applied is None or applied.item() == (result == "stepped")
        if sides.mine.track_grad_norms and result == "stepped":
            assert_near(sides.mine.grad_norm, step.norm, step.norm, "grad_norm", F32)

    @staticmethod
    def end_otherwise(sides: Sides, end: str, stepped: dict[Pair, Tensor]) -> None:
        """Gives the batch up in some way, after a call that is refused."""
        if end == "again" and stepped:
            params = [pair.mine for pair in stepped]
            error = error_of(lambda: torch.autograd.backward(params, [*stepped.values()]))
            assert "got another gradient after" in str(error), repr(error)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if end == "remove":
                sides.remove_release()
            sides.mine.zero_grad()
        of_ours = [str(w.message) for w in caught if "ended without step()" in str(w.message)]
        assert len(of_ours) == bool(stepped), of_ours
