"""Checkpoint files that are whole: a process that dies while it writes leaves the one before."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

__all__ = ["check_dict", "read_checkpoint", "write_checkpoint"]


def write_checkpoint(operation: str, content: Any, path: str | os.PathLike[str]) -> None:
    """Puts a file in place of what is at a path, in one step and only when it is on the disk.

    It is written beside it under another name, ``<name>.<16 digits>.tmp``. What a process that died
    has left of these for the same path is removed first.

    Args:
        operation: What errors call it.
        content: What ``torch.load`` reads with ``weights_only=True``.
        path: Where to; through a symbolic link, what it names is replaced.

    Raises:
        ValueError: If ``weights_only=True`` would refuse the file.
        OSError: If it can't be written. What was at the path is still there after any error.
    """
    path = Path(os.path.realpath(path))
    _remove_abandoned(path)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            _lock(file)
            _save(content, file)
            file.flush()
            os.fsync(file.fileno())
            _check_readable(operation, temporary)
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def read_checkpoint(path: str | os.PathLike[str]) -> Any:
    """Returns the content of a file, with all tensors on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def check_dict(name: str, value: object) -> None:
    """Raises ValueError if a value is no dict."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict, got {type(value).__name__}")


def _save(content: Any, file: BinaryIO) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # torch closes its archive after a full disk or Ctrl-C, and fails once more over that.
        if error.__context__ is not None:
            raise error.__context__ from None
        raise


def _check_readable(operation: str, path: Path) -> None:
    """Checks that a file has no objects but those that are read without running code."""
    classes = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if classes:
        raise ValueError(
            f"{operation}: model, trainer and extra must have tensors, numbers, text and lists and "
            f"dicts of these alone, got {', '.join(sorted(classes))}"
        )


def _sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# A process holds a lock on what it writes; the lock goes with the process, however that ends.


def _lock(file: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # some network file systems have none
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_abandoned(path: Path) -> None:
    for name in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 16}.tmp"):
        # Another process may be writing it, or have removed it meanwhile.
        with contextlib.suppress(OSError), open(name, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name.unlink()
