"""``amp_ext.optim``: the classes work where torch's do, and differ where they say so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F16, F32, F64, INF, NAN
from harness.list_operations import DESCRIBED
from harness.reference import tolerance
from harness.rows import rows
from torch.nn import Parameter

FEW_SHAPES = [(3, 5), (), (0,), (7,)]

# Numbers, states and their dtypes.


@cases.every_optimizer
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_ten_steps_match_torch_to_rounding(device, dtype, name, options):
    mine, other = cases.beside_torch(name, options, dtype, device)
    cases.train([mine, other], 10)
    cases.assert_all_close(mine, other, steps=10)


@cases.every_optimizer
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_without_decay_inf_and_nan_in_a_parameter_stay_out_of_its_states(
    device, dtype, name, options
):
    options = options | {"weight_decay": 0}
    mine, other = cases.beside_torch(name, options, dtype, device, [(40,)])
    for param in (*cases.params_of(mine), *cases.params_of(other)):
        param.data[3::4] = torch.tensor([INF, -INF, NAN] * 3 + [0.0])
    cases.train([mine, other], 3)
    close = tolerance(dtype, steps=3, size=2.0)
    for actual, expected in zip(*map(cases.bits_of, (mine, other)), strict=True):
        for key, value in expected.items():
            assert key == "param" or value.isfinite().all()
            torch.testing.assert_close(actual[key].to(value), value, **close, equal_nan=True)


@pytest.mark.parametrize("rounding", [None, "dither", "nearest"])
@cases.every_optimizer
@cases.FLOATS
def test_states_have_the_names_and_dtypes_promised(dtype, name, options, rounding):
    other = cases.trained(
        cases.theirs(name)(cases.make_params(F32, shapes=FEW_SHAPES), **options), 1
    )
    for master_weights in (True, False):
        for state_dtype in (F32, BF16, None):
            own = {"master_weights": master_weights, "state_dtype": state_dtype}
            own["rounding"] = rounding
            is_low_precision = state_dtype != F32 or not master_weights
            dithers = rounding == "dither" or (rounding is None and state_dtype is not None)
            mine = cases.trained(
                cases.ours(name)(cases.make_params(dtype, shapes=FEW_SHAPES), **options, **own), 2
            )
            buffer_dtype = dtype if state_dtype is None or dtype == F64 else state_dtype
            for param, twin in zip(cases.params_of(mine), cases.params_of(other), strict=True):
                expected = dict.fromkeys(other.state.get(twin, {}), (buffer_dtype, param.shape))
                if cases.counts_steps(name, options) or (is_low_precision and dithers):
                    expected["step"] = (F32, ())
                    assert mine.state[param]["step"].item() == 2
                if master_weights and dtype in (F16, BF16):
                    expected["master_param"] = (F32, param.shape)
                state = mine.state.get(param, {})
                assert {key: (t.dtype, t.shape) for key, t in state.items()} == expected


def test_steps_and_loads_do_not_depend_on_the_default_dtype_and_device():
    try:
        torch.set_default_dtype(F64)
        optimizer = cases.trained(cases.ours("Adam")(cases.make_params(F64, shapes=[(5,)])), 1)
        resumed = cases.ours("Adam")(cases.twins(optimizer))
        with torch.device("meta"):
            resumed.load_state_dict(optimizer.state_dict())
    finally:
        torch.set_default_dtype(F32)
    for state in (*optimizer.state.values(), *resumed.state.values()):
        assert state["step"].dtype == F32
        assert {value.device.type for value in state.values()} == {"cpu"}


# Arguments.


@cases.each_in_torch
def test_defaults_are_those_of_torch_and_three_more(name):
    mine, other = (package(name)(cases.make_params(F32)) for package in (cases.ours, cases.theirs))
    more = {"master_weights": True, "state_dtype": "float32", "rounding": None}
    if "decoupled_weight_decay" not in other.defaults:
        more["decoupled_weight_decay"] = False
    pairs = (mine.defaults, other.defaults), (*mine.param_groups, *other.param_groups)
    for actual, wanted in pairs:
        expected = {key: wanted[key] for key in wanted if key != "params"} | more
        assert {key: actual.get(key, "missing") for key in expected} == expected


WRONG_PARAMS = {
    "empty": lambda p, q: [],
    "bare-tensor": lambda p, q: p,
    "group-of-a-set": lambda p, q: [{"params": {p, q}}],
    "in-two-groups": lambda p, q: [{"params": [p]}, {"params": [q, p]}],
    "not-a-leaf": lambda p, q: [p, p * 2],
    "number": lambda p, q: [p, 3.0],
    "half-named": lambda p, q: [("p", p), q],
}


@pytest.mark.parametrize("params", rows(WRONG_PARAMS))
@cases.each_name
def test_wrong_parameters_raise_as_torch_does(name, params):
    p, q, errors = Parameter(torch.zeros(3)), Parameter(torch.zeros(2)), []
    for package in (cases.ours, cases.theirs):
        with pytest.raises((TypeError, ValueError)) as caught:
            package(name)(params(p, q), lr=0.1)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


# Tensors that no step takes: refused before anything is written.


UNUSUAL = {
    "mkldnn": (lambda: torch.ones(5).to_mkldnn(), "Mkldnn"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "Jagged"),
}


@pytest.mark.parametrize(("make", "got"), rows(UNUSUAL))
def test_only_sparse_gradients_are_called_sparse(make, got):
    param = torch.nn.Parameter(make(), requires_grad=False)
    param.grad = param.detach().clone()
    words = f"^SGD: grad of group 0, param 0 must be a strided tensor .*, got {got}"
    with pytest.raises(RuntimeError, match=words):
        cases.ours("SGD")([param]).step()


REFUSED_PARAMS = {
    "complex": (torch.ones(3, dtype=torch.cfloat), "ComplexFloat"),
    "meta": (torch.ones(3, device="meta"), "must be on cpu or cuda, got meta"),
    "overlapping": (torch.ones(1).expand(3), ".*(?i:overlap)"),
}


@pytest.mark.parametrize(("param", "words"), rows(REFUSED_PARAMS))
@cases.each_class
def test_a_parameter_that_no_kernel_takes_is_refused_by_name(name, options, param, words):
    good, bad = Parameter(torch.ones(3)), Parameter(param)
    optimizer = cases.ours(name)([good, bad], **options)
    good.grad, bad.grad = torch.ones(3), torch.ones_like(param)
    with pytest.raises(RuntimeError, match=f"^{name}: .* of group 0, param 1 .*{words}"):
        optimizer.step()
    assert torch.equal(good.detach(), torch.ones(3))
    assert param.is_meta or torch.equal(bad.detach(), torch.ones_like(param))


FROZEN = [torch.int8, torch.bool, torch.cfloat, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FROZEN, ids=str)
@cases.each_class
def test_frozen_parameters_of_any_dtype_are_left_alone(name, options, dtype):
    frozen = Parameter(torch.ones(3).to(dtype), requires_grad=False)
    mixed = cases.ours(name)([*cases.make_params(F32, shapes=[(5,)]), frozen], **options)
    plain = cases.ours(name)(cases.twins(cases.params_of(mixed)[:1]), **options)
    for _ in range(2):
        cases.give_grads(cases.params_of(mixed)[:1], plain)
        mixed.step()
        plain.step()
    cases.assert_same_bits(cases.bits_of(mixed)[:1], plain)
    assert torch.equal(frozen.float(), torch.ones(3))
    assert not mixed.state.get(frozen)


# What is replaced or written between steps.


@cases.each_class
def test_tensor_hyperparameters_are_their_values_and_the_rate_is_read_at_each_step(
    name, options, device
):
    options = {"weight_decay": 0.1, **cases.KINDS[name].decay}

    def as_tensors(value):
        if isinstance(value, tuple):
            return tuple(map(as_tensors, value))
        return torch.tensor(value, dtype=F64)

    lr = torch.ones(1, device=device)
    tensors = {key: as_tensors(value) for key, value in options.items()}
    expected = cases.ours(name)(cases.make_params(F32, device), **options)
    actual = cases.ours(name)(cases.twins(expected), lr=lr, **tensors)
    for value in (1.0, 0.5, 0.25):
        expected.param_groups[0]["lr"] = lr.fill_(value).item()
        cases.train([actual, expected])
        cases.assert_same_bits(actual, expected)


# Docstrings.


@cases.each_class
def test_the_docstring_of_a_class_says_what_each_argument_does(name, options):
    kind = cases.ours(name)
    arguments = inspect.getdoc(kind).partition("Args:\n")[2].partition("\n\n")[0]
    documented = re.findall(r"^    (\w+): \S", arguments, re.MULTILINE)
    assert sorted(documented) == sorted(inspect.signature(kind).parameters)


# Every optimizer stands in all places where CONTRIBUTING.md wants a new one.


ROOT = Path(__file__).resolve().parents[2]
# A file, and the beginning of the line that it has for every class or every operation. What does
# not compile without it is not among them.
PLACES = [
    ("amp_ext/ops.py", r"def {operation}\("),
    ("amp_ext/ops.py", r'    "{operation}",$'),
    ("csrc/include/amp_ext/amp_ext.h", r"using {name} = FusedOptimizer<{name}Options>;$"),
    ("tests/programs/test_cpp.py", r'    "\S.*": \(\s*"{name}",'),
    ("tests/harness/list_operations.py", r'    "{operation}": described\('),
    ("tests/harness/list_operations.py", r'        "\S+": \("{operation}", '),
    ("tests/harness/list_operations.py", r'        "\S+-dithered": \("{operation}", '),
    ("tests/harness/optimizer_cases.py", r'    "{name}": Kind\('),
    ("tests/harness/optimizer_cases.py", r'        \("\S+", "{name}", '),
    ("CHANGELOG.md", r".*`{name}`"),
]


@pytest.mark.parametrize(("place", "pattern"), PLACES)
def test_every_optimizer_stands_there(place: str, pattern: str) -> None:
    names = [{"name": name} for name in cases.CLASSES]
    if "{operation}" in pattern:
        names = [{"operation": described.operation} for described in DESCRIBED]
    text = (ROOT / place).read_text()
    for words in names:
        line = f"^{pattern.format(**words)}"
        assert re.search(line, text, re.MULTILINE), f"{place} lacks a line {line}"


def test_every_place_is_in_the_list_for_a_new_optimizer() -> None:
    steps = (ROOT / "CONTRIBUTING.md").read_text()
    steps = steps.partition("**An optimizer**")[2].partition("**A number format**")[0]
    assert [place for place, _ in PLACES if f"`{place}`" not in steps] == []
