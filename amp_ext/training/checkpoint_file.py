"""Writes checkpoint files atomically: a process that dies while it writes leaves the old file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch

from amp_ext import ops

__all__ = ["write_checkpoint"]


def write_checkpoint(operation: str, content: Any, path: str | os.PathLike[str]) -> None:
    """Replaces a file atomically, once the new file is on the disk.

    The new file is first written to the same folder as ``<name>.<16 digits>.tmp``, with a long name
    cut, and then renamed. It keeps the mode of the old file.

    Args:
        operation: Name of the operation in errors.
        content: An object that ``torch.load`` can read with ``weights_only=True``.
        path: Path of the file. If it is a symbolic link, the file that it points to is replaced.

    Raises:
        ValueError: If ``torch.load`` would refuse the file with ``weights_only=True``, or if the
            path is a folder, a device, a pipe or a socket.
        OSError: If the file can't be written. The old file is still there after any error.
    """
    temporary = None
    try:
        refusal, error, descriptor, temporary, target = ops.open_atomic(os.fsencode(path))
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
        os.fsync(folder)  # so that the new name survives a power failure
    finally:
        os.close(folder)


def _save(content: Any, file: BinaryIO) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # After a full disk or Ctrl-C torch closes its archive, which raises a second error. The
        # first one says more.
        if error.__context__ is not None:
            raise error.__context__ from None
        raise


def _check_readable(operation: str, path: Path) -> None:
    """Checks that ``torch.load`` can read a file with ``weights_only=True``."""
    classes = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if classes:
        raise ValueError(
            f"{operation}: model, trainer and extra must have tensors, numbers, text and lists and "
            f"dicts of these alone, got {', '.join(sorted(classes))}"
        )
