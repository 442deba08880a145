"""Masters that are split: the optimizers' option, what becomes of it in files and conversions."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_ext
from amp_ext.optim import SGD, Adam, AdamW, Lion

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
dtypes = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
MOMENTUM = functools.partial(SGD, lr=0.1, momentum=0.9)
every_class = pytest.mark.parametrize(
    "kind", [Adam, AdamW, Lion, MOMENTUM], ids=["Adam", "AdamW", "Lion", "SGD"]
)
FORMS: tuple[Any, ...] = (True, "split", "split8", False)


def model_of(dtype: torch.dtype, device: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 21), nn.Linear(21, 5)).to(device, dtype)


def give_grads(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator) * 0.1
        param.grad = grad.to(param.device, param.dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_grads(model, step)
        optimizer.step()


def bits(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone().view(torch.int16) for param in model.parameters()]


def assert_equal(first: list[Tensor], second: list[Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@every_class
@dtypes
def test_masters_are_those_that_stand_beside(device, kind, dtype):
    model, twin = model_of(dtype, device), model_of(dtype, device)
    optimizer = kind(model.parameters(), master_weights="split")
    other = kind(twin.parameters())
    for steps in (range(5), range(5, 10)):
        train(model, optimizer, steps)
        train(twin, other, steps)
        for split, whole in zip(optimizer.master_params(), other.master_params(), strict=True):
            assert split.dtype == F32
            error = 0.0 if dtype == BF16 else 2**-38
            assert (split - whole).abs().max().item() <= error
    for param, equal in zip(model.parameters(), twin.parameters(), strict=True):
        assert (param != equal).float().mean().item() < 0.01  # ties alone


@dtypes
def test_a_state_has_the_lower_part_under_the_name_of_its_format(device, dtype):
    model = model_of(dtype, device)
    weight = next(model.parameters())
    name = "bf16" if dtype == BF16 else "fp16"
    optimizer = AdamW(model.parameters(), master_weights="split")
    optimizer.init_state()
    low = optimizer.state[weight][f"master_low_{name}"]
    assert (low.dtype, low.shape) == (torch.uint8, (21, 37, 2))
    assert "master_param" not in optimizer.state[weight]
    optimizer = AdamW(model.parameters(), master_weights="split8")
    optimizer.init_state()
    low = optimizer.state[weight][f"master_low8_{name}"]
    assert (low.dtype, low.shape) == (torch.int8, (21, 37))


def test_wide_parameters_have_none(device):
    for dtype in (F32, torch.float64):
        model, twin = model_of(dtype, device), model_of(dtype, device)
        optimizer = AdamW(model.parameters(), master_weights="split")
        other = AdamW(twin.parameters())
        train(model, optimizer, range(3))
        train(twin, other, range(3))
        assert_equal([*model.parameters()], [*twin.parameters()])
        assert not any("master" in key for state in optimizer.state.values() for key in state)


@every_class
@dtypes
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_resumed_run_has_the_bits_of_one_that_went_on(device, kind, dtype, form):
    model, twin = model_of(dtype, device), model_of(dtype, device)
    optimizer = kind(model.parameters(), master_weights=form)
    other = kind(twin.parameters(), master_weights=form)
    train(model, optimizer, range(6))
    train(twin, other, range(3))
    resumed = model_of(dtype, device)
    resumed.load_state_dict(twin.state_dict())
    last = kind(resumed.parameters(), master_weights=form)
    last.load_state_dict(pickle.loads(pickle.dumps(other.state_dict())))
    train(resumed, last, range(3, 6))
    assert_equal(bits(resumed), bits(model))
    assert_equal(last.master_params(), optimizer.master_params())


@dtypes
@pytest.mark.parametrize(("saved", "loaded"), [*itertools.product(FORMS, FORMS)])
def test_every_form_loads_every_other(device, dtype, saved, loaded):
    model = model_of(dtype, device)
    optimizer = AdamW(model.parameters(), master_weights=saved)
    train(model, optimizer, range(4))
    resumed = model_of(dtype, device)
    resumed.load_state_dict(model.state_dict())
    other = AdamW(resumed.parameters(), master_weights=loaded)
    other.load_state_dict(optimizer.state_dict())
    bound = {True: 2**-23, "split": 2**-23, "split8": 2**-15, False: 1.0}[loaded]
    wanted, found = optimizer.master_params(), other.master_params()
    for param, master, got in zip(resumed.parameters(), wanted, found, strict=True):
        assert torch.equal(got.to(dtype), param) or loaded in ("split", "split8")
        if loaded is not False:
            error = (got - master.float()).abs() / master.float().abs().clamp(min=2**-14)
            # A tie of the parameter is a unit of the lower part away.
            assert error.max().item() <= bound, (saved, loaded)
    train(resumed, other, range(4, 6))
    assert all(param.isfinite().all() for param in resumed.parameters())


def test_torch_loads_such_a_file_and_its_own_loads(device):
    model = model_of(BF16, device)
    optimizer = AdamW(model.parameters(), master_weights="split")
    train(model, optimizer, range(3))
    torch_adamw = torch.optim.AdamW(model.parameters())
    torch_adamw.load_state_dict(optimizer.state_dict())
    give_grads(model, 3)
    torch_adamw.step()
    back = AdamW(model.parameters(), master_weights="split")
    back.load_state_dict(torch_adamw.state_dict())
    assert_equal(back.master_params(), [param.float() for param in model.parameters()])
    train(model, back, range(4, 5))


def test_a_float32_master_beside_a_lower_part_is_the_newer_one(device):
    """Whoever knows no lower parts gives them back as they were, beside what it trained."""
    model = model_of(BF16, device)
    optimizer = AdamW(model.parameters(), master_weights="split")
    train(model, optimizer, range(3))
    lows = [state["master_low_bf16"].clone() for state in optimizer.state.values()]
    other = AdamW(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    train(model, other, range(3, 6))
    saved = other.state_dict()
    for index, low in enumerate(lows):
        saved["state"][index]["master_low_bf16"] = low
    last = AdamW(model.parameters(), master_weights="split")
    last.load_state_dict(saved)
    for got, wanted in zip(last.master_params(), other.master_params(), strict=True):
        assert (got - wanted).abs().max().item() <= 2**-24


def test_a_flattened_parameter_is_refused(device):
    param = nn.Parameter(torch.ones(3, dtype=BF16, device=device))
    optimizer = AdamW([param], master_weights="split")
    param._fsdp_flattened = True
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="FullyShardedDataParallel flattens"):
        AdamW([param], master_weights="split")
    with pytest.raises(ValueError, match="FullyShardedDataParallel flattens"):
        optimizer.step()
    assert (param == 1).all()
    AdamW([param]).step()


def test_a_master_that_is_no_tensor_is_named():
    model = model_of(BF16, "cpu")
    for form, key in ((True, "master_param"), ("split", "master_low_bf16")):
        optimizer = AdamW(model.parameters(), master_weights=form)
        optimizer.init_state()
        optimizer.state[next(model.parameters())][key] = 5.0
        give_grads(model, 0)
        with pytest.raises(TypeError, match=f"{key} of group 0, param 0 must be a tensor, got 5.0"):
            optimizer.step()


@dtypes
def test_every_number_that_is_written_is_followed(device, dtype):
    """Whatever is below it, unless that is half a unit in the last place."""
    values = torch.arange(2**16).to(torch.int16).view(dtype)
    values = values[values.isfinite()].to(device)
    for start in (1.2, -0.7, 1.0 + 2**-12, 3e-5):
        param = nn.Parameter(torch.full(values.shape, start, dtype=dtype, device=device))
        optimizer = SGD([param], lr=0.0, master_weights="split")
        optimizer.init_state()
        key = next(key for key in optimizer.state[param] if key.startswith("master_low"))
        unit = 2.0**-7 if dtype == BF16 else 2.0**-10
        fractions = torch.linspace(-0.499, 0.499, len(values), device=device)
        near = param.detach().float() * (1 + unit * 0.65 * fractions)
        optimizer.state[param][key].copy_(amp_ext.ops.split_master(param.detach(), near, 16))
        with torch.no_grad():
            param.copy_(values)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert torch.equal(param, values)


def test_a_parameter_that_is_written_is_followed(device):
    """A master beside it would be refreshed from it, and a copy that comes back is as it was."""
    model = model_of(BF16, device)
    optimizer = AdamW(model.parameters(), lr=0.0, weight_decay=0.0, master_weights="split")
    train(model, optimizer, range(3))
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    train(model, optimizer, range(3, 4))
    assert all((param == 0.5).all() for param in model.parameters())
    for param in model.parameters():
        param.data.zero_()  # which no version shows
    train(model, optimizer, range(4, 5))
    assert all((param == 0).all() for param in model.parameters())
    optimizer = AdamW(model.parameters(), master_weights="split")
    model.load_state_dict(before)
    train(model, optimizer, range(3))
    kept, saved = optimizer.master_params(), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)  # an average for a validation, say
    model.load_state_dict(saved)
    assert_equal(optimizer.master_params(), kept)


def test_masters_are_copies_and_need_no_refresh(device):
    model = model_of(BF16, device)
    optimizer = AdamW(model.parameters(), master_weights="split")
    train(model, optimizer, range(3))
    before = bits(model)
    for master in optimizer.master_params():
        master.zero_()
    optimizer.refresh_masters()
    assert_equal(bits(model), before)
    assert all(master.any() for master in optimizer.master_params())


@pytest.mark.parametrize("form", ["split", "split8"])
def test_a_model_may_be_converted_in_mid_run(device, form):
    model = model_of(BF16, device)
    optimizer = AdamW(model.parameters(), lr=1e-3, master_weights=form)
    train(model, optimizer, range(4))
    masters = optimizer.master_params()
    model.half()
    give_grads(model, 4)
    optimizer.init_state()
    plan_masters = optimizer.master_params()
    train(model, optimizer, range(4, 5))
    state = next(iter(optimizer.state.values()))
    name = "master_low" if form == "split" else "master_low8"
    assert f"{name}_fp16" in state
    assert f"{name}_bf16" not in state
    for old, new in zip(masters, plan_masters, strict=True):
        assert ((old - new).abs() <= 2**-8 * old.abs()).all()
    model.float()
    train(model, optimizer, range(5, 6))
    assert not any("master" in key for state in optimizer.state.values() for key in state)
    model.bfloat16()
    train(model, optimizer, range(6, 7))
    assert f"{name}_bf16" in next(iter(optimizer.state.values()))


def test_groups_may_differ(device):
    model = model_of(BF16, device)
    first, second = model
    optimizer = AdamW(
        [
            {"params": first.parameters(), "master_weights": "split"},
            {"params": second.parameters(), "master_weights": "split8"},
        ]
    )
    train(model, optimizer, range(2))
    assert "master_low_bf16" in optimizer.state[first.weight]
    assert "master_low8_bf16" in optimizer.state[second.weight]


def test_a_loop_may_change_its_mind(device):
    model = model_of(BF16, device)
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(3))
    masters = [master.clone() for master in optimizer.master_params()]
    optimizer.param_groups[0]["master_weights"] = "split"
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["weight_decay"] = 0.0
    train(model, optimizer, range(3, 4))
    for state in optimizer.state.values():
        assert "master_param" not in state
    for master, kept in zip(optimizer.master_params(), masters, strict=True):
        assert (master - kept).abs().max().item() <= 2**-24  # ties


@dtypes
def test_a_copy_and_a_pickle_go_on(dtype):
    model = model_of(dtype, "cpu")
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, master_weights="split")
    train(model, optimizer, range(3))
    other, last = copy.deepcopy((model, optimizer))
    third, pickled = pickle.loads(pickle.dumps((model, optimizer)))
    for pair in ((model, optimizer), (other, last), (third, pickled)):
        train(*pair, range(3, 6))
    assert_equal(bits(other), bits(model))
    assert_equal(bits(third), bits(model))


@pytest.mark.parametrize("form", ["split", "split8"])
def test_a_skipped_step_writes_nothing(device, form):
    model = model_of(F16, device)
    scaler = amp_ext.GradScaler(device.type, init_scale=4.0)
    optimizer = AdamW(model.parameters(), master_weights=form)
    train(model, optimizer, range(2))
    before, states = bits(model), copy.deepcopy(optimizer.state_dict()["state"])
    give_grads(model, 2)
    next(model.parameters()).grad.view(-1)[3] = torch.inf
    scaler.scale(torch.ones((), device=device))
    scaler.step(optimizer)
    scaler.update()
    assert_equal(bits(model), before)
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(tensor, states[index][key]) for key, tensor in state.items())


def test_a_layout_is_kept(device):
    conv = nn.Conv2d(3, 8, 3).to(device, BF16, memory_format=torch.channels_last)
    twin = nn.Conv2d(3, 8, 3).to(device, BF16)
    twin.load_state_dict(conv.state_dict())
    optimizer = AdamW(conv.parameters(), master_weights="split")
    other = AdamW(twin.parameters(), master_weights="split")
    train(conv, optimizer, range(3))
    train(twin, other, range(3))
    assert_equal([*conv.parameters()], [*twin.parameters()])
    assert_equal(optimizer.master_params(), other.master_params())


def test_a_number_without_sense_is_refused():
    wanted = r"AdamW: master_weights must be True, False, 'split' or 'split8', got 2\.5j"
    with pytest.raises(TypeError, match=wanted):
        AdamW([torch.ones(3, dtype=BF16)], master_weights=2.5j)


def test_a_lower_part_that_does_not_fit_is_refused():
    model = model_of(BF16, "cpu")
    optimizer = AdamW(model.parameters(), master_weights="split")
    train(model, optimizer, range(1))
    for wrong, text in (
        (
            torch.zeros(21, 37, dtype=torch.uint8),
            r"must be torch.uint8 of shape \(21, 37, 2\), got",
        ),
        (
            torch.zeros(21, 37, 2, dtype=torch.int8),
            "must be torch.uint8 of shape .*, got torch.int8",
        ),
        (3, "must be a tensor, got int"),
    ):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["master_low_bf16"] = wrong
        before, kept = bits(model), optimizer.master_params()
        with pytest.raises(ValueError, match=f"master_low_bf16 of group 0, param 0 {text}"):
            optimizer.load_state_dict(saved)
        assert_equal(bits(model), before)
        assert_equal(optimizer.master_params(), kept)


def test_float16_states_beside_it_are_refused_before_anything_is_written():
    model = model_of(BF16, "cpu")
    optimizer = AdamW(model.parameters(), master_weights="split", state_dtype=None)
    give_grads(model, 0)
    optimizer.step()
    model.half()
    before = bits(model)
    give_grads(model, 0)
    with pytest.raises(RuntimeError, match="exp_avg of group 0, param 0 must be Float or BFloat16"):
        optimizer.step()
    assert_equal(bits(model), before)
