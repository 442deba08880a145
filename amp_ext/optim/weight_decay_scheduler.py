"""Schedules of the weight decay, used like torch's schedules of the learning rate."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from amp_ext.plain_numbers import is_number, plain, with_plain_numbers
from amp_ext.saved_dicts import check_is_dict, check_keys


class WeightDecayScheduler(ABC):
    """Sets ``group["weight_decay"]`` of an optimizer as a function of the number of steps.

    Works with every optimizer whose groups have a weight decay, from amp_ext or torch. A subclass
    defines :meth:`weight_decay_at`. Each value depends only on the number of the step, so a resumed
    run has the same bits as an uninterrupted one. Schedulers of the learning rate can be used as
    well, constructed and stepped in any order.

    Each group stores its initial value as ``initial_weight_decay``. A group that is added later
    joins at the next step, with its own weight decay as the initial value.

    Replays of a CUDA graph use the weight decay from the time of the capture.

    Args:
        optimizer: The optimizer whose groups are set, the first time by this constructor.

    Raises:
        TypeError: If ``optimizer`` is not an optimizer.
        ValueError: If a group has no weight decay.

    Example:
        >>> optimizer = amp_ext.optim.AdamW(model.parameters(), weight_decay=0.1)
        >>> scheduler = CosineAnnealingWeightDecay(optimizer, T_max=1000)
        >>> for x, y in data:
        ...     train_step(x, y)  # ends in optimizer.step()
        ...     scheduler.step()
    """

    _not_saved = frozenset({"optimizer"})

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"{type(self).__name__}: optimizer must be a torch.optim.Optimizer, got "
                f"{type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self.last_epoch = -1
        self.base_weight_decays: list[float] = []
        self._last_weight_decay: list[float] = []
        self.step()

    @abstractmethod
    def weight_decay_at(self, epoch: int, initial: float, group_index: int) -> float:
        """Returns the weight decay of a group, at least 0.

        Args:
            epoch: Number of previous calls of :meth:`step`; 0 for the first values.
            initial: Initial weight decay of the group.
            group_index: Index of the group.
        """

    def step(self) -> None:
        """Sets the next weight decay in every group. Call it after ``optimizer.step()``.

        Raises:
            ValueError: If a value is negative or not finite, or a group has no weight decay.
                Nothing has changed then.
        """
        known = self.base_weight_decays
        if len(known) > len(self.optimizer.param_groups):
            known = []  # Groups were removed. The others store their initial values.
        bases = self._bases(known)
        epoch = self.last_epoch + 1
        values = [float(self.weight_decay_at(epoch, base, i)) for i, base in enumerate(bases)]
        for index, value in enumerate(values):
            if not 0.0 <= value < math.inf:
                raise ValueError(
                    f"{type(self).__name__}.step: weight_decay of group {index} must be finite and "
                    f"at least 0, got {value} for epoch {epoch}"
                )
        self.last_epoch = epoch
        self._write(bases, values)

    def get_last_weight_decay(self) -> list[float]:
        """Returns the weight decays that were set last, one for each group."""
        return self._last_weight_decay[: len(self.optimizer.param_groups)]

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of all attributes except the optimizer, for ``torch.save``."""
        saved = {n: v for n, v in self.__dict__.items() if n not in self._not_saved}
        copied: dict[str, Any] = with_plain_numbers(copy.deepcopy(saved))
        return copied

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state and sets its values in the groups, before or after the optimizer loads.

        Groups that the state does not know start from their own weight decay. Groups that are added
        back before the next step continue from their saved values.

        Args:
            state_dict: A dict from ``state_dict()`` of the same class.

        Raises:
            TypeError: If ``state_dict`` is not a dict.
            KeyError: If an entry is missing, as in the state of another class.
            ValueError: If an entry is invalid. After any error nothing has changed.
        """
        operation = f"{type(self).__name__}.load_state_dict"
        check_is_dict(operation, state_dict)
        wanted = (name for name in self.__dict__ if name not in self._not_saved)
        check_keys(f"{operation}: state_dict", wanted, state_dict)
        loaded = copy.deepcopy({n: v for n, v in state_dict.items() if n not in self._not_saved})
        epoch = loaded["last_epoch"]
        if not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"{operation}: last_epoch must be an int of at least 0, got {epoch!r}")
        known, last = (loaded[name] for name in ("base_weight_decays", "_last_weight_decay"))
        for values in (known, last):
            if not isinstance(values, list) or not all(map(is_number, values)):
                raise ValueError(
                    f"{operation}: base_weight_decays and _last_weight_decay must be lists of "
                    f"numbers, got {values!r}"
                )
        bases = self._bases(known)
        self.__dict__.update(loaded)
        self._write(bases, last + bases[len(last) :])
        self.base_weight_decays = bases + known[len(bases) :]

    def _bases(self, known: list[float]) -> list[float]:
        """Returns the initial value of each group; new groups bring their own.

        Args:
            known: Initial values of the first groups.
        """
        groups = self.optimizer.param_groups
        joining = []
        for index, group in enumerate(groups[len(known) :], len(known)):
            initial = group.get("initial_weight_decay", group.get("weight_decay"))
            if initial is None:
                raise ValueError(
                    f"{type(self).__name__}: param_groups[{index}] must have weight_decay, got "
                    f"{[name for name in group if name != 'params']}"
                )
            joining.append(float(initial))
        return known[: len(groups)] + joining

    def _write(self, bases: list[float], values: list[float]) -> None:
        for group, base, value in zip(self.optimizer.param_groups, bases, values, strict=False):
            # Set again, because a load from a file without a scheduler removes this entry.
            group["initial_weight_decay"] = base
            group["weight_decay"] = value
        self.base_weight_decays = bases
        self._last_weight_decay = values


class LambdaWeightDecay(WeightDecayScheduler):
    """Multiplies the initial weight decay by a function of the epoch, as ``LambdaLR`` does.

    Args:
        optimizer: The optimizer whose groups are set.
        weight_decay_lambda: A function of the epoch, an int from 0, that returns the factor for all
            groups; or a list with one function for each group.

    Raises:
        ValueError: If a list does not have one function for each group.

    Note:
        A state dict does not contain the functions. Pass the same ones again when you resume.
    """

    _not_saved = frozenset({"optimizer", "weight_decay_lambdas"})

    def __init__(
        self,
        optimizer: Optimizer,
        weight_decay_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
    ) -> None:
        self._one_for_all = not isinstance(weight_decay_lambda, (list, tuple))
        given: Any = [weight_decay_lambda] if self._one_for_all else weight_decay_lambda
        self.weight_decay_lambdas: list[Callable[[int], float]] = list(given)
        super().__init__(optimizer)

    def weight_decay_at(self, epoch: int, initial: float, group_index: int) -> float:
        """Returns ``initial * weight_decay_lambda(epoch)``."""
        return initial * self.weight_decay_lambdas[0 if self._one_for_all else group_index](epoch)

    def _bases(self, known: list[float]) -> list[float]:
        functions, groups = len(self.weight_decay_lambdas), len(self.optimizer.param_groups)
        if not self._one_for_all and functions != groups:
            raise ValueError(
                "LambdaWeightDecay: weight_decay_lambda must be one function, or one for each of "
                f"{groups} groups, got {functions}"
            )
        return super()._bases(known)


class StepWeightDecay(WeightDecayScheduler):
    """Multiplies the weight decay by ``gamma`` every ``step_size`` steps, as ``StepLR`` does.

    Args:
        optimizer: The optimizer whose groups are set.
        step_size: Number of steps between two changes.
        gamma: Factor of each change.
    """

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> None:
        self.step_size = plain(step_size)
        self.gamma = plain(gamma)
        super().__init__(optimizer)

    def weight_decay_at(self, epoch: int, initial: float, group_index: int) -> float:
        """Returns ``initial * gamma ** (epoch // step_size)``."""
        return initial * self.gamma ** (epoch // self.step_size)


class CosineAnnealingWeightDecay(WeightDecayScheduler):
    """Moves the weight decay from its initial to a final value along half a cosine.

    The final value may be larger than the initial one. A group whose initial weight decay is 0, as
    is common for biases and norms, stays at 0. After ``T_max`` steps the value moves back, as with
    ``CosineAnnealingLR``.

    Args:
        optimizer: The optimizer whose groups are set.
        T_max: Number of steps from the initial to the final value.
        final_weight_decay: The value after ``T_max`` steps.

    Reference:
        Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017,
        equation 5, without restarts.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        T_max: int,  # noqa: N803, CosineAnnealingLR's name
        final_weight_decay: float = 0.0,
    ) -> None:
        self.T_max = plain(T_max)
        self.final_weight_decay = plain(final_weight_decay)
        super().__init__(optimizer)

    def weight_decay_at(self, epoch: int, initial: float, group_index: int) -> float:
        """Returns the average of the initial and the final value, weighted by the cosine."""
        if initial == 0.0:
            return 0.0
        left = (1.0 + math.cos(math.pi * epoch / self.T_max)) / 2.0
        return initial * left + self.final_weight_decay * (1.0 - left)


class CorrectedWeightDecay(WeightDecayScheduler):
    """Multiplies the weight decay by ``lr / max_lr``, for layers that a norm follows.

    The norm cancels the size of such weights. Decay then moves the ratio of gradient to weight
    towards a balance, which depends on ``weight_decay / lr``: under a schedule that lowers the
    learning rate, gradients grow towards the end of the training. With this correction, the balance
    stays where it is. Give other layers groups of their own, with None as ``max_lr``.

    Each value depends on the learning rate of its group, so construct and step this schedule after
    those of the learning rate. The host waits for a learning rate that is a tensor on a GPU.

    Args:
        optimizer: The optimizer whose groups are set.
        max_lr: The largest learning rate of the schedule, at which the weight decay has its initial
            value; or a list with one for each group, None for a group that keeps its weight decay.
            A larger learning rate gives a weight decay above the initial value.

    Raises:
        ValueError: If a number is not finite and above 0, or a list does not have one for each
            group.

    Example:
        >>> groups = [{"params": normalized}, {"params": others}]
        >>> optimizer = amp_ext.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
        >>> rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
        >>> decays = CorrectedWeightDecay(optimizer, max_lr=[1e-3, None])
        >>> for x, y in data:
        ...     train_step(x, y)  # ends in optimizer.step()
        ...     rates.step()
        ...     decays.step()

    Reference:
        Defazio, "Why Gradients Rapidly Increase Near the End of Training", arXiv 2506.02285.
    """

    def __init__(self, optimizer: Optimizer, max_lr: float | Sequence[float | None]) -> None:
        given: Any = max_lr
        is_list = isinstance(given, (list, tuple))
        self.max_lr: Any = [*map(plain, given)] if is_list else plain(given)
        each: Any
        for each in self.max_lr if is_list else [self.max_lr]:
            is_kept = is_list and each is None
            if not is_kept and not (is_number(each) and 0.0 < each < math.inf):
                raise ValueError(
                    f"CorrectedWeightDecay: max_lr must be finite and above 0, got {max_lr!r}"
                )
        super().__init__(optimizer)

    def weight_decay_at(self, epoch: int, initial: float, group_index: int) -> float:
        """Returns ``initial * lr / max_lr`` with the present learning rate of the group."""
        largest = self.max_lr[group_index] if isinstance(self.max_lr, list) else self.max_lr
        if largest is None:
            return initial
        return initial * (float(self.optimizer.param_groups[group_index]["lr"]) / largest)

    def _bases(self, known: list[float]) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if isinstance(self.max_lr, list) and len(self.max_lr) != groups:
            raise ValueError(
                f"CorrectedWeightDecay: max_lr must be one number, or one for each of {groups} "
                f"groups, got {len(self.max_lr)}"
            )
        return super()._bases(known)
