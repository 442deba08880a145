"""``amp_ext.optim.Muon``: torch's results in batches, with masters, 8-bit momentum and a scaler."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness.edge_shapes import BF16, F16, F32, F64, INF, NAN
from harness.optimizer_cases import group_of_one, through_a_file
from harness.reference import same_bits
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import amp_ext
import amp_ext.memory
from amp_ext import ops
from amp_ext.optim import AdamW, Muon
from amp_ext.params import params_of

SHAPES = [(1, 8), (2, 3), (16, 16), (33, 7), (64, 384)]
SHAPES += [shape[::-1] for shape in SHAPES if shape[0] != shape[1]]
LR = 0.02


@pytest.fixture
def place(device: torch.device) -> Iterator[None]:
    """Makes all tensors of a test on a device."""
    with torch.device(device):
        yield


def new_scaler(**options: Any) -> amp_ext.GradScaler:
    return amp_ext.GradScaler(torch.get_default_device().type, **options)


def noise(shape: tuple[int, ...], seed: int, rank: int = 0) -> Tensor:
    """Returns noise, or a matrix of rank ``rank`` with noise of 1e-3."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(shape, generator=generator, device="cpu")
    if rank:
        left = torch.randn(shape[0], rank, generator=generator, device="cpu")
        right = torch.randn(rank, shape[1], generator=generator, device="cpu")
        full = left @ right + 1e-3 * full
    return full.to(torch.get_default_device())


def matrices(shape: tuple[int, ...], count: int = 1, dtype: torch.dtype = F32) -> list[Parameter]:
    return [Parameter(noise(shape, 1000 + i).to(dtype)) for i in range(count)]


def give_grads(params: list[Parameter], step: int, **options: Any) -> None:
    for i, param in enumerate(params):
        param.grad = noise(tuple(param.shape), 100 * step + i, **options).to(param.dtype)


def train(optimizers: list[Any], steps: int, first: int = 0, rank: int = 0) -> None:
    """Steps optimizers of equal parameters with equal gradients, which differ at each step."""
    for step in range(first, first + steps):
        for optimizer in optimizers:
            give_grads(params_of(optimizer), step, rank=rank)
            optimizer.step()


def all_bits(optimizer: Muon) -> list[Tensor]:
    """Returns copies of all parameters and states."""
    params = params_of(optimizer)
    states = [tensor for param in params for tensor in optimizer.state[param].values()]
    return [tensor.detach().clone() for tensor in (*params, *states)]


def assert_equal(ones: list[Tensor], others: list[Tensor]) -> None:
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert same_bits(one, other)


def rms(tensor: Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()


# Beside torch, and beside an iteration in float64.


def assert_steps_are_those_of_torch(
    shape: tuple[int, ...], count: int, steps: int, rank: int, **options: Any
) -> None:
    mine, theirs = (matrices(shape, count) for _ in range(2))
    start = copy.deepcopy(mine)
    optimizer, other = Muon(mine, lr=LR, **options), torch.optim.Muon(theirs, lr=LR, **options)
    train([optimizer, other], steps, rank=rank)
    for param, twin, before in zip(mine, theirs, start, strict=True):
        assert rms(param - twin) <= 0.005 * rms(twin - before)
        buffers = (optimizer.state[param], other.state[twin])
        close = {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(*(each["momentum_buffer"] for each in buffers), **close)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize(
    ("nesterov", "adjust_lr_fn"), [(True, None), (False, "original"), (True, "match_rms_adamw")]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_twenty_steps_are_those_of_torch(shape, adjust_lr_fn, nesterov, count, rank):
    options = {"nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    assert_steps_are_those_of_torch(shape, count, 20, rank, **options)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(1, 8), (3, 2), (33, 7), (24, 40)], ids=str)
def test_steps_are_those_of_torch_on_every_engine(shape, nesterov):
    assert_steps_are_those_of_torch(shape, 3, 3, 0, nesterov=nesterov)


def iterated(update: Tensor, triples: list[tuple[float, float, float]], factor: float) -> Tensor:
    """Returns the iteration in float64."""
    x = update.double() if update.shape[0] <= update.shape[1] else update.double().T
    x = x / (x.norm() * factor)
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if update.shape[0] <= update.shape[1] else x.T


POLAR = [  # the first five triples of the paper, with their safety factor
    (a / 1.01, b / 1.01**3, c / 1.01**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
]
TWO = [(3.0, -3.2, 1.2), (1.875, -1.25, 0.375)]


@pytest.mark.parametrize("shape", [(64, 384), (384, 64), (96, 96)], ids=str)
@pytest.mark.parametrize(
    ("given", "steps", "triples", "factor"),
    [
        ("polar_express", 5, POLAR, 1.01),
        (TWO, 4, [TWO[0], TWO[1], TWO[1], TWO[1]], 1.0),
        ((2.0, -1.5, 0.5), 3, [(2.0, -1.5, 0.5)] * 3, 1.0),
        ((2.0, -1.5, 0.5), 0, [], 1.0),
    ],
    ids=["polar_express", "list", "triple", "no-step"],
)
def test_other_coefficients_give_the_iteration(shape, given, steps, triples, factor):
    param = matrices(shape)[0]
    before = param.detach().clone()
    options = {"lr": 1.0, "weight_decay": 0.0, "ns_coefficients": given, "ns_steps": steps}
    optimizer = Muon([param], **options, adjust_lr_fn="spectral_unclamped", momentum=0.0)
    param.grad = noise(shape, 5)
    optimizer.step()
    expected = iterated(param.grad, triples, factor) * math.sqrt(shape[0] / shape[1])
    assert rms(before - param - expected) <= 0.03 * rms(expected)


def test_the_learning_rate_depends_on_the_shape_as_promised():
    for shape, transposed in itertools.product([(8, 32), (32, 8)], [False, True]):
        out, rest = shape[::-1] if transposed else shape
        moved = {}
        for name in ("original", "match_rms_adamw", "spectral_unclamped"):
            param = matrices(shape)[0]
            before = param.detach().clone()
            options = {"adjust_lr_fn": name, "transposed": transposed, "weight_decay": 0.0}
            param.grad = noise(shape, 3)
            Muon([param], lr=0.5, **options).step()
            moved[name] = rms(param - before)
        unit = moved["original"] / math.sqrt(max(1, out / rest))
        assert moved["match_rms_adamw"] == pytest.approx(
            0.2 * math.sqrt(max(out, rest)) * unit, rel=1e-5
        )
        assert moved["spectral_unclamped"] == pytest.approx(math.sqrt(out / rest) * unit, rel=1e-5)


def test_weight_decay_uses_the_learning_rate_before_its_adjustment():
    param = matrices((32, 8))[0]
    before = param.detach().clone()
    param.grad = torch.zeros_like(param)
    lr = torch.tensor(0.5)
    Muon([param], lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    torch.testing.assert_close(param.detach(), before * (1 - 0.5 * 0.1))


@pytest.mark.usefixtures("place")
def test_cautious_decay_shrinks_what_the_update_does_not_move_away_from_0():
    def stepped(**options: Any) -> tuple[list[Tensor], list[Tensor]]:
        optimizer, hidden, others = two_algorithms(adjust_lr_fn="match_rms_adamw")
        train([optimizer], 1)
        before = [param.detach().clone() for param in (*hidden, *others)]
        for group in optimizer.param_groups:
            group.update(options)
        train([optimizer], 1, first=1)
        return before, [param.detach() for param in (*hidden, *others)]

    starts, kept = stepped(weight_decay=0.0)
    decayed = stepped(weight_decay=0.5)[1]
    cautious = stepped(weight_decay=0.5, cautious_weight_decay=True)[1]
    for start, without, within, param in zip(starts, kept, decayed, cautious, strict=True):
        agree = start.sign() * (start - without).sign() >= 0
        assert same_bits(param, torch.where(agree, within, without))
        assert 0 < agree.sum() < agree.numel()


def test_groups_of_adamw_share_cautious_decay():
    optimizer, *_ = two_algorithms(cautious_weight_decay=True)
    assert all(group["cautious_weight_decay"] for group in optimizer.param_groups)


@pytest.mark.parametrize("size", [2.0**83, 2.0**-83, 0.0])
@pytest.mark.parametrize("eps", [1e-7, 0.0])
@pytest.mark.usefixtures("place")
def test_gradients_of_any_size_give_an_update(size, eps):
    """The update of gradients of 1e25 is that of 1, of 1e-25 that of torch, and of 0 there is none.

    Sizes are powers of 2, so that rounding is the same.
    """
    mine, theirs = matrices((24, 40)), matrices((24, 40))
    before = mine[0].detach().clone()
    for params in (mine, theirs):
        give_grads(params, 1)
        params[0].grad.mul_(size)
    options = {"lr": LR, "eps": eps, "weight_decay": 0.0}
    optimizer = Muon(mine, **options)
    optimizer.step()
    unit = matrices((24, 40))
    give_grads(unit, 1)
    Muon(unit, **options).step()
    if size == 2.0**-83 and eps:
        torch.optim.Muon(theirs, **options).step()
        torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=1e-12)
    elif size == 0.0:
        assert same_bits(mine[0].detach(), before)
    else:
        assert same_bits(mine[0].detach(), unit[0].detach())
    assert optimizer.skipped_matrices.item() == 0


# Formats.


@pytest.mark.usefixtures("place")
def test_bf16_masters_have_the_bits_of_a_float32_run():
    grads = [[noise((33, 64), 10 * step + i).to(BF16) for i in range(3)] for step in range(6)]
    wide = matrices((33, 64), 3)
    for param in wide:
        param.data = param.data.bfloat16().float()
    reference = Muon(wide, lr=LR)
    runs = {}
    for form in (True, "split"):
        params = [Parameter(param.detach().bfloat16()) for param in wide]
        runs[form] = Muon(params, lr=LR, master_weights=form)
    for step_grads in grads:
        for optimizer in (reference, *runs.values()):
            for param, grad in zip(optimizer.param_groups[0]["params"], step_grads, strict=True):
                param.grad = grad.to(param.dtype)
            optimizer.step()
    for optimizer in runs.values():
        assert_equal(optimizer.master_params(), [param.detach() for param in wide])
    assert_equal(*([p.detach() for p in o.param_groups[0]["params"]] for o in runs.values()))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("form", [True, "split", False])
@pytest.mark.parametrize("state_dtype", [F32, BF16, "8bit"], ids=str)
@pytest.mark.usefixtures("place")
def test_sixteen_bits_follow_the_float32_run(dtype, form, state_dtype):
    wide, narrow = matrices((128, 64), 2), matrices((128, 64), 2, dtype)
    reference = Muon(wide, lr=LR)
    optimizer = Muon(narrow, lr=LR, master_weights=form, state_dtype=state_dtype)
    start = [param.detach().clone() for param in wide]
    train([reference, optimizer], 5)
    close = {F32: 0.25, BF16: 0.25}.get(state_dtype, 0.5) + (0.2 if form is False else 0)
    for param, twin, before in zip(narrow, wide, start, strict=True):
        assert rms(param - twin) <= close * rms(twin - before)
    expected = (
        {"momentum_buffer_q8m", "momentum_buffer_exp"}
        if state_dtype == "8bit"
        else {"momentum_buffer"}
    )
    assert expected <= optimizer.state[narrow[0]].keys()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.usefixtures("place")
def test_without_a_master_small_steps_are_dithered_and_not_lost(dtype):
    moved = {}
    for rounding in ("dither", "nearest"):
        params = [Parameter(torch.ones(32, 32, dtype=dtype))]
        options = {"lr": 2e-5, "weight_decay": 0.0, "momentum": 0.0, "rounding": rounding}
        optimizer = Muon(params, master_weights=False, **options)
        params[0].grad = noise((32, 32), 1).to(dtype)
        for _ in range(150):
            optimizer.step()
        moved[rounding] = params[0].detach().double() - 1
    direction = iterated(params[0].grad.float(), [(3.4445, -4.775, 2.0315)] * 5, 1.0)
    assert not moved["nearest"].any()
    assert (
        torch.corrcoef(torch.stack([moved["dither"].flatten(), -direction.flatten()]))[0, 1] > 0.2
    )


@pytest.mark.usefixtures("place")
def test_the_result_does_not_depend_on_the_scratch_memory_or_on_the_number_of_matrices():
    runs = []
    for scratch_bytes, count in ((0, 5), (3 * 4 * 40 * 40, 5), (2**28, 5), (2**28, 1)):
        params = matrices((40, 24), count)
        optimizer = Muon(params, lr=LR, scratch_bytes=scratch_bytes)
        train([optimizer], 3)
        runs.append(params)
    for params in runs[1:]:
        assert_equal([p.detach() for p in params], [p.detach() for p in runs[0][: len(params)]])


@pytest.mark.parametrize("transposes", [False, True])
@pytest.mark.usefixtures("place")
def test_other_layouts_give_the_same_step(transposes):
    plain = matrices((24, 40))
    other = [Parameter(plain[0].detach().T.clone().T)]
    padded = [Parameter(torch.zeros(24, 48)[:, :40].copy_(plain[0].detach()))]
    if transposes:
        plain, other, padded = (
            [Parameter(params[0].detach().T)] for params in (plain, other, padded)
        )
    train([Muon(params, lr=LR) for params in (plain, other, padded)], 3)
    for params in (other, padded):
        assert rms(params[0] - plain[0]) < 1e-3 * LR


@pytest.mark.usefixtures("place")
def test_kernels_of_convolutions_are_one_matrix_or_a_batch_of_matrices():
    kernel = noise((8, 4, 3, 3), 1)
    grads = [noise((8, 4, 3, 3), step) for step in range(3)]

    def stepped(params: list[Parameter], of: Any, **options: Any) -> list[Tensor]:
        optimizer = Muon(params, lr=LR, **options)
        for grad in grads:
            for param, part in zip(params, of(grad), strict=True):
                param.grad = part
            optimizer.step()
        return [param.detach() for param in params]

    flat = stepped([Parameter(kernel.flatten(1).clone())], lambda grad: [grad.flatten(1)])
    whole = stepped([Parameter(kernel.clone())], lambda grad: [grad], flatten=True)
    assert same_bits(whole[0].flatten(1), flat[0])
    last = {"memory_format": torch.channels_last}
    channels_last = stepped(
        [Parameter(kernel.clone(**last))], lambda grad: [grad.clone(**last)], flatten=True
    )
    assert rms(channels_last[0] - whole[0]) < 0.01 * LR
    batch = stepped([Parameter(kernel.clone())], lambda grad: [grad], flatten=False)
    singles = stepped(
        [Parameter(each) for each in kernel.flatten(0, 1).clone()],
        lambda grad: [*grad.flatten(0, 1)],
    )
    assert same_bits(batch[0].flatten(0, 1), torch.stack(singles))


# Scaler, clipping, skips.


def two_algorithms(**options: Any) -> tuple[Muon, list[Parameter], list[Parameter]]:
    """Returns an optimizer of two matrices and of a matrix and a vector for AdamW."""
    hidden = matrices((16, 24), 2)
    others = [Parameter(noise((7, 5), 50)), Parameter(noise((11,), 51))]
    groups = [
        {"params": hidden},
        {"params": others, "algorithm": "adamw", "lr": 1e-2, "weight_decay": 0.3},
    ]
    return Muon(groups, lr=LR, **options), hidden, others


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.usefixtures("place")
def test_groups_of_adamw_have_the_bits_of_adamw(clips):
    optimizer, hidden, others = two_algorithms(max_grad_norm=2.0 if clips else None)
    twins = copy.deepcopy(others)
    adamw = AdamW(twins, lr=1e-2, weight_decay=0.3)
    scaler = new_scaler(init_scale=256.0, growth_interval=7)
    for step in range(50):
        give_grads([*hidden, *others], step)
        norm = torch.stack([p.grad.double().norm() for p in (*hidden, *others)]).norm()
        factor = min(1.0, (2.0 / (norm + 1e-6)).item()) if clips else 1.0
        overflows = step % 10 == 3
        for param, twin in zip(others, twins, strict=True):
            twin.grad = param.grad.float() * torch.tensor(factor).float()
        scale = scaler.scale(torch.ones(())).item()
        for param in (*hidden, *others):
            param.grad.mul_(scale)
        if overflows:
            hidden[1].grad[3, 4] = INF
        else:
            adamw.step()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.state[others[0]]["step"].item() == adamw.state[twins[0]]["step"].item()
        if clips and not overflows:
            assert optimizer.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    for param, twin in zip(others, twins, strict=True):
        if clips:
            torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)
        else:
            assert same_bits(param.detach(), twin.detach())
            for key, value in adamw.state[twin].items():
                assert same_bits(optimizer.state[param][key], value)


@pytest.mark.parametrize("where", ["hidden", "others"])
@pytest.mark.parametrize("state_dtype", [F32, "8bit"], ids=str)
@pytest.mark.usefixtures("place")
def test_a_skipped_step_leaves_every_byte(where, state_dtype):
    optimizer, hidden, others = two_algorithms(state_dtype=state_dtype)
    scaler = new_scaler(init_scale=4.0)
    train([optimizer], 2)
    before = all_bits(optimizer)
    give_grads([*hidden, *others], 9)
    {"hidden": hidden, "others": others}[where][1].grad.view(-1)[3] = NAN
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert_equal(all_bits(optimizer), before)
    assert scaler.get_scale() == 2.0
    assert optimizer.skipped_matrices.item() == 0


@pytest.mark.usefixtures("place")
def test_scaled_steps_have_the_bits_of_plain_steps():
    runs = []
    for scale in (1.0, 1024.0):
        optimizer, *_ = two_algorithms(max_grad_norm=3.0)
        scaler = new_scaler(init_scale=scale, enabled=scale != 1.0)
        for step in range(5):
            give_grads(params_of(optimizer), step)
            for param in params_of(optimizer):
                param.grad.mul_(scale)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        runs.append(all_bits(optimizer))
    assert_equal(*runs)


@pytest.mark.usefixtures("place")
def test_nonfinite_elements_count_as_zero_with_skip_nonfinite():
    params, twins = matrices((16, 24)), matrices((16, 24))
    mine, other = (
        Muon(each, lr=LR, clip_value=0.5, skip_nonfinite=each is params) for each in (params, twins)
    )
    for step in range(3):
        for each in (params, twins):
            give_grads(each, step)
        params[0].grad[2, 3], params[0].grad[5, 1] = INF, NAN
        twins[0].grad[2, 3] = twins[0].grad[5, 1] = 0.0
        mine.step()
        other.step()
    assert same_bits(params[0].detach(), twins[0].detach())


@pytest.mark.usefixtures("place")
def test_a_matrix_whose_iteration_diverges_is_left_and_counted():
    params = matrices((16, 24), 3)
    before = [param.detach().clone() for param in params]
    # These coefficients multiply singular values by 1e20 at each step, and 0 stays 0.
    optimizer = Muon(params, lr=LR, ns_coefficients=(1e20, 1e20, 1e20), weight_decay=0.5)
    give_grads(params, 1)
    params[1].grad.zero_()
    optimizer.step()
    assert optimizer.skipped_matrices.item() == 2
    assert same_bits(params[0].detach(), before[0])
    assert same_bits(params[2].detach(), before[2])
    torch.testing.assert_close(params[1].detach(), before[1] * (1 - LR * 0.5))


class Calls(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        self.names.append(f"{func.__name__} {'' if device is None else device}".strip())
        return func(*args, **(kwargs or {}))


def test_a_step_reads_no_number_on_the_host_and_copies_to_no_other_device():
    optimizer, *_ = two_algorithms(max_grad_norm=1.0, rounding="dither", state_dtype=BF16)
    train([optimizer], 1)
    give_grads(params_of(optimizer), 2)
    with Calls() as calls:
        optimizer.step()
    assert "baddbmm.out" in calls.names
    assert not [
        name for name in calls.names if "local_scalar" in name or "_to_copy.default " in name
    ]


# Options and refusals.


def test_defaults_are_those_of_torch():
    mine, other = Muon(matrices((2, 3))), torch.optim.Muon(matrices((2, 3)))
    assert {name: mine.defaults[name] for name in other.defaults} == other.defaults
    adamw = {"params": [Parameter(torch.zeros(3))], "algorithm": "adamw", "lr": 0.1}
    mine.add_param_group(adamw)
    theirs = AdamW([Parameter(torch.zeros(3))], lr=0.1).param_groups[0]
    assert {key: mine.param_groups[1][key] for key in theirs if key != "params"} == {
        key: value for key, value in theirs.items() if key != "params"
    }
    assert not {"momentum", "ns_steps", "flatten"} & mine.param_groups[1].keys()


VECTOR, CUBE = torch.zeros(3), torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("params", "options", "error"),
    [
        ([VECTOR], {}, r"param 0 of group 0 must be a matrix .* of shape \(3,\).*adamw"),
        ([CUBE], {}, "flatten=True .* flatten=False"),
        ([torch.zeros(2, 3, dtype=F64)], {}, "must be a matrix in float32, float16 or bfloat16"),
        ([torch.zeros(2, 3)], {"master_weights": "split8"}, "master_weights .* got 'split8'"),
        ([torch.zeros(2, 3, dtype=F16)], {"state_dtype": None}, "state_dtype .* got None"),
        ([torch.zeros(2, 3)], {"lr": -1.0}, "Learning rate should be >= 0"),
        ([torch.zeros(2, 3)], {"momentum": -1.0}, "momentum should be >= 0"),
        ([torch.zeros(2, 3)], {"weight_decay": -1.0}, "weight_decay should be >= 0"),
        ([torch.zeros(2, 3)], {"eps": -1.0}, "eps must be a number of at least 0"),
        ([torch.zeros(2, 3)], {"ns_steps": 2.5}, "ns_steps must be an integer of at least 0"),
        ([torch.zeros(2, 3)], {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three"),
        ([torch.zeros(2, 3)], {"ns_coefficients": "polar"}, "ns_coefficients .* 'polar_express'"),
        ([torch.zeros(2, 3)], {"adjust_lr_fn": "other"}, "adjust_lr_fn must be 'original'"),
        ([torch.zeros(2, 3)], {"algorithm": "adam"}, "algorithm must be 'muon' or 'adamw'"),
        (
            [{"params": [VECTOR], "algorithm": "adamw"}],
            {},
            "lr of group 0 must be present, .* the learning rate of Muon does not suit",
        ),
    ],
)
def test_what_cannot_work_is_refused(params, options, error):
    params = [p if isinstance(p, dict) else Parameter(p) for p in params]
    with pytest.raises((ValueError, TypeError), match=error):
        Muon(params, **options)


def test_options_that_change_count_and_wrong_ones_raise_before_anything_is_written():
    optimizer, *_ = two_algorithms()
    train([optimizer], 1)
    for name, wrong in (("adjust_lr_fn", "x"), ("ns_coefficients", [(1.0, 2.0)]), ("lr", NAN)):
        right = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = wrong
        before = all_bits(optimizer)
        with pytest.raises((ValueError, TypeError), match=f"{name} of group 0"):
            train([optimizer], 1, first=3)
        assert_equal(all_bits(optimizer), before)
        optimizer.param_groups[0][name] = right
    twin, *_ = two_algorithms()
    train([twin], 1)
    for each in (optimizer, twin):
        each.param_groups[0]["ns_steps"] = 3 if each is twin else 5
    train([optimizer, twin], 1, first=5)
    assert not torch.equal(all_bits(optimizer)[0], all_bits(twin)[0])


def test_schedules_reach_both_algorithms():
    lr_scheduler = torch.optim.lr_scheduler
    for make in (
        lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.5)],
            [2],
        ),
        # The cycle of momentum reaches Muon's groups only, because the optimizer has a momentum.
        lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.01], total_steps=6),
    ):
        optimizer, *_ = two_algorithms()
        betas = optimizer.param_groups[1]["betas"]
        schedule = make(optimizer)
        rates = []
        for step in range(4):
            train([optimizer], 1, first=step)
            schedule.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
        for one, other in zip(rates[0], rates[-1], strict=True):
            assert one != other
        assert optimizer.param_groups[1]["betas"] == betas
    assert optimizer.param_groups[0]["momentum"] not in (0.95, 0.85)


# Files.


def test_a_file_of_both_algorithms_resumes_with_the_same_bits():
    for options in ({}, {"state_dtype": "8bit"}, {"state_dtype": BF16, "rounding": "dither"}):
        optimizer, *_ = two_algorithms(**options)
        train([optimizer], 3)
        file = through_a_file(optimizer.state_dict(), weights_only=True)
        resumed, *_ = two_algorithms(**options)
        for param, twin in zip(params_of(resumed), params_of(optimizer), strict=True):
            param.data.copy_(twin.data)
        resumed.load_state_dict(file)
        train([optimizer, resumed], 3, first=3)
        assert_equal(all_bits(optimizer), all_bits(resumed))


def test_a_file_of_torch_goes_on_here_and_back():
    params, twins = matrices((16, 24), 2), matrices((16, 24), 2)
    theirs, reference = (torch.optim.Muon(each, lr=LR) for each in (params, twins))
    train([theirs, reference], 3)
    start = [twin.detach().clone() for twin in twins]
    mine = Muon(params)
    mine.load_state_dict(theirs.state_dict())
    assert mine.param_groups[0]["lr"] == LR
    train([mine, reference], 3, first=3)
    back = torch.optim.Muon(params)
    back.load_state_dict(mine.state_dict())
    train([back, reference], 3, first=6)
    for param, twin, before in zip(params, twins, start, strict=True):
        assert rms(param - twin) <= 0.005 * rms(twin - before)


def test_a_file_of_another_algorithm_is_refused():
    optimizer, *_ = two_algorithms()
    train([optimizer], 1)
    file = optimizer.state_dict()
    file["param_groups"][1]["algorithm"] = "muon"
    before = all_bits(optimizer)
    with pytest.raises(ValueError, match=r"algorithm of param_groups\[1\] must be 'adamw'"):
        optimizer.load_state_dict(file)
    assert_equal(all_bits(optimizer), before)


# Beside other features.


def test_released_gradients_give_the_bits_of_whole_steps():
    runs = []
    for releases in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 12), nn.Linear(12, 12))
        groups = amp_ext.optim.param_groups_for_muon(model, lr=LR, adamw={"lr": 1e-3})
        optimizer = Muon(groups)
        if releases:
            amp_ext.optim.release_gradients(optimizer)
        for step in range(3):
            model(noise((4, 12), step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append([param.detach() for param in model.parameters()])
    assert_equal(*runs)


def test_averages_follow_muon():
    optimizer, hidden, _ = two_algorithms()
    average = amp_ext.optim.WeightAverage(optimizer, decay=0.5)
    expected = hidden[0].detach().clone()
    for step in range(3):
        train([optimizer], 1, first=step)
        expected = (
            hidden[0].detach().clone() if step == 0 else expected.lerp(hidden[0].detach(), 0.5)
        )
    with average.swap():
        torch.testing.assert_close(hidden[0].detach(), expected)


def test_distributed_checkpoints_resume_with_the_same_bits(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def made() -> tuple[nn.Module, Muon]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
        groups = amp_ext.optim.param_groups_for_muon(model, lr=LR, adamw={"lr": 1e-3})
        return model, Muon(groups, state_dtype="8bit")

    (model, optimizer), (other, resumed) = made(), made()
    train([optimizer], 2)
    dcp.save(
        {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    resumed.init_state()
    file = {"model": other.state_dict(), "optim": get_optimizer_state_dict(other, resumed)}
    dcp.load(file, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(file["model"])
    set_optimizer_state_dict(other, resumed, file["optim"])
    train([optimizer, resumed], 2, first=2)
    assert_equal(all_bits(optimizer), all_bits(resumed))


def test_shards_are_refused_by_name_before_anything_moves():
    from torch.distributed.fsdp import fully_shard

    with group_of_one():
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
        optimizer = Muon([module.weight for module in model], lr=LR)
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"param 0 of group 0 must not be sharded.*Use DDP"):
            Muon([module.weight for module in model], lr=LR)
        sharded = [module.weight for module in model]
        before = [param.full_tensor().clone() for param in sharded]
        model(torch.randn(3, 6)).sum().backward()
        optimizer.param_groups[0]["params"] = sharded
        with pytest.raises(ValueError, match="must not be sharded"):
            optimizer.step()
        assert_equal([param.full_tensor() for param in sharded], before)


def test_offloaded_states_are_refused_by_name():
    optimizer, *_ = two_algorithms()
    with pytest.raises((TypeError, ValueError), match="Muon"):
        amp_ext.optim.offload_states(optimizer)


@pytest.mark.parametrize(
    ("dtype", "form", "state_dtype"),
    [(F32, True, "8bit"), (BF16, True, BF16), (BF16, "split", F32), (BF16, "split", "8bit")],
    ids=str,
)
def test_the_states_take_the_memory_that_was_calculated(dtype, form, state_dtype):
    model = nn.Sequential(nn.Embedding(9, 64), nn.Linear(64, 128), nn.LayerNorm(128)).to(dtype)
    options = {"master_weights": form, "state_dtype": state_dtype}
    groups = amp_ext.optim.param_groups_for_muon(model, adamw={"lr": 0.1}, **options)
    optimizer = Muon(groups, **options)
    optimizer.init_state()
    states = [each for state in optimizer.state.values() for each in state.items()]
    (usage,) = [
        row
        for row in amp_ext.memory.training_memory(model, "muon")[1:]
        if row.configuration.dtype == dtype
        and (row.configuration.master_weights, row.configuration.state_dtype) == (form, state_dtype)
    ]
    taken = [tensor.untyped_storage().nbytes() for key, tensor in states if key != "step"]
    assert sum(taken) == usage.bytes["masters"] + usage.bytes["states"]
    with pytest.raises(ValueError, match="Muon can't be offloaded"):
        amp_ext.memory.training_memory("7B", "muon", offloaded=True)


@pytest.mark.usefixtures("place")
def test_the_operator_over_lists_is_the_step_of_the_optimizer():
    params, twins = matrices((16, 24), 3), matrices((16, 24), 3)
    optimizer = Muon(params, lr=LR, max_grad_norm=1.0)
    buffers = [torch.zeros(16, 24) for _ in twins]
    skipped = torch.zeros((), dtype=torch.int64)
    for step in range(3):
        for each in (params, twins):
            give_grads(each, step)
        optimizer.step()
        grads = [twin.grad for twin in twins]
        with torch.no_grad():
            ops.muon_(twins, grads, buffers, lr=LR, max_grad_norm=1.0, skipped_matrices=skipped)
    assert_equal([p.detach() for p in params], [p.detach() for p in twins])
    assert_equal([optimizer.state[p]["momentum_buffer"] for p in params], buffers)
    with pytest.raises(ValueError, match="wrong value"):
        ops.muon_(twins, grads, buffers, lr=LR, ns_coefficients=(1.0, 2.0))
    with pytest.raises(RuntimeError, match=r"muon_: params\[0\] must have two dimensions"):
        ops.muon_([VECTOR], [VECTOR], [VECTOR], lr=LR)
