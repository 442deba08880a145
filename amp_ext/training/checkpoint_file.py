"""Writes checkpoint files atomically, and saves the states of torch's random generators."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["random_state", "set_random_state", "write_checkpoint"]

_LONGEST_NAME = 255  # bytes in the name of a file


def write_checkpoint(content: Any, path: str | os.PathLike[str]) -> None:
    """Replaces a file atomically, once the new file is on the disk.

    The new file is first written to the same folder as ``<name>.<16 digits>.tmp``, with a long name
    cut, and then renamed. It keeps the mode of the old file.

    Args:
        content: An object that ``torch.load`` can read with ``weights_only=True``.
        path: Path of the file. If it is a symbolic link, the file that it points to is replaced.

    Raises:
        ValueError: If ``torch.load`` would refuse the file with ``weights_only=True``, or if the
            path is a folder, a device, a pipe or a socket.
        OSError: If the file can't be written. The old file is still there after any error.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    if not os.path.basename(path) or not (mode is None or stat.S_ISREG(mode)):
        raise ValueError(
            f"MixedPrecisionTrainer.save: path must be of a file, or of nothing yet, got {path}, "
            "which is a folder, a device, a pipe or a socket"
        )
    target = os.path.realpath(os.fsdecode(path))
    folder, name = os.path.split(target)
    end = f".{secrets.token_hex(8)}.tmp"
    begin = os.fsdecode(os.fsencode(name)[: _LONGEST_NAME - len(end)])
    temporary = os.path.join(folder, begin + end)
    permissions = 0o666 if mode is None else stat.S_IMODE(mode)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)
    try:
        with open(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, permissions)  # with those that the umask removed
            try:
                torch.save(content, file)
            except RuntimeError as error:
                # After a full disk or Ctrl-C torch closes its archive, which raises a second error.
                # The first one says more.
                raise (error.__context__ or error) from None
            file.flush()
            os.fsync(descriptor)
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(temporary)
        if classes:
            raise ValueError(
                "MixedPrecisionTrainer.save: model, trainer and extra must have tensors, numbers, "
                f"text and lists and dicts of these alone, got {', '.join(sorted(classes))}"
            )
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # so that the new name survives a power failure
    finally:
        os.close(descriptor)


def random_state() -> dict[str, Any]:
    """Returns the states of the CPU generator and, once CUDA is initialized, of all GPUs."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores torch's generators; skips the states of GPUs that this machine lacks.

    Args:
        state: The result of :func:`random_state`.
    """
    for device, one in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(one, device)
    torch.set_rng_state(state["cpu"])
