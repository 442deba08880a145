"""Ctrl-C at each line of a call, one at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import amp_ext

_OURS, _TORCH = Path(amp_ext.__file__).parent, Path(torch.__file__).parent
_FILES = (_OURS, _TORCH / "optim", _TORCH / "amp" / "grad_scaler.py")


class _Interrupt:
    """Counts the lines that are run of the package and of the classes of torch that it extends."""

    def __init__(self, at: int, files: tuple[str, ...]) -> None:
        self.left = at
        self._files = files

    def of_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.of_line if frame.f_code.co_filename.startswith(self._files) else None

    def of_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return self.of_line


def interrupted_at_each_line(
    make: Callable[[], Any], call: Callable[[Any], Any], package: str | None = None
) -> Iterator[tuple[Any, str]]:
    """Yields what was made, after a call was interrupted at its first line, at its second, ...

    Args:
        make: Makes what is called, anew for each line.
        call: Takes it.
        package: Whose lines alone count, as "training"; None for those of all packages of ours, of
            torch's optimizers and of its scaler.

    Yields:
        What was made, and the line.
    """
    files = tuple(map(str, _FILES if package is None else (_OURS / package,)))
    at = 0
    while True:
        at += 1
        made, tracer, before = make(), _Interrupt(at, files), sys.gettrace()
        sys.settrace(tracer.of_frame)
        try:
            call(made)
        except KeyboardInterrupt as interrupt:
            where = str(interrupt)
        else:
            where = ""
        finally:
            sys.settrace(before)
        if tracer.left > 0:
            return
        assert where, "an interrupt was swallowed"
        yield made, where
