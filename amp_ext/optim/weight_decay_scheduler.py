"""Schedules of the weight decay, used as torch's schedules of the learning rate are."""

from __future__ import annotations

import copy
import math
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from amp_ext.plain_numbers import is_count, is_number, plain, with_plain_numbers
from amp_ext.put_back import Before

__all__ = [
    "CosineAnnealingWeightDecay",
    "LambdaWeightDecay",
    "StepWeightDecay",
    "WeightDecayScheduler",
]


class WeightDecayScheduler(ABC):
    """Writes ``group["weight_decay"]`` of an optimizer as a function of the number of steps.

    Works on every optimizer whose groups have a weight decay, amp_ext's and torch's, coupled and
    decoupled. A subclass gives :meth:`weight_decay_at`; values never depend on the ones before, so
    a resumed run has the bits of one that was not interrupted. It leaves the rest of a group alone:
    schedulers of the learning rate may stand beside it, made and stepped in any order.

    The value that a group starts from is kept in it as ``initial_weight_decay``. A group that is
    added later joins at the next step, with its own weight decay as the value to start from.

    Under a replayed CUDA graph the weight decay stays what it was when the graph was captured.

    Args:
        optimizer: Whose groups to write. The values of the first step are written at once.
        last_epoch: -1 starts anew. The ``last_epoch`` of an earlier scheduler goes on behind it,
            from the ``initial_weight_decay`` that the groups have.

    Raises:
        TypeError: If ``optimizer`` is not one.
        ValueError: If a group has no weight decay, or no ``initial_weight_decay`` to go on from.

    Example:
        >>> optimizer = amp_ext.optim.AdamW(model.parameters(), weight_decay=0.1)
        >>> scheduler = CosineAnnealingWeightDecay(optimizer, T_max=1000)
        >>> for x, y in data:
        ...     train_step(x, y)  # ends in optimizer.step()
        ...     scheduler.step()
    """

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        """Remembers the values of all groups and writes the first ones; see the class."""
        name = type(self).__name__
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"{name}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        last_epoch = plain(last_epoch)
        if not isinstance(last_epoch, int) or last_epoch < -1:
            raise ValueError(f"{name}: last_epoch must be an int of at least -1, got {last_epoch}")
        for index, group in enumerate(optimizer.param_groups):
            if last_epoch >= 0 and "initial_weight_decay" not in group:
                raise ValueError(
                    f"{name}: param_groups[{index}] must have initial_weight_decay to go on after "
                    f"last_epoch={last_epoch}, got {_options(group)}"
                )
        self.optimizer = optimizer
        self.last_epoch = last_epoch
        self.base_weight_decays: list[float] = []
        self._last_weight_decay: list[float] = []
        self.step()

    @abstractmethod
    def weight_decay_at(self, epoch: int, initial: float, group_index: int) -> float:
        """Returns the weight decay of a group, at least 0.

        Args:
            epoch: How many calls of :meth:`step` came before; 0 for the first values.
            initial: The value that the group starts from.
            group_index: Which group it is.
        """

    def step(self) -> None:
        """Writes the next weight decay into every group; to be called after ``optimizer.step()``.

        Raises:
            ValueError: If a value is negative or not finite, a group has no weight decay, or groups
                have gone. Nothing has been changed then, nor after an interrupt.
        """
        bases = self._bases()
        epoch = self.last_epoch + 1
        values = [float(self.weight_decay_at(epoch, base, i)) for i, base in enumerate(bases)]
        for index, value in enumerate(values):
            if not 0.0 <= value < math.inf:
                raise ValueError(
                    f"{type(self).__name__}.step: weight_decay of group {index} must be finite and "
                    f"at least 0, got {value} for epoch {epoch}"
                )
        before = Before(self._written())
        try:
            self.last_epoch = epoch
            self._write(bases, values)
        except BaseException:  # also an interrupt, after which a notebook goes on
            before.put_back()
            raise

    def get_last_weight_decay(self) -> list[float]:
        """Returns the values that were written last, one for each group."""
        return list(self._last_weight_decay)

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of everything but the optimizer, for ``torch.save``."""
        copied: dict[str, Any] = with_plain_numbers(copy.deepcopy(self._saved()))
        return copied

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state and writes its values into the groups, before or after the optimizer's.

        Args:
            state_dict: From ``state_dict()`` of the same class.

        Raises:
            ValueError: If the state is another class's, of more groups than there are, or has an
                entry that is out of range. Nothing has been changed then, nor after an interrupt.
        """
        self._bases()  # raises if the groups do not fit
        self._check_saved(f"{type(self).__name__}.load_state_dict", state_dict)
        before = Before(self._written())
        try:
            self._restore(copy.deepcopy(state_dict))
            bases, last = self._bases(), self._last_weight_decay
            self._write(bases, last + bases[len(last) :])
        except BaseException:
            before.put_back()
            raise

    def _written(self) -> list[dict[str, Any]]:
        """Returns what a step or a load writes: the attributes of this object, and the groups."""
        return [vars(self), *self.optimizer.param_groups]

    def _saved(self) -> dict[str, Any]:
        """Returns what a state dict holds."""
        return {name: value for name, value in self.__dict__.items() if name != "optimizer"}

    def _check_saved(self, operation: str, saved: dict[str, Any]) -> None:
        """Raises ValueError if a state dict does not fit."""
        if not isinstance(saved, Mapping):
            raise ValueError(f"{operation}: state_dict must be a dict, got {type(saved).__name__}")
        wanted, got = sorted(self._saved()), sorted(saved)
        if wanted != got:
            raise ValueError(f"{operation}: state_dict must have {wanted}, got {got}")
        if not isinstance(saved["last_epoch"], int) or saved["last_epoch"] < 0:
            raise ValueError(
                f"{operation}: last_epoch must be an int of at least 0, got {saved['last_epoch']!r}"
            )
        for name in ("base_weight_decays", "_last_weight_decay"):
            values = saved[name]
            if not isinstance(values, list):
                raise ValueError(f"{operation}: {name} must be a list, got {values!r}")
            for index, value in enumerate(values):
                _not_negative(f"{operation}: {name}[{index}]", value)
        count, groups = len(saved["base_weight_decays"]), len(self.optimizer.param_groups)
        if count > groups:
            raise ValueError(
                f"{operation}: base_weight_decays must be of at most {groups} groups, got {count}"
            )
        if count != len(saved["_last_weight_decay"]):
            raise ValueError(
                f"{operation}: _last_weight_decay must be of {count} groups as base_weight_decays, "
                f"got {len(saved['_last_weight_decay'])}"
            )

    def _restore(self, saved: dict[str, Any]) -> None:
        """Takes over a state dict that fits."""
        self.__dict__.update(saved)

    def _bases(self) -> list[float]:
        """Returns the value that each group starts from; new groups bring their own."""
        groups, known = self.optimizer.param_groups, self.base_weight_decays
        if len(groups) < len(known):
            raise ValueError(
                f"{type(self).__name__}.step: optimizer must have at least {len(known)} groups as "
                f"before, got {len(groups)}"
            )
        joining = []
        for index, group in enumerate(groups[len(known) :], len(known)):
            initial = group.get("initial_weight_decay", group.get("weight_decay"))
            if initial is None:
                raise ValueError(
                    f"{type(self).__name__}: param_groups[{index}] must have weight_decay, got "
                    f"{_options(group)}"
                )
            joining.append(float(initial))
        return known + joining

    def _write(self, bases: list[float], values: list[float]) -> None:
        for group, base, value in zip(self.optimizer.param_groups, bases, values, strict=True):
            # Loading a file of an optimizer that had no scheduler takes it out of the group.
            group["initial_weight_decay"] = base
            group["weight_decay"] = value
        self.base_weight_decays = bases
        self._last_weight_decay = values


class LambdaWeightDecay(WeightDecayScheduler):
    """Multiplies the initial weight decay by a function of the epoch, as ``LambdaLR`` does.

    Args:
        optimizer: Whose groups to write.
        weight_decay_lambda: Takes the epoch, an int from 0, and returns the factor; one callable
            for all groups, those added later included, or a list of one for each group.
        last_epoch: -1, or where to go on from.

    Raises:
        TypeError: If a function is not callable.
        ValueError: If there is not one function for each group.

    Note:
        As with ``LambdaLR``, a state dict holds the attributes of callable objects, and None for
        functions, which can't be stored. Give the same ones again when resuming.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        weight_decay_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
    ) -> None:
        """Checks the functions; see the class."""
        self._one_for_all = not isinstance(weight_decay_lambda, (list, tuple))
        given: Any = [weight_decay_lambda] if self._one_for_all else weight_decay_lambda
        for index, function in enumerate(given):
            if not callable(function):
                raise TypeError(
                    f"LambdaWeightDecay: weight_decay_lambda[{index}] must be callable, got "
                    f"{type(function).__name__}"
                )
        self.weight_decay_lambdas: list[Callable[[int], float]] = list(given)
        super().__init__(optimizer, last_epoch)

    def weight_decay_at(self, epoch: int, initial: float, group_index: int) -> float:
        """Returns ``initial * weight_decay_lambda(epoch)``."""
        return initial * self.weight_decay_lambdas[0 if self._one_for_all else group_index](epoch)

    def _bases(self) -> list[float]:
        functions, groups = len(self.weight_decay_lambdas), len(self.optimizer.param_groups)
        if not self._one_for_all and functions != groups:
            raise ValueError(
                "LambdaWeightDecay: weight_decay_lambda must be one function, or one for each of "
                f"{groups} groups, got {functions}"
            )
        return super()._bases()

    def _saved(self) -> dict[str, Any]:
        attributes = [_attributes(function) for function in self.weight_decay_lambdas]
        return {**super()._saved(), "weight_decay_lambdas": attributes}

    def _check_saved(self, operation: str, saved: dict[str, Any]) -> None:
        super()._check_saved(operation, saved)
        attributes = saved["weight_decay_lambdas"]
        if not isinstance(attributes, list):
            raise ValueError(
                f"{operation}: weight_decay_lambdas must be a list, got {attributes!r}"
            )
        functions, count = len(self.weight_decay_lambdas), len(attributes)
        if count != functions:
            raise ValueError(
                f"{operation}: weight_decay_lambdas must be of {functions} functions, got {count}"
            )
        for index, (function, one) in enumerate(
            zip(self.weight_decay_lambdas, attributes, strict=True)
        ):
            if one is not None and not (isinstance(one, dict) and hasattr(function, "__dict__")):
                raise ValueError(
                    f"{operation}: weight_decay_lambdas[{index}] must be None or the attributes of "
                    f"an object, got {one!r}"
                )

    def _written(self) -> list[dict[str, Any]]:
        own = [_attributes(function) for function in self.weight_decay_lambdas]
        return [*super()._written(), *(one for one in own if one is not None)]

    def _restore(self, saved: dict[str, Any]) -> None:
        all_attributes = saved.pop("weight_decay_lambdas")
        for function, attributes in zip(self.weight_decay_lambdas, all_attributes, strict=True):
            if attributes is not None:
                function.__dict__.update(attributes)
        super()._restore(saved)


class StepWeightDecay(WeightDecayScheduler):
    """Multiplies the weight decay by ``gamma`` every ``step_size`` steps, as ``StepLR`` does.

    Args:
        optimizer: Whose groups to write.
        step_size: Steps between two changes.
        gamma: The factor of a change.
        last_epoch: -1, or where to go on from.

    Raises:
        ValueError: If ``step_size`` is no positive int, or ``gamma`` negative or not finite.
    """

    def __init__(
        self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        """Checks the options; see the class."""
        self.step_size = _positive_int("StepWeightDecay: step_size", step_size)
        self.gamma = _not_negative("StepWeightDecay: gamma", gamma)
        super().__init__(optimizer, last_epoch)

    def _check_saved(self, operation: str, saved: dict[str, Any]) -> None:
        super()._check_saved(operation, saved)
        _positive_int(f"{operation}: step_size", saved["step_size"])
        _not_negative(f"{operation}: gamma", saved["gamma"])

    def weight_decay_at(self, epoch: int, initial: float, group_index: int) -> float:
        """Returns ``initial * gamma ** (epoch // step_size)``."""
        return initial * self.gamma ** (epoch // self.step_size)


class CosineAnnealingWeightDecay(WeightDecayScheduler):
    """Leads the weight decay from its initial to a final value along half a cosine.

    The final value may be the larger one. A group whose initial weight decay is 0, as biases and
    norms often have, stays at 0. After ``T_max`` steps the way goes back, as ``CosineAnnealingLR``
    does.

    Args:
        optimizer: Whose groups to write.
        T_max: Steps from the initial to the final value.
        final_weight_decay: The value after ``T_max`` steps.
        last_epoch: -1, or where to go on from.

    Raises:
        ValueError: If ``T_max`` is no positive int, or ``final_weight_decay`` negative or not
            finite.

    Reference:
        Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017,
        equation 5, without restarts.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        T_max: int,  # noqa: N803, CosineAnnealingLR's name
        final_weight_decay: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        """Checks the options; see the class."""
        name = "CosineAnnealingWeightDecay"
        self.T_max = _positive_int(f"{name}: T_max", T_max)
        self.final_weight_decay = _not_negative(f"{name}: final_weight_decay", final_weight_decay)
        super().__init__(optimizer, last_epoch)

    def _check_saved(self, operation: str, saved: dict[str, Any]) -> None:
        super()._check_saved(operation, saved)
        _positive_int(f"{operation}: T_max", saved["T_max"])
        _not_negative(f"{operation}: final_weight_decay", saved["final_weight_decay"])

    def weight_decay_at(self, epoch: int, initial: float, group_index: int) -> float:
        """Returns the mean of both values, the initial one with the share that is left of it."""
        if initial == 0.0:
            return 0.0
        left = (1.0 + math.cos(math.pi * epoch / self.T_max)) / 2.0
        return initial * left + self.final_weight_decay * (1.0 - left)


def _attributes(function: Callable[[int], float]) -> dict[str, Any] | None:
    """Returns what can be stored of a callable object, None for a function."""
    if isinstance(function, types.FunctionType):
        return None
    return getattr(function, "__dict__", None)


def _options(group: dict[str, Any]) -> list[str]:
    return [name for name in group if name != "params"]


def _positive_int(what: str, value: int) -> int:
    value = plain(value)
    if not is_count(value):
        raise ValueError(f"{what} must be a positive int, got {value!r}")
    return value


def _not_negative(what: str, value: float) -> float:
    if not (is_number(plain(value)) and 0.0 <= value < math.inf):
        raise ValueError(f"{what} must be finite and at least 0, got {value!r}")
    return float(value)
