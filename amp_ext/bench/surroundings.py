"""What a figure needs to be worth something: hardware, versions, commit, date and command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import torch

import amp_ext
from amp_ext import ops

_PACKAGE = Path(amp_ext.__file__).parent
_TICKS = os.sysconf("SC_CLK_TCK")  # per second


def describe(device: torch.device, arguments: list[str]) -> dict[str, Any]:
    """Returns hardware, versions, commit of the build, date and command.

    Args:
        device: Where the measurements are made.
        arguments: Those of the command line.
    """
    return {
        "hardware": _hardware(device),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "amp_ext": amp_ext.__version__,
            "instructions": ops.cpu_isa(),
        },
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "amp_ext.bench", *arguments]),
        "load_average": os.getloadavg()[0],
    }


class OthersOnTheCpu:
    """Measures which share of the processor other programs take, while it is entered.

    Attributes:
        share: From 0 to 1, once left; None where the system does not tell.
    """

    share: float | None = None

    def __enter__(self) -> OthersOnTheCpu:
        self._start = _cpu_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        if self._start is not None and (end := _cpu_seconds()) is not None:
            busy, own, total = (b - a for a, b in zip(self._start, end, strict=True))
            self.share = max(0.0, busy - own) / total if total else 0.0


def _cpu_seconds() -> tuple[float, float, float] | None:
    """Returns the seconds that all programs, this one, and all with idling took on all cores."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    ticks = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]  # and waiting for files
    own = sum(os.times()[:4])  # and of the compilers that it started
    return (sum(ticks) - idle) / _TICKS, own, sum(ticks) / _TICKS


def file_stem(surroundings: dict[str, Any]) -> str:
    """Returns the name of a file of results: the date and the hardware."""
    hardware = surroundings["hardware"]
    place = hardware["gpu"] or f"{hardware['cpu']} {hardware['threads']} threads"
    return f"{surroundings['date'][:10]}-{re.sub('[^a-z0-9]+', '-', place.lower()).strip('-')}"


def _hardware(device: torch.device) -> dict[str, Any]:
    gpu = device.type == "cuda"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "device": device.type,
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory / 2**30, 1),
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "gpu_memory_gib": (
            round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1) if gpu else None
        ),
        "driver": (
            _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
            if gpu
            else None
        ),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"^model name\s*: *(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Returns the commit that was built, or that of the folder if the build did not note one."""
    info = _PACKAGE / "_build_info.json"
    built = json.loads(info.read_text()).get("git") if info.exists() else None
    if built or not (_PACKAGE.parent / ".git").exists():
        return built
    describe = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return _first_line("git", "-C", str(_PACKAGE.parent), *describe)


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.partition("\n")[0].strip() or None
