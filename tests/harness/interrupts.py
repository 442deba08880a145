"""Ctrl-C at each line of a call, one at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import amp_ext

_OURS, _TORCH = Path(amp_ext.__file__).parent, Path(torch.__file__).parent
_FILES = (_OURS, _TORCH / "optim", _TORCH / "amp" / "grad_scaler.py")

# A step of torch's makes many calls, and may stop between them: no interrupt comes there.
_THEIR_STEPS = {str(_TORCH / "optim" / f"{name}.py") for name in ("sgd", "adam", "adamw")}

#: Makes the sweeps complete: each line each time that it is run instead of the first time, and
#: every row instead of a few.
IS_COMPLETE = os.environ.get("AMP_EXT_ALL_INTERRUPTS") == "1"


class _Interrupt:
    """Counts the lines that are run of the package and of the classes of torch that it extends."""

    def __init__(self, at: int, files: tuple[str, ...]) -> None:
        self.left = at
        self._files = files
        self._seen: set[tuple[str, int]] = set()

    def of_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        is_in = frame.f_code.co_filename.startswith(self._files) and not _is_of_their_step(frame)
        return self.of_line if is_in else None

    def of_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            if IS_COMPLETE or line not in self._seen:
                self._seen.add(line)
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt("{}:{}".format(*line))
        return self.of_line


def _is_of_their_step(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename not in _THEIR_STEPS:
        frame = frame.f_back
    return frame is not None


class Modes:
    """Modes of the process that torch's contexts set, and leave set if an interrupt ends them."""

    def __init__(self) -> None:
        """Remembers those that are on."""
        self.has_grad = torch.is_grad_enabled()
        self.autocast = torch.is_autocast_enabled("cpu")
        self._dtype = torch.get_autocast_dtype("cpu")
        self._cache = torch.is_autocast_cache_enabled()
        self._nesting = _nesting()

    def put_back(self) -> None:
        torch.set_grad_enabled(self.has_grad)
        torch.set_autocast_enabled("cpu", self.autocast)
        torch.set_autocast_dtype("cpu", self._dtype)
        torch.set_autocast_cache_enabled(self._cache)
        while _nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def interrupted_at_each_line(
    make: Callable[[], Any], call: Callable[[Any], Any]
) -> Iterator[tuple[Any, str]]:
    """Yields what was made, after a call was interrupted at its first line, at its second, ...

    Args:
        make: Makes what is called, anew for each line.
        call: Takes it.

    Yields:
        What was made, and the line.
    """
    files = tuple(map(str, _FILES))
    at = 0
    while True:
        at += 1
        made, tracer, before, modes = make(), _Interrupt(at, files), sys.gettrace(), Modes()
        sys.settrace(tracer.of_frame)
        try:
            call(made)
        except KeyboardInterrupt as interrupt:
            where = str(interrupt)
        else:
            where = ""
        finally:
            sys.settrace(before)
            modes.put_back()
        if tracer.left > 0:
            return
        assert where, "an interrupt was swallowed"
        yield made, where
