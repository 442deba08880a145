"""``amp_ext.ops.adam_``: Adam, AdamW and AMSGrad over lists of tensors."""

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
    transposed,
)
from reference import adam, assert_close, same_bits

from amp_ext import ops

# A large eps and step, so that a wrong place of eps or a lost update shows in 8 bits as well.
HYPER = {"lr": 0.3, "beta1": 0.8, "beta2": 0.99, "eps": 0.05, "weight_decay": 0.0}

OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"weight_decay": 0.3}, id="decay"),
    pytest.param({"weight_decay": 0.3, "decoupled_weight_decay": True}, id="decoupled"),
    pytest.param({"amsgrad": True}, id="amsgrad"),
    pytest.param({"maximize": True}, id="maximize"),
    pytest.param({"amsgrad": True, "weight_decay": 0.3, "maximize": True}, id="amsgrad-decay-max"),
    pytest.param(
        {"weight_decay": 0.3, "decoupled_weight_decay": True, "maximize": True}, id="decoupled-max"
    ),
]

Lists = dict[str, list[torch.Tensor]]


def build(shapes, dtypes: Dtypes, device, *, amsgrad: bool = False, step: int = 3) -> Lists:
    """Makes the arguments of a step that others went before, by the names of the operation."""

    def normal(dtype):
        return [torch.randn(shape, device=device).to(dtype) for shape in shapes]

    def squares(dtype):
        return [(torch.rand(shape, device=device) * 0.05 + 1e-3).to(dtype) for shape in shapes]

    masters = normal(F32 if dtypes.master else dtypes.param)
    lists = {
        "params": [master.to(dtypes.param, copy=True) for master in masters],
        "grads": normal(dtypes.grad),
        "exp_avgs": normal(dtypes.state),
        "exp_avg_sqs": squares(dtypes.state),
        "steps": [torch.tensor(float(step), device=device) for _ in shapes],
    }
    if amsgrad:
        lists["max_exp_avg_sqs"] = squares(dtypes.state)
    if dtypes.master:
        lists["master_params"] = masters
    return lists


def copied(lists: Lists) -> Lists:
    return {name: [tensor.clone() for tensor in tensors] for name, tensors in lists.items()}


def run(lists: Lists, **options) -> None:
    options.pop("amsgrad", None)
    ops.adam_(**lists, **(HYPER | options))


def assert_same(actual: Lists, expected: Lists) -> None:
    for name, tensors in expected.items():
        for index, tensor in enumerate(tensors):
            assert same_bits(actual[name][index], tensor), f"{name}[{index}] {tuple(tensor.shape)}"


def assert_is_the_formula(after: Lists, before: Lists, **options) -> None:
    """Compares every written tensor with one step of the reference from ``before``."""
    options.pop("amsgrad", None)
    for index, start in enumerate(before["params"]):
        old = {name: tensors[index] for name, tensors in before.items()}
        new = {name: tensors[index] for name, tensors in after.items()}
        expected = adam(
            old.get("master_params", start),
            old["grads"],
            old["exp_avgs"],
            old["exp_avg_sqs"],
            old["steps"],
            old.get("max_exp_avg_sqs"),
            **(HYPER | options),
        )
        shape = tuple(start.shape)
        assert_close(
            new.get("master_params", new["params"]), expected["param"], what=f"param {shape}"
        )
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            if name in expected:
                assert_close(new[f"{name}s"], expected[name], what=f"{name} {shape}")
        if "master_params" in new:
            assert torch.equal(new["params"], new["master_params"].to(start.dtype))
        assert new["steps"].item() == old["steps"].item() + 1
        assert same_bits(new["grads"], old["grads"]), "a gradient was written"


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_one_step_is_the_formula(device, dtypes, options):
    lists = build(SHAPES, dtypes, device, amsgrad="amsgrad" in options)
    before = copied(lists)
    run(lists, **options)
    assert_is_the_formula(lists, before, **options)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=str)
def test_ten_steps_follow_the_fused_adam_of_torch(device, dtype, options):
    names = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.0} | options
    theirs = [torch.nn.Parameter(torch.randn(1000, device=device).to(dtype)) for _ in range(2)]
    optimizer = torch.optim.Adam(theirs, betas=(0.9, 0.999), fused=True, **names)
    amsgrad = names.pop("amsgrad", False)
    ours = build([(1000,)] * 2, Dtypes(dtype, dtype, dtype), device, amsgrad=amsgrad, step=0)
    for name, tensors in ours.items():
        for tensor, start in zip(tensors, theirs, strict=True):
            tensor.copy_(start.detach()) if name == "params" else tensor.zero_()
    for _ in range(10):
        for index, param in enumerate(theirs):
            param.grad = torch.randn_like(param)
            ours["grads"][index] = param.grad.clone()
        optimizer.step()
        run(ours, beta1=0.9, beta2=0.999, **names)
    for index, param in enumerate(theirs):
        assert_close(ours["params"][index], param, steps=10)
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if amsgrad else 2]:
            assert_close(ours[f"{name}s"][index], optimizer.state[param][name], steps=10)


def test_constants_are_computed_in_double(device):
    lists = build([(4,)], Dtypes(F32, F32, F32), device, step=0)
    lists["exp_avgs"][0].zero_()
    lists["exp_avg_sqs"][0].zero_()
    lists["grads"][0].fill_(1.0)
    run(lists, beta1=0.9, beta2=0.999)
    assert same_bits(lists["exp_avgs"][0], torch.full((4,), 1 - 0.9))
    assert same_bits(lists["exp_avg_sqs"][0], torch.full((4,), 1 - 0.999))


@pytest.mark.parametrize("step", [0, 1, 999, 100_000, 16_777_214])
def test_bias_correction_is_right_at_any_age(device, step):
    lists = build([(64,)], Dtypes(F32, F32, F32), device, step=step)
    before = copied(lists)
    run(lists, beta2=0.999)
    assert_is_the_formula(lists, before, beta2=0.999)


def test_each_tensor_has_its_own_step_count(device):
    lists = build([(5,)] * 4, Dtypes(F32, F32, F32), device)
    for count, step in zip([0, 1, 7, 50], lists["steps"], strict=True):
        step.fill_(count)
    before = copied(lists)
    run(lists)
    assert_is_the_formula(lists, before)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_zero_gradients_and_states_leave_parameters_alone(device, dtype):
    lists = build([(100,)], Dtypes(dtype, dtype, dtype), device, step=0)
    for name in ("grads", "exp_avgs", "exp_avg_sqs"):
        lists[name][0].zero_()
    before = copied(lists)
    run(lists, eps=1e-8)
    before["steps"][0].fill_(1)
    assert_same(lists, before)


def test_tiny_fp16_gradients_still_move_the_master(device):
    lists = build([(64,)], Dtypes(F16, F16, F32, master=True), device, step=0)
    lists["exp_avgs"][0].zero_()
    lists["exp_avg_sqs"][0].zero_()
    lists["grads"][0].fill_(2**-24)
    before = copied(lists)
    run(lists, eps=1e-8)
    assert_is_the_formula(lists, before, eps=1e-8)
    assert (lists["master_params"][0] < before["master_params"][0]).all()


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}], ids=["plain", "amsgrad"])
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_nan_and_inf_spoil_only_their_own_element(device, dtypes, options):
    lists = build([(70,)], dtypes, device, amsgrad="amsgrad" in options)
    clean = copied(lists)
    lists["grads"][0][7] = float("nan")
    lists["grads"][0][33] = float("-inf")
    run(lists, **options)
    run(clean, **options)
    for name in lists.keys() - {"grads", "steps"}:
        actual, expected = lists[name][0], clean[name][0]
        keep = torch.ones(70, dtype=torch.bool, device=device)
        keep[[7, 33]] = False
        assert same_bits(actual[keep], expected[keep]), name
        assert actual[7].isnan(), name
        assert not actual[33].isfinite(), name


@pytest.mark.parametrize("dtypes", DTYPES)
def test_three_thousand_tiny_tensors_step_as_one(device, dtypes):
    sizes = [index % 7 for index in range(3000)]
    one = build([(sum(sizes),)], dtypes, device, amsgrad=True)
    many = {name: [part.clone() for part in tensors[0].split(sizes)]
            for name, tensors in one.items() if name != "steps"}  # fmt: skip
    many["steps"] = [one["steps"][0].clone() for _ in sizes]
    run(one, weight_decay=0.3)
    run(many, weight_decay=0.3)
    for name in one.keys() - {"steps"}:
        assert same_bits(torch.cat(many[name]), one[name][0]), name
    assert all(step.item() == 4 for step in many["steps"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_any_layout_gives_the_bits_of_contiguous_tensors(device, dtypes, layout):
    expected = build([LAYOUT_SHAPE] * 2, dtypes, device, amsgrad=True)
    actual = {
        name: [t.clone() if t.dim() == 0 else placed(t, layout) for t in tensors]
        for name, tensors in expected.items()
    }
    run(expected)
    run(actual)
    assert_same(actual, expected)
    for name in actual.keys() - {"steps"}:
        assert all(neighbours_untouched(view) for view in actual[name]), name


@pytest.mark.parametrize("name", ["params", "grads", "exp_avgs", "exp_avg_sqs", "master_params"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_list_may_have_a_layout_of_its_own(device, name, layout):
    dtypes = Dtypes(BF16, BF16, F32, master=True)
    expected = build([LAYOUT_SHAPE] * 2, dtypes, device)
    actual = copied(expected)
    actual[name] = [placed(tensor, layout) for tensor in expected[name]]
    run(expected)
    run(actual)
    assert_same(actual, expected)
    assert all(neighbours_untouched(view) for view in actual[name])


@pytest.mark.parametrize("dtypes", FEW_DTYPES)
@pytest.mark.parametrize("shape", [(1,), (6, 1), (1, 5), (6, 5)], ids=str)
def test_a_gradient_may_be_expanded(device, dtypes, shape):
    expected = build([(6, 5)], dtypes, device)
    actual = copied(expected)
    small = torch.randn(shape, device=device).to(dtypes.grad)
    actual["grads"] = [small.expand(6, 5)]
    expected["grads"] = [small.expand(6, 5).contiguous()]
    run(expected)
    run(actual)
    assert_same(actual, expected)


def test_transposed_gradients_under_contiguous_parameters_are_matched_by_place(device):
    lists = build([(6, 5)], Dtypes(F32, F32, F32), device)
    before = copied(lists)
    lists["grads"] = [placed(tensor, transposed) for tensor in lists["grads"]]
    run(lists)
    assert_is_the_formula(lists, before)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 65536.0, 3.0, 0.1, 2.0**40])
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=str)
def test_grad_scale_multiplies_by_the_rounded_inverse(device, dtype, scale, shape):
    dtypes = Dtypes(dtype, F64 if dtype == F64 else F32, F64 if dtype == F64 else F32)
    scaled = build([(70,), (5,)], dtypes, device)
    inverse = (1 / torch.tensor(scale).double()).float().item()
    plain = copied(scaled)
    plain["grads"] = [grad * inverse for grad in plain["grads"]]
    run(scaled, grad_scale=torch.full(shape, scale, device=device))
    run(plain)
    del scaled["grads"], plain["grads"]
    assert_same(scaled, plain)


def test_unscaling_happens_in_float32_for_16_bit_gradients(device):
    lists = build([(70,)], Dtypes(F16, F16, F32, master=True), device)
    before = copied(lists)
    scale = torch.tensor(65536.0, device=device)
    run(lists, grad_scale=scale)
    assert_is_the_formula(lists, before, grad_scale=scale)


@pytest.mark.parametrize("value", [1.0, 2.0, 3.0, 0.5])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_overflow_changes_not_a_bit(device, dtypes, shape, value):
    lists = build([(0,), (), (5,), (16385,)], dtypes, device, amsgrad=True)
    lists["grads"][2][1] = float("inf")
    before = copied(lists)
    run(
        lists,
        weight_decay=0.3,
        found_inf=torch.full(shape, value, device=device),
        grad_scale=torch.tensor(65536.0, device=device),
    )
    assert_same(lists, before)


@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_a_clean_found_inf_steps_as_without(device, dtypes):
    plain = build([(5,), (16385,)], dtypes, device)
    checked = copied(plain)
    found_inf = torch.zeros(1, device=device)
    run(plain)
    run(checked, found_inf=found_inf)
    assert_same(checked, plain)
    assert found_inf.item() == 0


def test_the_step_counter_of_an_empty_tensor_advances(device):
    lists = build([(0,), (0, 3)], Dtypes(F32, F32, F32), device)
    run(lists)
    assert [step.item() for step in lists["steps"]] == [4, 4]


def test_step_counters_of_shape_one_are_taken(device):
    lists = build([(5,)], Dtypes(F32, F32, F32), device)
    expected = copied(lists)
    lists["steps"] = [torch.full((1,), 3.0, device=device)]
    run(lists)
    run(expected)
    assert same_bits(lists["params"][0], expected["params"][0])
    assert lists["steps"][0].item() == 4


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_lr_may_be_a_tensor(device, shape):
    expected = build([(5,), (70,)], Dtypes(BF16, BF16, F32, master=True), device)
    actual = copied(expected)
    run(actual, lr=torch.full(shape, 0.25, device=device))
    run(expected, lr=0.25)
    assert_same(actual, expected)


def test_empty_lists_are_nothing_to_do(device):
    run({name: [] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps")})


def test_written_tensors_get_a_new_version(device):
    lists = build([(5,)], Dtypes(BF16, BF16, F32, master=True), device, amsgrad=True)
    before = {name: tensors[0]._version for name, tensors in lists.items()}
    run(lists)
    for name in lists.keys() - {"grads"}:
        assert lists[name][0]._version > before[name], name
    assert lists["grads"][0]._version == before["grads"]


@pytest.mark.parametrize("dtypes", FEW_DTYPES)
def test_the_number_of_threads_does_not_change_a_bit(dtypes):
    lists = build([(70000,), (5,), (200_001,)], dtypes, "cpu", amsgrad=True)
    alone = copied(lists)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        run(alone)
        torch.set_num_threads(3)
        run(lists)
    finally:
        torch.set_num_threads(threads)
    assert_same(lists, alone)


def sample_results() -> list[Lists]:
    """Steps every combination of dtypes and options twice, for comparison between engines."""
    results = []
    for dtypes in DTYPES:
        for options in OPTIONS:
            lists = build(
                [(), (5,), (1000,)], *dtypes.values, "cpu", amsgrad="amsgrad" in options.values[0]
            )
            run(lists, **options.values[0])
            run(lists, grad_scale=torch.tensor(3.0), **options.values[0])
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


def shorten(name: str):
    return lambda lists: lists[name].pop()


def share(name: str, index: int, other: str, other_index: int):
    """Returns a function that puts one tensor at two places."""

    def spoil(lists):
        lists[name][index] = lists[other][other_index]

    return spoil


def sparse(tensor):
    return tensor.to_sparse()


def overlapping(tensor):
    return tensor[:1].expand_as(tensor)


BAD = [
    pytest.param(shorten("grads"), {}, r"grads", id="grads-too-few"),
    pytest.param(shorten("exp_avgs"), {}, r"exp_avgs", id="exp-avgs-too-few"),
    pytest.param(shorten("exp_avg_sqs"), {}, r"exp_avg_sqs", id="exp-avg-sqs-too-few"),
    pytest.param(shorten("max_exp_avg_sqs"), {}, r"max_exp_avg_sqs", id="max-too-few"),
    pytest.param(shorten("steps"), {}, r"steps", id="steps-too-few"),
    pytest.param(shorten("master_params"), {}, r"master_params", id="masters-too-few"),
    pytest.param(
        replace("exp_avgs", 1, torch.Tensor.double), {},
        r"exp_avgs\[1\] must be \w*(Float|Half).*, got Double", id="exp-avg-dtype",
    ),
    pytest.param(
        replace("exp_avg_sqs", 2, torch.Tensor.bfloat16), {},
        r"exp_avg_sqs\[2\] must be .*Float.*, got BFloat16", id="exp-avg-sq-dtype",
    ),
    pytest.param(
        replace("max_exp_avg_sqs", 1, torch.Tensor.int), {},
        r"max_exp_avg_sqs\[1\] must be .*Float.*, got Int", id="max-dtype",
    ),
    pytest.param(
        replace("steps", 1, torch.Tensor.long), {},
        r"steps\[1\] must be Float, got Long", id="step-dtype",
    ),
    pytest.param(
        replace("master_params", 1, torch.Tensor.half), {},
        r"master_params\[1\] must be Float, got Half", id="master-dtype",
    ),
    pytest.param(replace("params", 1, torch.Tensor.int), {}, r"params\[1\]", id="param-integer"),
    pytest.param(replace("grads", 1, torch.Tensor.int), {}, r"grads\[1\]", id="grad-integer"),
    pytest.param(replace("grads", 1, torch.Tensor.cfloat), {}, r"grads\[1\]", id="grad-complex"),
    pytest.param(replace("params", 1, torch.Tensor.cfloat), {}, r"params\[1\]", id="param-complex"),
    pytest.param(replace("grads", 1, sparse), {}, r"grads\[1\]", id="grad-sparse"),
    pytest.param(replace("grads", 2, lambda t: t[:-1]), {}, r"grads\[2\]", id="grad-shape"),
    pytest.param(
        replace("grads", 2, lambda t: t.view(1, -1)), {}, r"grads\[2\]", id="grad-dimensions"
    ),
    pytest.param(replace("exp_avgs", 2, lambda t: t[:-1]), {}, r"exp_avgs\[2\]", id="avg-shape"),
    pytest.param(
        replace("master_params", 2, lambda t: t[:-1]), {}, r"master_params\[2\]", id="master-shape"
    ),
    pytest.param(replace("steps", 1, lambda t: t.repeat(2)), {}, r"steps\[1\]", id="step-shape"),
    pytest.param(
        share("params", 1, "params", 0), {}, r"params\[[01]\].* params\[[01]\]", id="param-twice"
    ),
    pytest.param(
        share("steps", 2, "steps", 0), {}, r"steps\[[02]\].* steps\[[02]\]", id="step-twice"
    ),
    pytest.param(
        share("exp_avg_sqs", 1, "exp_avgs", 1),
        {},
        r"exp_avg(_sq)?s\[1\].* exp_avg(_sq)?s\[1\]",
        id="states-share",
    ),
    pytest.param(
        share("master_params", 1, "exp_avgs", 1),
        {},
        r"(master_params|exp_avgs)\[1\].* (master_params|exp_avgs)\[1\]",
        id="master-shares",
    ),
    pytest.param(replace("params", 1, overlapping), {}, r"params\[1\]", id="param-overlaps"),
    pytest.param(replace("exp_avgs", 1, overlapping), {}, r"exp_avgs\[1\]", id="avg-overlaps"),
    pytest.param(
        replace("master_params", 1, overlapping), {}, r"master_params\[1\]", id="master-overlaps"
    ),
    pytest.param(replace("grads", 1, lambda t: t.to("meta")), {}, r"grads\[1\]", id="grad-device"),
    pytest.param(
        replace("exp_avgs", 1, lambda t: t.to("meta")), {}, r"exp_avgs\[1\]", id="avg-device"
    ),
    pytest.param(
        lambda lists: None, {"found_inf": torch.zeros(2)}, r"found_inf", id="found-inf-shape"
    ),
    pytest.param(
        lambda lists: None, {"grad_scale": torch.ones(2)}, r"grad_scale", id="grad-scale-shape"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "options", "words"), BAD)
def test_bad_input_is_named_before_anything_is_written(spoil, options, words):
    lists = build([(5,)] * 3, Dtypes(F16, F16, F32, master=True), "cpu", amsgrad=True)
    spoil(lists)
    before = {name: list(tensors) for name, tensors in lists.items()}
    values = {
        name: [None if t.is_meta else t.to_dense().clone() for t in tensors]
        for name, tensors in lists.items()
    }
    with pytest.raises(RuntimeError, match=f"^adam_: {words}"):
        run(lists, **options)
    for name, tensors in before.items():
        for tensor, value in zip(tensors, values[name], strict=True):
            assert value is None or torch.equal(tensor.to_dense(), value), name
