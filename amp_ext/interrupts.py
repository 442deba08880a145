"""What tells a gradient scaler how far a call of it came that was interrupted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from amp_ext.nonfinite import params_of

__all__ = [
    "MarkedGrads",
    "marked_in_part",
    "may_have_stepped",
    "version_of",
    "versions_of_params",
]

_Result = TypeVar("_Result")

_NUMBERS = itertools.count()
_MARK = "_marked_by_amp_ext"

# The functions that torch lays around each step, and where they keep what it returned.
_RETURNED_IN = {
    ("torch.optim.optimizer", "wrapper"): "out",  # with the hooks
    ("torch.optim.optimizer", "_use_grad"): "ret",
}


class MarkedGrads:
    """The gradients that were there when a call was interrupted, told from later ones.

    Each carries a number among its attributes. A reference to it, weak or not, would keep
    ``torch.utils.swap_tensors`` from taking it, and its address may become another's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Marks the gradients that an optimizer has."""
        self._number = next(_NUMBERS)
        self._params = set(map(id, params_of(optimizer)))
        for grad in _present_grads(optimizer):
            vars(grad)[_MARK] = (self._number, version_of(grad))

    def _version_then(self, grad: Tensor) -> int | None:
        """Returns the version that a gradient had when it was marked, None if it was not."""
        number, version = vars(grad).get(_MARK, (None, None))
        return version if number == self._number else None

    def has_any_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether the optimizer has one of these gradients, written since or not."""
        return any(self._version_then(grad) is not None for grad in _present_grads(optimizer))

    def are_there(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether the optimizer has these gradients, and not others throughout.

        Raises:
            RuntimeError: If it has some of them, they have been written since, or there is one of a
                parameter that was not there: that one may be anything.
        """
        grads = _present_grads(optimizer)
        if all(self._version_then(grad) == version_of(grad) for grad in grads):
            return True
        wanted = (
            "GradScaler.step: gradients must be as the last step left them, which was interrupted "
            "after they had been unscaled, or all be new, got"
        )
        if self.has_any_of(optimizer):
            raise RuntimeError(
                f"{wanted} some that were written: call optimizer.zero_grad(), and backward anew"
            )
        with_grad = {id(param) for param in params_of(optimizer) if param.grad is not None}
        if not with_grad <= self._params:
            raise RuntimeError(
                f"{wanted} those of parameters that were not there: call update() first"
            )
        return False


def marked_in_part(state: dict[str, Any], unscale: Callable[[], _Result]) -> _Result:
    """Unscales gradients, which count as unscaled in part until the scaler knows that all are.

    Args:
        state: What the scaler knows of their optimizer.
        unscale: Unscales some or all of them.
    """
    was_marked = "in_part" in state
    state["in_part"] = None  # before: an interrupt must not lead to a second unscaling
    try:
        return unscale()
    except torch.AcceleratorError:  # a launch was refused, perhaps after others
        raise
    except Exception:  # refused, and nothing has been written
        if not was_marked:
            del state["in_part"]
        raise


def may_have_stepped(error: BaseException) -> bool:
    """Returns whether an optimizer may have stepped before an error came out of its step.

    torch's fused kernels write parameters and leave their versions. But the frames around a step
    tell whether it was reached and has ended.

    Args:
        error: What was raised. An error of the step itself is a refusal; an interrupt may come
            after the kernel.
    """
    is_reached = False
    traceback = error.__traceback__
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        function = frame.f_locals.get("func")
        returned = _RETURNED_IN.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        if returned is None or function is None:
            continue
        if returned in frame.f_locals:
            return True
        is_reached = traceback is not None and traceback.tb_frame.f_code is function.__code__
        if not is_reached:
            return False
    return is_reached and not isinstance(error, Exception)


def version_of(tensor: Tensor) -> int:
    """Returns a number that changes when a tensor is written; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of_params(optimizer: Any) -> list[int]:
    """Returns numbers that change when a step writes parameters.

    Args:
        optimizer: The optimizer, or an object that delegates to it.
    """
    params = params_of(optimizer) if hasattr(optimizer, "param_groups") else []
    try:
        return [param._version for param in params]
    except RuntimeError:  # an inference tensor has none; to ask each takes as long again
        return [version_of(param) for param in params]


def _present_grads(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param.grad for param in params_of(optimizer) if param.grad is not None]
