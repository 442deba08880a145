"""Times the sides of a row in turns, in one process, and keeps the fastest run of each."""

from __future__ import annotations

import gc
import re
import statistics
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.benchmark import Timer

from amp_ext.bench import peers
from amp_ext.bench.shapes import ShapeList, beside_peers, for_device
from amp_ext.bench.steps import Step, make_program
from amp_ext.bench.work import (
    BESIDE_PEERS,
    DTYPES,
    EVERY,
    FEATURED,
    SIDES,
    SLOW,
    Work,
    is_quick,
    target_ratios,
    target_share,
)

STREAMING_ELEMENTS = {"cpu": 64_000_000, "cuda": 256_000_000}  # float32, far larger than caches
_SWEEP = 16_000_000  # float32: 64 MB, more than the caches of a few cores
_ROOM = 0.75  # of the free memory may be taken


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: How often each side of a row has its turn.
        seconds: The least time of a turn.
        quick: Whether only some rows are measured, and slow sides only where they have a target.
        shrink: Divides all sizes, for a trial of the tool itself.
        pattern: Regular expression that a row's name must match.
        peers: Whether the rows are those that stand beside peers.
    """

    rounds: int = 6
    seconds: float = 0.15
    quick: bool = False
    shrink: int = 1
    pattern: str = ""
    peers: bool = False


@dataclass(frozen=True)
class Row:
    """Some work on some parameters.

    Attributes:
        work: What is done.
        shapes: The parameters.
        same: Beside peers: which sides take part, and whether each does just this work.
    """

    work: Work
    shapes: ShapeList
    same: Mapping[str, bool] | None = None

    @property
    def name(self) -> str:
        """As ``--list`` and the progress show it."""
        return row_name(self.work.name, self.shapes.name)


def row_name(work: str, shapes: str) -> str:
    """Returns what ``--filter`` is held against, in letters that keyboards have."""
    return f"{work}, {shapes}".replace("×", "x")


def matches(pattern: str, work: str, shapes: str) -> bool:
    """Returns whether a row is chosen by a regular expression."""
    return re.search(pattern, row_name(work, shapes), re.IGNORECASE) is not None


def choose_rows(device: torch.device, effort: Effort) -> list[Row]:
    """Returns what is to be measured on a device."""
    rows = _rows_beside_peers(effort) if effort.peers else _rows_beside_torch(device, effort)
    rows = [Row(row.work, row.shapes.shrunk(effort.shrink)) for row in rows]
    return [row for row in rows if matches(effort.pattern, row.work.name, row.shapes.name)]


def _rows_beside_torch(device: torch.device, effort: Effort) -> list[Row]:
    room = int(_ROOM * free_memory(device) / 60)  # three sides of 16 to 20 bytes an element
    rows = [
        Row(work, shapes)
        for index, shapes in enumerate(for_device(device.type, room))
        for work in (EVERY if index < 2 else FEATURED)
    ]
    if effort.quick:
        rows = [row for row in rows if is_quick(row.work, row.shapes, device.type)]
    return rows


def _rows_beside_peers(effort: Effort) -> list[Row]:
    lists = beside_peers()
    if effort.quick:
        return [Row(work, shapes) for shapes in (lists[0], lists[2]) for work in BESIDE_PEERS]
    return [
        Row(replace(work, scaler=scaler), shapes)
        for shapes in lists
        for scaler in ((False, True) if shapes.many_small and not shapes.cold else (False,))
        for work in BESIDE_PEERS
    ]


def beside(rows: list[Row], methods: list[dict[str, Any]]) -> list[Row]:
    """Returns rows with all sides that can be measured.

    Args:
        rows: What is to be measured beside peers.
        methods: What ``agreement.compare`` returned for each side of each work.
    """
    same: dict[str, dict[str, bool]] = {}
    for method in methods:
        if method["why"] is None:
            same.setdefault(method["work"], {})[method["side"]] = method["same"]
    return [replace(row, same=same[row.work.name]) for row in rows]


def measure(
    device: torch.device, rows: list[Row], effort: Effort, report: Callable[[str], None]
) -> dict[str, Any]:
    """Measures all rows.

    Args:
        device: Where to measure.
        rows: What to measure; beside peers as :func:`beside` returns them.
        effort: How long.
        report: Called with the name of each row before it is measured.

    Returns:
        ``rows``, each as :func:`measure_row` returns it, and ``left_out``: for which sides of which
        rows the memory is too small, and which peers fail there.
    """
    stream, streaming = make_streaming(device, effort.shrink)
    cold = any(row.shapes.cold for row in rows)
    sweep = torch.ones(_SWEEP // effort.shrink, device=device) if cold else torch.ones(0)
    measured, left_out = [], []
    for row in rows:
        report(row.name)
        wanted = wanted_sides(row, device, effort)
        sides = sides_that_fit(row, wanted, device)
        if sides:
            steps, failures = make_steps(row, sides, device)
            left_out += [{"row": row.name, "why": failure} for failure in failures]
            timing = Timing(effort, sweep.sum if row.shapes.cold else None)
            measured.append(measure_row(row, steps, device, timing, stream, streaming["bytes"]))
            del steps
        if len(sides) < len(wanted):
            names = ", ".join(SIDES[side] for side in wanted[len(sides) :])
            left_out.append({"row": row.name, "why": f"too little free memory for {names}"})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    speeds = [row["streaming_gb_per_s"] for row in measured if row["streaming_gb_per_s"]]
    return {
        "streaming": {**streaming, "gb_per_s": max(speeds, default=None)},
        "rows": measured,
        "left_out": left_out,
    }


def make_streaming(
    device: torch.device, shrink: int
) -> tuple[Callable[[], object], dict[str, Any]]:
    """Returns the operation that shows the bandwidth of memory, and its description."""
    elements = STREAMING_ELEMENTS[device.type] // shrink
    tensor = torch.ones(elements, device=device)
    size = f"{elements / 1e6:.3g}M float32"
    if device.type == "cpu":
        return lambda: tensor.mul_(1.0000001), {"what": f"x.mul_(c), {size}", "bytes": 8 * elements}
    target = torch.empty_like(tensor)
    return lambda: target.copy_(tensor), {"what": f"y.copy_(x), {size}", "bytes": 8 * elements}


def free_memory(device: torch.device) -> int:
    """Returns the bytes that can be had."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        available = re.search(r"MemAvailable: *(\d+) kB", file.read())
    return 1024 * int(available[1]) if available else 0


def wanted_sides(row: Row, device: torch.device, effort: Effort) -> list[str]:
    """Returns the sides of a row that are to be measured."""
    if row.same is not None:
        return list(row.same)
    sides = row.work.sides(device.type)
    if not effort.quick:
        return sides
    targets = target_ratios(row.work, row.shapes, device.type)
    return [side for side in sides if side not in SLOW or side in targets]


def sides_that_fit(row: Row, sides: list[str], device: torch.device) -> list[str]:
    """Returns the first of some sides; none if one does not fit, or two where two are wanted."""
    work, elements, wanted, sides = row.work, row.shapes.elements, len(sides), list(sides)
    held = work.bytes_stored
    extra = {
        "by_hand": 4,
        "by_hand_buffered": 4,
        "foreach": 3 * held / 4,
        "in_float32": work.in_float32.bytes_stored - held,
        **dict.fromkeys(peers.PEERS, 24),
    }  # fp32 gradients; temporary tensors
    free = _ROOM * free_memory(device)
    while sides and elements * (held * len(sides) + max(extra.get(s, 0) for s in sides)) > free:
        sides.pop()
    return sides if len(sides) >= min(2, wanted) else []


def make_steps(
    row: Row, sides: list[str], device: torch.device
) -> tuple[dict[str, Step], list[str]]:
    """Returns the steps of some sides of a row, each of which made its states; and what failed."""
    steps, failures = {}, []
    for side in sides:
        try:
            step = make_program(side, row.work, row.shapes, device).step
            step()
        except Exception as error:
            if side not in peers.PEERS:
                raise
            failures.append(f"{SIDES[side]}: {peers.reason(error)}")
        else:
            steps[side] = step
    return steps, failures


@dataclass(frozen=True)
class Timing:
    """How steps are timed.

    Attributes:
        effort: How long.
        sweep: What empties the caches before each step, None to leave them.
    """

    effort: Effort
    sweep: Callable[[], object] | None = None


def measure_row(
    row: Row,
    steps: dict[str, Step],
    device: torch.device,
    timing: Timing,
    stream: Callable[[], object],
    stream_bytes: int,
) -> dict[str, Any]:
    """Measures one row.

    Returns:
        What the row is, the bandwidth of streaming measured in turns with it (None for many small
        tensors), the figures of each side, the ratios of their times to ours, and the targets.
    """
    work, shapes = row.work, row.shapes
    streamed = not shapes.many_small
    times = interleaved({**steps, "streaming": stream} if streamed else steps, timing)
    streaming = 1e-9 * stream_bytes / min(times.pop("streaming")) if streamed else None
    figures = {}
    for side, step in steps.items():
        seconds = min(times[side])
        gb_per_s = 1e-9 * work.bytes_per_element * shapes.elements / seconds
        host = seconds if device.type == "cpu" else host_seconds(step)
        figures[side] = {
            "seconds": seconds,
            "seconds_median": statistics.median(times[side]),
            "ns_per_element": 1e9 * seconds / shapes.elements,
            "gb_per_s": gb_per_s,
            "share_of_streaming": gb_per_s / streaming if streaming else None,
            "host_us_per_tensor": 1e6 * host / len(shapes.sizes),
            "launches": launches(step) if device.type == "cuda" else None,
        }
    if row.same is None:
        targets: dict[str, Any] = {
            "target_ratios": target_ratios(work, shapes, device.type),
            "target_share": target_share(shapes, device.type),
        }
    else:  # nobody who does the same is to be faster
        equal = {side: 1.0 for side in steps if row.same[side] and side != "ours"}
        unequal = [side for side in steps if not row.same[side]]
        targets = {"target_ratios": equal, "target_share": None, "unequal": unequal}
    return {
        "work": work.name,
        "shapes": shapes.name,
        "optimizer": work.optimizer,
        "dtype": DTYPES[work.dtype],
        "scaler": work.scaler,
        "clip": work.clip,
        "masters": work.dtype != torch.float32 and work.masters,
        "states": work.states.name,
        "featured": work in FEATURED,
        "many_small": shapes.many_small,
        "cold": shapes.cold,
        "tensors": len(shapes.sizes),
        "elements": shapes.elements,
        "bytes_per_element": work.bytes_per_element,
        "bytes_stored": work.bytes_stored,
        "streaming_gb_per_s": streaming,
        "sides": figures,
        "ratios": {side: min(times[side]) / min(times["ours"]) for side in steps if side != "ours"},
        **targets,
    }


def interleaved(
    steps: Mapping[str, Callable[[], object]], timing: Timing
) -> dict[str, list[float]]:
    """Returns the seconds of every run of each step.

    The order turns round each time: a machine that changes its clocks, or that others use as well,
    meets all sides alike. Slow sides have every other turn.
    """
    threads = torch.get_num_threads()
    timers = {
        name: Timer("step()", globals={"step": step}, num_threads=threads)
        for name, step in steps.items()
    }
    times: dict[str, list[float]] = {name: [] for name in timers}
    effort = timing.effort
    for turn in range(effort.rounds):
        for name in list(timers)[:: 1 if turn % 2 == 0 else -1]:
            if name in SLOW and turn % 2:
                continue
            if timing.sweep is None:
                times[name] += timers[name].blocked_autorange(min_run_time=effort.seconds).times
            else:
                times[name] += cold_times(steps[name], timing.sweep, effort.seconds)
    return times


def cold_times(
    step: Callable[[], object], sweep: Callable[[], object], seconds: float
) -> list[float]:
    """Returns the seconds of single steps, each after a sweep that is not counted.

    Args:
        step: What is timed.
        sweep: Reads so much that the caches hold nothing else.
        seconds: For how long to go on, sweeps included.
    """
    times: list[float] = []
    end = timeit.default_timer() + seconds
    while not times or timeit.default_timer() < end:
        sweep()
        start = timeit.default_timer()
        step()
        times.append(timeit.default_timer() - start)
    return times


def host_seconds(step: Step, calls: int = 3, repeats: int = 10) -> float:
    """Returns the time until a step's work is queued on a GPU, the least of some trials."""
    fastest = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = timeit.default_timer()
        for _ in range(calls):
            step()
        fastest = min(fastest, (timeit.default_timer() - start) / calls)
    torch.cuda.synchronize()
    return fastest


def launches(step: Step) -> int:
    """Returns the number of kernels of one step; copies and fills of memory do not count."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return sum(
        event.device_type.name == "CUDA"
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
        for event in profiler.events()
    )
