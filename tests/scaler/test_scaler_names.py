"""Tests of the names that ``GradScaler`` tells of bad gradients, and of its log."""

from __future__ import annotations

import logging

import pytest
import torch
from harness import scaler_cases as cases
from harness.rows import rows
from harness.scaler_cases import (
    all_optimizers,
    give_grads,
    iterate,
    name_of_last,
    named,
    new_params,
    ready,
)

import amp_ext

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
TWO_SKIPS = {1: SKIPPED % (1, 1, 32), 3: SKIPPED % (1, 3, 16)}


LOGS = {
    "one-warning-for-a-series": ("xxxxxx", AFTER_3, {3: SKIPPED % (3, 3, 8)}),
    "none-for-short-series": ("xx.xx.xx", AFTER_3, {}),
    "one-for-each-series": ("xxx.xxxx.x", AFTER_3, TWO_SERIES),
    "from-the-first": ("x.x.", {"warn_after": 1}, TWO_SKIPS),
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


def test_a_warning_without_a_name_says_so(device, caplog):
    scaler = ready(device, warn_after=2)
    optimizer = cases.torchs_sgd(new_params(device))
    iterate(scaler, optimizer, bad=[1])
    iterate(scaler, optimizer)  # a name of before is not told
    for _ in range(2):
        give_grads(optimizer)
        scaler.unscale_(optimizer)
        cases.set_recorded(scaler, optimizer, 1.0)
        scaler.update()
        scaler.last_step_skipped(wait=True)
    scaler.update(2.0)
    assert "was that of a parameter that is not known here" in caplog.text
