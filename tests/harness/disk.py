"""A disk on which a save ends in the middle: at a call of write, flush, fsync or rename."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from amp_ext.training import checkpoint_file


class Disk:
    """Counts the calls that write a checkpoint, and ends at one of them.

    Attributes:
        calls: Their names, in order.
    """

    def __init__(self, at: int, end: Callable[[], None], *, forgets: bool = False) -> None:
        """Sets what happens.

        Args:
            at: Number of the call that is not made; the one before it is the last.
            end: What happens instead, after half of the bytes if it is a write.
            forgets: Keeps of a file only what was synchronised, as after a power cut.
        """
        self.calls: list[str] = []
        self._at, self._end, self._forgets = at, end, forgets
        self._files: dict[int, _File] = {}
        self._sync, self._rename = os.fsync, os.replace

    def put_in_place(self, patch: pytest.MonkeyPatch) -> Disk:
        patch.setattr(checkpoint_file, "open", self.open, raising=False)
        patch.setattr(os, "fsync", self.fsync)
        patch.setattr(os, "replace", self.replace)
        return self

    def open(self, path: Any, mode: str) -> Any:
        file = open(path, mode)  # noqa: SIM115
        if mode != "wb":
            return file
        self._files = {file.fileno(): _File(self, file, self._forgets)}  # one at a time
        return self._files[file.fileno()]

    def forget(self) -> None:
        self._files = {}  # the number may stand for another one later

    def fsync(self, descriptor: int) -> None:
        self.count("fsync")
        if descriptor in self._files:
            self._files[descriptor].reach_the_disk()
        self._sync(descriptor)

    def replace(self, source: Any, target: Any) -> None:
        self.count("replace")
        self._rename(source, target)

    def is_next(self) -> bool:
        return len(self.calls) + 1 == self._at

    def count(self, name: str) -> None:
        if self.is_next():
            self._end()
        self.calls.append(name)


class _File:
    def __init__(self, disk: Disk, file: Any, forgets: bool) -> None:
        self._disk, self._file, self._forgets = disk, file, forgets
        self._pending: list[bytes] = []

    def write(self, content: bytes) -> int:
        if self._disk.is_next():
            self._pending.append(bytes(content)[: len(content) // 2])
            self.flush_quietly()
        self._disk.count("write")
        self._pending.append(bytes(content))
        return len(content)

    def flush(self) -> None:
        self._disk.count("flush")
        self.flush_quietly()

    def flush_quietly(self) -> None:
        if not self._forgets:
            self.reach_the_disk()

    def reach_the_disk(self) -> None:
        for content in self._pending:
            self._file.write(content)
        self._pending.clear()
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: Any) -> None:
        self._disk.forget()
        self._file.close()
