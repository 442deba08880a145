"""Times a step with states in host memory: compared with its parts, and with DeepSpeed.

    python benchmarks/offload.py                   # on a CPU, one thread; half a minute
    python benchmarks/offload.py --device cuda     # on a GPU

The parts are the same optimizer's step on the CPU (``step``) and the copies of all gradients and
updated parameters (``copies``). Without a GPU, the copies stay within host memory and run at once,
so a step should take as long as both parts together. With a GPU, it should take as long as the
longest of ``step``, ``copies`` in both directions at once, and ``memory``: the bytes that a step
moves, at the bandwidth of the host memory. In addition, the peak of GPU memory is compared with
the table of ``python -m amp_ext.memory --offloaded``.

The other package is DeepSpeed, whose CPU Adam steps in the loops that one writes by hand around
float32 masters. All sides of a table have the same gradients and run in turns, and the least time
of each counts: the CPU time of all threads without a GPU, which other programs hardly change, and
the clock with one.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from common import CPU, in_turns, make_parser, reason, seconds_of, states_of
from torch import Tensor
from torch.nn import Parameter

from amp_ext.bench import OPTIONS, describe, make_streaming
from amp_ext.memory import CONFIGURATIONS, Configuration, training_memory
from amp_ext.optim import AdamW
from amp_ext.optim.offload import OffloadedStates
from amp_ext.optim.transport import Transport
from amp_ext.text_table import format_table

ADAMW = OPTIONS["AdamW"]
BY_NAME = {each.name: each for each in CONFIGURATIONS}
MASTERS = BY_NAME["16-bit + masters, fp32 states"]
SPLIT = BY_NAME["16-bit + split masters, bf16 states"]
SPLIT8 = BY_NAME["16-bit + split8 masters, 8bit states"]
FP32 = BY_NAME["fp32"]
FORMS = [FP32, MASTERS, SPLIT, SPLIT8]
#: Limits of ``--check``: the ratio of times, and the difference of GPU memory from the table.
TIME_LIMITS = {"cpu": 1.15, "cuda": 1.2}
MEMORY_LIMIT = 0.03


class ImmediateTransport:
    """Copies within host memory, which have ended when the call returns."""

    device = CPU

    def allocate(self, size: int) -> Tensor:
        """Returns memory whose pages exist already, as those of pinned memory."""
        return torch.zeros(size, dtype=torch.uint8)

    def copy_down(self, target: Tensor, source: Tensor) -> None:
        """Copies a tensor."""
        target.data.copy_(source.data)

    copy_up = copy_down

    def begin(self, event: Any = None) -> None:
        """Does nothing: no copy is under way."""

    record_down = record_up = wait = join = close = begin


def make_transport(device: torch.device) -> Any:
    """Returns the transport between a device and host memory."""
    return Transport(device, pinned=True) if device.type == "cuda" else ImmediateTransport()


def offload(optimizer: AdamW, threads: int, device: torch.device) -> Callable[[], int]:
    """Moves the states to host memory; returns what counts all bytes there."""
    transport, sizes = make_transport(device), list[int]()
    allocate = transport.allocate

    def allocate_and_count(size: int) -> Tensor:
        sizes.append(size)
        return allocate(size)

    transport.allocate = allocate_and_count
    OffloadedStates(optimizer, transport, threads)
    return lambda: host_bytes(states_of(optimizer)) + sum(sizes)


def least_times(
    calls: dict[str, Callable[[], Any]], rounds: int, device: torch.device
) -> dict[str, float]:
    """Calls each once per round; returns the least milliseconds of each.

    Counts the time by the clock on a GPU, and the CPU time of all threads without one.
    """
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    timed = {name: seconds_of(call, device, clock) for name, call in calls.items()}
    return {name: 1000 * seconds for name, seconds in in_turns(timed, rounds).items()}


def make_params(shapes: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Parameter]:
    """Returns parameters with gradients, which are the same at each call."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(elements: int) -> Tensor:
        shape = (elements // 1024, 1024)
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    params = []
    for elements in shapes:
        params.append(Parameter(draw(elements)))
        params[-1].grad = draw(elements)
    return params


def make_optimizer(params: list[Parameter], form: Configuration) -> AdamW:
    """Returns our optimizer that stores its states as ``form`` says."""
    stored: dict[str, Any] = {"master_weights": form.master_weights}
    return AdamW(params, **ADAMW, **stored, state_dtype=form.state_dtype)


def host_bytes(values: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors in host memory, without step counters."""
    return sum(value.nbytes for value in values if value.dim() and value.device == CPU)


# A step and its parts.


def measure_form(
    form: Configuration, shapes: Sequence[int], rounds: int, threads: int, device: torch.device
) -> tuple[list[str], list[str]]:
    """Returns the cells of a form's row, and which limits it exceeds."""
    elements, on_gpu = sum(shapes), device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    params = make_params(shapes, form.dtype or torch.float32, device)
    others = [Parameter(param.detach().to(CPU, copy=True)) for param in params]
    for param, other in zip(params, others, strict=True):
        other.grad = param.grad.to(CPU, copy=True)
    plain, offloaded = make_optimizer(others, form), make_optimizer(params, form)
    host, extra = offload(offloaded, threads, device), make_transport(device)
    calls: dict[str, Callable[[], Any]] = {"step": plain.step, "offloaded": offloaded.step}
    least_times(calls, 2, device)
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0

    grads = [param.grad for param in params]
    spare = [torch.zeros_like(param) for param in params]
    hosts = [extra.allocate(each.nbytes).view(each.dtype).view(each.shape) for each in grads * 2]

    def copy() -> None:
        extra.begin()
        for host, grad in zip(hosts, grads, strict=False):
            extra.copy_down(host, grad)
        for param, host in zip(spare, hosts[len(grads) :], strict=True):
            extra.copy_up(param, host)
        extra.wait(extra.record_down())
        extra.join(extra.record_up())

    calls["copies"] = copy
    if on_gpu:
        calls["memory"], streamed = make_streaming(CPU)
    found = least_times(calls, rounds, device)
    assert all(
        torch.equal(param.to(CPU), other) for param, other in zip(params, others, strict=True)
    )
    parts = [found["step"], found["copies"]]
    if on_gpu:
        # States are read and written. Gradients arrive in host memory, and are read. Parameters are
        # written, and also read if there is no float32 master.
        passes = 3 if form == MASTERS else 4
        moved = 2 * host_bytes(states_of(plain)) + passes * host_bytes(others)
        parts.append(found["memory"] * moved / streamed)
    ratio = found["offloaded"] / (max(parts) if on_gpu else sum(parts))
    cells = [*(f"{part:.1f}" for part in parts), f"{found['offloaded']:.1f}", f"{ratio:.2f}"]
    cells.append(f"{host() / elements:.2f}")
    wrong = []
    if ratio > TIME_LIMITS[device.type]:
        wrong.append(f"{form.name}: the ratio {ratio:.2f} is above {TIME_LIMITS[device.type]}")
    if on_gpu:
        rows = training_memory(elements, offloaded=True)
        (expected,) = [row.gpu for row in rows if row.configuration == form]
        cells += [f"{peak / elements:.3f}", f"{expected / elements:.3f}"]
        if abs(peak / expected - 1) > MEMORY_LIMIT:
            wrong.append(f"{form.name}: the peak of GPU memory differs from the table")
    return [form.name, *cells], wrong


# The steps of another package.


class Side(NamedTuple):
    """A way to take a step with states in host memory."""

    name: str
    step: Callable[[], Any]  # steps the parameters with their gradients
    params: list[Parameter]  # on the device
    host: Callable[[], int]  # returns the bytes that are in host memory between steps


@torch.no_grad()
def by_deepspeed(params: list[Parameter], keeps_buffers: bool) -> Side:
    """Returns a loop around float32 masters and ``DeepSpeedCPUAdam``, as one writes it by hand.

    Args:
        params: The parameters, on the device.
        keeps_buffers: True keeps the float32 gradients, and a 16-bit buffer for the copies in both
            directions, which is pinned for a GPU. Otherwise each step makes new tensors.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would search for other devices
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    masters = [Parameter(param.detach().to(CPU, torch.float32)) for param in params]
    optimizer = DeepSpeedCPUAdam(masters, **ADAMW)
    is_pinned, buffers = params[0].is_cuda, list[Tensor]()
    if keeps_buffers:
        buffers = [torch.zeros_like(param, device=CPU, pin_memory=is_pinned) for param in params]
        for master in masters:
            master.grad = torch.zeros_like(master)

    @torch.no_grad()
    def step_with_buffers() -> None:
        for param, buffer in zip(params, buffers, strict=True):
            buffer.copy_(param.grad, non_blocking=True)
        if is_pinned:
            torch.cuda.synchronize()
        torch._foreach_copy_([master.grad for master in masters], buffers)
        optimizer.step()
        for param, master, buffer in zip(params, masters, buffers, strict=True):
            param.copy_(buffer.copy_(master), non_blocking=True)

    @torch.no_grad()
    def step_with_new_tensors() -> None:
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.to(CPU, copy=True).float()
        optimizer.step()
        for param, master in zip(params, masters, strict=True):
            param.copy_(master.to(param.dtype))

    def host() -> int:
        grads = [master.grad for master in masters]
        return host_bytes([*masters, *grads, *buffers, *states_of(optimizer)])

    if keeps_buffers:
        return Side("DeepSpeed, buffers kept", step_with_buffers, params, host)
    return Side("DeepSpeed, new tensors", step_with_new_tensors, params, host)


def makers_of(
    shapes: Sequence[int], threads: int, device: torch.device
) -> list[Callable[[], Side]]:
    """Returns functions that make the sides, which are compared with each other."""

    def made(form: Configuration) -> list[Parameter]:
        return make_params(shapes, form.dtype or torch.float32, device)

    def ours(form: Configuration) -> Side:
        optimizer = make_optimizer(params := made(form), form)
        host = offload(optimizer, threads, device)
        return Side(f"amp_ext, {form.name}", optimizer.step, params, host)

    return [
        *(partial(ours, form) for form in (MASTERS, SPLIT)),
        *(lambda keeps=keeps: by_deepspeed(made(MASTERS), keeps) for keeps in (True, False)),
    ]


def compare(
    makers: list[Callable[[], Side]], rounds: int, device: torch.device
) -> tuple[list[list[str]], list[str]]:
    """Returns the rows of all sides, with the heading, and why sides are missing."""
    sides, missing = [], []
    for make in makers:
        try:
            sides.append(make())
            sides[-1].step()  # creates states, or fails
        except Exception as error:  # a package may be missing, or may not build
            if sides:
                missing.append(reason(error))
    found = least_times({side.name: side.step for side in sides}, rounds, device)
    ours = [name for name in found if name.startswith("amp_ext")]
    rows = [["", "ms", *(f"÷ {name.partition(', ')[2]}" for name in ours), "host, B/param."]]
    for side in sides:
        ratios = (f"{found[side.name] / found[name]:.2f}" for name in ours)
        size = side.host() / sum(param.numel() for param in side.params)
        rows.append([side.name, f"{found[side.name]:.1f}", *ratios, f"{size:.2f}"])
    return rows, list(dict.fromkeys(missing))


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line, and prints the tables."""
    parser = make_parser(__doc__)
    parser.add_argument("--tensors", type=int, help="how many there are (4; on a GPU 16)")
    parser.add_argument(
        "--elements", type=int, help="of each tensor, a multiple of 1024 (8M; on a GPU 32M)"
    )
    parser.add_argument("--rounds", type=int, help="how often each side runs (20; on a GPU 8)")
    parser.add_argument("--check", action="store_true", help="fails if a limit is exceeded")
    options = parser.parse_args(arguments)
    device, on_gpu = torch.device(options.device), options.device == "cuda"
    threads = torch.get_num_threads() if on_gpu else 1
    torch.set_num_threads(threads)
    rounds = options.rounds or (8 if on_gpu else 20)
    elements = options.elements or (32 << 20 if on_gpu else 8 << 20)
    shapes = [elements] * (options.tensors or (16 if on_gpu else 4))
    print("\n".join(describe(device)))
    print(f"{len(shapes)} tensors of {elements} elements, milliseconds\n")

    heading = ["form", "step", "copies", *["memory"] * on_gpu, "offloaded", "ratio"]
    heading += ["host, B/param.", *["GPU, B/param.", "GPU, table"] * on_gpu]
    rows, wrong = [heading], []
    for form in FORMS:
        cells, exceeded = measure_form(form, shapes, rounds, threads, device)
        rows.append(cells)
        wrong += exceeded
        gc.collect()  # frees the optimizers, which are in reference cycles
    print(format_table(rows), flush=True)

    rows, missing = compare(makers_of(shapes, threads, device), rounds, device)
    print("\n".join(["", format_table(rows), *(f"not measured: {why}" for why in missing)]))
    print("".join(f"\n{line}" for line in wrong))
    return 1 if wrong and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
