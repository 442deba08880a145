"""Options of groups: what is refused by name wherever it comes from, and that numpy's are taken."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F16, F32
from harness.optimizer_cases import give_grads, make_params, ours, params_of
from harness.reference import same_bits
from harness.rows import rows
from harness.scaler_cases import ready

import amp_ext
from amp_ext.optim.options import CONFIGURED_OPTIONS, DESCRIPTIONS

numpy = pytest.importorskip("numpy")

NAN, TWO = math.nan, torch.ones(2)
A_RATE, A_LIMIT = "a number or a tensor of one element", "a number of at least 0 or None"
TWO_NUMBERS = "two numbers or two tensors of one element"
UNUSED = {each.name for one in DESCRIPTIONS.values() for each in one.options if not each.is_read}
A_STATE_DTYPE = "torch.float32, torch.bfloat16, '8bit-bf16', '8bit' or None"

# The class, the option, a wrong value, what it must be, and how the message shows what came: of
# each kind of option, and of each way of being wrong.
MASTERS, ROUNDING = "True, False, 'split' or 'split8'", "'dither', 'nearest' or None"
REFUSED = sorted(
    {o.name for one in DESCRIPTIONS.values() for o in one.options if o.type == "refused flag"}
)
ANYWHERE = {
    "lr-text": ("Adam", "lr", "1e-3", A_RATE, "'1e-3'"),
    "lr-none": ("SGD", "lr", None, A_RATE, "None"),
    "lr-list": ("Lion", "lr", [1e-3], A_RATE, r"\[0.001\]"),
    "lr-complex": ("AdamW", "lr", 1j, A_RATE, "1j"),
    "lr-array": ("SGD", "lr", numpy.ones(1), A_RATE, "array"),
    "maximize-list": ("Adam", "maximize", [], "True or False", r"\[\]"),
    "masters-case": ("Lion", "master_weights", "Split", MASTERS, "'Split'"),
    "masters-empty": ("SGD", "master_weights", "", MASTERS, "''"),
    "fused-text": ("Adam", "fused", "no", "True, False or None", "'no'"),
    "rounding-flag": ("AdamW", "rounding", True, ROUNDING, "True"),
    "rounding": ("Lion", "rounding", "up", ROUNDING, "'up'"),
    "norm-text": ("SGD", "max_grad_norm", "1", "a number or None", "'1'"),
    "norm-bool": ("Adam", "max_grad_norm", True, "a number or None", "True"),
    "norm-nan": ("Lion", "max_grad_norm", NAN, A_LIMIT, "nan"),
    "clip-tensor": ("SGD", "clip_value", torch.ones(()), "a number or None", "a tensor of sizes"),
    "clip-negative": ("AdamW", "clip_value", -1e-30, A_LIMIT, "-1e-30"),
    "dtype": ("SGD", "state_dtype", "8BIT", A_STATE_DTYPE, "'8BIT'"),
    "dtype-fp16": ("Adam", "state_dtype", F16, A_STATE_DTYPE, "torch.float16, in which second mom"),
    "beta": ("Adam", "betas", (0.9,), TWO_NUMBERS, r"\(0.9,\)"),
    "betas": ("Lion", "betas", 0.9, TWO_NUMBERS, "0.9"),
    "betas-text": ("AdamW", "betas", "09", TWO_NUMBERS, "'09'"),
    "beta-text": ("Adam", "betas", (0.9, "0"), TWO_NUMBERS, r"\(0.9, '0'\)"),
    "floor-nan": ("AdamW", "denominator_floor", NAN, "a number of at least 0", "nan"),
    # A text in the place of each flag and each number, by what the default is.
    **{
        option: (
            name,
            option,
            "no",
            "True or False" if isinstance(default, bool) else "a number",
            "'no'",
        )
        for name in cases.NAMES
        for option, default in ours(name)(make_params(F32)).defaults.items()
        if isinstance(default, (bool, int, float))
        and option not in ("lr", "master_weights", *REFUSED)
    },
}
# torch checks these as defaults, in its own words.
IN_GROUPS = {
    "lr-nan": ("Adam", "lr", NAN, A_RATE, "nan"),
    "lr-numpy-nan": ("SGD", "lr", numpy.float32("nan"), A_RATE, "nan"),
    "lr-two": ("Lion", "lr", TWO, A_RATE, r"a tensor of sizes \(2,\)"),
    "decay-nan": ("AdamW", "weight_decay", NAN, "a number", "nan"),
    "beta-nan": ("Adam", "betas", (0.9, NAN), TWO_NUMBERS, r"\(0.9, nan\)"),
    "dampening-nan": ("SGD", "dampening", NAN, "a number", "nan"),
}


def refused(name: str, place: str, wanted: str, got: str):
    """Expects the error of an option at a place: "Adam: %s of group 1"."""
    return pytest.raises((TypeError, ValueError), match=rf"^{place} must be {wanted}, got {got}")


@pytest.mark.parametrize(
    ("name", "option", "value", "wanted", "got"), rows({**ANYWHERE, **IN_GROUPS})
)
def test_a_wrong_option_is_refused_wherever_it_comes_from(name, option, value, wanted, got):
    params = make_params(F32)
    if (name, option, value, wanted, got) in ANYWHERE.values():
        with refused(name, f"{name}: {option}", wanted, got):
            ours(name)(params, **{option: value})
    optimizer = ours(name)(params[:1])
    with refused(name, f"{name}: {option} of group 1", wanted, got):
        optimizer.add_param_group({"params": params[1:], option: value})
    assert len(optimizer.param_groups) == 1
    with refused(name, f"{name}: {option} of group 1", wanted, got):
        ours(name)([{"params": params[:1]}, {"params": params[1:], option: value}])
    cases.train([optimizer])
    before, saved = cases.bits_of(optimizer), copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0][option] = value
    if option not in CONFIGURED_OPTIONS:
        with refused(name, rf"{name}.load_state_dict: {option} of param_groups\[0\]", wanted, got):
            optimizer.load_state_dict(saved)
    cases.assert_same_bits(optimizer, before)
    cases.train([optimizer])


@pytest.mark.parametrize("scaled", [False, True], ids=["alone", "under-a-scaler"])
@pytest.mark.parametrize(
    ("name", "option", "value", "wanted", "got"),
    rows({key: row for key, row in {**ANYWHERE, **IN_GROUPS}.items() if row[1] not in UNUSED}),
)
def test_a_step_refuses_what_a_loop_wrote(name, option, value, wanted, got, scaled):
    if isinstance(value, numpy.ndarray):
        value = numpy.ones(2)  # numpy before 2.4 converts an array of one element to a number
    params = make_params(F32)
    optimizer = ours(name)([{"params": params[:1]}, {"params": params[1:]}])
    if option in ("max_grad_norm", "skip_nonfinite") and got != "'no'":
        optimizer.param_groups[0][option] = value
    optimizer.param_groups[1][option] = value
    give_grads(params)
    before = cases.bits_of(optimizer)
    scaler = amp_ext.GradScaler("cpu", enabled=scaled)
    scaler.scale(torch.ones(()))
    with refused(name, f"{name}: {option} of group [01]", wanted, got):
        scaler.step(optimizer)
    cases.assert_same_bits(optimizer, before)


@pytest.mark.parametrize("flag", REFUSED)
@cases.each_name
def test_a_flag_that_is_refused_is_refused_in_a_group_too(name, flag):
    optimizer = ours(name)(make_params(F32)[:1])
    if flag not in optimizer.defaults:
        pytest.skip("another class has this flag")
    with pytest.raises(RuntimeError, match=f"^{name}: {flag} must be False, got True"):
        ours(name)(make_params(F32), **{flag: True})
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0][flag] = True
    added = {"params": make_params(F32)[1:], flag: True}
    words = f"{flag} of .* must be False, got True"
    with pytest.raises(RuntimeError, match=f"^{name}: {words}"):
        optimizer.add_param_group(added)
    with pytest.raises(ValueError, match=f"^{name}.load_state_dict: {words}"):
        optimizer.load_state_dict(saved)
    assert [group[flag] for group in optimizer.param_groups] == [False]


# What is taken.


NUMBERS = {
    "float32": numpy.float32(0.25),
    "float64": numpy.float64(0.25),
    "float16": numpy.float16(0.25),
    "array": numpy.array(0.25),
}


@pytest.mark.parametrize("value", rows(NUMBERS))
@pytest.mark.parametrize(
    ("name", "option"),
    [
        *(("AdamW", option) for option in ("lr", "eps", "weight_decay", "denominator_floor")),
        *(("SGD", option) for option in ("lr", "weight_decay", "clip_value", "max_grad_norm")),
    ],
)
def test_numbers_of_numpy_are_numbers_everywhere(name, option, value):
    start = make_params(F32)
    by_constructor = ours(name)(cases.twins(start), **{option: value})
    in_a_group = ours(name)([{"params": cases.twins(start), option: value}])
    written, loaded, wanted = (ours(name)(cases.twins(start)) for _ in range(3))
    written.param_groups[0][option] = value
    saved = copy.deepcopy(wanted.state_dict())
    saved["param_groups"][0][option] = value
    loaded.load_state_dict(saved)
    if option in CONFIGURED_OPTIONS:
        loaded.param_groups[0][option] = value
    wanted.param_groups[0][option] = 0.25
    everyone = [by_constructor, in_a_group, written, loaded]
    cases.train([wanted, *everyone], 2)
    for optimizer in everyone:
        cases.assert_same_bits(optimizer, wanted)


@pytest.mark.parametrize("save", [lambda opt: opt.state_dict(), amp_ext.optim.float32_state_dict])
@cases.each_name
def test_what_a_schedule_of_numpy_writes_is_saved_as_numbers_of_python(name, save):
    optimizer = cases.trained(ours(name)(make_params(F32)))
    group = optimizer.param_groups[0]
    numbers = {"lr": 0.125, "weight_decay": 0.5, "initial_lr": 0.25, "maximize": True}
    group.update({option: numpy.array(number)[()] for option, number in numbers.items()})
    group.update(max_lr=numpy.array(0.5), schedule={"steps": [numpy.int64(3), (numpy.float64(4),)]})
    expected = {**numbers, "max_lr": 0.5, "schedule": {"steps": [3, (4.0,)]}}
    if "betas" in group:
        group["betas"], expected["betas"] = numpy.array([0.5, 0.75]), (0.5, 0.75)
    (saved,) = cases.through_a_file(save(optimizer))["param_groups"]
    assert {option: saved[option] for option in expected} == expected
    assert {type(saved[option]) for option in ("lr", "initial_lr", "max_lr")} == {float}
    assert type(group["initial_lr"]) is numpy.float64  # the schedule's own stays


def test_what_torch_takes_for_numbers_and_flags_is_taken():
    optimizer = ours("Adam")(
        make_params(F32), weight_decay=torch.tensor(0.5), amsgrad=1, maximize=None
    )
    optimizer.param_groups[0].update(lr=True, eps=Decimal("1e-8"), betas=[0.9, 0.99], name="all")
    cases.train([optimizer])
    assert optimizer.param_groups[0]["name"] == "all"


# Options that a group has lost.


USES = {
    "step": lambda optimizer: optimizer.step(),
    "ours": lambda optimizer: ready().step(optimizer),
    "init": lambda optimizer: optimizer.init_state(),
    "export": amp_ext.optim.float32_state_dict,
}


@pytest.mark.parametrize("use", rows(USES))
@cases.each_name
def test_an_option_of_torchs_that_a_group_has_lost_is_named(name, use):
    params = make_params(F32)
    optimizer = ours(name)([{"params": params[:1]}, {"params": params[1:]}])
    cases.train([optimizer])
    give_grads(params)
    before = cases.bits_of(optimizer)
    group = optimizer.param_groups[1]
    whole = dict(group)
    described = optimizer.description.options
    own = {each.name for each in described if each.on_load in ("kept", "kept if missing")}
    of_torch = whole.keys() - UNUSED - own
    assert {"lr", "weight_decay", "params"} <= of_torch
    for option in sorted(of_torch):
        del group[option]
        with pytest.raises(
            ValueError, match=rf"^{name}.*: {option} of group 1 must be present, got \["
        ):
            use(optimizer)
        group[option] = whole[option]
    cases.assert_same_bits(optimizer, before)
    for option in (UNUSED | own) & group.keys():
        del group[option]
    optimizer.step()
    assert {option: group[option] for option in own} == {option: whole[option] for option in own}
    assert not same_bits(params[1], before[1]["param"])


def test_a_load_gives_back_what_a_file_has_and_the_rest_as_constructed():
    optimizer = cases.trained(ours("AdamW")(make_params(F32), lr=0.25))
    saved = copy.deepcopy(optimizer.state_dict())
    for group in (*optimizer.param_groups, *saved["param_groups"]):
        del group["clip_value"]
    del optimizer.param_groups[0]["lr"]
    optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["clip_value"]) == (0.25, None)


HALF_AND_SPLIT = {"master_weights": "split8", "state_dtype": None}


@cases.each_class
def test_float16_moments_beside_a_split_master_are_refused_by_both_options(name, options):
    words = (
        r"state_dtype of (group 1|param_groups\[0\]) must be torch.float32 or torch.bfloat16 for "
        r"parameters in torch.float16 with master_weights='split8', got None$"
    )
    halves = make_params(F16)
    optimizer = ours(name)(make_params(BF16), **options, **HALF_AND_SPLIT)
    with pytest.raises(ValueError, match=rf"^{name}: {words}"):
        optimizer.add_param_group({"params": halves})
    loaded = ours(name)(cases.twins(halves), **options)
    loaded.param_groups[0].update(HALF_AND_SPLIT)
    with pytest.raises(ValueError, match=rf"^{name}.load_state_dict: {words}"):
        loaded.load_state_dict(ours(name)(halves, **options, state_dtype=None).state_dict())
    if name == "SGD":  # without momentum it has none
        cases.train([ours(name)(halves, **HALF_AND_SPLIT)])


# States without a group.


@pytest.mark.parametrize("save", [lambda opt: opt.state_dict(), amp_ext.optim.float32_state_dict])
@cases.each_class
def test_a_state_whose_parameter_left_the_groups_is_named(name, options, save):
    optimizer = cases.trained(ours(name)(make_params(F32, shapes=[(3, 2), (5,)]), **options))
    left = optimizer.param_groups[0]["params"].pop(0)
    cases.train([optimizer])
    words = (
        rf"^{name}.state_dict: a parameter of shape \(3, 2\) has a state but is in no group. Put "
        r"the parameter back into a group, or delete its state with del optimizer.state\[param\]."
    )
    with pytest.raises(ValueError, match=words):
        save(optimizer)
    del optimizer.state[left]
    assert list(save(optimizer)["state"]) == [0]


# Groups whose parameters a loop put into another container than a list.


CONTAINERS = {
    "tuple": tuple,
    "deque": collections.deque,
    "module": torch.nn.ParameterList,
    "values": lambda params: dict(enumerate(params)).values(),
}


def used_up(params: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    iterator = iter(params)
    collections.deque(iterator, maxlen=0)
    return iterator


# What can be read only once, or in another order in another process.
READ_ONCE = {
    "list_iterator": iter,
    "generator": lambda params: (param for param in params),
    "used-up": used_up,
    "set": set,
    "frozenset": frozenset,
}
# What reads them, and what the error calls it.
READERS: dict[str, tuple[str, Callable[[Any, amp_ext.GradScaler], Any]]] = {
    "step": ("AdamW.step", lambda optimizer, scaler: optimizer.step()),
    "scaler.step": ("AdamW.scan_gradients", lambda optimizer, scaler: scaler.step(optimizer)),
    "unscale_": ("GradScaler", lambda optimizer, scaler: scaler.unscale_(optimizer)),
    "init_state": ("AdamW.init_state", lambda optimizer, scaler: optimizer.init_state()),
    "refresh": ("AdamW.refresh_masters", lambda optimizer, scaler: optimizer.refresh_masters()),
    "save": ("AdamW.state_dict", lambda optimizer, scaler: optimizer.state_dict()),
}


@pytest.mark.parametrize("container", rows(CONTAINERS))
@cases.each_name
def test_parameters_are_taken_from_any_sequence(name, container):
    optimizer, wanted = cases.pair(name, {})
    optimizer.param_groups[0]["params"] = container(optimizer.param_groups[0]["params"])
    cases.train([wanted, optimizer], 3)
    assert all(map(same_bits, params_of(optimizer), params_of(wanted)))
    optimizer.load_state_dict(wanted.state_dict())


# Every container in a step, and every reader of one.
READ = {
    f"{key}-{reader}": (container, reader)
    for key, container in READ_ONCE.items()
    for reader in READERS
    if reader == "step" or key == "generator"
}


@pytest.mark.parametrize(("container", "reader"), rows(READ))
def test_parameters_that_can_not_be_read_again_are_refused(container, reader):
    params = make_params(F32)
    optimizer = ours("AdamW")(params)
    cases.train([optimizer])
    saved = optimizer.state_dict()
    give_grads(params)
    before = cases.bits_of(optimizer)
    held = optimizer.param_groups[0]["params"] = container(params)
    scaler = amp_ext.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    what, read = READERS[reader]
    words = rf"^{what}: params of group 0 must be a list, got {type(held).__name__}$"
    for _ in range(2):  # it does not use an iterator up
        with pytest.raises(TypeError, match=words):
            read(optimizer, scaler)
    with pytest.raises(TypeError, match="load_state_dict: params of group 0 must be a list"):
        optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["params"] = params
    cases.assert_same_bits(optimizer, before)
    optimizer.step()
    assert not same_bits(params[0], before[0]["param"])


@pytest.mark.parametrize("container", [set, frozenset])
@cases.each_name
def test_a_constructor_refuses_a_set(name, container):
    """torch takes it; from 2.15 on it warns."""
    message = rf"^{name}: params must be ordered, such as a list, got {container.__name__}$"
    with pytest.raises(TypeError, match=message):
        ours(name)(container(make_params(F32)))
