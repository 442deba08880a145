"""How parameters, masters and moments may be kept: what holds for every form of them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import (
    BF16,
    F16,
    F32,
    F64,
    channels_last,
    contiguous,
    placed,
    strided,
    transposed,
)
from harness.list_operations import BUFFERS, OPERATIONS
from harness.number_codes import counter_of
from harness.optimizer_cases import (
    AS_TORCH,
    HALVES,
    assert_same_bits,
    bits_of,
    give_grads,
    loading,
    make_params,
    of_other_classes,
    ours,
    params_of,
    theirs,
    through_a_file,
    train,
    trained,
    twins,
)
from harness.reference import refreshed_master, same_bits, snapshot
from harness.rows import rows
from torch import Tensor
from torch.nn import Parameter

import amp_ext
from amp_ext.optim import AdamW, float32_state_dict

# Moments in 8 bits have groups in the first two; the others are small, of rows that 32 does not
# divide, a scalar, and nothing.
SHAPES = [(130, 32), (64, 32, 3, 3), (127, 32), (16385,), (3, 5), (), (0, 32)]

# A class of each kind of moments, with betas and momenta that are dithered.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"weight_decay": 0.5, "betas": (0.99, 0.999)}),
    "lion": ("Lion", {"weight_decay": 0.5}),
    "momentum": ("SGD", {"lr": 0.01, "momentum": 0.99, "dampening": 0.5}),
}
SETTINGS |= of_other_classes(SETTINGS, "Adam")
each_setting = pytest.mark.parametrize(("name", "options"), rows(SETTINGS))

# What is kept of the masters, and how the moments are.
KEPT: dict[str, dict[str, Any]] = {
    "masters": {},
    "narrow": {"state_dtype": BF16},
    "nearest": {"state_dtype": BF16, "rounding": "nearest"},
    "split": {"master_weights": "split"},
    "split8": {"master_weights": "split8", "state_dtype": BF16},
    "split-8bit": {"master_weights": "split", "state_dtype": "8bit"},
    "split8-8bit-bf16": {"master_weights": "split8", "state_dtype": "8bit-bf16"},
    "8bit": {"state_dtype": "8bit"},
    "alone": {"master_weights": False},
    "alone-narrow": {"master_weights": False, "state_dtype": BF16},
    "as-torch": AS_TORCH,
}
OWN = ("master_weights", "state_dtype", "rounding")
FORMS = {
    **{f"bf16-{key}": (BF16, kept) for key, kept in KEPT.items()},
    **{f"fp16-{key}": (F16, KEPT[key]) for key in ("split", "split8-8bit-bf16", "as-torch")},
    **{f"fp32-{key}": (F32, KEPT[key]) for key in ("narrow", "8bit")},
}
each_form = pytest.mark.parametrize(("dtype", "kept"), rows(FORMS))
SMALL = {key: form for key, form in FORMS.items() if "split" in key or "8bit" in key}
small_forms = pytest.mark.parametrize(("dtype", "kept"), rows(SMALL))
# AdamW has moments of all kinds; what the others keep differs in few forms.
OF_OTHERS = {key for key in FORMS if "8bit" in key} | {"fp32-narrow", "bf16-alone"}
each_form_and_setting = pytest.mark.parametrize(
    ("name", "options", "dtype", "kept"),
    rows(
        {
            f"{setting}-{form}": (*SETTINGS[setting], *FORMS[form])
            for setting, form in itertools.product(SETTINGS, FORMS)
            if setting == "adamw" or form in OF_OTHERS
        }
    ),
)
of_two_forms = pytest.mark.parametrize(
    ("name", "options", "dtype", "first", "second"),
    rows(
        {
            f"{setting}-{first}-to-{second}": (
                *SETTINGS[setting],
                dtype,
                KEPT[first],
                KEPT[second],
            )
            for (first, second), other in zip(
                itertools.permutations(KEPT, 2),
                itertools.cycle([key for key in SETTINGS if key != "adamw"]),
                strict=False,
            )
            for setting, dtype in (("adamw", BF16), (other, F16))
        }
    ),
)


def make(name: str, dtype: torch.dtype, device: Any = "cpu", **options: Any) -> Any:
    return ours(name)(make_params(dtype, device, SHAPES), **options)


def numbers_of(optimizer: Any) -> list[dict[str, Tensor]]:
    """Returns what the states of each parameter stand for, in float32."""
    states = float32_state_dict(optimizer)["state"]
    return [
        {key: value for key, value in states.get(index, {}).items() if key != "step"}
        for index in range(len(params_of(optimizer)))
    ]


# Beside the largest of a master, or the norm of a moment.
ERRORS = {True: 2.0**-23, "split": 2.0**-23, "split8": 2.0**-14, F32: 0.0, BF16: 0.01}


def assert_kept(found: Any, wanted: list[dict[str, Tensor]], kept: dict[str, Any]) -> None:
    """Asserts that an optimizer has these numbers, as closely as what it keeps of them allows."""
    masters, moments = kept.get("master_weights", True), kept.get("state_dtype", F32)
    for param, numbers, got in zip(params_of(found), wanted, numbers_of(found), strict=True):
        for key, value in numbers.items():
            if key != "master_param":
                error = (got[key] - value).norm()
                assert error <= ERRORS.get(moments, 0.06) * value.norm(), key
            elif masters is not False and param.dtype != F32:
                unit = value.abs().clamp(min=2.0**-14)  # of float16 with split masters
                assert ((got[key] - value).abs() <= ERRORS[masters] * unit).all()


@each_form_and_setting
def test_a_resumed_run_has_the_bits_of_one_that_went_on(device, name, options, dtype, kept):
    straight = trained(make(name, dtype, device, **options, **kept))
    resumed = ours(name)(twins(straight), **options | {"lr": 1.0}, **kept)
    resumed.load_state_dict(through_a_file(straight.state_dict()))
    assert_same_bits(resumed, straight)
    train([straight, resumed], 3)
    assert_same_bits(resumed, straight)


@of_two_forms
def test_every_form_loads_every_other(name, options, dtype, first, second):
    optimizer = trained(make(name, dtype, **options, **first))
    other = loading(ours(name)(twins(optimizer), **options, **second), optimizer.state_dict())
    other.init_state()  # masters that the file lacks
    ahead = ours(name)(twins(optimizer), **options, **second)
    ahead.init_state()
    keys = [
        # A counter of a file stays where the options have no use for it.
        [one.state[param].keys() - {"step"} for param in params_of(one)]
        for one in (other, ahead)
    ]
    assert keys[0] == keys[1]
    groups = [one.param_groups[0] for one in (other, ahead)]
    assert [groups[0][option] for option in OWN] == [groups[1][option] for option in OWN]
    assert_kept(other, numbers_of(optimizer), second)
    train([other])
    assert all(param.isfinite().all() for param in params_of(other))


@of_two_forms
def test_a_loop_may_change_the_form(name, options, dtype, first, second):
    optimizer = trained(make(name, dtype, **options, **first))
    resumed = ours(name)(twins(optimizer), **options, **second)
    resumed.load_state_dict(optimizer.state_dict())
    for option in OWN:
        optimizer.param_groups[0][option] = resumed.param_groups[0][option]
    train([optimizer, resumed], 2)
    assert_same_bits(optimizer, resumed)


@cases.COPIES
@each_form
def test_a_copy_goes_on_as_the_original(copied, dtype, kept):
    for name, options in SETTINGS.values():
        optimizer = trained(make(name, dtype, **options, **kept))
        other = copied(optimizer)
        assert_same_bits(other, optimizer)
        train([optimizer, other], 2)
        assert_same_bits(other, optimizer)


@each_form_and_setting
def test_states_created_ahead_change_no_bit_of_the_training(name, options, dtype, kept):
    ahead = make(name, dtype, **options, **kept)
    plain = ours(name)(twins(ahead), **options, **kept)
    ahead.init_state()
    train([ahead, plain], 3)
    assert_same_bits(ahead, plain)


@each_setting
def test_groups_may_differ(name, options):
    groups = [
        {"params": make_params(dtype, "cpu", SHAPES), **kept} for dtype, kept in FORMS.values()
    ]
    alone = [
        ours(name)([{**group, "params": twins(group["params"])}], **options) for group in groups
    ]
    together = ours(name)(groups, **options)
    for _ in range(3):
        give_grads(together, [param for optimizer in alone for param in params_of(optimizer)])
        for optimizer in (together, *alone):
            optimizer.step()
    assert_same_bits(together, [bits for optimizer in alone for bits in bits_of(optimizer)])


@each_form
@cases.each_class
def test_cautious_decay_shrinks_what_the_update_does_not_move_away_from_0(
    device, name, options, dtype, kept
):
    params = make_params(dtype, device, [(130, 32), (5, 7)])
    start = ours(name)(params, **options, **kept)
    start.param_groups[0]["decoupled_weight_decay"] = True
    train([start], 3)
    changes = ({"weight_decay": 0.5, "cautious_weight_decay": True}, {"weight_decay": 0.5}, {})
    runs = [copy.deepcopy(start) for _ in changes]
    for run, change in zip(runs, changes, strict=True):
        run.param_groups[0].update({"weight_decay": 0.0} | change)
    train(runs)
    masters = [run.master_params() for run in runs]
    for before, cautious, decayed, plain in zip(start.master_params(), *masters, strict=True):
        update = (before - plain).sign()
        expected = torch.where(before.sign() * update >= 0, decayed, plain)
        # An update that is rounded off in a parameter without a master has no sign here.
        is_right = (cautious == expected) | ((update == 0) & (cautious == plain))
        assert is_right.all()
        assert (cautious != decayed).any()
    for cautious, decayed in zip(*map(bits_of, runs[:2]), strict=True):
        same = [key for key in cautious if not key.startswith(("param", "master"))]
        assert all(same_bits(cautious[key], decayed[key]) for key in same)


@each_form_and_setting
def test_a_model_may_be_converted_in_mid_run(name, options, dtype, kept):
    optimizer = trained(make(name, dtype, **options, **kept))
    keys = [state.keys() for state in optimizer.state.values()]
    numbers = numbers_of(optimizer)
    moments = kept.get("state_dtype", F32)
    for other in (F16, F32, F64, BF16, dtype):
        for param in params_of(optimizer):
            param.data = param.data.to(other)
            param.grad = None
        optimizer.init_state()
        if moments is None:
            continue
        for wanted, got in zip(numbers, numbers_of(optimizer), strict=True):
            for key in wanted.keys() - {"master_param"}:
                error = (got[key] - wanted[key]).norm()
                assert error <= 1e-6 * wanted[key].norm(), (other, key)
            if "master_param" in wanted.keys() & got.keys():
                # No more than the least precise of the parameters has lost.
                master = wanted["master_param"]
                error = (got["master_param"] - master).abs()
                assert (error <= 2.0**-7 * master.abs().clamp(min=2.0**-14)).all(), other
    assert [state.keys() for state in optimizer.state.values()] == keys
    train([optimizer], 2)
    assert all(param.isfinite().all() for param in params_of(optimizer))


@each_form_and_setting
def test_a_skipped_step_touches_nothing_and_moves_no_dither(device, name, options, dtype, kept):
    optimizer = trained(make(name, dtype, device, **options, **kept))
    straight = loading(ours(name)(twins(optimizer), **options, **kept), optimizer.state_dict())
    scaler = amp_ext.GradScaler(device.type, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    before = bits_of(optimizer)
    give_grads(optimizer)
    params_of(optimizer)[3].grad.view(-1)[5] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert_same_bits(optimizer, before)
    train([optimizer, straight], 2)
    assert_same_bits(optimizer, straight)


# Exports.


@small_forms
@each_setting
def test_what_is_exported_in_float32_rounds_to_what_it_was(name, options, dtype, kept):
    optimizer = trained(make(name, dtype, **options, **kept))
    exported, before = float32_state_dict(optimizer), bits_of(optimizer)
    names = {*optimizer.state_spec_of(optimizer.param_groups[0]).names}
    names |= {"master_param"} if dtype != F32 else set()
    for index, master in enumerate(optimizer.master_params()):
        state = exported["state"][index]
        assert state.keys() - {"step"} == names
        assert {tensor.dtype for tensor in state.values()} == {F32}
        assert dtype == F32 or torch.equal(state["master_param"], master)
    (group,) = exported["param_groups"]
    assert (group["state_dtype"], group["master_weights"]) == ("float32", True)
    optimizer.load_state_dict(exported)
    assert_same_bits(optimizer, before)


def test_an_export_is_a_copy_and_leaves_float64():
    optimizer = trained(ours("AdamW")(make_params(F32)))
    exported, own = float32_state_dict(optimizer), optimizer.state_dict()
    assert exported["param_groups"] == own["param_groups"]
    for left, right in zip(exported["state"].values(), own["state"].values(), strict=True):
        assert left.keys() == right.keys()
        for key, tensor in right.items():
            assert torch.equal(left[key], tensor)
            assert not tensor.numel() or left[key].data_ptr() != tensor.data_ptr()
    doubles = float32_state_dict(trained(ours("AdamW")(make_params(F64))))
    assert doubles["state"][0]["exp_avg"].dtype == F64
    with pytest.raises(TypeError, match=r"optimizer must be one of amp_ext\.optim, got SGD"):
        float32_state_dict(torch.optim.SGD(make_params(F32), lr=0.1))


# Files of those who know less.


@small_forms
@each_setting
def test_a_number_beside_a_code_is_the_newer_one(name, options, dtype, kept):
    """Whoever knows no codes gives them back as they were, beside what it trained."""
    optimizer = trained(make(name, dtype, **options, **kept))
    old = copy.deepcopy(optimizer.state_dict()["state"])
    other = loading(ours(name)(twins(optimizer), **options), optimizer.state_dict())
    train([other], 2)
    saved = other.state_dict()
    for index, state in old.items():
        for key in state.keys() - saved["state"][index].keys():
            saved["state"][index][key] = state[key]
    for wanted in (kept, {}):
        last = loading(ours(name)(twins(other), **options, **wanted), saved)
        assert_kept(last, numbers_of(other), wanted)
        assert not any("_low" in key for state in last.state.values() for key in state) or wanted


@each_form
@pytest.mark.parametrize("name", cases.IN_TORCH)
def test_files_of_torch_load_and_torch_loads_all_but_codes(name, dtype, kept):
    options = {"lr": 0.01, "momentum": 0.9} if name == "SGD" else {}
    optimizer = trained(make(name, dtype, **options, **kept))
    other = theirs(name)(twins(optimizer), **options, **cases.KINDS[name].in_16_bits)
    other.load_state_dict(optimizer.state_dict())
    has_codes = any("_q8" in key for state in optimizer.state.values() for key in state)
    if has_codes and name != "SGD":  # which begins anew
        give_grads(other)
        with pytest.raises(KeyError, match=optimizer.description.buffers[0].name):
            other.step()
    other = trained(theirs(name)(twins(optimizer), **options, **cases.KINDS[name].in_16_bits))
    back = loading(ours(name)(twins(other), **options, **kept), other.state_dict())
    back.init_state()
    wanted = [
        {key: value.float() for key, value in other.state[param].items() if key != "step"}
        for param in params_of(other)
    ]
    for param, numbers in zip(params_of(other), wanted, strict=True):
        numbers["master_param"] = param.detach().float()
    assert_kept(back, wanted, kept)
    train([back])


# What is refused.


@small_forms
def test_a_flattened_parameter_is_refused(dtype, kept):
    param = Parameter(torch.ones(8192, dtype=dtype))
    optimizer = ours("AdamW")([param], **kept)
    param._fsdp_flattened = True
    param.grad = torch.ones_like(param)
    words = "must be .* FullyShardedDataParallel flattens"
    with pytest.raises(ValueError, match=words):
        ours("AdamW")([param], **kept)
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    assert (param == 1).all()
    assert not optimizer.state


@each_form_and_setting
def test_a_state_that_is_no_tensor_is_named(name, options, dtype, kept):
    optimizer = trained(make(name, dtype, **options, **kept))
    state = optimizer.state[params_of(optimizer)[0]]
    give_grads(optimizer)
    for key, value in state.items():
        before = bits_of(optimizer)
        state[key] = 5.0
        words = f"^{name}: {key} of group 0, param 0 must be a tensor, got 5.0"
        with pytest.raises(TypeError, match=words):
            optimizer.step()
        state[key] = value
        assert_same_bits(optimizer, before)
    assert same_bits(params_of(optimizer)[0], before[0]["param"])


# Moments in codes of 8 bits.


def has_groups(optimizer: Any) -> bool:
    """Returns whether a moment has codes that share exponents, as contiguous parameters may."""
    codes = {"8bit-bf16": ("q8m",), "8bit": ("q8m", "q8s")}[optimizer.defaults["state_dtype"]]
    buffers = BUFFERS[optimizer.description.operation].values()
    return any(buffer.code in codes for buffer in buffers)


# Of two, three and four dimensions, and of one row.
GROUPED = [(130, 32), (3, 5, 1024), (64, 32, 3, 3), (1, 4096)]
# Small, of one dimension, a scalar, nothing, and of rows that 32 does not divide.
UNGROUPED = [(127, 32), (4128,), (), (0, 32), (128, 33)]


def test_moments_share_exponents_where_32_elements_of_a_row_can():
    params = make_params(F32, shapes=GROUPED + UNGROUPED)
    optimizer = trained(ours("Lion")(params, state_dtype="8bit"), 1)
    for param in params:
        shape = tuple(param.shape)
        wanted: dict[str, Any] = {"step": (F32, ()), "exp_avg": (BF16, shape)}
        if shape in GROUPED:
            del wanted["exp_avg"]
            groups = (shape[0], param[0].numel() // 32)
            wanted |= {"exp_avg_q8m": (torch.uint8, shape), "exp_avg_exp": (torch.uint8, groups)}
        state = optimizer.state[param]
        assert {key: (each.dtype, tuple(each.shape)) for key, each in state.items()} == wanted


LAYOUTS = (contiguous, channels_last, transposed, strided)


def spread_grad(step: int) -> Tensor:
    """Gradients of many sizes: moments beside the exponents of other groups would show."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.logspace(-3, 0, 64 * 32 * 9).view(64, 32, 3, 3)
    return torch.randn(64, 32, 3, 3, generator=generator) * sizes


@pytest.mark.parametrize("state_dtype", ["8bit-bf16", "8bit"])
@pytest.mark.parametrize("through", ["a conversion", "a file"])
@pytest.mark.parametrize(
    ("first", "second"),
    [pair for pair in itertools.permutations(LAYOUTS, 2) if contiguous in pair],
)
@cases.each_class
def test_another_layout_keeps_the_moments(name, options, first, second, through, state_dtype):
    """Only contiguous parameters have groups."""
    param = Parameter(placed(torch.randn(64, 32, 3, 3), first))
    optimizer = ours(name)([param], **options, state_dtype=state_dtype)
    for step in range(3):
        param.grad = spread_grad(step)
        optimizer.step()
    has_exponents = any(key.endswith("_exp") for key in optimizer.state[param])
    assert has_exponents == (first is contiguous and has_groups(optimizer))
    before = float32_state_dict(optimizer)["state"][0]
    if through == "a file":
        other = Parameter(placed(param.detach(), second))
        saved, param = optimizer.state_dict(), other
        optimizer = ours(name)([param], **options, state_dtype=state_dtype)
        optimizer.load_state_dict(through_a_file(saved))
    else:
        param.data = placed(param.detach(), second)
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    kept = param.detach().clone()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert same_bits(param.detach(), kept)
    after = float32_state_dict(optimizer)["state"][0]
    group = cases.numbers_of(optimizer.param_groups[0])
    decays = OPERATIONS[cases.operation_of(name)].decays
    for key in before.keys() - {"step"}:
        moment = before[key]
        # A step without gradients, and a code's width.
        decay = group[decays[f"{key}s"]]
        assert (after[key] - moment * decay).norm() <= 0.03 * moment.norm(), key


# Checkpoints.


def test_a_moment_that_is_decoded_has_the_layout_of_its_parameter():
    param = Parameter(torch.randn(8, 16, 4, 4))
    saved = AdamW([param], state_dtype="8bit")
    param.grad = torch.randn_like(param)
    saved.step()
    last = Parameter(param.detach().to(memory_format=torch.channels_last))
    loaded = AdamW([last])
    loaded.load_state_dict(saved.state_dict())
    assert loaded.state[last]["exp_avg_sq"].stride() == last.stride()


# Counters of what is dithered.


@pytest.mark.parametrize(("name", "first"), [("Lion", 0.0), ("SGD", 1.0)])
def test_a_file_without_counters_starts_them(name, first):
    """As torch's SGD, and ours where nothing was dithered."""
    options = {"momentum": 0.99} if name == "SGD" else {}
    before = ours(name)(make_params(F32), **options)
    train([before], 2)
    assert all("step" not in state for state in before.state.values())
    after = ours(name)(cases.twins(before), **options, state_dtype=BF16)
    after.load_state_dict(before.state_dict())
    train([after], 1)
    assert {state["step"].item() for state in after.state.values()} == {first + 1}


# What dithers, in the order of what a step reads.
DITHERED = {
    "parameters": ("SGD", BF16, {"master_weights": False}),
    "split8": ("SGD", F16, {"master_weights": "split8"}),
    "states": ("AdamW", F32, {"state_dtype": BF16}),
    "8bit": ("AdamW", BF16, {"state_dtype": "8bit"}),
    "8bit-momentum": ("SGD", F32, {"state_dtype": "8bit", "momentum": 0.99}),
}


def count_from(optimizer: torch.optim.Optimizer, steps: int) -> None:
    optimizer.init_state()
    for state in optimizer.state.values():
        state["step"].copy_(counter_of(steps))


@pytest.mark.parametrize(("name", "dtype", "options"), rows(DITHERED))
def test_counters_and_resumed_runs_go_on_behind_2_24_steps(name, dtype, options, device):
    straight, resumed = cases.pair(name, {"lr": 0.05, **options}, dtype, device, [(64, 64), (7,)])
    count_from(straight, 2**24 - 2)
    count_from(resumed, 2**24 - 2)
    for step in range(6):
        train([straight, resumed], 1)
        file = cases.through_a_file(resumed.state_dict())
        resumed = cases.loading(ours(name)(cases.twins(resumed), lr=1.0, **options), file)
        counters = {state["step"].item() for state in straight.state.values()}
        assert counters == {counter_of(2**24 - 1 + step).item()}
        assert_same_bits(resumed, straight)


# Float32 masters of 16-bit parameters: what they keep, and what happens when weights change.


def still_step(optimizer: cases.Optimizer) -> None:
    """Takes a step that moves nothing: with a learning rate of 0."""
    (group,) = optimizer.param_groups
    lr, group["lr"] = group["lr"], 0.0
    train([optimizer])
    group["lr"] = lr


def masters_of(optimizer: cases.Optimizer) -> list[Tensor]:
    return snapshot([optimizer.state[param]["master_param"] for param in params_of(optimizer)])


def assert_refreshed(
    optimizer: cases.Optimizer, before: list[Tensor], changed: list[Tensor]
) -> None:
    """Asserts that the masters hold what parameters were changed to, and no parameter moved."""
    masters = masters_of(optimizer)
    assert all(map(same_bits, params_of(optimizer), changed))
    assert all(map(same_bits, masters, map(refreshed_master, before, changed)))


# Ways to change weights under their masters.


@torch.no_grad()
def clamp(params: list[Parameter]) -> None:
    for param in params:
        param.clamp_(-0.3, 0.3)


@torch.no_grad()
def add_in_place(params: list[Parameter]) -> None:
    for param in params:
        param += 0.125


def write_through_data(params: list[Parameter]) -> None:
    """Writes what torch does not count."""
    for param in params:
        param.data.mul_(0.5)


@pytest.mark.parametrize("change", [clamp, add_in_place, write_through_data])
@pytest.mark.parametrize(("name", "options"), cases.optimizers_named("adamw", "dampening"))
@HALVES
def test_changed_weights_reach_the_master_at_the_next_step(device, dtype, name, options, change):
    """After a write that torch does not count, when ``refresh_masters`` is called, and at once.

    An overflow between does not let it be forgotten.
    """
    optimizer = trained(ours(name)(make_params(dtype, device), **options))
    before = masters_of(optimizer)
    change(params_of(optimizer))
    changed = snapshot(params_of(optimizer))
    assert not same_bits(changed[0], before[0].to(dtype))
    if change is clamp:  # elements that did not change keep their extra bits
        kept = changed[0] == before[0].to(dtype)
        assert kept.any()
        assert (before[0] != changed[0].float())[kept].any()
    if change is write_through_data:
        optimizer.refresh_masters()
        assert_refreshed(optimizer, before, changed)
    if change is add_in_place:
        optimizer.found_inf = torch.ones((), device=device)
        train([optimizer], 2)
        assert all(map(same_bits, params_of(optimizer), changed))
        del optimizer.found_inf
    still_step(optimizer)
    assert_refreshed(optimizer, before, changed)


# Masters that are written or replaced by hand, and what else changes before the step.


def fill_masters(optimizer: cases.Optimizer) -> None:
    for master in optimizer.master_params(params_of(optimizer)[:1]):
        master.fill_(3.0)


def replace_masters(optimizer: cases.Optimizer) -> None:
    state = optimizer.state[params_of(optimizer)[0]]
    state["master_param"] = torch.full_like(state["master_param"], 3.0)


def write_as_of_a_loop(optimizer: cases.Optimizer) -> None:
    """Writes the parameter, too."""
    param = params_of(optimizer)[0]
    param.detach().mul_(2.0)


def give_other_memory(optimizer: cases.Optimizer) -> None:
    param = params_of(optimizer)[0]
    param.data = param.detach() * 2.0


def give_other_strides(optimizer: cases.Optimizer) -> None:
    param = params_of(optimizer)[0]
    param.data = param.detach().transpose(2, 3)


def reload(optimizer: cases.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


THEN = [write_as_of_a_loop, give_other_memory, give_other_strides, reload, copy.deepcopy, None]


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("write", [fill_masters, replace_masters])
@HALVES
def test_a_step_goes_on_from_a_master_that_is_written_and_from_no_other(dtype, write, then, device):
    """Another tensor, and one whose parameter is written, count where they round to it."""
    values = torch.arange(8.0, device=device).to(dtype).view(1, 2, 2, 2)
    optimizer = ours("SGD")([Parameter(placed(values, channels_last))], lr=0.5)
    step_by_zeros(optimizer)
    for _ in range(2):
        write(optimizer)
        optimizer = (then and then(optimizer)) or optimizer
        (param,) = params_of(optimizer)
        wanted = param.detach().clone()
        if write is fill_masters and then is None:
            wanted.fill_(3.0)
        step_by_zeros(optimizer)
        assert torch.equal(param.detach(), wanted)
        assert torch.equal(optimizer.state[param]["master_param"], wanted.float())


def step_by_zeros(optimizer: cases.Optimizer) -> None:
    for param in params_of(optimizer):
        param.grad = torch.zeros_like(param)
    optimizer.step()


# Split masters.


def test_split_masters_are_copies_and_need_no_refresh(device):
    optimizer = trained(ours("AdamW")(make_params(BF16, device, [(37,)]), master_weights="split"))
    before = snapshot(params_of(optimizer))
    optimizer.master_params()[0].zero_()
    optimizer.refresh_masters()
    assert all(map(same_bits, params_of(optimizer), before))
    assert optimizer.master_params()[0].any()
