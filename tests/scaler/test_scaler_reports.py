"""Tests of what ``GradScaler`` tells of its updates: skips, counts, names and its log."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import scaler_cases as cases
from harness.rows import rows
from harness.scaler_cases import (
    all_optimizers,
    exact,
    give_grads,
    iterate,
    name_of_last,
    named,
    new_params,
    our_sgd,
    ready,
    torchs_sgd,
)
from torch.nn import Parameter

import amp_ext

NOTHING_YET = amp_ext.ScalerStats(0, 0, 0, 0, 4.0, 4.0, 4.0, None)


def skips(scaler: amp_ext.GradScaler, *optimizers: Any) -> list[bool | None]:
    """Returns whether the last step of each was skipped, and before them that of any."""
    return [scaler.last_step_skipped(each, wait=True) for each in (None, *optimizers)]


@contextlib.contextmanager
def tensors_out_of_reach() -> Iterator[None]:
    """Lets whatever reads a tensor's values, or asks a GPU for anything, fail."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a tensor was read")

    readers = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
    with pytest.MonkeyPatch.context() as patch:
        for reader in readers:
            patch.setattr(torch.Tensor, reader, refuse)
        patch.setattr(torch.cuda, "synchronize", refuse)
        patch.setattr(torch.cuda.Event, "synchronize", refuse)
        yield


def all_reads(scaler: amp_ext.GradScaler, *optimizers: Any, wait: bool = False) -> list[Any]:
    of_each = [scaler.last_step_skipped(optimizer, wait=wait) for optimizer in optimizers]
    return [scaler.last_step_skipped(wait=wait), of_each, scaler.stats(wait=wait)]


@pytest.mark.parametrize("unscale", [False, True])
@cases.over([our_sgd, cases.our_adamw_with_norm, cases.torchs_adam])
def test_a_loop_waits_for_no_gpu(make, unscale, device):
    scaler, optimizer = ready(device, hysteresis=2), make(named(device, "a", "b"))
    for _ in range(2):
        give_grads(optimizer)
        with tensors_out_of_reach():
            scaler.scale(torch.ones((), device=device))
            cases.scan_and_step(scaler, optimizer, unscale)
            scaler.update()
            with pytest.raises(AssertionError, match="was read"):
                torch.ones((), device=device).item()
    assert exact(scaler).steps == 2


# Skips


def test_before_the_first_update_nothing_is_known(device):
    scaler, optimizer = amp_ext.GradScaler(device.type, 4.0), our_sgd(new_params(device))
    unknown = [None, [None], NOTHING_YET]
    assert all_reads(scaler, optimizer) == unknown
    scaler.scale(torch.ones((), device=device))
    assert all_reads(scaler, optimizer) == unknown
    give_grads(optimizer, 0)
    scaler.step(optimizer)
    assert all_reads(scaler, optimizer) == all_reads(scaler, optimizer, wait=True) == unknown
    scaler.update()
    assert skips(scaler, optimizer) == [True, True]


@cases.torchs_and_ours
def test_the_scaler_keeps_nothing_alive_and_knows_no_newcomer(make, device):
    scaler, first = ready(device), make(new_params(device))
    for unscale in (False, True):
        iterate(scaler, first, bad=[1], unscale=unscale)
    gone = [weakref.ref(first), *map(weakref.ref, cases.params_of(first))]
    del first
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    assert name_of_last(scaler) is None, "its names are gone"
    second = make(new_params(device))
    assert skips(scaler, second) == [True, None]
    for bad in ([], [2]):
        iterate(scaler, second, bad=bad)
        assert skips(scaler, second)[1] is bool(bad)
    assert name_of_last(scaler) == "group 0, param 2"


@cases.unscaled_first
def test_more_optimizers_than_one_launch_takes(unscale, device):
    scaler = ready(device)
    optimizers = [torchs_sgd(named(device, f"of {i}")) for i in range(130)]
    for culprits in ((), (0,), (127, 128), (129,), (5, 128), ()):
        for i, optimizer in enumerate(optimizers):
            give_grads(optimizer, *[0] * (i in culprits))
            cases.scan_and_step(scaler, optimizer, unscale)
        scaler.update()
        assert skips(scaler)[0] is bool(culprits)
        assert [i for i, s in enumerate(skips(scaler, *optimizers)[1:]) if s] == list(culprits)
        if culprits:
            assert name_of_last(scaler) == f"of {culprits[-1]}"
    assert dataclasses.astuple(exact(scaler)) == (6, 2, 4, 0, 0.25, 0.25, 4.0, "of 128", 0)


def test_a_disabled_scaler_never_skips_and_logs_nothing(caplog):
    scaler = amp_ext.GradScaler("cpu", enabled=False, warn_after=1)
    optimizer = our_sgd(new_params())
    nothing = amp_ext.ScalerStats(0, 0, 0, 0, 1.0, 1.0, 1.0, None)
    with caplog.at_level(logging.DEBUG, logger="amp_ext"):
        for wait in (False, True):
            scaler.scale(torch.ones(()))
            iterate(scaler, optimizer, bad=[0])
            assert all_reads(scaler, optimizer, wait=wait) == [False, [False], nothing]
    assert not caplog.records


# Counts


def test_the_counts_are_those_of_the_loop(device):
    scaler = ready(device, growth_interval=2)
    optimizer = torchs_sgd(new_params(device))
    scales, skipped, after, in_a_row = [], [], [], 0
    for letter in "..x.xx....xxxx..":
        scales.append(scaler.get_scale())
        skipped.append(letter == "x")
        in_a_row = in_a_row + 1 if skipped[-1] else 0
        iterate(scaler, optimizer, bad=[0] * skipped[-1])
        after.append(scaler.get_scale())
        assert exact(scaler) == amp_ext.ScalerStats(
            updates=len(scales),
            steps=skipped.count(False),
            skips=skipped.count(True),
            consecutive_skips=in_a_row,
            scale=after[-1],
            smallest_scale=min(scales[0], *after),
            largest_scale=max(scales[0], *after),
            last_nonfinite="group 0, param 0" if any(skipped) else None,
        )


@pytest.mark.parametrize("duplicate", [cases.through_a_file, copy.copy, copy.deepcopy])
def test_a_duplicate_counts_anew(duplicate, device):
    scaler, optimizer = ready(device), our_sgd(new_params(device))
    iterate(scaler, optimizer)
    iterate(scaler, optimizer, bad=[1])
    twin = duplicate(scaler)
    fresh = amp_ext.ScalerStats(0, 0, 0, 0, 2.0, 2.0, 2.0, None)
    assert all_reads(twin, optimizer) == [None, [None], fresh]
    twin.scale(torch.ones((), device=device))
    iterate(twin, optimizer)
    assert exact(twin) == amp_ext.ScalerStats(1, 1, 0, 0, 2.0, 2.0, 2.0, None)
    assert (exact(scaler).updates, exact(scaler).skips) == (2, 1), "the original keeps its counts"
    give_grads(optimizer)
    other = duplicate(scaler)
    other.scale(torch.ones((), device=device))
    other.unscale_(optimizer)
    scaler.unscale_(optimizer)  # the original knows nothing of that


def test_scales_that_are_set_are_reported(device):
    scaler, optimizer = ready(device), torchs_sgd(new_params(device))
    scaler.load_state_dict(scaler.state_dict() | {"scale": 32.0})
    assert exact(scaler).scale == 32
    scaler.update(8.0)
    assert exact(scaler).updates == 0, "nothing was looked at"
    give_grads(optimizer, 0)
    scaler.step(optimizer)
    scaler.update(2.0**20)
    iterate(scaler, optimizer, bad=[0])
    assert exact(scaler).scale == 2.0**19
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**-10})
    iterate(scaler, optimizer)
    assert (exact(scaler).smallest_scale, exact(scaler).largest_scale) == (2.0**-10, 2.0**20)


@pytest.mark.parametrize("found_infs", [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_flags_of_several_devices_are_one_step_of_their_optimizer(found_infs, device):
    scaler = amp_ext.GradScaler(device, growth_interval=1)
    optimizer = amp_ext.optim.SGD([Parameter(torch.zeros(3, device=device))], lr=0.1)
    for updates in (1, 2):
        scaler.scale(torch.ones((), device=device))
        flags = [torch.full((), float(found), device=device) for found in found_infs]
        state = scaler._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = dict(enumerate(flags))  # as a client writes it
        before = scaler.get_scale()
        scaler.update()
        assert scaler.get_scale() == before * (0.5 if any(found_infs) else 2.0)
        stats = scaler.stats(wait=True)
        assert (stats.updates, stats.skips) == (updates, updates if any(found_infs) else 0)


# Names


# Parameters without a gradient, and bad ones, of two groups of three; whether unscale_ looks.
ITERATIONS = [((), (), False), ((0, 3), (5, 4), True), ((0,), (), False), ((), (4, 2), False)]
ITERATIONS += [((), (1,), True), ((), (2,), True), ((), (3,), False), ((5,), (), True)]


@all_optimizers
@pytest.mark.parametrize("names", ["abcdef", None])
def test_the_first_bad_parameter_of_the_last_skip_is_named(make, names, device):
    params = named(device, *names) if names else new_params(device, 6)
    scaler, optimizer = ready(device), make([{"params": params[:3]}, {"params": params[3:]}])
    expected = None
    for missing, bad, unscale in ITERATIONS:
        give_grads(optimizer, *bad, missing=missing)
        cases.scan_and_step(scaler, optimizer, unscale)
        scaler.update()
        if bad:
            group, index = divmod(min(bad), 3)
            expected = names[min(bad)] if names else f"group {group}, param {index}"
        assert name_of_last(scaler) == expected


@cases.unscaled_first
@cases.torchs_and_ours
@pytest.mark.parametrize("drop", ["handle_nan_loss", "new scale"])
def test_an_iteration_that_was_dropped_leaves_no_name(make, drop, unscale, device):
    scaler, optimizer = ready(device), make(named(device, *"abc"))
    give_grads(optimizer, 0)
    (scaler.unscale_ if unscale else scaler._check_inf_per_device)(optimizer)
    if drop == "new scale":
        scaler.update(4.0)
    else:
        assert amp_ext.handle_nan_loss(float("nan"), optimizer, scaler=scaler)
    iterate(scaler, optimizer, bad=[2], unscale=unscale)
    assert name_of_last(scaler) == "c"


def test_a_sparse_gradient_is_named(device):
    scaler = ready(device)
    optimizer = torch.optim.SGD(named(device, "dense", "sparse"), lr=0.5)
    give_grads(optimizer, 1)
    cases.params_of(optimizer)[1].grad = cases.params_of(optimizer)[1].grad.to_sparse()
    scaler.step(optimizer)
    scaler.update()
    assert name_of_last(scaler) == "sparse"


# Log


SKIPPED = (
    "GradScaler: %d updates in a row were skipped, up to update %d; the loss scale is %g. The "
    "first bad gradient was that of bias. Gradients that are inf or NaN at any scale come from "
    "the model or the data."
)
AFTER_3 = {"warn_after": 3}
TWO_SERIES = {3: SKIPPED % (3, 3, 8), 7: SKIPPED % (3, 7, 1)}


LOGS = {
    "one-warning-for-a-series": ("xxxxxx", AFTER_3, {3: SKIPPED % (3, 3, 8)}),
    "none-for-short-series": ("xx.xx.xx", AFTER_3, {}),
    "one-for-each-series": ("xxx.xxxx.x", AFTER_3, TWO_SERIES),
    "after-ten": ("x" * 15, {}, {10: SKIPPED % (10, 10, 0.0625)}),
}


@pytest.mark.parametrize(("sequence", "options", "expected"), rows(LOGS))
def test_each_long_series_of_skips_is_logged_once(sequence, options, expected, device, caplog):
    if device.type == "cuda":
        pytest.skip("the host may be some updates ahead")
    scaler = ready(device, init_scale=64.0, **options)
    optimizer, records = cases.our_sgd(named(device, "weight", "bias")), {}
    with caplog.at_level(logging.DEBUG, logger="amp_ext"):
        for number, letter in enumerate(sequence, start=1):
            caplog.clear()
            iterate(scaler, optimizer, bad=[1] * (letter == "x"))
            for record in caplog.records:
                assert (record.name, record.levelno) == ("amp_ext", logging.WARNING)
                assert number not in records
                records[number] = record.getMessage()
    assert records == expected
