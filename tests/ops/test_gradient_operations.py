"""What all operations over lists of gradients share: sizes, layouts, long lists, errors."""

from __future__ import annotations

import math

import pytest
import torch
from harness import gradient_lists as cases
from harness.edge_shapes import (
    BF16,
    F32,
    F64,
    INF,
    NAN,
    threads,
)
from harness.engine_results import EXTREMES, lists_to_sum
from harness.optimizer_cases import HALVES
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor

from amp_ext import ops


@cases.each_dtype
@cases.each_operation
def test_every_size_is_read_whole(operation, dtype, device) -> None:
    for share in (0.0, 0.3):
        tensors = [cases.spoiled(size, dtype, device, share) for size in cases.SIZES]
        for tensor in tensors:
            cases.assert_right(operation, [tensor], tensor.shape)
        cases.assert_right(operation, tensors)


@cases.each_bad_value
@cases.each_dtype
@cases.each_operation
def test_one_bad_element_anywhere_is_found(operation, dtype, value, device) -> None:
    for size in cases.SIZES[1:-1]:
        tensor = torch.ones(size, dtype=dtype, device=device)
        for index in {0, 1, size // 3, size // 2, size - 2, size - 1} & set(range(size)):
            bad = tensor.clone()
            bad[index] = value
            cases.assert_right(operation, [tensor.clone(), bad, tensor.clone()], (size, index))


@HALVES
@cases.each_operation
def test_every_16_bit_pattern_is_judged_right(operation, dtype, device) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).to(device)
    finite = patterns.isfinite()
    cases.assert_right(operation, [patterns.clone()])
    cases.assert_right(operation, [patterns[finite]])
    bad = list(patterns[~finite][:: 1 if dtype == BF16 else 13].clone())
    for index in range(0, len(bad), 40):
        cases.assert_right(operation, bad[index : index + 40])
        cases.assert_right(operation, bad[index : index + 1])


UNUSUAL = {
    "signalling-nan": (0x7F800001, torch.int32),
    "nan-with-all-bits": (0x7FFFFFFF, torch.int32),
    "signalling-nan-double": (0x7FF0000000000001, torch.int64),
    "inf-double": (0x7FF0000000000000, torch.int64),
}


@pytest.mark.parametrize(("pattern", "dtype"), rows(UNUSUAL))
@cases.each_operation
def test_unusual_patterns_are_found(operation, pattern, dtype, device) -> None:
    tensor = torch.zeros(100, dtype=dtype)
    tensor[57] = pattern
    cases.assert_right(operation, [tensor.view(F32 if dtype == torch.int32 else F64).to(device)])


@cases.each_dtype
@cases.each_operation
def test_large_and_small_finite_numbers_are_no_overflow(operation, dtype, device) -> None:
    limits = torch.finfo(dtype)
    values = [limits.max, limits.min, limits.tiny, limits.smallest_normal / 2, -0.0, 0.0]
    values += [1e39] if dtype == F64 else []  # above float32
    for value in values:
        cases.assert_right(
            operation, [torch.full((5000,), value, dtype=dtype, device=device)], value
        )
    both_signs = torch.tensor([limits.max, limits.min], dtype=dtype, device=device)
    cases.assert_right(operation, [both_signs.repeat(2500)])


@cases.each_operation
def test_one_bad_tensor_of_very_many_in_all_dtypes_is_found(operation, device) -> None:
    """More than two launches of CUDA hold of float32."""
    dtypes = [F32] * 7 + cases.GRAD_DTYPES
    tensors = [torch.randn(i % 5).to(dtypes[i % 11]).to(device) for i in range(3300)]
    for bad in (3299, 1201):
        cases.assert_right(operation, tensors)
        tensors[bad][-1] = NAN
    cases.assert_right(operation, tensors)


@cases.each_operation
def test_empty_lists_and_tensors_are_clean_and_hide_nothing(operation, device) -> None:
    empty = torch.empty(0, device=device)
    cases.assert_right(operation, [])
    cases.assert_right(operation, [empty, torch.empty(3, 0, 2, device=device), empty.double()])
    bad, good = torch.full((), NAN, device=device), torch.ones(3, device=device)
    cases.assert_right(operation, [empty, good, empty, bad, empty])


@cases.each_view
@cases.each_dtype
@cases.each_operation
def test_a_view_is_read_whole_and_its_neighbours_not_at_all(operation, dtype, view, device) -> None:
    inside = view(torch.arange(4200)).flatten()
    if operation.writes and len(inside.unique()) < len(inside):
        return  # refused: some elements are there twice
    base = torch.full((4200,), NAN, dtype=dtype, device=device)
    base[inside] = torch.randn(len(inside), device=device).to(dtype)
    for bad in (None, inside.min(), inside.max()):
        actual = base.clone()
        if bad is not None:
            actual[bad] = INF
        wanted = actual.clone()
        if operation.writes:
            view(wanted).copy_(operation.writes(view(wanted)))
        assert operation.run([view(actual)]) == operation.finds([view(wanted)])
        assert cases.equal(actual, wanted)


@cases.each_dtype
@cases.each_operation
def test_short_slices_at_every_alignment_are_right(operation, dtype, device) -> None:
    for start in range(17):
        for length in range(0, 36, 5):
            base = torch.full((60,), NAN, dtype=dtype, device=device)
            base[start : start + length] = torch.randn(length, device=device).to(dtype)
            for end in (start + length, start + length + 1):
                cases.assert_right(operation, [base[start:end]], (start, end))
                assert base[:start].isnan().all()
                assert base[start + length :].isnan().all()


@cases.each_operation
def test_versions_move_exactly_where_something_is_written(operation, device) -> None:
    tensors = [torch.ones(5, device=device), torch.ones(4, 4, device=device).t()]
    tensors += [cases.spoiled(1000, dtype, device) for dtype in cases.GRAD_DTYPES]
    versions = [tensor._version for tensor in tensors]
    operation.run(tensors)
    for tensor, before in zip(tensors, versions, strict=True):
        assert (tensor._version > before) == bool(operation.writes)


# Errors.


def without_storage() -> Tensor:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


BAD_TENSORS = {
    "integers": (torch.ones(2, dtype=torch.int32), "must be Float, .*got Int"),
    "complex": (torch.ones(2).cfloat(), "must be Float, .*got Complex"),
    "sparse": (torch.ones(2).to_sparse(), "must be a strided .*[Ss]parse"),
    "another-device": (torch.ones(2, device="meta"), "must be on cpu, got meta"),
    "no-storage": (without_storage(), "must have a storage that holds"),
}


@pytest.mark.parametrize(("bad", "text"), rows(BAD_TENSORS))
@cases.each_operation
def test_a_bad_tensor_is_named_and_nothing_is_written(operation, bad, text) -> None:
    good = torch.ones(3)
    words = rf"^{operation.name}: {operation.list_name}\[1\] {text}"
    with pytest.raises(RuntimeError, match=words):
        operation.run([good, bad, good.clone()])
    assert good.tolist() == [1, 1, 1]


# Every number that an operation reads or writes in place, and its dtype.
I32, I64 = torch.int32, torch.int64
FOUND = {"found_inf": F32, "first_nonfinite": I64}
NUMBERS = {
    "check_finite_": {**FOUND, "grad_scale": F32, "sum_of_squares": F64},
    "unscale_": {**FOUND, "inv_scale": F32},
    "clip_grads_": {"total_norm": F32},
    "update_scale_": {"scale": F32, "found_infs": F32},
}
NUMBERS["update_scale_"] |= {"growth_tracker": I32, "hysteresis_tracker": I32}
NAMES = {F32: "Float", F64: "Double", I32: "Int", I64: "Long"}


def call(name: str, numbers: dict[str, Tensor], device: torch.device | str = "cpu") -> None:
    """Calls an operation with bad gradients and numbers that would change."""
    if name == "update_scale_":
        found_infs = [torch.ones((), device=device), numbers["found_infs"]]
        factors = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
        ops.update_scale_(**numbers | {"found_infs": found_infs}, **factors)
        return
    more = {"max_norm": 1.0} if name == "clip_grads_" else {}
    getattr(ops, name)([torch.full((3,), NAN, device=device)], **numbers, **more)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_any_shape_of_one_element_and_neighbours_are_left(name, shape, device):
    dtypes = NUMBERS[name]
    wholes = {key: torch.full((3,), 5, dtype=dtypes[key], device=device) for key in dtypes}
    call(name, {key: whole[1:2].view(shape) for key, whole in wholes.items()}, device)
    written = {"found_inf": 1, "first_nonfinite": 0, "growth_tracker": 0, "hysteresis_tracker": 4}
    for key, whole in wholes.items():
        assert (whole[0], whole[2]) == (5, 5), key
        if key != "sum_of_squares":  # of NaN
            assert whole[1] == written.get(key, 5), key
        if key in ("grad_scale", "inv_scale", "total_norm", "found_infs"):
            assert whole._version == 0, key


BAD_NUMBERS = {
    "half": (Tensor.half, "must be {}, got Half"),
    "bool": (Tensor.bool, "must be {}, got Bool"),
    "two": (lambda t: t.repeat(2), r"must be one element, got sizes \[2\]"),
    "none": (lambda t: t.new_zeros(0), r"must be one element, got sizes \[0\]"),
    "meta": (lambda t: t.to("meta"), r"must be on cpu( or cuda)?, got meta"),
    "sparse": (lambda t: t[None].to_sparse(), "must be a strided .*[Ss]parse"),
}


@pytest.mark.parametrize(("spoil", "text"), rows(BAD_NUMBERS))
@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name in NUMBERS for number in NUMBERS[name]]
)
def test_a_bad_number_is_named_and_nothing_is_written(name, number, spoil, text) -> None:
    dtype = NUMBERS[name][number]
    others = {key: torch.full((), 5, dtype=NUMBERS[name][key]) for key in NUMBERS[name]}
    wrong = spoil(torch.full((), 5, dtype=dtype))
    shown = {"found_infs": r"found_infs\[1\]"}.get(number, number)
    with pytest.raises(RuntimeError, match=f"^{name}: {shown} {text.format(NAMES[dtype])}"):
        call(name, others | {number: wrong})
    assert all(other == 5 for other in others.values())


# The update of the scale at the edges; test_scaler_limits.py has all rules beside torch's.


LARGEST = torch.finfo(torch.float32).max


def factors(growth_factor=2.0, backoff_factor=0.5, growth_interval=3) -> dict[str, float]:
    names = ("growth_factor", "backoff_factor", "growth_interval")
    return dict(zip(names, (growth_factor, backoff_factor, growth_interval), strict=True))


UPDATES = {
    "interval-zero": (8.0, 0, [0.0], factors(growth_interval=0), (8.0, 1)),
    "found-inf-nan": (8.0, 1, [math.nan], factors(), (4.0, 0)),
    "first-of-several-launches": (8.0, 2, [1.0] + [0.0] * 300, factors(), (4.0, 0)),
    "rounded-once": (3.0, 2, [0.0], factors(1.7), (torch.tensor(5.1).item(), 0)),
    "never-to-inf": (2.0**127, 2, [0.0], factors(), (2.0**127, 0)),
    "up-to-the-largest": (LARGEST / 2, 2, [0.0], factors(), (LARGEST, 0)),
    "down-to-zero": (2.0**-149, 2, [1.0], factors(), (0.0, 0)),
    "subnormal": (2.0**-130, 2, [1.0], factors(), (2.0**-131, 0)),
}


@pytest.mark.parametrize(("scale", "tracker", "found_infs", "numbers", "expected"), rows(UPDATES))
def test_one_update(scale, tracker, found_infs, numbers, expected, device) -> None:
    scale_tensor = torch.full((), scale, device=device)
    tracker_tensor = torch.full((), tracker, dtype=torch.int32, device=device)
    flags = [torch.full((), value, device=device) for value in found_infs]
    ops.update_scale_(scale_tensor, tracker_tensor, flags, **numbers)
    assert (scale_tensor.item(), tracker_tensor.item()) == expected


def test_a_product_with_the_scale_can_not_go_back_after_an_update(device) -> None:
    scale = torch.full((), 8.0, device=device)
    tracker = torch.zeros((), dtype=torch.int32, device=device)
    loss = torch.ones((), device=device, requires_grad=True) * scale
    ops.update_scale_(scale, tracker, [torch.ones((), device=device)], **factors())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert (scale._version, tracker._version) == (1, 1)


# What only reads its gradients writes nothing, not even the same bits.


READ_ONLY = """
import mmap, sys
import torch, amp_ext
from amp_ext import ops
with open(sys.argv[1], "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
    tensor = torch.frombuffer(pages, dtype=dtype)
    whole, found_inf = tensor[: tensor.numel() // 2], torch.zeros(())
    ops.check_finite_([whole, whole[1:]], found_inf)
    assert found_inf.item() == 0
    ops.check_finite_([tensor, tensor[1::2]], found_inf, grad_scale=torch.ones(()))
    assert found_inf.item() == 1
    grads = [whole[:5000], whole[5001:9001].view(40, 100).t(), whole[9001:10001:2]]
    params = [torch.nn.Parameter(torch.ones_like(grad)) for grad in grads]
    for param, grad in zip(params, grads):
        param.grad = grad
    assert amp_ext.clip_grad_norm_(params, 1.0).item() == 0
    ops.clip_grads_(grads, torch.tensor(0.5), max_norm=1.0)
    for each in (amp_ext.optim.AdamW, amp_ext.optim.SGD):
        each(params, max_grad_norm=1.0, clip_value=1.0).step()
    scaler = amp_ext.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for each in (torch.optim.SGD, amp_ext.optim.Adam, amp_ext.optim.SGD):
        optimizer = each(params)
        found_infs = scaler._check_inf_per_device(optimizer).values()
        assert [found_inf.item() for found_inf in found_infs] == [0]
        if each is not torch.optim.SGD:
            scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536
"""


def test_memory_that_cannot_be_written_can_be_checked_clipped_and_stepped(run_module, tmp_path):
    """A write of any kind would end the child with a signal."""
    file = tmp_path / "read_only"
    file.write_bytes(bytes(160_016) + b"\xff" * 8)  # zeros, and a NaN of every dtype
    (tmp_path / "steps.py").write_text(READ_ONLY)
    done = run_module("steps", str(file), folder=tmp_path, PYTHONWARNINGS="ignore")
    assert done.returncode == 0, (done.returncode, done.stderr)


# The flags.


def found(tensors: list[Tensor], *, before: float = 0.0, **options: Tensor) -> float:
    """Returns found_inf after a look, one that unscales where there is ``inv_scale``."""
    found_inf = torch.full((), before, device=tensors[0].device)
    scan = ops.unscale_ if "inv_scale" in options else ops.check_finite_
    scan(tensors, found_inf=found_inf, **options)
    return found_inf.item()


@pytest.mark.parametrize("before", [0.0, 1.0, 3.0, -2.0])
def test_found_inf_is_set_to_one_or_left_as_it_is(before: float, device) -> None:
    inverses = [torch.tensor(inverse, device=device) for inverse in (0.5, 1.0, 0.0, INF, NAN)]
    for options in ({}, *({"inv_scale": inverse} for inverse in inverses)):
        bad = [torch.full((9_000,), INF, device=device) for _ in range(3)]
        assert found(bad, before=before, **options) == 1
        is_finite = not options or options["inv_scale"].isfinite()
        clean = [torch.ones(10, device=device), torch.empty(0, device=device)]
        assert found(clean, before=before, **options) == (before if is_finite else 1)


SCALES = {
    "usual": (65536.0, 0),
    "inverse-below-the-largest-float": (1e-38, 0),
    "subnormal-with-a-finite-inverse": (3e-39, 0),
    "inverse-above-the-largest-float": (1e-39, 1),
    "zero": (0.0, 1),
    "nan": (NAN, 1),
}


@pytest.mark.parametrize(("scale", "expected"), rows(SCALES))
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_scale_without_a_finite_inverse_counts_as_overflow(scale, expected, shape, device):
    grad_scale = torch.full(shape, scale, device=device)
    clean = torch.ones(10, device=device)
    assert found([clean], grad_scale=grad_scale) == expected
    assert found([clean, clean * INF], grad_scale=grad_scale) == 1
    assert same_bits(grad_scale, torch.full(shape, scale))


@pytest.mark.parametrize("inverse", [1 / 65536, 1.0, 3.0, 1e30])
@cases.each_dtype
def test_any_inverse_multiplies_in_place_and_the_verdict_is_about_what_came(dtype, inverse, device):
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    limits = torch.tensor([0.0, -0.0, tiny / 2, -tiny, 1.1, largest, -largest], dtype=dtype)
    grads = [torch.randn(70).to(dtype).to(device), limits.to(device, copy=True)]
    wanted, addresses = [cases.multiplied(g, inverse) for g in grads], [g.data_ptr() for g in grads]
    assert found(grads, inv_scale=torch.tensor(inverse, device=device)) == 0
    assert all(map(cases.equal, grads, wanted))
    assert grads[1][-2].isinf() == (largest * inverse > largest)
    assert [grad.data_ptr() for grad in grads] == addresses


# Counts.


@cases.each_dtype
def test_tensors_of_nothing_but_nan_are_counted_whole(dtype: torch.dtype, device) -> None:
    sizes = [1, 33, 4097, 70_000, 500_003]
    tensors = [torch.full((size,), NAN, dtype=dtype, device=device) for size in sizes]
    assert ops.count_nonfinite(tensors).tolist() == sizes


def test_counts_are_integers_beside_the_tensors_outside_of_any_graph(device) -> None:
    tensor = cases.spoiled(100, F32, device).requires_grad_()
    bad = int((~tensor.isfinite()).sum())
    counts = ops.count_nonfinite([tensor, tensor, tensor[:0], tensor * 2])  # one may be there twice
    assert counts.tolist() == [bad, bad, 0, bad]
    assert (counts.dtype, counts.shape, counts.device) == (torch.int64, (4,), tensor.device)
    assert not counts.requires_grad
    none = ops.count_nonfinite([])
    assert (none.dtype, none.shape) == (torch.int64, (0,))


# Sums of squares.


def scan(tensors: list[Tensor], *, before: float = -1.0, **options: Tensor) -> tuple[Tensor, float]:
    """Returns the sum of squares, which held ``before``, and found_inf."""
    device = tensors[0].device if tensors else "cpu"
    total = torch.full((), before, dtype=F64, device=device)
    found_inf = torch.zeros((), device=device)
    ops.check_finite_(tensors, found_inf, sum_of_squares=total, **options)
    return total, found_inf.item()


def assert_sum_is_right(tensors: list[Tensor], what: object = "") -> None:
    cases.assert_right(cases.SUM_OF_SQUARES, tensors, what)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1.9999, 3e4])
@cases.each_dtype
def test_equal_numbers_do_not_let_roundings_pile_up(dtype, value, device) -> None:
    """A running sum rounds every addition the same way and drifts; pairs do not."""
    for size in (4097, 70_000, 200_003):
        assert_sum_is_right([torch.full((size,), value, dtype=dtype, device=device)], size)


@pytest.mark.parametrize(
    ("dtype", "value"), [pytest.param(*row, id=f"{row[1]}-{row[0]}") for row in EXTREMES]
)
def test_squares_may_leave_the_range_of_float32(dtype: torch.dtype, value: float, device) -> None:
    for size in (1, 5, 16385, 100_000):
        tensor = torch.full((size,), value, dtype=F64).to(device, dtype)
        assert tensor[0] != 0
        tensor[::2] *= -1
        assert_sum_is_right([tensor], size)


@pytest.mark.parametrize("place", [0, 1, 4097, 16383, 16384, 49_998, 49_999])
@pytest.mark.parametrize(("rest", "one"), [(1.0, 3e38), (1e-22, 1e20), (0.0, 1e-40), (0.0, 1e-22)])
def test_one_extreme_element_is_not_lost(rest: float, one: float, place: int, device) -> None:
    tensor = torch.full((50_000,), rest, device=device)
    tensor[place] = one
    assert_sum_is_right([tensor])
    assert_sum_is_right([tensor[:place], tensor[place : place + 1], tensor[place + 1 :]])


@cases.each_bad_value
@cases.each_dtype
def test_inf_and_nan_are_found_among_numbers_whose_squares_are_inf(dtype, value, device) -> None:
    for size in (1, 5, 4097, 16385, 70_000):
        for index in {0, size // 2, size - 1}:
            fill = torch.finfo(dtype).max if dtype != F64 else 1e39
            tensor = torch.full((size,), fill, dtype=dtype, device=device)
            tensor[index] = value
            assert_sum_is_right([torch.ones(3, device=device), tensor], (size, index))


def test_a_sum_above_float64_is_inf_and_no_overflow_of_a_gradient(device) -> None:
    total, found = scan([torch.full((5,), 1e200, dtype=F64, device=device)])
    assert (total.item(), found) == (INF, 0)


@pytest.mark.parametrize("before", [0.0, 5.0, INF, NAN])
def test_the_sum_is_set_whatever_was_there(before: float, device) -> None:
    assert scan([torch.full((3,), 2.0, device=device)], before=before)[0].item() == 12
    empty = torch.empty(0, device=device)
    nothings = [[], [empty], [empty, empty.view(3, 0)], [empty.half(), empty.double()]]
    zeros = [torch.zeros(70_000, dtype=dtype, device=device) for dtype in cases.GRAD_DTYPES]
    for nothing in (*nothings, zeros, [-zero for zero in zeros], *([zero] for zero in zeros)):
        total, found = scan(nothing, before=before)
        assert same_bits(total, torch.zeros((), dtype=F64))
        assert found == 0


def test_the_sum_is_of_the_numbers_as_they_are_whatever_the_scale(device) -> None:
    tensors = [torch.full((3,), 2.0, device=device)]
    for scale, found in ((65536.0, 0), (3.0, 0), (0.0, 1), (1e-39, 1)):
        total, found_inf = scan(tensors, grad_scale=torch.tensor(scale, device=device))
        assert (total.item(), found_inf) == (12, found)


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    sums = {}
    for count in (1, 2, 3):
        torch.manual_seed(0)
        with threads(count):
            sums[count] = torch.stack([scan(tensors)[0] for tensors in lists_to_sum("cpu")])
    assert same_bits(sums[2], sums[1])
    assert same_bits(sums[3], sums[1])
