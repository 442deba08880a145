"""Checkpoint files that are whole: a process that dies while it writes leaves the one before."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch

from amp_ext import ops

__all__ = ["write_checkpoint"]


def write_checkpoint(operation: str, content: Any, path: str | os.PathLike[str]) -> None:
    """Puts a file in place of what is at a path, in one step and only when it is on the disk.

    It is written beside it under another name, ``<name>.<16 digits>.tmp``, in which a long name is
    cut. The mode of what is there stays.

    Args:
        operation: What errors call it.
        content: What ``torch.load`` reads with ``weights_only=True``.
        path: Where to; through a symbolic link, what it names is replaced.

    Raises:
        ValueError: If ``weights_only=True`` would refuse the file, or at the path is a folder, a
            device, a pipe or a socket.
        OSError: If it can't be written. What was at the path is still there after any error.
    """
    temporary = None
    try:
        refusal, error, descriptor, temporary, target = ops.open_beside(os.fsencode(path))
        if refusal:
            raise ValueError(f"{operation}: {os.fsdecode(refusal)}")
        if error:
            raise OSError(error, os.strerror(error), os.fspath(path))
        with open(descriptor, "wb") as file:
            _save(content, file)
            file.flush()
            os.fsync(file.fileno())
            _check_readable(operation, Path(os.fsdecode(temporary)))
            os.replace(temporary, target)
    except BaseException:
        if temporary:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        raise
    folder = os.open(os.path.dirname(temporary), os.O_RDONLY)
    try:
        os.fsync(folder)  # the names in it
    finally:
        os.close(folder)


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
