"""Bad input of the operations: named in the error, before anything is written."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from harness import list_operations as cases
from harness.coded_lists import CODED_STEPS, FIRST_STATES, build_coded, coded_steps
from harness.edge_shapes import BF16, F16, F32, F64, INF, NAN, Dtypes, placed, strided
from harness.launch_failures import WORDS, refusing_launch
from harness.number_codes import GROUP
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_ext import ops
from amp_ext.ops import OptimizerType


def assert_refused(call: Callable[[], Any], words: str, *tensors: Any) -> None:
    """Asserts that a call is refused with these words and writes none of these tensors."""
    each = [t for t in tree_leaves(tensors) if isinstance(t, Tensor) and not t.is_meta]
    before = [tensor.to_dense().clone() for tensor in each]
    with pytest.raises(RuntimeError, match=f"^{words}"):
        call()
    for tensor, value in zip(each, before, strict=True):
        assert torch.equal(tensor.to_dense(), value)


def assert_step_refused(operation: str, lists: Any, words: str, **options: Any) -> None:
    call = partial(cases.run, operation, lists, **options)
    assert_refused(call, f"{operation}: {words}", lists, options)


def some_lists(operation: str, options: cases.Options) -> cases.Lists:
    return cases.build(operation, options, [(5,)] * 3, Dtypes(F16, F16, F32, master=True), "cpu")


def named(lists: cases.Lists, kinds: str) -> list[str]:
    """Returns the names of some lists of an operation; "buffers" are those of its states."""
    others = {"params", "grads", "steps", "master_params"}
    wanted = set(kinds.split())
    return [
        name for name in lists if name in wanted or ("buffers" in wanted and name not in others)
    ]


def overlapping(tensor: Tensor) -> Tensor:
    return tensor[:1].expand_as(tensor)


ITSELF = r"is written and must not overlap itself, got sizes \[5\] with strides \[0\]"
SIZES = r"must be of sizes \[5\], got"
TWO = r"must be one element, got sizes \[2\]"


BAD_TENSORS = {
    "buffer-double": ("buffers", Tensor.double, "must be Float.*, got Double"),
    "buffer-integer": ("buffers", Tensor.int, "must be Float.*, got Int"),
    "step-integer": ("steps", Tensor.long, "must be Float, got Long"),
    "master-half": ("master_params", Tensor.half, "must be Float, Byte or Char, got Half"),
    "integer": ("params grads", Tensor.int, "must be Float, .*got Int"),
    "complex": ("params grads", Tensor.cfloat, "must be Float, .*got Complex"),
    "sparse": ("grads", Tensor.to_sparse, "must be .*[sS]parse"),
    "shape": ("grads buffers master_params", lambda t: t[:-1], f"{SIZES} \\[4\\]"),
    "dimensions": ("grads", lambda t: t.view(1, -1), f"{SIZES} \\[1, 5\\]"),
    "step-shape": ("steps", lambda t: t.repeat(2), TWO),
    "overlaps-itself": ("params buffers master_params", overlapping, ITSELF),
    "device": ("grads buffers", lambda t: t.to("meta"), "must be .*meta"),
}


@pytest.mark.parametrize(("kinds", "spoil", "words"), rows(BAD_TENSORS))
@cases.few_steps_and_updates
def test_a_bad_tensor_is_named(operation, options, kinds, spoil, words):
    for name in named(some_lists(operation, options), kinds):
        lists = some_lists(operation, options)
        lists[name][1] = spoil(lists[name][1])
        assert_step_refused(operation, lists, rf"{name}\[1\] {words}", **options)


@cases.few_steps
def test_a_gradient_that_overlaps_itself_is_not_written_back(operation, options):
    lists = some_lists(operation, options)
    lists["grads"][1] = overlapping(lists["grads"][1])
    assert_step_refused(operation, lists, rf"grads\[1\] {ITSELF}", write_back_grads=True, **options)


@cases.few_steps_and_updates
def test_a_list_that_is_too_short_is_named(operation, options):
    for name in named(some_lists(operation, options), "grads buffers steps master_params"):
        lists = some_lists(operation, options)
        lists[name].pop()
        words = f"{name} must have 3 tensors, one for each of params, got 2"
        assert_step_refused(operation, lists, words, **options)


NOT_FLOATING = r"must be one floating-point element, got Long of sizes \[\]"
NOT_ONE = r"must be one floating-point element, got Float of sizes \[2\]"
LIMITS = ("max_grad_norm", "clip_value")


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        *[(name, torch.tensor(1), NOT_FLOATING) for name in ("found_inf", "grad_scale", "lr")],
        *[(name, torch.ones(2), NOT_ONE) for name in ("found_inf", "grad_scale", "lr")],
        ("grad_norm", torch.ones(()).double(), "must be Float, got Double"),
        ("grad_norm", torch.ones(2), TWO),
        ("sum_of_squares", torch.ones(()), "must be Double, got Float"),
        ("sum_of_squares", torch.ones(2, dtype=F64), TWO),
        ("grad_norm", torch.ones((), device="meta"), "must .*meta"),
        *[(name, -1.0, "must be at least 0, got -1") for name in LIMITS],
        *[(name, math.nan, "must be .*, got nan") for name in LIMITS],
    ],
)
@cases.few_steps
def test_a_bad_number_is_named(operation, options, name, number, words):
    options = options | {"max_grad_norm": 1.0, name: number}
    lists = some_lists(operation, options)
    assert_step_refused(operation, lists, f"{name} {words}", **options)


@pytest.mark.parametrize(("operation", "options"), cases.UPDATES)
def test_a_learning_rate_of_two_numbers_is_named(operation, options):
    lists = some_lists(operation, options)
    assert_step_refused(operation, lists, f"lr {NOT_ONE}", **options | {"lr": torch.ones(2)})


# The number of a step, in counters or alone.


@pytest.mark.parametrize("timestep", [0, -1, NAN, INF, 1.5, True, "2"], ids=str)
@pytest.mark.parametrize("operation", cases.BUFFERS)
def test_what_is_no_number_of_a_step_is_named(operation, timestep):
    lists = cases.build(operation, {}, [(5,)], cases.IN_FLOAT, "cpu")
    lists.pop("steps", None)
    words = f"timestep must be an int of at least 1, got {timestep}$"
    assert_step_refused(operation, lists, words, timestep=timestep)


@pytest.mark.parametrize(cases.STEP, cases.COUNTED)
def test_counters_and_a_number_are_refused_together_and_so_is_neither(operation, options):
    lists = some_lists(operation, options)
    words = "steps must be None beside a timestep, got 3 tensors$"
    assert_step_refused(operation, lists, words, timestep=4, **options)
    without = {**lists, "steps": None}
    assert_step_refused(operation, without, "steps must be given ", **options)


@pytest.mark.parametrize(("operation", "name", "option"), cases.OF_OPTIONS)
def test_buffers_that_do_not_fit_their_option_are_named(operation, name, option):
    words = f"{name} must be given if and only if {option} is not 0, got {option} "
    for built_for, options in ({option: 0.7}, {}), ({}, {option: 0.7}):
        assert_step_refused(operation, some_lists(operation, built_for), words, **options)


def test_dampening_without_steps_is_named():
    lists = some_lists("sgd_", cases.MOMENTUM)
    words = "steps must be given with dampening, whose first step differs"
    assert_step_refused("sgd_", lists, words, **cases.DAMPENING)


@pytest.mark.parametrize("kind", OptimizerType)
@pytest.mark.parametrize("name", ["velocities", "exp_avgs", "exp_avg_sqs"])
def test_buffers_of_an_update_that_are_too_few_or_too_many_are_named(kind, name):
    workspace = ops.OptimizerWorkspace()
    options = {"optimizer_type": kind, "workspace": workspace, "max_grad_norm": 1.0}
    lists = some_lists("optimizer_update_", options)
    needed = name in cases.UPDATE_BUFFERS[kind]
    for wrong in [None] if needed else [list(lists["params"]), []]:
        got = "None" if wrong is None else f"{len(wrong)} tensors"
        words = f"{name} must be {'given' if needed else 'None'} for {kind}, got {got}$"
        assert_step_refused("optimizer_update_", lists | {name: wrong}, words, **options)
    words = "grads must have 3 tensors"
    assert_step_refused("optimizer_update_", lists | {"grads": []}, words, **options)
    assert workspace.grad_norm is None, "there was no update whose norm it could be"


# Moments in codes of 8 bits.


def coded_lists(operation: str, code: str) -> tuple[cases.Lists, cases.Options]:
    options = cases.ALL_BUFFERS[operation]
    return build_coded(operation, options, code, cases.IN_FLOAT, [(2 * GROUP,)] * 3), options


def with_maxima(lists: cases.Lists) -> None:
    lists["max_exp_avg_sqs"] = [torch.zeros(2 * GROUP, dtype=BF16) for _ in lists["params"]]


def with_exponents(lists: cases.Lists) -> None:
    lists["exponents"] = [torch.ones(2, dtype=torch.uint8) for _ in lists["params"]]


def not_of_whole_groups(lists: cases.Lists) -> None:
    for name in lists.keys() - {"steps", "exponents"}:
        lists[name][1] = torch.cat([lists[name][1], lists[name][1][:1]])


def second(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[cases.Lists], None]:
    """Returns what changes the second tensor of a list."""
    return lambda lists: lists[name].__setitem__(1, change(lists[name][1]))


NARROW = "must be Float or BFloat16, got"
BESIDE = "must be BFloat16 or Byte beside first moments of Char, got"
SIZES_OF_CODES = r"must be of sizes \[64\], got \[32\]"
NOT_BYTES = r"exponents\[1\] must be Byte and contiguous, got"
BLOCKS = [("adam_", "q8s"), ("lion_", "q8m"), ("sgd_", "q8m")]
# The operation, its code, what is changed of its lists, and what the error says.
WRONG_CODES = [
    ("lion_", "q8m", second("exp_avgs", Tensor.char), rf"exp_avgs\[1\] {NARROW} Char"),
    ("sgd_", "q8m", second("momentum_buffers", lambda t: t[:GROUP]), rf".*\[1\] {SIZES_OF_CODES}"),
    ("adam_", "q8h", second("exp_avgs", Tensor.byte), rf"exp_avgs\[1\] {NARROW} Byte"),
    ("adam_", "q8s", second("exp_avg_sqs", Tensor.char), rf"exp_avg_sqs\[1\] {BESIDE} Char"),
    ("adam_", "q8h", second("exp_avg_sqs", Tensor.float), rf"exp_avg_sqs\[1\] {BESIDE} Float"),
    ("adam_", "q8s", second("exp_avgs", Tensor.float), rf"exp_avg_sqs\[1\] {NARROW} Byte"),
    ("adam_", "q8h", with_maxima, rf"exp_avgs\[0\] {NARROW} Char"),
    ("adam_", "q8h", with_exponents, r"exponents\[0\] must be None for moments without groups"),
    *(
        (*block, change, words)
        for block in BLOCKS
        for change, words in (
            (second("exponents", lambda t: t[:0]), r"exponents\[1\] must be of 2 elements, got 0"),
            (second("exponents", Tensor.char), f"{NOT_BYTES} Char"),
            (second("exponents", lambda t: t.repeat_interleave(2)[::2]), f"{NOT_BYTES} Byte"),
            (
                second("exponents", lambda t: t[:1].expand(2)),
                r"exponents\[1\] is written and must not",
            ),
            (second("exponents", lambda t: t.to("meta")), r"exponents\[1\] .* on cpu, got meta"),
            (second("exponents", Tensor.to_sparse), r"exponents\[1\] must be .*[sS]parse"),
            (lambda lists: lists.pop("exponents"), r"exponents\[0\] must be of 2 elements, got 0"),
            (not_of_whole_groups, r"params\[1\] must be of a multiple of 32 elements for moments"),
        )
    ),
]


@pytest.mark.parametrize(("operation", "code", "change", "words"), WRONG_CODES)
def test_codes_that_do_not_fit_are_named(operation, code, change, words):
    lists, options = coded_lists(operation, code)
    change(lists)
    assert_step_refused(operation, lists, words, **options)


@coded_steps
def test_codes_of_a_float64_parameter_are_named(operation, options, code):
    lists, more = coded_lists(operation, code)
    if "dither" in options:
        lists["steps"] = [torch.zeros(()) for _ in lists["params"]]
    for name in ("params", "grads"):
        lists[name][1] = lists[name][1].double()
    first = FIRST_STATES[operation]
    dtype = "Char" if cases.BUFFERS[operation][first].code == "q8h" else "Byte"
    words = rf"{first}\[1\] must be Double, got {dtype}"
    assert_step_refused(operation, lists, words, **more | options)


@pytest.mark.parametrize(("operation", "options", "code"), CODED_STEPS[::2])
def test_gradients_of_another_dtype_than_a_16_bit_parameter_are_named(operation, options, code):
    lists = build_coded(operation, options, code, Dtypes(BF16, F32, F32), [(2 * GROUP,)] * 3)
    for index in (0, 2):
        lists["grads"][index] = lists["grads"][index].bfloat16()
    words = r"grads\[1\] must be of the parameter's dtype with moments in 8 bits, BFloat16, got"
    for dtype, name in ((F32, "Float"), (F64, "Double")):
        lists["grads"][1] = lists["grads"][1].to(dtype)
        assert_step_refused(operation, lists, f"{words} {name}", **options)


# Single calls, by the operation: its arguments, and what the error says.

ONE, ONES = torch.ones(4), torch.ones(3)
BF16S = torch.ones(3, dtype=BF16)
FLOATS = torch.ones(2, GROUP)
CODES, RATIOS = FLOATS.byte(), FLOATS.char()
EXPONENTS = torch.ones(2, 1, dtype=torch.uint8)
FLAT, SQUARE, PAIRS = (torch.zeros(*size, dtype=torch.uint8) for size in ((3,), (3, 3), (3, 2)))
TWO_ROWS = "of sizes [2, 32], got"
ROWS_OF_GROUPS = "must have rows of a multiple of 32 elements, dimension 0 outermost, got sizes"
A_MASTER = "master_params[0] must be"
KINDS = f"{A_MASTER} Float, Byte or Char, got"


def sgd(text: str, param: Tensor, **more: Any) -> tuple[Callable[[], Any], str]:
    return partial(ops.sgd_, [param], [ONES], **{"lr": 1.0} | more), text


def coded(text: str, operation: Callable[..., Any], *tensors: Any) -> tuple[Any, str]:
    return partial(operation, *tensors), text


DITHERED = {"steps": [torch.zeros(())], "dither": True}
ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 0.1, "weight_decay": 0.0, "timestep": 1}
WRONG_CALLS = [
    *(
        (partial(ops.adam_, *[[ONES]] * 4, **ADAM | {name: NAN}), f"{name} must be a number, got n")
        for name in ("lr", "eps", "weight_decay", "beta1")
    ),
    coded(f"moment must be Float {TWO_ROWS} Half", ops.quantize_ratios, FLOATS.half(), FLOATS),
    coded(
        f"second_moment must be Float {TWO_ROWS} D", ops.quantize_ratios, FLOATS, FLOATS.double()
    ),
    coded(f"codes must be Char {TWO_ROWS} Byte", ops.dequantize_ratios, CODES, FLOATS),
    coded(
        f"second_moment must be Float {TWO_ROWS} F", ops.dequantize_ratios, RATIOS, FLOATS.view(-1)
    ),
    coded("code must be 'q8s' or 'q8m', got 'q8h'", ops.quantize_blockwise, FLOATS, "q8h"),
    coded(f"moment must be Float {TWO_ROWS} Half", ops.quantize_blockwise, FLOATS.half(), "q8s"),
    coded(f"moment {ROWS_OF_GROUPS} [4, 33]", ops.quantize_blockwise, torch.ones(4, 33), "q8s"),
    coded(
        f"moment {ROWS_OF_GROUPS} [64, 32]", ops.quantize_blockwise, torch.ones(32, 64).t(), "q8m"
    ),
    coded(
        f"codes must be Byte {TWO_ROWS} Char", ops.dequantize_blockwise, RATIOS, EXPONENTS, "q8m"
    ),
    coded("exponents must be Byte", ops.dequantize_blockwise, CODES, EXPONENTS.view(-1), "q8m"),
    coded("param must be Half or BFloat16", ops.split_fp32, ONES, ONES, 16),
    coded("low_bits must be 16 or 8, got 4", ops.split_fp32, BF16S, ONES, 4),
    coded("master_params must have 2 tensors", ops.refresh_masters_, [BF16S, BF16S], [ONES]),
    coded("master_params[1] must be ", ops.refresh_masters_, [BF16S] * 2, [ONES, ONES.half()]),
    sgd(f"{KINDS} Long", BF16S, master_params=[FLAT.long()]),
    sgd(f"{A_MASTER} of sizes [3, 2], got [3]", BF16S, master_params=[FLAT]),
    sgd("must have its last dimension in one piece", BF16S, master_params=[SQUARE[:2].t()]),
    sgd(f"{A_MASTER} None for a parameter of Float", ONES.clone(), master_params=[PAIRS]),
    sgd(
        "must be Float or BFloat16 with a split master, got Half",
        ONES.half(),
        master_params=[PAIRS],
        momentum_buffers=[ONES.half()],
        momentum=0.9,
    ),
    sgd("steps[0] must be given to dither, got None", BF16S, dither=True),
    sgd("must have 1 elements, as params, got 2", BF16S, global_offsets=[0, 1], **DITHERED),
    sgd("global_offsets[0] must be at least 0, got -1", BF16S, global_offsets=[-1], **DITHERED),
    sgd(
        "exponents[0] must be None for moments without groups, got 2",
        ONES.clone(),
        exponents=[FLAT[:2]],
    ),
]


@pytest.mark.parametrize(
    ("call", "text"),
    [pytest.param(*row, id=f"{row[0].func.__name__}-{row[1]}") for row in WRONG_CALLS],
)
def test_what_does_not_fit_is_named(call, text):
    words = f"{call.func.__name__}: .*{re.escape(text)}"
    assert_refused(call, words, call.args, call.keywords)


def test_what_is_no_type_of_an_optimizer_is_refused():
    assert [kind.name for kind in OptimizerType] == ["SGD", "MOMENTUM", "ADAM"]
    for kind in ("adam", 2, None, torch.optim.Adam):
        call = partial(ops.optimizer_update_, kind, [], [], lr=0.1, timestep=1)
        assert_refused(call, "optimizer_update_: optimizer_type must be an ")


def test_a_dither_of_float32_and_moments_without_groups_ask_for_nothing():
    param = torch.ones(3)
    ops.sgd_([param], [ONES], lr=1.0, dither=True, exponents=[FLAT[:0]])
    assert not param.any()


# Names.


@pytest.mark.parametrize("described", cases.DESCRIBED, ids=lambda each: each.operation)
def test_an_operation_names_every_field_and_buffer_of_its_optimizer(described):
    arguments = inspect.signature(getattr(ops, described.operation)).parameters
    lists = {f"{buffer.name}s" for buffer in described.buffers}
    of_gradients = {"grad_scale", "found_inf", "max_grad_norm", "skip_nonfinite"}
    of_gradients |= {"sum_of_squares", "grad_norm"}
    common = {"params", "grads", "steps", "master_params", "global_offsets", "exponents"}
    assert set(arguments) == lists | set(described.fields) | of_gradients | common


def test_an_unknown_argument_is_refused_by_the_binary():
    with pytest.raises(AttributeError, match="colour"):
        ops._C.adam_(params=[], grads=[], exp_avgs=[], exp_avg_sqs=[], steps=[], colour=1)


def test_what_is_no_list_of_tensors_is_refused_by_name():
    with pytest.raises(TypeError, match=r"adam_: exp_avgs must be a list of tensors, got int"):
        ops.adam_(*([], [], 3, [], []), lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)


# Operations some of whose launches are refused: each launch in turn.


COUNT = 1100  # more than a launch holds


def refused(call: Callable[[], Any]) -> Iterator[str]:
    """Yields the message after each launch of a call was refused in turn."""
    for number in itertools.count():
        try:
            with refusing_launch(number):
                call()
        except torch.AcceleratorError as error:
            yield str(error)
        else:
            return


@cases.few_steps_and_updates
def test_a_step_that_is_refused_in_the_middle_says_how_many_it_stepped(
    operation, options, emulated
):
    """The parameters of the last launch are in 16 bits."""
    before = cases.build(operation, options, [(5,), (3, 2), (7,)], cases.IN_FLOAT, "cpu")
    before["params"][1] = before["params"][1].to(BF16)
    whole, lists = cases.copied(before), cases.copied(before)
    cases.run(operation, whole, **options)

    def call() -> None:
        for name, tensors in cases.copied(before).items():
            lists[name][:] = tensors
        cases.run(operation, lists, **options)

    found = []
    for message in refused(call):
        stepped = [same_bits(*pair) for pair in zip(lists["params"], whole["params"], strict=True)]
        for name in before:
            for index, is_new in enumerate(stepped):
                expected = (whole if is_new else before)[name][index]
                assert same_bits(lists[name][index], expected), f"{name}[{index}]"
        found.append(sum(stepped))
        words = (
            f"{WORDS} ({operation}: the step failed after updating {sum(stepped)} of 3 parameters. "
            "Restore the parameters and their states before the next step.)"
        )
        assert message == (words if any(stepped) else WORDS)
    assert found == [0, 2]


def gradients() -> list[Tensor]:
    """Returns gradients for four launches."""
    torch.manual_seed(0)
    grads = [torch.randn(5, dtype=dtype) for dtype in (F16, F32, BF16, F64, F32)]
    return [placed(grads[0], strided), *grads[1:]]


NUMBERS = {
    "unscale_": {"inv_scale": torch.tensor(0.5), "found_inf": torch.zeros(())},
    "clip_grads_": {"total_norm": torch.tensor(4.0), "max_norm": 1.0},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_gradients_of_a_refused_launch_are_as_before_and_the_message_counts_the_others(
    name, emulated
):
    arguments = NUMBERS[name]
    before, whole, grads = gradients(), gradients(), gradients()
    getattr(ops, name)(whole, **arguments)

    def call() -> None:
        grads[:] = gradients()
        getattr(ops, name)(grads, **arguments)

    found = []
    for message in refused(call):
        written = [same_bits(*pair) for pair in zip(grads, whole, strict=True)]
        versions = [grad._version > 0 for grad in grads[1:]]  # the first was placed
        assert versions == written[1:]
        for grad, old, is_written in zip(grads, before, written, strict=True):
            assert is_written or same_bits(grad, old)
        found.append(sum(written))
        words = (
            f"{WORDS} ({name}: the call failed after changing {sum(written)} of 5 gradients. Call"
        )
        assert message == WORDS if not any(written) else message.startswith(words)
    assert found == [0, 2, 3, 4]


def test_lists_of_several_launches_are_written_up_to_the_refused_one(emulated):
    grads: list[Tensor] = []

    def call() -> None:
        grads[:] = [torch.ones(3) for _ in range(COUNT)]
        ops.unscale_(grads, torch.tensor(0.5), torch.zeros(()))

    messages = list(refused(call))
    assert len(messages) >= 2  # an older driver takes fewer at once
    written = int(re.search(rf"changing (\d+) of {COUNT} gradients", messages[1])[1])
    assert 0 < written < COUNT

    with pytest.raises(torch.AcceleratorError), refusing_launch(1):
        call()
    assert [grad.tolist() for grad in grads[:written]] == [[0.5] * 3] * written
    assert [grad.tolist() for grad in grads[written:]] == [[1.0] * 3] * (COUNT - written)


def refused_by_an_old_driver() -> list[str]:
    """What the emulator's operations say."""
    from conftest import emulated_cuda

    messages = []
    param, flag = torch.ones(3), torch.zeros(())
    calls = (
        lambda: ops.sgd_([param], [param.clone()], lr=1.0),
        lambda: ops.check_finite_([param], flag),
        lambda: ops.count_nonfinite([param]),
        lambda: ops.unscale_([param], torch.ones(()), flag),
    )
    with emulated_cuda():
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                messages.append(str(error).splitlines()[0])
    assert torch.equal(param, torch.ones(3))
    return messages


def test_an_old_driver_is_named(under_isa, monkeypatch, emulated):
    monkeypatch.setenv("CUDA_EMULATOR_DRIVER_VERSION", "12000")
    _, messages = under_isa(refused_by_an_old_driver, None)
    words = (
        "the GPU's driver is that of CUDA 12.0, which is too old. Update it to that of CUDA 12.1 "
        "or later."
    )
    operations = ("sgd_", "check_finite_", "count_nonfinite", "unscale_")
    assert messages == [f"{operation}: {words}" for operation in operations]
