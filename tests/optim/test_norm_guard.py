"""The guard of an optimizer, which judges the norm of its gradients at every step."""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import Any

import pytest
import torch
from harness.clipping_cases import SCALERS, WAYS, Way
from harness.edge_shapes import BF16, F16, F32, INF, NAN
from harness.guard_rules import GuardRules, norms_of_a_run
from harness.optimizer_cases import ours
from harness.reference import same_bits
from torch import Tensor
from torch.nn import Parameter

import amp_ext
from amp_ext.optim import NormGuard


def one_param(device: torch.device, **options: Any) -> tuple[Parameter, Any]:
    param = Parameter(torch.zeros(1, device=device))
    return param, ours("SGD")([param], lr=1.0, **options)


def step_with(
    optimizer: Any, grad: float | Tensor | None, way: Way | None = None, scaler: Any = None
) -> None:
    """Takes a step whose unscaled gradients are all this number."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None if grad is None else torch.full_like(param, grad)
            if scaler is not None and grad is not None:
                param.grad = scaler.scale(param.grad)
    (way or Way(None)).step(optimizer, scaler)


@pytest.mark.parametrize("action", ["skip", "clip"])
@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[3], WAYS[4]])
def test_each_decision_is_that_of_the_rules(way: Way, action, device, request):
    is_short = way.scaler is not None or "emulated" in request.node.name
    count = 400 if is_short else 5_000
    guard = NormGuard(action=action, max_norm=400.0)
    param, optimizer = one_param(device, norm_guard=guard)
    scaler = way.scaler and way.scaler(device.type, 8.0, growth_interval=100)
    model, outliers, nonfinite = GuardRules(max_norm=400.0), 0, 0
    for norm in norms_of_a_run(count):
        if norm is None and scaler is not None:
            continue  # which refuses to step
        limit = model.limit()
        param.detach().zero_()
        step_with(optimizer, norm, way, scaler)
        moved = -param.item()
        if norm is None or not math.isfinite(norm):
            assert moved == 0.0
            nonfinite += norm is not None and scaler is None
            continue
        seen = optimizer.grad_norm.item()
        assert seen == pytest.approx(norm, rel=1e-6)
        taken = model.takes(seen)
        outliers += not taken
        if taken:
            assert moved == pytest.approx(norm, rel=1e-5)
        else:
            assert moved == pytest.approx(limit if action == "clip" else 0.0, rel=1e-5)
            assert guard.last_step_skipped(wait=True) == (action == "skip")
    stats = guard.stats(wait=True)
    assert outliers > count // 100, "the run has outliers"
    assert (stats.outliers, stats.nonfinite) == (outliers, nonfinite)
    assert stats.norms == model.entered + outliers + nonfinite
    state = guard.state_dict()
    assert (state["mean"], state["variance"]) == (model.mean, model.variance)
    assert (state["count"], state["outliers_in_row"]) == (model.count, model.in_row)
    assert stats.limit == model.limit()


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def warm_guard(**options: Any) -> NormGuard:
    """Returns a guard with a limit of 6, 20 deviations of 1 % above a mean of 5."""
    guard = NormGuard(**{"sigma_factor": 20.0, **options})
    state = guard.state_dict() | {"norms": 70, "entered": 70, "count": 70, "mean": 5.0}
    guard.load_state_dict(state)
    assert guard.stats().limit == 6.0
    return guard


def test_all_launches_of_a_step_have_one_verdict(device):
    """Of three dtypes, two kernels and more tensors than a launch holds."""
    params = [
        Parameter(torch.ones(4, dtype=dtype, device=device))
        for dtype in 2 * (F32, F16, BF16)
        for _ in range(300)
    ]
    groups = [{"params": params[:900]}, {"params": params[900:], "amsgrad": True}]
    guard = NormGuard(warmup_steps=3)
    optimizer = ours("AdamW")(groups, lr=0.5, norm_guard=guard)
    for step, (size, taken) in enumerate(
        [(1.0, True), (1.0, True), (1.25, True), (8.0, False), (1.0, True)]
    ):
        before = [param.detach().clone() for param in params]
        step_with(optimizer, size)
        changed = [not same_bits(new, old) for new, old in zip(params, before, strict=True)]
        assert changed == [taken] * len(params), step
    stats = guard.stats(wait=True)
    assert (stats.norms, stats.outliers, stats.last_outlier) == (5, 1, 4)
    assert {optimizer.state[param]["step"].item() for param in params} == {4.0}


@pytest.mark.parametrize("max_grad_norm", [None, 2.0, 50.0])
def test_an_outlier_is_clipped_to_the_limit_or_to_less(max_grad_norm, device):
    params = [Parameter(torch.zeros(100, device=device)) for _ in range(4)]
    guard = warm_guard(action="clip")
    optimizer = ours("SGD")(
        params, lr=1.0, norm_guard=guard, max_grad_norm=max_grad_norm, write_back_grads=True
    )
    step_with(optimizer, 1.0)
    limit = 6.0 if max_grad_norm is None else min(6.0, max_grad_norm)
    expected = torch.full((100,), limit / (20.0 + 1e-6), device=device)
    for param in params:
        torch.testing.assert_close(param.grad, expected)
        torch.testing.assert_close(param.detach(), -expected)
    assert optimizer.grad_norm.item() == 20.0
    assert not guard.last_step_skipped(wait=True)
    assert guard.stats(wait=True).outliers == 1
    step_with(optimizer, 0.25)  # a norm of 5
    factor = 1.0 if max_grad_norm != 2.0 else 2.0 / (5.0 + 1e-6)
    torch.testing.assert_close(params[0].grad, torch.full_like(expected, 0.25 * factor))


@pytest.mark.parametrize("way", SCALERS)
def test_an_outlier_is_no_overflow(way: Way, device):
    """The scale grows, and nothing but the step is skipped, as after a clean one."""
    guard = warm_guard()
    param, optimizer = one_param(device, norm_guard=guard)
    scaler = way.make_scaler(device, 4.0)  # grows after 2 clean steps
    for norm in (5.0, 500.0):
        step_with(optimizer, norm, way, scaler)
    assert param.item() == -5.0
    assert scaler.get_scale() == 8.0
    assert guard.last_step_skipped(wait=True)
    if isinstance(scaler, amp_ext.GradScaler):
        assert scaler.last_step_skipped(wait=True) is True
        assert scaler.last_step_skipped(optimizer, wait=True) is True
        assert scaler.stats(wait=True).skips == 0
    step_with(optimizer, INF, way, scaler)
    assert scaler.get_scale() == 4.0
    assert not guard.last_step_skipped(wait=True)
    assert guard.stats(wait=True).nonfinite == 0
    step_with(optimizer, 5.0, way, scaler)
    assert param.item() == -10.0
    if isinstance(scaler, amp_ext.GradScaler):
        assert scaler.last_step_skipped(wait=True) is False


def test_other_optimizers_of_a_scaler_skip_nothing(device):
    scaler = amp_ext.GradScaler(device.type, 4.0)
    (_, guarded), (_, other) = one_param(device, norm_guard=warm_guard()), one_param(device)
    for optimizer in (guarded, other):
        optimizer.param_groups[0]["params"][0].grad = scaler.scale(
            torch.full((1,), 99.0).to(device)
        )
        scaler.step(optimizer)
    scaler.update()
    answers = [scaler.last_step_skipped(each, wait=True) for each in (guarded, other, None)]
    assert answers == [True, False, True]


def test_finite_elements_are_stepped_where_they_are_asked_for(device):
    guard = NormGuard()
    param = Parameter(torch.zeros(2, device=device))
    optimizer = ours("SGD")([param], lr=1.0, norm_guard=guard, skip_nonfinite=True)
    param.grad = torch.tensor([INF, 3.0], device=device)
    optimizer.step()
    assert param.tolist() == [0.0, -3.0]
    assert guard.stats(wait=True).last_norm == 3.0
    param.grad = torch.full((2,), 3e38, device=device)  # no float32 has their norm
    optimizer.step()
    assert (param < -1e38).all()
    assert guard.stats(wait=True).nonfinite == 1


def test_a_limit_in_numbers_holds_from_the_first_step_and_never_yields(device):
    guard = NormGuard(max_norm=10.0, patience=2, warmup_steps=1)
    param, optimizer = one_param(device, norm_guard=guard)
    for _ in range(5):
        step_with(optimizer, 11.0)
    assert param.item() == 0.0
    assert guard.stats(wait=True).outliers == 5
    for norm in (1.0, 12.0, 5.0, 12.0, 5.0):  # the last is the second in a row
        step_with(optimizer, norm)
    assert param.item() == -6.0
    assert guard.stats(wait=True).mean == 5.0


def test_a_gradient_that_changes_after_the_look_of_a_scaler_is_judged_as_it_is(device):
    """Without a hook, such as in a wrapper that delegates to the step."""
    guard = warm_guard()
    param, optimizer = one_param(device, norm_guard=guard)
    scaler = amp_ext.GradScaler(device.type, 4.0)
    step = optimizer.step

    def step_of_other_gradients():
        param.grad.mul_(100.0)
        step()

    optimizer.step = step_of_other_gradients
    step_with(optimizer, 5.0, Way(amp_ext.GradScaler), scaler)
    assert param.item() == 0.0
    assert guard.last_step_skipped(wait=True)
    assert guard.stats(wait=True).last_norm == 500.0


@pytest.mark.parametrize("skips", [False, True], ids=["", "finite-elements"])
def test_an_overflow_after_unscaling_skips_the_step_and_counts_no_norm(skips, device):
    guard = warm_guard()
    param = Parameter(torch.zeros(2, device=device))
    optimizer = ours("SGD")([param], lr=1.0, norm_guard=guard, skip_nonfinite=skips)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    param.grad = scaler.scale(torch.ones(2, device=device))
    scaler.unscale_(optimizer)
    param.grad[1] = INF
    scaler.step(optimizer)
    assert param.tolist() == [0.0, 0.0]
    assert guard.stats(wait=True).norms == 70
    assert not guard.last_step_skipped()


@pytest.mark.parametrize("dtype", [F32, F16, torch.float64])
def test_norms_beyond_float32_are_clipped_in_float64_or_skipped(dtype, device):
    value = 1e200 if dtype is torch.float64 else 3e4
    param = Parameter(torch.zeros(4, dtype=dtype, device=device))
    guard = NormGuard(max_norm=2.0, action="clip")
    optimizer = ours("SGD")([param], lr=1.0, norm_guard=guard)
    param.grad = torch.full_like(param, value)
    optimizer.step()
    expected = 0.0 if dtype is torch.float64 else -1.0  # inf in float32, which nothing clips
    assert param.tolist() == pytest.approx([expected] * 4, rel=1e-3)
    assert guard.last_step_skipped(wait=True) == (dtype is torch.float64)


def test_it_is_an_attribute_of_one_optimizer(device):
    guard = NormGuard()
    _param, optimizer = one_param(device, norm_guard=guard)
    assert optimizer.norm_guard is guard
    assert "norm_guard" not in optimizer.param_groups[0] | optimizer.defaults
    message = r"^SGD: norm_guard already belongs to another optimizer\. Make a NormGuard for"
    with pytest.raises(ValueError, match=message):
        one_param(device, norm_guard=guard)
    with pytest.raises(TypeError, match=r"^SGD: norm_guard must be a NormGuard or None, got 6$"):
        optimizer.norm_guard = 6
    optimizer.norm_guard = None
    step_with(optimizer, 1.0)
    assert optimizer.grad_norm is None
    _, other = one_param(device, norm_guard=guard)
    step_with(other, 1.0)
    del other
    optimizer.norm_guard = guard
    optimizer.norm_guard = guard  # again
    optimizer.load_state_dict(optimizer.state_dict())
    step_with(optimizer, 3.0)
    assert (guard.stats(wait=True).norms, guard.stats().mean) == (2, 2.0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_copies_of_an_optimizer_have_a_guard_of_their_own(copied, device):
    guard = warm_guard(patience=3)
    _param, optimizer = one_param(device, norm_guard=guard)
    step_with(optimizer, 7.0)
    other = copied(optimizer)
    assert other.norm_guard is not guard
    assert other.norm_guard.state_dict() == guard.state_dict()
    assert other.norm_guard.options == guard.options
    if copied is not copy.copy:
        pair = copied([optimizer, guard])
        assert pair[0].norm_guard is pair[1], "what is copied together stays together"
    (twin,) = other.param_groups[0]["params"]
    twin.data = torch.zeros(1, device=device)
    for norm in (7.0, 7.5):
        step_with(other, norm)
    assert twin.item() == -7.5, "the third in a row"
    assert guard.stats(wait=True).norms == 71


def test_a_state_dict_is_plain_and_goes_on(device):
    guard, other = (NormGuard(warmup_steps=2, patience=2) for _ in range(2))
    _, optimizer = one_param(device, norm_guard=guard)
    for norm in (1.0, 2.0, 50.0):
        step_with(optimizer, norm)
    assert {type(value) for value in guard.state_dict().values()} == {int, float}
    other.load_state_dict(pickle.loads(pickle.dumps(guard.state_dict())))
    assert (other.state_dict(), other.stats()) == (guard.state_dict(), guard.stats())
    param, twin = one_param(device, norm_guard=other)
    step_with(twin, 60.0)
    assert param.item() == -60.0, "the second in a row"


# What numbers of guards must be.
RANGES = {
    "sigma_factor": "a finite number above 0",
    "max_norm": "a number above 0",
    **dict.fromkeys(("window", "warmup_steps", "patience"), "an int from 1 to 9.22e+18"),
    "action": "'skip' or 'clip'",
    "mean": "a finite number of at least 0",
    "variance": "a finite number of at least 0",
}


A_COUNT = "an int from 0 to 9.22e+18"
BAD_STATES = [
    ("mean", None, RANGES["mean"]),
    ("mean", -1.0, RANGES["mean"]),
    ("norms", 1.5, A_COUNT),
    ("count", -1, A_COUNT),
    ("last_norm", NAN, "a number of at least 0"),
]


@pytest.mark.parametrize(("name", "value", "wanted"), BAD_STATES)
def test_a_load_takes_all_or_nothing(name, value, wanted):
    guard = warm_guard()
    before = guard.state_dict()
    text = re.escape(f"NormGuard.load_state_dict: {name} must be {wanted}, got {value!r}")
    with pytest.raises(ValueError, match=f"^{text}$"):
        guard.load_state_dict(before | {"mean": 9.0} | {name: value})
    assert guard.state_dict() == before
    with pytest.raises(KeyError, match=r"state_dict must have 'norms', got .*'guard'"):
        guard.load_state_dict({"guard": before})
    with pytest.raises(TypeError, match="state_dict must be a dict, got int"):
        guard.load_state_dict(1)


BAD_ARGUMENTS = [
    ("window", 0, ValueError),
    ("max_norm", -1.0, ValueError),
    ("action", "warn", ValueError),
    ("sigma_factor", "6", TypeError),
    ("warmup_steps", 2.5, TypeError),
    ("max_norm", NAN, ValueError),
    ("patience", True, TypeError),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD_ARGUMENTS)
def test_arguments_are_checked_by_name(name, value, error):
    text = re.escape(f"NormGuard: {name} must be {RANGES[name]}, got {value!r}")
    with pytest.raises(error, match=f"^{text}$"):
        NormGuard(**{name: value})
    with pytest.raises(TypeError, match=r"process_group must be None or a .* member of, got 1$"):
        NormGuard(process_group=1)


def test_only_a_step_with_gradients_counts(device):
    guard = warm_guard()
    param, optimizer = one_param(device, norm_guard=guard)
    step_with(optimizer, 60.0)
    assert guard.last_step_skipped(wait=True)
    step_with(optimizer, None)
    assert not guard.last_step_skipped(wait=True), "that of the last step"
    param.grad = torch.full_like(param, 5.0)
    for _ in range(3):
        optimizer.scan_gradients(torch.zeros((), device=device))
    assert guard.stats(wait=True).norms == 71
    optimizer.register_step_pre_hook(lambda *_: setattr(param, "grad", param.grad.clone()))
    optimizer.step()  # looks a second time
    assert guard.stats(wait=True).norms == 72
    empty = ours("SGD")([{"params": []}], lr=1.0, norm_guard=NormGuard())
    empty.step()
    assert empty.norm_guard.stats(wait=True).norms == 0


def test_norms_that_somebody_has_clipped_are_told_of_once(device, recwarn):
    guard = NormGuard()
    _param, optimizer = one_param(device, norm_guard=guard)
    for _ in range(70):
        step_with(optimizer, 0.0)
    for step in range(63):
        step_with(optimizer, 1.0 + 5e-5 * (step % 2))
    step_with(optimizer, 2.0)
    for _ in range(64):
        step_with(optimizer, 1.0)
    assert not recwarn.list
    for _ in range(16):  # the first of them warns
        step_with(optimizer, 1.0)
        assert len(recwarn.list) == 1
    assert [str(warning.message)[:50] for warning in recwarn.list] == [
        "NormGuard: 64 norms in a row lie within 1e-4 of on"
    ]


def test_a_guard_prints_as_its_call():
    guard = NormGuard(4, max_norm=2.5)
    assert eval(repr(guard)).options == guard.options
    assert repr(guard) == (
        "NormGuard(sigma_factor=4, window=128, warmup_steps=64, max_norm=2.5, action='skip', "
        "patience=16)"
    )
