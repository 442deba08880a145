"""The rules of those who watch: norms, a guard and averages, beside other steps."""

from __future__ import annotations

import torch
from harness.edge_shapes import F32
from hypothesis import strategies as st
from hypothesis.stateful import rule

from amp_ext.optim import NormGuard, WeightAverage
from state_machine.loops import Loops, number, seeds
from state_machine.sides import assert_exact, assert_near, doubled


class Watching(Loops):
    """Loops whose steps are watched, which moves nothing."""

    @rule(which=number, tracks=st.booleans(), guards=st.booleans())
    def watch(self, which: int, tracks: bool, guards: bool) -> None:
        """Changes what steps leave from now on. A guard that never warms up sees inf and NaN."""
        mine = self.sides(which).mine
        mine.track_grad_norms = tracks
        mine.norm_guard = NormGuard(warmup_steps=10**6) if guards else None
        mine.track_step_applied()
        self.did("watch")

    @rule(which=number, seed=seeds, bad=st.sampled_from([None, "inf"]))
    def follow_by_average(self, which: int, seed: int, bad: str | None) -> None:
        """Averages over two iterations, of which the first may overflow, and evaluates."""
        sides = self.sides(which)
        if any(pair.is_converted for _, pair in sides):
            return  # a tensor of another dtype has no average
        average = WeightAverage(sides.mine, decay=0.25)
        restarts = [pair.restarts for _, pair in sides]
        expected, taken = [pair.twin.detach().clone() for _, pair in sides], 0
        sizes = [mean.abs() for mean in expected]  # the largest numbers that a mean is made of
        for each, overflow in ((seed, bad), (seed + 1, None)):
            result = self.iterate(which, each, overflow)
            if result != "stepped" or not sides.with_grads():
                continue
            taken += 1
            for mean, size, (_, pair) in zip(expected, sizes, sides, strict=True):
                mean.lerp_(pair.twin.detach(), 0.75 if taken > 1 else 1.0)
                torch.maximum(size, pair.twin.detach().abs(), out=size)
        assert average.n_averaged == taken
        with average.swap():
            rows = zip(average.averages, expected, sizes, restarts, sides, strict=True)
            for actual, mean, size, before, (_, pair) in rows:
                if pair.restarts == before:
                    assert_near(actual, mean, size, "an average", F32)
                assert_exact(pair.mine, doubled(actual), "a parameter that holds its average")
        average.remove()
        self.did("follow_by_average")
