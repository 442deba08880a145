"""``amp_ext.ops.optimizer_update_``: one step for people who keep their own loop and buffers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from awkward import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    FEW_DTYPES,
    LAYOUT_SHAPE,
    LAYOUTS,
    SHAPES,
    Dtypes,
    neighbours_untouched,
    placed,
)
from reference import assert_close, classic_update, clipped, same_bits, snapshot
from torch import Tensor
from torch.nn import Parameter

import amp_ext
from amp_ext import ops
from amp_ext.ops import OptimizerType

INF, NAN = float("inf"), float("nan")

# The lists of each type and what the reference calls one of them.
BUFFERS = {
    OptimizerType.SGD: {},
    OptimizerType.MOMENTUM: {"velocities": "velocity"},
    OptimizerType.ADAM: {"exp_avgs": "exp_avg", "exp_avg_sqs": "exp_avg_sq"},
}
TYPES = [pytest.param(kind, id=kind.value) for kind in OptimizerType]

# A large eps and step, so that a wrong place of eps or a lost update shows in 8 bits as well.
HYPER = {"lr": 0.3, "beta1": 0.8, "beta2": 0.99, "eps": 0.05, "weight_decay": 0.3}
SMALL = [(0,), (), (1,), (3,), (7, 5), (1025,)]

Lists = dict[str, list[Tensor]]


def build(kind: OptimizerType, shapes, dtypes: Dtypes, device, *, fresh: bool = False) -> Lists:
    """Makes the tensors of an update; buffers are zeros for a ``fresh`` start."""

    def normal(dtype):
        return [torch.randn(shape, device=device).to(dtype) for shape in shapes]

    masters = normal(F32 if dtypes.master else dtypes.param)
    lists = {
        "params": [master.to(dtypes.param, copy=True) for master in masters],
        "grads": normal(dtypes.grad),
    }
    for name in BUFFERS[kind]:
        lists[name] = normal(dtypes.state)
        for buffer in lists[name]:
            if name == "exp_avg_sqs":
                buffer.square_().mul_(0.02)
            if fresh:
                buffer.zero_()
    if dtypes.master:
        lists["master_params"] = masters
    return lists


def new_grads(grads: list[Tensor], *, bad: bool = False) -> None:
    """Draws gradients, of which a tenth is inf, -inf or NaN if wanted."""
    for grad in grads:
        grad.copy_(torch.randn(grad.shape))
        if bad:
            kinds = torch.tensor([INF, -INF, NAN])[torch.randint(3, grad.shape)].to(grad)
            grad.copy_(torch.where((torch.rand(grad.shape) < 0.1).to(grad.device), kinds, grad))


def copied(lists: Lists) -> Lists:
    return {name: snapshot(tensors) for name, tensors in lists.items()}


def run(kind: OptimizerType, lists: Lists, *, timestep: int = 4, **options: Any) -> None:
    ops.optimizer_update_(kind, **lists, **(HYPER | {"timestep": timestep} | options))


def assert_same(actual: Lists, expected: Lists) -> None:
    for name, tensors in expected.items():
        for index, tensor in enumerate(tensors):
            assert same_bits(actual[name][index], tensor), f"{name}[{index}] {tuple(tensor.shape)}"


def assert_is_the_formula(
    kind: OptimizerType, after: Lists, before: Lists, *, timestep: int = 4, **options: Any
) -> None:
    """Compares one update with the reference, and asserts that skipped elements kept their bits."""
    limits = {name: options.pop(name, None) for name in ("clip_value", "max_grad_norm")}
    grads, _ = clipped(before["grads"], **limits)
    for index, grad in enumerate(grads):
        old = {name: tensors[index] for name, tensors in before.items()}
        new = {name: tensors[index] for name, tensors in after.items()}
        expected = classic_update(
            kind.value,
            old.get("master_params", old["params"]),
            grad,
            {one: old[name] for name, one in BUFFERS[kind].items()},
            timestep=timestep,
            **(HYPER | options),
        )
        param = new.get("master_params", new["params"])
        assert_close(param, expected["param"], what=f"param[{index}]")
        for name, one in BUFFERS[kind].items():
            assert_close(new[name], expected[one], what=f"{name}[{index}]")
        for name, tensor in new.items():
            assert same_bits(tensor[~grad.isfinite()], old[name][~grad.isfinite()]), name
        if "master_params" in new:
            assert torch.equal(new["params"], new["master_params"].to(new["params"].dtype))
        assert same_bits(new["grads"], old["grads"]), "a gradient was written"


CLIPPING = [
    pytest.param({}, id="plain"),
    pytest.param({"max_grad_norm": 3.0}, id="norm"),
    pytest.param({"clip_value": 0.25}, id="value"),
    pytest.param({"max_grad_norm": 10.0, "clip_value": 0.25}, id="norm-and-value"),
]


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_one_update_is_the_formula(device, dtypes, kind, clipping):
    lists = build(kind, SMALL, dtypes, device)
    new_grads(lists["grads"], bad=True)
    before = copied(lists)
    run(kind, lists, **clipping)
    assert_is_the_formula(kind, lists, before, **clipping)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_tensors_of_every_size_are_updated(device, dtypes, kind):
    lists = build(kind, SHAPES, dtypes, device)
    new_grads(lists["grads"], bad=True)
    before = copied(lists)
    run(kind, lists)
    assert_is_the_formula(kind, lists, before)


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("kind", TYPES)
def test_a_loop_of_forty_steps_is_the_loop_of_the_formula(device, kind, clipping):
    lists = build(kind, [(70,), (3, 5)], Dtypes(F64, F64, F64), device, fresh=True)
    params = snapshot(lists["params"])
    buffers = [
        {one: lists[name][index].clone() for name, one in BUFFERS[kind].items()}
        for index in range(2)
    ]
    workspace = ops.OptimizerWorkspace()
    for timestep in range(1, 41):
        new_grads(lists["grads"], bad=timestep % 3 == 0)
        hyper = HYPER | {"lr": 0.3 / timestep, "timestep": timestep}
        grads, _ = clipped(lists["grads"], **clipping)
        for index, grad in enumerate(grads):
            new = classic_update(kind.value, params[index], grad, buffers[index], **hyper)
            params[index] = new.pop("param")
            buffers[index] = new
        run(kind, lists, workspace=workspace, **hyper, **clipping)
    for index in range(2):
        assert_close(lists["params"][index], params[index], steps=40)
        for name, one in BUFFERS[kind].items():
            assert_close(lists[name][index], buffers[index][one], steps=40, what=name)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_ten_steps_match_torch(device, dtype, kind):
    theirs = [Parameter(torch.randn(1000, device=device).to(dtype)) for _ in range(2)]
    decay = 0.02  # torch's SGD adds its decay to the gradient, so it is applied before the step
    optimizer: torch.optim.Optimizer = {
        OptimizerType.SGD: lambda: torch.optim.SGD(theirs, lr=0.1),
        OptimizerType.MOMENTUM: lambda: torch.optim.SGD(theirs, lr=0.1, momentum=0.9),
        OptimizerType.ADAM: lambda: torch.optim.Adam(theirs, lr=0.1),
    }[kind]()
    lists = build(kind, [(1000,)] * 2, Dtypes(dtype, dtype, dtype), device, fresh=True)
    lists["params"] = snapshot([param.detach() for param in theirs])
    for timestep in range(1, 11):
        new_grads(lists["grads"])
        for param, grad in zip(theirs, lists["grads"], strict=True):
            param.grad = grad.clone()
            param.data.mul_(1.0 - 0.1 * decay)
        optimizer.step()
        hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": decay}
        ops.optimizer_update_(kind, **lists, timestep=timestep, **hyper)
    for index, param in enumerate(theirs):
        assert_close(lists["params"][index], param, steps=10)
    names = {"velocities": "momentum_buffer"} | BUFFERS[OptimizerType.ADAM]
    for name in BUFFERS[kind]:
        for index, param in enumerate(theirs):
            expected = optimizer.state[param][names[name]]
            assert_close(lists[name][index], expected, steps=10, what=name)


OPTIMIZERS = {
    OptimizerType.SGD: (amp_ext.optim.SGD, {}),
    OptimizerType.MOMENTUM: (amp_ext.optim.SGD, {"momentum": 0.8}),
    OptimizerType.ADAM: (
        amp_ext.optim.Adam,
        {"betas": (0.8, 0.99), "eps": 0.05, "denominator_floor": 1e-12},
    ),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_it_has_the_bits_of_the_optimizer_with_these_options(device, dtypes, kind):
    lists = build(kind, SMALL, dtypes, device, fresh=True)
    make, options = OPTIMIZERS[kind]
    optimizer = make(
        [Parameter(param.clone()) for param in lists["params"]],
        lr=0.3,
        weight_decay=0.3,
        decoupled_weight_decay=True,
        skip_nonfinite=True,
        max_grad_norm=5.0,
        clip_value=0.5,
        master_weights=dtypes.master,
        state_dtype=None if dtypes.state == dtypes.param else torch.float32,
        **options,
    )
    if dtypes.master:
        lists["master_params"] = [param.float() for param in lists["params"]]
    params = optimizer.param_groups[0]["params"]
    workspace = ops.OptimizerWorkspace()
    for timestep in range(1, 4):
        new_grads(lists["grads"], bad=True)
        for param, grad in zip(params, lists["grads"], strict=True):
            param.grad = grad.clone()
        optimizer.step()
        limits = {"max_grad_norm": 5.0, "clip_value": 0.5}
        run(kind, lists, timestep=timestep, workspace=workspace, **limits)
        assert same_bits(workspace.grad_norm, optimizer.grad_norm)
    for index, param in enumerate(params):
        assert same_bits(lists["params"][index], param)
        if dtypes.master:
            assert same_bits(lists["master_params"][index], optimizer.state[param]["master_param"])


@pytest.mark.parametrize("timestep", [1, 2, 1000, 10**7])
@pytest.mark.parametrize("kind", TYPES)
def test_any_timestep_is_right(device, kind, timestep):
    lists = build(kind, [(70,)], Dtypes(F32, F32, F32), device)
    before = copied(lists)
    run(kind, lists, timestep=timestep, beta2=0.999)
    assert_is_the_formula(kind, lists, before, timestep=timestep, beta2=0.999)


def test_the_timestep_is_nothing_to_the_velocity(device):
    first = build(OptimizerType.MOMENTUM, [(70,)], Dtypes(F32, F32, F32), device)
    later = copied(first)
    for _ in range(3):
        run(OptimizerType.MOMENTUM, first, timestep=1)
        run(OptimizerType.MOMENTUM, later, timestep=100)
    assert_same(first, later)


def test_a_velocity_without_memory_is_the_gradient(device):
    lists = build(OptimizerType.MOMENTUM, [(70,)], Dtypes(F32, F32, F32), device)
    before = copied(lists)
    run(OptimizerType.MOMENTUM, lists, beta1=0.0)
    assert_is_the_formula(OptimizerType.MOMENTUM, lists, before, beta1=0.0)
    assert torch.equal(lists["velocities"][0], lists["grads"][0])


def test_the_denominator_of_adam_has_a_floor_of_a_millionth(device):
    lists = build(OptimizerType.ADAM, [(3,)], Dtypes(F32, F32, F32), device, fresh=True)
    lists["params"][0].zero_()
    lists["grads"][0].copy_(torch.tensor([1e-9, 0.0, 1.0]))
    run(OptimizerType.ADAM, lists, timestep=1, eps=0.0)
    # Where the gradient is above the floor, its first step has the length of the learning rate.
    assert_close(lists["params"][0], torch.tensor([-0.3e-3, 0.0, -0.3]))


def test_nothing_is_written_where_no_gradient_is_finite(device):
    for kind, bad in itertools.product(OptimizerType, (INF, -INF, NAN)):
        lists = build(kind, [(5,), (70,)], Dtypes(BF16, BF16, F32, master=True), device)
        for grad in lists["grads"]:
            grad.fill_(bad)
        before = copied(lists)
        run(kind, lists, max_grad_norm=1.0)
        assert_same(lists, before)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_lr_may_be_a_tensor(device, kind, shape):
    expected = build(kind, [(5,), (70,)], Dtypes(BF16, BF16, F32, master=True), device)
    actual = copied(expected)
    run(kind, expected, lr=0.25)
    run(kind, actual, lr=torch.full(shape, 0.25, device=device))
    assert_same(actual, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", TYPES)
def test_any_layout_gives_the_bits_of_contiguous_tensors(device, kind, layout):
    expected = build(kind, [LAYOUT_SHAPE], Dtypes(F16, F16, F32, master=True), device)
    new_grads(expected["grads"], bad=True)
    actual = {name: [placed(tensors[0], layout)] for name, tensors in expected.items()}
    run(kind, expected)
    run(kind, actual)
    assert_same(actual, expected)
    for name, tensors in actual.items():
        assert neighbours_untouched(tensors[0]), name


@pytest.mark.parametrize("kind", TYPES)
def test_a_thousand_tiny_tensors_update_as_one(device, kind):
    sizes = [index % 7 for index in range(1000)]
    one = build(kind, [(sum(sizes),)], Dtypes(BF16, BF16, F32, master=True), device)
    many = {
        name: [part.clone() for part in tensors[0].split(sizes)] for name, tensors in one.items()
    }
    run(kind, one)
    run(kind, many)
    for name in one:
        assert same_bits(torch.cat(many[name]), one[name][0]), name


@pytest.mark.parametrize("kind", TYPES)
def test_empty_lists_are_nothing_to_do(device, kind):
    workspace = ops.OptimizerWorkspace()
    lists = {name: [] for name in ("params", "grads", *BUFFERS[kind])}
    run(kind, lists, max_grad_norm=1.0, workspace=workspace)
    assert workspace.grad_norm is None


def test_parameters_that_require_gradients_are_updated_in_place(device):
    weight = torch.randn(3, 5, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad((weight**2).sum(), [weight])
    start, version = weight.detach().clone(), weight._version
    ops.optimizer_update_(OptimizerType.SGD, [weight], [grad], lr=0.25, timestep=1)
    assert same_bits(weight, start - 0.25 * grad)
    assert weight._version > version
    assert weight.requires_grad


# Workspaces.


def test_one_workspace_serves_lists_of_every_kind(device):
    workspace = ops.OptimizerWorkspace()
    for kind, dtypes, clipping in itertools.product(OptimizerType, DTYPES, CLIPPING):
        lists = build(kind, [(5,), (70,)], *dtypes.values, device)
        new_grads(lists["grads"], bad=True)
        alone = copied(lists)
        run(kind, lists, workspace=workspace, **clipping.values[0])
        run(kind, alone, **clipping.values[0])
        assert_same(lists, alone)


def test_one_workspace_serves_several_devices(device):
    workspace = ops.OptimizerWorkspace()
    for place in (device, torch.device("cpu"), device):
        lists = build(OptimizerType.ADAM, [(5,), (70,)], Dtypes(F32, F32, F32), place)
        before = copied(lists)
        run(OptimizerType.ADAM, lists, workspace=workspace, max_grad_norm=3.0)
        assert_is_the_formula(OptimizerType.ADAM, lists, before, max_grad_norm=3.0)
        assert workspace.grad_norm is not None
        assert workspace.grad_norm.device == lists["params"][0].device


def test_the_workspace_holds_the_norm_of_the_last_update_that_took_one(device):
    workspace = ops.OptimizerWorkspace()
    lists = build(OptimizerType.SGD, SMALL, Dtypes(BF16, BF16, F32), device)
    run(OptimizerType.SGD, lists, workspace=workspace)
    assert workspace.grad_norm is None
    for limit in (1.0, 1e6):
        new_grads(lists["grads"], bad=True)
        run(OptimizerType.SGD, lists, workspace=workspace, max_grad_norm=limit)
        _, expected = clipped(lists["grads"])
        assert workspace.grad_norm.dtype == F32
        assert workspace.grad_norm.shape == ()
        assert workspace.grad_norm.item() == pytest.approx(expected, rel=1e-6)
    last = workspace.grad_norm.clone()
    new_grads(lists["grads"])
    run(OptimizerType.SGD, lists, workspace=workspace)
    assert same_bits(workspace.grad_norm, last)


# Errors.


def second_of(name: str, change: Any) -> Any:
    """Returns a function that spoils the second tensor of a list."""

    def spoil(lists: dict[str, Any]) -> None:
        lists[name][1] = change(lists[name][1])

    return spoil


def with_list(name: str, value: Any) -> Any:
    return lambda lists: lists.update({name: value(lists) if callable(value) else value})


SGD, MOMENTUM, ADAM = OptimizerType.SGD, OptimizerType.MOMENTUM, OptimizerType.ADAM
LIKE_PARAMS = lambda lists: snapshot(lists["params"])  # noqa: E731, a row of the table
BAD_LISTS = [
    pytest.param(SGD, with_list("velocities", LIKE_PARAMS),
                 "velocities must be None for .*SGD, got 3 tensors", id="sgd-velocities"),
    pytest.param(SGD, with_list("exp_avgs", LIKE_PARAMS),
                 "exp_avgs must be None for .*SGD, got 3 tensors", id="sgd-exp-avgs"),
    pytest.param(MOMENTUM, with_list("velocities", None),
                 "velocities must be given for .*MOMENTUM, got None", id="momentum-without"),
    pytest.param(MOMENTUM, with_list("exp_avg_sqs", LIKE_PARAMS),
                 "exp_avg_sqs must be None for .*MOMENTUM", id="momentum-exp-avg-sqs"),
    pytest.param(ADAM, with_list("exp_avgs", None),
                 "exp_avgs must be given for .*ADAM, got None", id="adam-without-exp-avgs"),
    pytest.param(ADAM, with_list("exp_avg_sqs", None),
                 "exp_avg_sqs must be given for .*ADAM, got None", id="adam-without-exp-avg-sqs"),
    pytest.param(ADAM, with_list("velocities", LIKE_PARAMS),
                 "velocities must be None for .*ADAM", id="adam-velocities"),
    pytest.param(ADAM, with_list("velocities", []),
                 "velocities must be None for .*ADAM, got 0 tensors", id="adam-empty-velocities"),
    pytest.param(SGD, lambda lists: lists["grads"].pop(),
                 "grads must have 3 tensors.* got 2", id="grads-too-few"),
    pytest.param(MOMENTUM, lambda lists: lists["velocities"].pop(),
                 "velocities must have 3 tensors.* got 2", id="velocities-too-few"),
    pytest.param(ADAM, lambda lists: lists["exp_avg_sqs"].pop(),
                 "exp_avg_sqs must have 3 tensors.* got 2", id="exp-avg-sqs-too-few"),
    pytest.param(ADAM, lambda lists: lists["master_params"].pop(),
                 "master_params must have 3 tensors.* got 2", id="masters-too-few"),
    pytest.param(MOMENTUM, second_of("velocities", torch.Tensor.double),
                 r"velocities\[1\] must be Float.*, got Double", id="velocity-dtype"),
    pytest.param(MOMENTUM, second_of("velocities", lambda t: t[:-1]),
                 r"velocities\[1\] must be of sizes \[5\], got \[4\]", id="velocity-shape"),
    pytest.param(ADAM, second_of("exp_avgs", torch.Tensor.double),
                 r"exp_avgs\[1\] must be Float.*, got Double", id="exp-avg-dtype"),
    pytest.param(SGD, second_of("grads", lambda t: t[:-1]),
                 r"grads\[1\] must be of sizes \[5\], got \[4\]", id="grad-shape"),
    pytest.param(SGD, second_of("params", torch.Tensor.int),
                 r"params\[1\] must be Float, .*got Int", id="param-integer"),
    pytest.param(ADAM, second_of("master_params", torch.Tensor.half),
                 r"master_params\[1\] must be Float, got Half", id="master-dtype"),
    pytest.param(ADAM, lambda lists: lists.update(exp_avg_sqs=lists["exp_avgs"]),
                 r"exp_avg.*\[\d\].*exp_avg.*\[\d\]", id="lists-overlap"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "spoil", "words"), BAD_LISTS)
def test_wrong_lists_are_named_before_anything_is_written(device, kind, spoil, words):
    lists: dict[str, Any] = build(kind, [(5,)] * 3, Dtypes(F16, F16, F32, master=True), device)
    spoil(lists)
    given = {name: list(tensors) for name, tensors in lists.items() if tensors is not None}
    before = copied(given)
    workspace = ops.OptimizerWorkspace()
    with pytest.raises(RuntimeError, match=f"^optimizer_update_: {words}"):
        run(kind, lists, workspace=workspace, max_grad_norm=1.0)
    assert_same(given, before)
    assert workspace.grad_norm is None, "there was no update whose norm it could be"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        pytest.param(ADAM, {"timestep": 0}, "timestep must be .*1, got 0", id="timestep-0"),
        pytest.param(SGD, {"timestep": -1}, "timestep must be .*1, got -1", id="timestep-negative"),
        pytest.param(SGD, {"timestep": NAN}, "timestep must be .*1, got nan", id="timestep-nan"),
        pytest.param(ADAM, {"timestep": INF}, "timestep must be .*1, got inf", id="timestep-inf"),
        pytest.param(ADAM, {"timestep": 1.5}, "timestep must be .*1, got 1.5", id="timestep-1.5"),
        pytest.param(
            ADAM, {"lr": torch.ones(2)}, "lr must be one floating-point element, .*2", id="lr-two"
        ),
    ],
)
def test_wrong_options_are_named_before_anything_is_written(device, kind, options, words):
    lists = build(kind, [(5,)] * 3, Dtypes(F16, F16, F32, master=True), device)
    before = copied(lists)
    with pytest.raises(RuntimeError, match=f"^optimizer_update_: {words}"):
        run(kind, lists, **options)
    assert_same(lists, before)


@pytest.mark.parametrize("kind", ["adam", 2, None, torch.optim.Adam])
def test_something_else_than_a_type_is_refused(kind):
    with pytest.raises(RuntimeError, match=r"^optimizer_update_: optimizer_type must be an "):
        ops.optimizer_update_(kind, [], [], lr=0.1, timestep=1)


def test_the_types_are_three():
    assert [kind.name for kind in OptimizerType] == ["SGD", "MOMENTUM", "ADAM"]


# The same bits everywhere.


def sample_results() -> list[Lists]:
    """Updates every combination of types, dtypes and clippings, for comparison between engines."""
    results = []
    workspace = ops.OptimizerWorkspace()
    for kind, dtypes, clipping in itertools.product(OptimizerType, DTYPES, CLIPPING):
        lists = build(kind, [(), (5,), (1001,)], *dtypes.values, "cpu")
        new_grads(lists["grads"], bad=True)
        run(kind, lists, workspace=workspace, **clipping.values[0])
        norm = workspace.grad_norm if "max_grad_norm" in clipping.values[0] else None
        results.append(copied(lists) | ({} if norm is None else {"norm": [norm.clone()]}))
    return results


def test_every_instruction_set_gives_the_same_bits(under_isa):
    plain_isa, plain = under_isa(sample_results, "plain")
    assert plain_isa == "plain"
    best_isa, best = under_isa(sample_results, None)
    if best_isa == "plain":
        pytest.skip("this machine has the plain engine only")
    for actual, expected in zip(best, plain, strict=True):
        assert_same(actual, expected)


def test_infinite_limits_clip_nothing(device):
    plain = build(ADAM, [(5,), (70,)], Dtypes(F32, F32, F32), device)
    limited = copied(plain)
    run(ADAM, plain)
    run(ADAM, limited, max_grad_norm=math.inf, clip_value=math.inf)
    assert_same(limited, plain)
