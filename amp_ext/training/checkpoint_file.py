"""Writes checkpoint files atomically."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch

__all__ = ["write_checkpoint"]


def write_checkpoint(content: Any, path: str | os.PathLike[str]) -> None:
    """Replaces a file atomically, once the new file is on the disk.

    The new file is first written to the same folder as ``<name>.<16 digits>.tmp``, and then
    renamed. It keeps the mode of the old file.

    Args:
        content: An object that ``torch.load`` can read with ``weights_only=True``.
        path: Path of the file. If it is a symbolic link, the file that it points to is replaced.

    Raises:
        ValueError: If ``torch.load`` would refuse the file with ``weights_only=True``, or if the
            path is a folder, a device, a pipe or a socket.
        OSError: If the file can't be written. The old file is still there after any error.
    """
    is_replaced = os.path.exists(path)
    if not os.path.basename(path) or (is_replaced and not os.path.isfile(path)):
        raise ValueError(
            f"MixedPrecisionTrainer.save: path must be of a file, or of nothing yet, got {path}, "
            "which is a folder, a device, a pipe or a socket"
        )
    target = os.path.realpath(os.fsdecode(path))
    temporary = f"{target}.{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, "wb") as file:
            if is_replaced:  # before anything is written that others may not read
                shutil.copymode(target, temporary)
            try:
                torch.save(content, file)
            except RuntimeError as error:
                # After a full disk or Ctrl-C torch closes its archive, which raises a second error.
                # The first one says more.
                raise (error.__context__ or error) from None
            file.flush()
            os.fsync(file.fileno())
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(temporary)
        if classes:
            raise ValueError(
                "MixedPrecisionTrainer.save: model, trainer and extra must have tensors, numbers, "
                f"text and lists and dicts of these alone, got {', '.join(sorted(classes))}"
            )
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)  # after a rename there is none
