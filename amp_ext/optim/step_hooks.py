"""Runs hooks and the profiler around a step, without ``record_function`` at every step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from amp_ext import ops


def with_step_hooks(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step with its hooks around it, and with the profiler if one is running.

    ``torch.optim.Optimizer.profile_hook_step`` always calls ``record_function``, even without a
    profiler, which takes as long as the rest of a small step.

    Args:
        func: The ``step`` of a class of optimizers.
    """
    as_torch = torch.optim.Optimizer.profile_hook_step(func)
    is_profiled = ops.extension.is_profiled

    @functools.wraps(func)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = args[0]
        try:
            if torch.compiler.is_compiling() or has_step_pre_hooks(optimizer) or is_profiled():
                return as_torch(*args, **kwargs)
            returned = func(*args, **kwargs)
            for hooks in (
                optimizer._optimizer_step_post_hooks,
                torch_optimizer._global_optimizer_post_hooks,
            ):
                for hook in hooks.values():
                    hook(optimizer, args, kwargs)
        except BaseException:
            for name in ("grad_scale", "found_inf"):  # torch's scaler keeps them after an error
                vars(optimizer).pop(name, None)
            if optimizer._stepper.last_scan is not None:
                optimizer._stepper.forget_scan()
            raise
        return returned

    return step


def has_step_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if pre-hooks of this optimizer, or torch's global ones, run before its step."""
    return bool(optimizer._optimizer_step_pre_hooks or torch_optimizer._global_optimizer_pre_hooks)
