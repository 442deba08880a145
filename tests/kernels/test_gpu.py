"""What only a GPU can show: graphs, streams, how many launches, and that the host never waits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness.edge_shapes import BF16, F16, F32
from harness.engine_results import results_of, trainings
from harness.gradient_lists import equal
from harness.optimizer_cases import assert_same_bits, bits_of
from harness.reference import same_bits
from harness.rows import rows
from torch import Tensor
from torch.nn import Parameter

import amp_ext

MakeOptimizer = Callable[[list[Parameter], Any], torch.optim.Optimizer]

OF_PACKAGE = {
    "adamw": amp_ext.optim.AdamW,
    "amsgrad": partial(amp_ext.optim.Adam, amsgrad=True),
    "momentum": partial(amp_ext.optim.SGD, momentum=0.9, dampening=0.1),
}
OPTIMIZERS = rows(OF_PACKAGE)
DTYPES = pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=["fp16", "bf16", "fp32"])


def without_waiting(function: Callable[[], None]) -> None:
    """Calls a function, which fails where the host would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Training:
    """Iterations over tensors that stay where they are, as a CUDA graph wants them.

    Every gradient is elementwise, so that two runs agree to the bit.
    """

    def __init__(
        self, make: MakeOptimizer, dtype: torch.dtype, device: torch.device, tensor_lr: bool = False
    ) -> None:
        shapes = [(4097,), (33, 5), (1,), ()]
        torch.manual_seed(0)
        self.params = [Parameter(torch.randn(shape).to(dtype).to(device)) for shape in shapes]
        self.inputs = [torch.zeros_like(param, requires_grad=False) for param in self.params]
        self.lr = torch.tensor(0.05).to(device) if tensor_lr else 0.05
        self.optimizer = make(self.params, self.lr)
        self.scaler = amp_ext.GradScaler(device.type, init_scale=64.0, growth_interval=3)
        self.scales: list[Tensor] = []

    def load(self, batch: int, overflow: bool) -> None:
        torch.manual_seed(1 + batch)
        for tensor in self.inputs:
            value = torch.rand(tensor.shape)
            tensor.copy_(value * float("inf") if overflow else value)
        if isinstance(self.lr, Tensor):
            self.lr.mul_(0.75)

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        losses = [
            (param * tensor).float().square().sum()
            for param, tensor in zip(self.params, self.inputs, strict=True)
        ]
        self.scaler.scale(torch.stack(losses).sum()).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def iterate(self) -> None:
        self.backward()
        self.step()

    def record(self) -> None:
        self.scales.append(self.scaler._scale.clone())


WARM_UP, BATCHES, OVERFLOWS = 3, 12, (5, 6, 9)


def train_eagerly(training: Training, batches: range = range(BATCHES)) -> None:
    for batch in batches:
        training.load(batch, batch in OVERFLOWS)
        training.iterate()
        training.record()


def train_in_a_graph(training: Training) -> None:
    """Takes the first steps on a side stream, captures one and replays it for the others."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train_eagerly(training, range(WARM_UP))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    training.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        training.iterate()
    for batch in range(WARM_UP, BATCHES):
        training.load(batch, batch in OVERFLOWS)
        graph.replay()
        training.record()
    torch.cuda.synchronize()


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float-lr", "tensor-lr"])
@pytest.mark.parametrize("make", OPTIMIZERS)
@DTYPES
def test_a_replayed_graph_trains_as_eagerly_to_the_bit(gpu, dtype, make, tensor_lr) -> None:
    """Scale, backward, step and update in one graph, through growth, overflow and backoff."""
    eager, graphed = (Training(make, dtype, gpu, tensor_lr) for _ in range(2))
    train_eagerly(eager)
    train_in_a_graph(graphed)
    scales = [scale.item() for scale in graphed.scales]
    assert scales == [scale.item() for scale in eager.scales]
    assert scales == [64, 64, 128, 128, 128, 64, 32, 32, 32, 16, 16, 16]
    assert_same_bits(graphed.optimizer, eager.optimizer)
    assert same_bits(graphed.scaler._growth_tracker, eager.scaler._growth_tracker)
    if dtype != F32:
        for param in graphed.params:
            assert same_bits(param, graphed.optimizer.state[param]["master_param"].to(dtype))


@DTYPES
def test_a_guard_and_an_average_in_a_replayed_graph_do_as_in_eager_steps(gpu, dtype) -> None:
    trainings = [Training(amp_ext.optim.AdamW, dtype, gpu, False) for _ in range(2)]
    averages = []
    for training in trainings:
        training.optimizer.norm_guard = amp_ext.optim.NormGuard(0.5, warmup_steps=2)
        averages.append(amp_ext.optim.WeightAverage(training.optimizer, 0.5))
    train_eagerly(trainings[0])
    train_in_a_graph(trainings[1])
    eager, graphed = (training.optimizer.norm_guard.state_dict() for training in trainings)
    assert graphed == eager
    assert eager["norms"] == BATCHES - len(OVERFLOWS)
    counts = [average.n_averaged.item() for average in averages]
    assert counts == [eager["norms"] - eager["outliers"]] * 2
    assert all(map(same_bits, averages[1].averages, averages[0].averages))
    assert_same_bits(trainings[1].optimizer, trainings[0].optimizer)


@pytest.mark.parametrize(
    ("make", "dtype", "unscales"),
    [
        *itertools.product(OF_PACKAGE.values(), (F16, BF16, F32), (False,)),
        *itertools.product(
            [partial(torch.optim.AdamW, fused=True), *OF_PACKAGE.values()], (F32,), (True,)
        ),
    ],
)
def test_the_host_never_waits_in_step_and_update(gpu, make, dtype, unscales) -> None:
    """Not in the first step either, which makes states and masters, nor after an overflow."""
    training = Training(make, dtype, gpu)

    def step() -> None:
        if unscales:
            training.scaler.unscale_(training.optimizer)
        training.step()

    for batch in range(4):
        training.load(batch, overflow=batch == 2)
        training.backward()
        without_waiting(step)
    assert training.scaler.get_scale() == 32


def kernels_of(function: Callable[[], None]) -> list[str]:
    """Returns the names of the kernels that a function launches."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    on_the_gpu = torch.autograd.DeviceType.CUDA
    return [
        event.name
        for event in profile.events()
        if event.device_type == on_the_gpu and not event.is_user_annotation
    ]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("make", OPTIMIZERS)
@DTYPES
def test_a_step_is_one_look_one_step_and_one_update(gpu, dtype, make, groups) -> None:
    params = [Parameter(torch.randn(1000).to(dtype).to(gpu)) for _ in range(300)]
    optimizer = make([{"params": params[i::groups]} for i in range(groups)], 0.01)
    scaler = amp_ext.GradScaler("cuda")
    scaler.scale(torch.ones((), device=gpu))
    for param in params:
        param.grad = torch.randn_like(param)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    step()
    kernels = kernels_of(step)
    print(f"{len(params)} tensors in {groups} groups, {len(kernels)} launches:", *kernels, sep="\n")
    ours = [kernel for kernel in kernels if "amp_ext" in kernel]
    for name in ("scan_kernel", "step_kernel", "update_scale_kernel"):
        assert sum(name in kernel for kernel in ours) == 1, kernels
    assert len(ours) == 3, kernels
    assert len(kernels) <= 10, kernels  # torch's own: zeros, copies and sums of one number


@DTYPES
def test_a_step_goes_to_the_stream_that_is_current(gpu: torch.device, dtype: torch.dtype) -> None:
    """The gradient arrives late on a side stream; only a step behind it sees it."""
    param = Parameter(torch.ones(70_000).to(dtype).to(gpu))
    expected = Parameter(param.detach().cpu().clone())
    optimizers = [amp_ext.optim.AdamW([p], 0.1) for p in (param, expected)]
    param.grad = torch.zeros_like(param)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        param.grad.fill_(1.0)
        optimizers[0].step()
    side.synchronize()
    expected.grad = torch.ones_like(expected)
    optimizers[1].step()
    assert_same_bits(*map(bits_of, optimizers))


def test_steps_after_the_first_leave_no_memory_behind(gpu: torch.device) -> None:
    training = Training(amp_ext.optim.AdamW, F16, gpu)
    training.load(0, overflow=False)
    training.iterate()
    allocated = torch.cuda.memory_allocated()
    for _ in range(5):
        training.iterate()
        training.optimizer.zero_grad(set_to_none=True)
        training.backward()
    assert torch.cuda.memory_allocated() == allocated


@pytest.mark.parametrize("case", rows(dict(trainings())))
def test_a_training_has_the_bits_of_the_cpu(gpu, case) -> None:
    expected = results_of("", case, torch.device("cpu"))
    found = results_of("", case, gpu)
    assert [name for name in expected if not equal(found[name], expected[name])] == []


def test_sequences_of_the_fast_path_are_rounded_to_nearest(gpu):
    """Of all 2^24 roots, 2^23 reciprocals and 10^8 quotients none is off."""
    assert amp_ext.ops.count_division_errors(gpu, 1).tolist() == [0, 0, 0]


# States in host memory.


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("make", OPTIMIZERS)
@DTYPES
def test_offloaded_states_train_as_on_the_gpu_to_the_bit(gpu, dtype, make, pinned) -> None:
    plain, offloaded = (Training(make, dtype, gpu, tensor_lr=True) for _ in range(2))
    offload = amp_ext.optim.offload_states(offloaded.optimizer, pinned)
    side = torch.cuda.Stream()
    for training in (plain, offloaded):
        train_eagerly(training, range(6))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            train_eagerly(training, range(6, BATCHES))
        torch.cuda.current_stream().wait_stream(side)
    states = [state.values() for state in offloaded.optimizer.state.values()]
    assert {tensor.device.type for state in states for tensor in state} == {"cpu"}
    for left, right in zip(offloaded.params, plain.params, strict=True):
        assert same_bits(left, right)
    offload.remove()
    assert_same_bits(offloaded.optimizer, plain.optimizer)
    for training in (plain, offloaded):
        train_eagerly(training, range(3))
    assert_same_bits(offloaded.optimizer, plain.optimizer)


def test_offloaded_states_take_no_memory_of_the_gpu(gpu) -> None:
    param = Parameter(torch.ones(1 << 22, dtype=BF16, device=gpu))
    optimizer = amp_ext.optim.AdamW([param], max_grad_norm=1.0)
    amp_ext.optim.offload_states(optimizer)
    param.grad = torch.ones_like(param)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    file = optimizer.state_dict()
    optimizer.load_state_dict(file)
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < param.nbytes / 4


def test_a_step_with_offloaded_states_can_not_be_captured(gpu) -> None:
    param = Parameter(torch.ones(4, device=gpu))
    optimizer = amp_ext.optim.AdamW([param])
    amp_ext.optim.offload_states(optimizer)
    param.grad = torch.ones_like(param)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="can't be captured"), torch.cuda.graph(graph):
        optimizer.step()
