"""An average of weights that follows the steps of an optimizer."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from typing import Any

import numpy
import pytest
import torch
from harness.edge_shapes import BF16, F16, F32, INF
from harness.optimizer_cases import assert_same_bits, bits_of, train
from harness.reference import same_bits
from torch import nn
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import amp_ext
from amp_ext.optim import WeightAverage


def params_of(device: torch.device, *dtypes: torch.dtype) -> list[Parameter]:
    return [
        Parameter(torch.randn(37 * i + 5).to(dtype).to(device)) for i, dtype in enumerate(dtypes)
    ]


def step(optimizer: Any) -> None:
    train([optimizer])


def model_of() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model[2].weight.requires_grad_(False)
    return model


def trained(model: nn.Module, **options: Any) -> tuple[Any, WeightAverage, AveragedModel]:
    """Six steps of a model, with averages by us and by torch."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = amp_ext.optim.AdamW(params, lr=0.01)
    average = WeightAverage(optimizer, 0.9, model=model, **options)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        theirs.update_parameters(model)
    return optimizer, average, theirs


@pytest.mark.parametrize("scaler_class", [amp_ext.GradScaler, torch.amp.GradScaler])
def test_it_follows_the_steps_that_landed_and_takes_parameters_without_a_gradient(
    scaler_class, device
):
    params = params_of(device, F32, BF16, F32)
    optimizer = amp_ext.optim.SGD(params, lr=0.1)
    average = WeightAverage(optimizer, 0.0, every=2)
    scaler = scaler_class(device.type, init_scale=4.0)
    scaler.scale(torch.zeros((), device=device))
    params[0].grad = torch.ones_like(params[0])
    taken = []
    for bad in (1.0, INF, 1.0, 1.0, INF, INF, 1.0, 1.0):
        params[0].grad.fill_(bad)
        with torch.no_grad():
            params[1] += 0.25  # nothing but the average sees it
        scaler.step(optimizer)
        scaler.update()
        taken.append(average.n_averaged.item())
        if taken[-1:] != taken[-2:-1] and taken[-1]:  # one was taken
            assert same_bits(average.averages[0], params[0])
            assert same_bits(average.averages[1], params[1].float())
    assert taken == [0, 0, 1, 1, 1, 1, 2, 2]
    optimizer.zero_grad()
    optimizer.step()
    assert average.state_dict()["steps"] == 5, "a step without a gradient lands nowhere"


def test_a_master_that_its_parameter_has_left_behind_is_what_the_next_step_would_make_of_it(device):
    params = params_of(device, BF16, F32)
    optimizer = amp_ext.optim.SGD(params, lr=0.1)
    average = WeightAverage(optimizer, 0.0)
    step(optimizer)
    with torch.no_grad():
        params[0].copy_(torch.arange(5.0))
    begun = WeightAverage(optimizer)  # the gradient is still there
    assert same_bits(begun.averages[0], params[0].float())
    params[0].grad, params[1].grad = None, torch.ones_like(params[1])
    optimizer.step()
    assert same_bits(average.averages[0], params[0].float())


@pytest.mark.parametrize("masters", [True, "split", "split8"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_swap_restores_every_bit_and_leaves_masters_alone(fails, masters, device):
    params = params_of(device, BF16, F32, F16)
    optimizer = amp_ext.optim.AdamW(params, lr=0.1, master_weights=masters)
    average = WeightAverage(optimizer, 0.5, dtype=BF16)
    train([optimizer], 2)
    before, twin = bits_of(optimizer), copy.deepcopy(optimizer)
    with contextlib.suppress(KeyboardInterrupt), average.swap():
        for param, ours in zip(params, average.averages, strict=True):
            assert same_bits(param, ours.to(param.dtype))
        if masters is not True:
            assert all(map(same_bits, optimizer.master_params(), [p.float() for p in params]))
        if fails:
            raise KeyboardInterrupt
    assert_same_bits(optimizer, before)
    train([optimizer, twin])
    assert_same_bits(optimizer, twin)


def test_a_step_a_save_and_a_load_inside_a_swap_are_refused_by_name():
    optimizer, average, _ = trained(model_of())
    other = WeightAverage(optimizer)
    state, own = optimizer.state_dict(), average.state_dict()
    text = "the parameters hold their averages, because a WeightAverage.swap"
    with average.swap():
        for name, refused in {
            "AdamW.step": optimizer.step,
            "AdamW.scan_gradients": lambda: optimizer.scan_gradients(torch.zeros(())),
            "WeightAverage": lambda: WeightAverage(optimizer),
            "AdamW.state_dict": optimizer.state_dict,
            "AdamW.load_state_dict": lambda: optimizer.load_state_dict(state),
            "AdamW.__getstate__": lambda: copy.deepcopy(optimizer),
            "WeightAverage.swap": average.swap().__enter__,
            "WeightAverage.state_dict": average.state_dict,
            "WeightAverage.averaged_state_dict": average.averaged_state_dict,
            "WeightAverage.load_state_dict": lambda: average.load_state_dict(own),
            "AdamW.refresh_masters": optimizer.refresh_masters,
            "WeightAverage.restart": other.restart,
        }.items():
            with pytest.raises(RuntimeError, match=f"^{name}: {text}"):
                refused()
        with pytest.raises(RuntimeError, match=f"^WeightAverage.swap: {text}"):
            other.swap().__enter__()
    step(optimizer)
    assert average.n_averaged == 7


def test_a_backward_pass_that_steps_is_refused_inside_a_swap():
    param = Parameter(torch.ones(3))
    optimizer = amp_ext.optim.SGD([param], lr=0.1)
    average = WeightAverage(optimizer)
    release = amp_ext.optim.release_gradients(optimizer)
    text = "^SGD: a step in the backward pass: the parameters hold their averages"
    with average.swap(), pytest.raises(RuntimeError, match=text):
        param.sum().backward()
    assert same_bits(param, torch.ones(3))
    release.remove()


def test_parameters_may_join_and_leave(device):
    params = params_of(device, F32, F32)
    optimizer = amp_ext.optim.SGD(params, lr=0.0)
    average = WeightAverage(optimizer)
    step(optimizer)
    kept = average.averages[1].clone()
    new = Parameter(torch.full((3,), 2.0, device=device))
    optimizer.add_param_group({"params": [new]})
    with average.swap():  # before a step has seen it
        assert [each.numel() for each in average.averages] == [5, 42, 3]
    step(optimizer)
    assert (average.averages[2] == 2).all()
    del optimizer.param_groups[0]["params"][0]
    step(optimizer)
    assert [each.numel() for each in average.averages] == [42, 3]
    assert same_bits(average.averages[0], kept)
    average.remove()
    step(optimizer)
    optimizer.add_param_group({"params": [Parameter(torch.ones(4, device=device))]})
    assert [each.numel() for each in average.averages] == [42, 3, 4]
    assert average.n_averaged == 3, "to list parameters takes no step"


def test_an_average_goes_when_nobody_holds_it_and_holds_its_optimizer():
    gc.disable()
    try:
        optimizer = amp_ext.optim.SGD([Parameter(torch.ones(3))], lr=0.1)
        average = WeightAverage(optimizer)
        step(optimizer)
        gone, held = weakref.ref(average), weakref.ref(optimizer)
        del optimizer
        step(average.optimizer)
        optimizer = average.optimizer
        del average
        assert gone() is None
        step(optimizer)
        del optimizer
        assert held() is None
    finally:
        gc.enable()


def test_a_parameter_of_another_shape_needs_a_restart():
    params = params_of(torch.device("cpu"), F32, F32)
    optimizer = amp_ext.optim.SGD(params, lr=0.1)
    average = WeightAverage(optimizer)
    step(optimizer)
    params[0].grad = None
    params[0].data = params[0].data[:2].clone()
    text = r"^average_params_: params\[0\] must be of sizes \[5\] on cpu, got \[2\] on cpu"
    with pytest.raises(RuntimeError, match=text):
        step(optimizer)
    average.restart()
    assert same_bits(average.averages[0], optimizer.master_params()[0])
    assert average.n_averaged == 0
    step(optimizer)
    assert average.n_averaged == 1
    assert same_bits(average.averages[0], optimizer.master_params()[0])


@pytest.mark.parametrize("masters", [True, "split", "split8"])
def test_an_average_always_takes_the_master_that_the_state_has(masters, device):
    params = params_of(device, BF16, F16)
    optimizer = amp_ext.optim.AdamW(params, lr=1e-3, master_weights=masters)
    train([optimizer], 3)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    average = WeightAverage(optimizer, 0.0)
    weights = [weight.clone() for weight in copy.deepcopy(optimizer).master_params()]
    assert not same_bits(weights[0], params[0].float()), "the parameter is not the master"
    for begin in (lambda: None, average.restart):
        begin()
        assert all(map(same_bits, average.averages, weights))
    params[0].grad = None
    optimizer.step()
    assert average.n_averaged == 1
    assert same_bits(average.averages[0], weights[0])
    with average.swap():
        if masters is not True:
            state = optimizer.state[params[0]]
            assert not any(state[key].any() for key in state if "low" in key)
    assert same_bits(optimizer.master_params()[0], weights[0])


def test_the_options_may_be_numbers_of_numpy_and_change_between_steps():
    optimizer = amp_ext.optim.SGD([Parameter(torch.ones(2))], lr=0.1)
    average = WeightAverage(optimizer, numpy.float32(0.5), numpy.int64(2))
    assert (average.decay, average.every, average.warmup) == (0.5, 2, False)
    step(optimizer)
    assert average.n_averaged == 0
    average.decay, average.every = 0.0, 1
    for _ in range(2):
        step(optimizer)
        assert same_bits(average.averages[0], optimizer.param_groups[0]["params"][0])
    assert average.n_averaged == 2


def test_a_parameter_may_change_its_dtype(device):
    params = params_of(device, F32, F32)
    optimizer = amp_ext.optim.SGD(params, lr=0.1)
    average = WeightAverage(optimizer, 0.0)
    step(optimizer)
    params[0].data, params[0].grad = params[0].data.bfloat16(), None
    step(optimizer)
    assert average.n_averaged == 2
    assert same_bits(average.averages[0], optimizer.master_params()[0])


def test_autograd_sees_a_swap():
    model = nn.Linear(3, 3)
    average = WeightAverage(amp_ext.optim.SGD(model.parameters(), lr=0.0), 0.5)
    x = torch.ones(2, 3, requires_grad=True)
    with average.swap():
        inside = model(x).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        inside.backward()


def test_autocast_casts_the_averages_and_then_the_parameters_again(device):
    model = nn.Linear(3, 3).to(device)
    optimizer = amp_ext.optim.SGD(model.parameters(), lr=0.5)
    average = WeightAverage(optimizer, 0.9)
    for _ in range(3):
        step(optimizer)
    x = torch.randn(2, 3, device=device)
    with torch.autocast(device.type, BF16):
        before = model(x)
        with average.swap():
            assert not same_bits(model(x), before)
        assert same_bits(model(x), before)


def test_a_parameter_of_another_shape_after_a_swap_is_refused_and_the_others_are_back():
    params = params_of(torch.device("cpu"), F32, F32, F32)
    optimizer = amp_ext.optim.SGD(params, lr=0.1)
    average = WeightAverage(optimizer, 0.5)
    step(optimizer)
    step(optimizer)
    before = [param.detach().clone() for param in params]
    text = r"^WeightAverage.swap: param 1 got another shape, so it was not restored\. Convert"
    with pytest.raises(RuntimeError, match=text), average.swap():
        other = params[1].data = params[1].detach()[:2].clone()
    assert same_bits(params[1], other)
    assert same_bits(params[0], before[0])
    assert same_bits(params[2], before[2])
    params[1].data = before[1]
    step(optimizer)
    assert average.n_averaged == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_follow_their_own_optimizer(copied):
    """Also of an average that the model holds; and of one that was removed, none."""
    model = model_of()
    optimizer, average, _ = trained(model, warmup=True)
    model.average = average
    other_model, other_optimizer = copied((model, optimizer))
    other = other_model.average
    assert other.optimizer is other_optimizer
    assert other.model is other_model
    before = [each.clone() for each in average.averages]
    for side in (other_optimizer, optimizer):
        torch.manual_seed(3)
        step(side)
        if side is other_optimizer:
            assert all(map(same_bits, average.averages, before))
    assert all(map(same_bits, average.averages, other.averages))
    assert other.n_averaged == average.n_averaged == 7
    average.remove()
    optimizer, removed = copied((optimizer, average))
    step(optimizer)
    assert removed.n_averaged == 7


WRONG = [
    (
        {"optimizer": torch.optim.SGD([torch.ones(1)])},
        TypeError,
        "optimizer must be one of amp_ext.optim, such as AdamW, got .*torch.optim.sgd.SGD.*inside",
    ),
    ({"decay": 1.1}, ValueError, 'decay must be a number from 0 to 1 or "equal", got 1.1'),
    ({"decay": "even"}, ValueError, "decay must be a number from 0 to 1 or .*, got 'even'"),
    ({"every": 0}, ValueError, "every must be an int of at least 1, got 0"),
    ({"every": numpy.float64(2.0)}, ValueError, r"every must be an int .*, got 2\.0"),
    ({"dtype": F16}, ValueError, "dtype must be torch.float32 or bfloat16, got torch.float16"),
    ({"decay": "equal", "warmup": True}, ValueError, "warmup must be False where decay is"),
    ({"model": 3}, ValueError, "model must be a torch.nn.Module or None, got 3"),
]


@pytest.mark.parametrize(("change", "error", "text"), WRONG)
def test_wrong_arguments_are_refused_by_name(change, error, text):
    optimizer = amp_ext.optim.SGD([Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(error, match=f"^WeightAverage: {text}"):
        WeightAverage(**{"optimizer": optimizer} | change)
