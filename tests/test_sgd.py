"""``amp_ext.ops.sgd_``: SGD with momentum, Nesterov and dampening over lists of tensors."""

from __future__ import annotations

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
from reference import assert_close, same_bits, sgd

from amp_ext import ops

OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"weight_decay": 0.3}, id="decay"),
    pytest.param({"weight_decay": 0.3, "decoupled_weight_decay": True}, id="decoupled"),
    pytest.param({"maximize": True, "weight_decay": 0.3}, id="maximize-decay"),
    pytest.param({"momentum": 0.7}, id="momentum"),
    pytest.param({"momentum": 0.7, "dampening": 0.4}, id="dampening"),
    pytest.param({"momentum": 0.7, "nesterov": True}, id="nesterov"),
    pytest.param({"momentum": 0.7, "nesterov": True, "weight_decay": 0.3}, id="nesterov-decay"),
    pytest.param(
        {"momentum": 0.7, "dampening": 0.4, "weight_decay": 0.3, "maximize": True},
        id="dampening-decay-maximize",
    ),
    pytest.param(
        {"momentum": 0.7, "weight_decay": 0.3, "decoupled_weight_decay": True},
        id="momentum-decoupled",
    ),
]
MOMENTUM = {"momentum": 0.7, "dampening": 0.4}

Lists = dict[str, list[torch.Tensor]]


def build(shapes, dtypes: Dtypes, device, options: dict, *, step: int = 3) -> Lists:
    """Makes the arguments of a step that ``step`` others went before, by their names."""

    def normal(dtype):
        return [torch.randn(shape, device=device).to(dtype) for shape in shapes]

    masters = normal(F32 if dtypes.master else dtypes.param)
    lists = {
        "params": [master.to(dtypes.param, copy=True) for master in masters],
        "grads": normal(dtypes.grad),
    }
    if "momentum" in options:
        lists["momentum_buffers"] = normal(dtypes.state)
        if step == 0:
            torch._foreach_zero_(lists["momentum_buffers"])
    if "dampening" in options:
        lists["steps"] = [torch.tensor(float(step), device=device) for _ in shapes]
    if dtypes.master:
        lists["master_params"] = masters
    return lists


def copied(lists: Lists) -> Lists:
    return {name: [tensor.clone() for tensor in tensors] for name, tensors in lists.items()}


def run(lists: Lists, **options) -> None:
    ops.sgd_(**lists, **({"lr": 0.3} | options))


def assert_same(actual: Lists, expected: Lists) -> None:
    for name, tensors in expected.items():
        for index, tensor in enumerate(tensors):
            assert same_bits(actual[name][index], tensor), f"{name}[{index}] {tuple(tensor.shape)}"


def assert_is_the_formula(after: Lists, before: Lists, *, first: bool = False, **options) -> None:
    """Compares every written tensor with one step of the reference from ``before``."""
    for index, start in enumerate(before["params"]):
        old = {name: tensors[index] for name, tensors in before.items()}
        new = {name: tensors[index] for name, tensors in after.items()}
        expected = sgd(
            old.get("master_params", start),
            old["grads"],
            old.get("momentum_buffers"),
            first=first,
            **({"lr": 0.3} | options),
        )
        shape = tuple(start.shape)
        assert_close(
            new.get("master_params", new["params"]), expected["param"], what=f"param {shape}"
        )
        if "momentum_buffers" in new:
            assert_close(
                new["momentum_buffers"], expected["momentum_buffer"], what=f"buffer {shape}"
            )
        if "master_params" in new:
            assert torch.equal(new["params"], new["master_params"].to(start.dtype))
        if "steps" in new:
            assert new["steps"].item() == old["steps"].item() + 1
        assert same_bits(new["grads"], old["grads"]), "a gradient was written"


@pytest.mark.parametrize("step", [0, 3], ids=["first-step", "later-step"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_one_step_is_the_formula(device, dtypes, options, step):
    lists = build(SHAPES, dtypes, device, options, step=step)
    before = copied(lists)
    run(lists, **options)
    assert_is_the_formula(lists, before, first=step == 0, **options)


@pytest.mark.parametrize("options", [row for row in OPTIONS if "decoupled" not in row.id])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_ten_steps_follow_the_loop_of_torch(device, dtype, options):
    theirs = [torch.nn.Parameter(torch.randn(1000, device=device).to(dtype)) for _ in range(2)]
    optimizer = torch.optim.SGD(theirs, lr=0.1, foreach=False, **options)
    ours = build([(1000,)] * 2, Dtypes(dtype, dtype, dtype), device, options, step=0)
    for mine, start in zip(ours["params"], theirs, strict=True):
        mine.copy_(start.detach())
    for _ in range(10):
        for index, param in enumerate(theirs):
            param.grad = torch.randn_like(param)
            ours["grads"][index] = param.grad.clone()
        optimizer.step()
        run(ours, lr=0.1, **options)
    for index, param in enumerate(theirs):
        assert_close(ours["params"][index], param, steps=10)
        if "momentum" in options:
            buffer = optimizer.state[param]["momentum_buffer"]
            assert_close(ours["momentum_buffers"][index], buffer, steps=10)


def test_first_and_later_steps_may_share_a_launch(device):
    lists = build([(5,)] * 3, Dtypes(F32, F32, F32), device, MOMENTUM)
    lists["steps"][1].zero_()
    before = copied(lists)
    run(lists, **MOMENTUM)
    for index, first in enumerate([False, True, False]):
        one_before, one_after = (
            {name: [tensors[index]] for name, tensors in side.items()} for side in (before, lists)
        )
        assert_is_the_formula(one_after, one_before, first=first, **MOMENTUM)


def test_the_first_step_does_not_use_the_buffer(device):
    lists = build([(70,)], Dtypes(F32, F32, F32), device, MOMENTUM, step=0)
    expected = copied(lists)
    lists["momentum_buffers"][0].fill_(12345.0)
    run(lists, **MOMENTUM)
    run(expected, **MOMENTUM)
    assert_same(lists, expected)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_16_bit_gradient_is_read_exactly(device, dtype):
    grad = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)
    param = torch.zeros(2**16, device=device)
    run({"params": [param], "grads": [grad]}, lr=1.0)
    assert torch.equal(param.nan_to_num(nan=12345.0), (0 - grad.float()).nan_to_num(nan=12345.0))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_the_parameter_is_the_master_rounded_to_nearest_even(device, dtype):
    exact = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype).float()
    neighbour = exact.view(torch.int32)
    # Every 16-bit number, the middle to the next one, a bit beside the middle, and random bits.
    half = 1 << (15 if dtype == BF16 else 12)
    bits = [neighbour + offset for offset in (0, half - 1, half, half + 1)]
    bits.append(torch.randint(-(2**31), 2**31 - 1, (100_000,)).to(torch.int32).to(device))
    grad = torch.cat(bits).view(F32)
    master, param = torch.zeros_like(grad), torch.zeros_like(grad, dtype=dtype)
    run({"params": [param], "grads": [grad], "master_params": [master]}, lr=1.0)
    expected = 0 - grad
    keep = ~expected.isnan()
    assert same_bits(master[keep], expected[keep])
    assert same_bits(param[keep], expected.to(dtype)[keep])
    assert param[~keep].isnan().all()


@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_nan_and_inf_spoil_only_their_own_element(device, dtypes):
    lists = build([(70,)], dtypes, device, MOMENTUM)
    clean = copied(lists)
    lists["grads"][0][7] = float("nan")
    lists["grads"][0][33] = float("-inf")
    run(lists, **MOMENTUM)
    run(clean, **MOMENTUM)
    for name in lists.keys() - {"grads", "steps"}:
        actual, expected = lists[name][0], clean[name][0]
        keep = torch.ones(70, dtype=torch.bool, device=device)
        keep[[7, 33]] = False
        assert same_bits(actual[keep], expected[keep]), name
        assert actual[7].isnan(), name
        assert actual[33].isinf(), name


@pytest.mark.parametrize("dtypes", DTYPES)
def test_three_thousand_tiny_tensors_step_as_one(device, dtypes):
    sizes = [index % 7 for index in range(3000)]
    one = build([(sum(sizes),)], dtypes, device, {"momentum": 0.7})
    many = {name: [part.clone() for part in tensors[0].split(sizes)]
            for name, tensors in one.items()}  # fmt: skip
    run(one, momentum=0.7, weight_decay=0.3, nesterov=True)
    run(many, momentum=0.7, weight_decay=0.3, nesterov=True)
    for name in one:
        assert same_bits(torch.cat(many[name]), one[name][0]), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, MOMENTUM], ids=["plain", "momentum"])
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_any_layout_gives_the_bits_of_contiguous_tensors(device, dtypes, options, layout):
    expected = build([LAYOUT_SHAPE] * 2, dtypes, device, options)
    actual = {
        name: [t.clone() if t.dim() == 0 else placed(t, layout) for t in tensors]
        for name, tensors in expected.items()
    }
    run(expected, **options)
    run(actual, **options)
    assert_same(actual, expected)
    for name in actual.keys() - {"steps"}:
        assert all(neighbours_untouched(view) for view in actual[name]), name


@pytest.mark.parametrize("name", ["params", "grads", "momentum_buffers", "master_params"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_list_may_have_a_layout_of_its_own(device, name, layout):
    dtypes = Dtypes(BF16, BF16, F32, master=True)
    expected = build([LAYOUT_SHAPE] * 2, dtypes, device, MOMENTUM)
    actual = copied(expected)
    actual[name] = [placed(tensor, layout) for tensor in expected[name]]
    run(expected, **MOMENTUM)
    run(actual, **MOMENTUM)
    assert_same(actual, expected)
    assert all(neighbours_untouched(view) for view in actual[name])


@pytest.mark.parametrize("dtypes", FEW_DTYPES)
@pytest.mark.parametrize("shape", [(1,), (6, 1), (1, 5), (6, 5)], ids=str)
def test_a_gradient_may_be_expanded(device, dtypes, shape):
    expected = build([(6, 5)], dtypes, device, MOMENTUM)
    actual = copied(expected)
    small = torch.randn(shape, device=device).to(dtypes.grad)
    actual["grads"] = [small.expand(6, 5)]
    expected["grads"] = [small.expand(6, 5).contiguous()]
    run(expected, **MOMENTUM)
    run(actual, **MOMENTUM)
    assert_same(actual, expected)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 65536.0, 3.0, 0.1, 2.0**40])
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=str)
def test_grad_scale_multiplies_by_the_rounded_inverse(device, dtype, scale, shape):
    wide = F64 if dtype == F64 else F32
    scaled = build([(70,), (5,)], Dtypes(dtype, wide, wide), device, MOMENTUM)
    inverse = (1 / torch.tensor(scale).double()).float().item()
    plain = copied(scaled)
    plain["grads"] = [grad * inverse for grad in plain["grads"]]
    run(scaled, grad_scale=torch.full(shape, scale, device=device), **MOMENTUM)
    run(plain, **MOMENTUM)
    del scaled["grads"], plain["grads"]
    assert_same(scaled, plain)


def test_unscaling_happens_in_float32_for_16_bit_gradients(device):
    lists = build([(70,)], Dtypes(F16, F16, F32, master=True), device, MOMENTUM)
    before = copied(lists)
    scale = torch.tensor(65536.0, device=device)
    run(lists, grad_scale=scale, **MOMENTUM)
    assert_is_the_formula(lists, before, grad_scale=scale, **MOMENTUM)


@pytest.mark.parametrize("value", [1.0, 2.0, 3.0, 0.5])
@pytest.mark.parametrize("options", [{}, MOMENTUM], ids=["plain", "momentum"])
@pytest.mark.parametrize("step", [0, 3], ids=["first-step", "later-step"])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_overflow_changes_not_a_bit(device, dtypes, options, step, value):
    lists = build([(0,), (), (5,), (16385,)], dtypes, device, options, step=step)
    lists["grads"][2][1] = float("inf")
    before = copied(lists)
    run(
        lists,
        found_inf=torch.full((1,) if step else (), value, device=device),
        grad_scale=torch.tensor(65536.0, device=device),
        **options,
    )
    assert_same(lists, before)


@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_a_clean_found_inf_steps_as_without(device, dtypes):
    plain = build([(5,), (16385,)], dtypes, device, MOMENTUM)
    checked = copied(plain)
    found_inf = torch.zeros(1, device=device)
    run(plain, **MOMENTUM)
    run(checked, found_inf=found_inf, **MOMENTUM)
    assert_same(checked, plain)
    assert found_inf.item() == 0


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_lr_may_be_a_tensor(device, shape):
    expected = build([(5,), (70,)], Dtypes(BF16, BF16, F32, master=True), device, MOMENTUM)
    actual = copied(expected)
    run(actual, **MOMENTUM, lr=torch.full(shape, 0.25, device=device))
    run(expected, **MOMENTUM, lr=0.25)
    assert_same(actual, expected)


def test_empty_lists_are_nothing_to_do(device):
    run({"params": [], "grads": []})


def test_written_tensors_get_a_new_version(device):
    lists = build([(5,)], Dtypes(BF16, BF16, F32, master=True), device, MOMENTUM)
    before = {name: tensors[0]._version for name, tensors in lists.items()}
    run(lists, **MOMENTUM)
    for name in lists.keys() - {"grads"}:
        assert lists[name][0]._version > before[name], name
    assert lists["grads"][0]._version == before["grads"]


@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_the_number_of_threads_does_not_change_a_bit(dtypes):
    lists = build([(70000,), (5,), (200_001,)], dtypes, "cpu", MOMENTUM)
    alone = copied(lists)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        run(alone, **MOMENTUM)
        torch.set_num_threads(3)
        run(lists, **MOMENTUM)
    finally:
        torch.set_num_threads(threads)
    assert_same(lists, alone)


def sample_results() -> list[Lists]:
    """Steps every combination of dtypes and options twice, for comparison between engines."""
    results = []
    for dtypes in DTYPES:
        for row in OPTIONS:
            (options,) = row.values
            lists = build([(), (5,), (1000,)], *dtypes.values, "cpu", options, step=0)
            run(lists, **options)
            run(lists, grad_scale=torch.tensor(3.0), **options)
            results.append(lists)
    return results


def test_every_instruction_set_gives_the_same_bits(under_isa):
    plain_isa, plain = under_isa(sample_results, "plain")
    assert plain_isa == "plain"
    best_isa, best = under_isa(sample_results, None)
    if best_isa == "plain":
        pytest.skip("this machine has the plain engine only")
    for actual, expected in zip(best, plain, strict=True):
        assert_same(actual, expected)


def replace(name: str, index: int, change):
    """Returns a function that spoils one tensor of the arguments."""

    def spoil(lists):
        lists[name][index] = change(lists[name][index])

    return spoil


def drop(name: str):
    return lambda lists: lists.pop(name)


def shorten(name: str):
    return lambda lists: lists[name].pop()


def overlapping(tensor):
    return tensor[:1].expand_as(tensor)


BAD = [
    pytest.param(shorten("grads"), {}, r"grads", id="grads-too-few"),
    pytest.param(shorten("momentum_buffers"), {}, r"momentum_buffers", id="buffers-too-few"),
    pytest.param(shorten("steps"), {}, r"steps", id="steps-too-few"),
    pytest.param(shorten("master_params"), {}, r"master_params", id="masters-too-few"),
    pytest.param(drop("momentum_buffers"), {}, r"momentum_buffers", id="momentum-without-buffers"),
    pytest.param(drop("steps"), {}, r"steps", id="dampening-without-steps"),
    pytest.param(
        lambda lists: None,
        {"momentum": 0.0, "dampening": 0.0},
        r"momentum_buffers",
        id="buffers-without-momentum",
    ),
    pytest.param(
        replace("momentum_buffers", 1, torch.Tensor.double), {},
        r"momentum_buffers\[1\] must be .*Float.*, got Double", id="buffer-dtype",
    ),
    pytest.param(
        replace("steps", 1, torch.Tensor.half), {},
        r"steps\[1\] must be Float, got Half", id="step-dtype",
    ),
    pytest.param(
        replace("master_params", 1, torch.Tensor.half), {},
        r"master_params\[1\] must be Float, got Half", id="master-dtype",
    ),
    pytest.param(replace("params", 1, torch.Tensor.int), {}, r"params\[1\]", id="param-integer"),
    pytest.param(replace("grads", 1, torch.Tensor.int), {}, r"grads\[1\]", id="grad-integer"),
    pytest.param(replace("grads", 1, torch.Tensor.cfloat), {}, r"grads\[1\]", id="grad-complex"),
    pytest.param(replace("grads", 1, torch.Tensor.to_sparse), {}, r"grads\[1\]", id="grad-sparse"),
    pytest.param(replace("grads", 2, lambda t: t[:-1]), {}, r"grads\[2\]", id="grad-shape"),
    pytest.param(
        replace("momentum_buffers", 2, lambda t: t[:-1]), {},
        r"momentum_buffers\[2\]", id="buffer-shape",
    ),
    pytest.param(
        lambda lists: lists.update(params=[lists["params"][0]] * 3),
        {},
        r"params\[[01]\].* params\[[01]\]",
        id="param-twice",
    ),
    pytest.param(replace("params", 1, overlapping), {}, r"params\[1\]", id="param-overlaps"),
    pytest.param(
        replace("momentum_buffers", 1, overlapping), {},
        r"momentum_buffers\[1\]", id="buffer-overlaps",
    ),
    pytest.param(
        replace("grads", 1, lambda t: t.to("meta")), {}, r"grads\[1\]", id="grad-device"
    ),
    pytest.param(
        lambda lists: None, {"found_inf": torch.zeros(2)}, r"found_inf", id="found-inf-shape"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "options", "words"), BAD)
def test_bad_input_is_named_before_anything_is_written(spoil, options, words):
    lists = build([(5,)] * 3, Dtypes(F16, F16, F32, master=True), "cpu", MOMENTUM)
    spoil(lists)
    before = {name: list(tensors) for name, tensors in lists.items()}
    values = {
        name: [None if t.is_meta else t.to_dense().clone() for t in tensors]
        for name, tensors in lists.items()
    }
    with pytest.raises(RuntimeError, match=f"^sgd_: {words}"):
        run(lists, **(MOMENTUM | options))
    for name, tensors in before.items():
        for tensor, value in zip(tensors, values[name], strict=True):
            assert value is None or torch.equal(tensor.to_dense(), value), name
