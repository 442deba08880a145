"""What an optimizer says of itself and of its groups, and whether the options fit that."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.nonfinite import check_params
from amp_ext.optim.options import check_defaults, check_group
from amp_ext.optim.state_store import check_flattened

__all__ = ["DescribedOptimizer"]


class DescribedOptimizer(torch.optim.Optimizer):
    """An optimizer whose options and buffers the compiled module and its own signature describe."""

    # The description of the compiled module that names the formula.
    _hyperparameters_class: ClassVar[str]

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        """Checks the options and adds the parameters.

        Args:
            params: Parameters or groups, as for torch.optim.Optimizer.
            defaults: Options of the groups, as :func:`options_of` takes them from a signature.
        """
        if isinstance(params, (set, frozenset)):
            raise TypeError(
                f"{type(self).__name__}: params must have an order that stays, as in a list, got "
                f"a {type(params).__name__}"
            )
        check_defaults(self.description, defaults, f"{type(self).__name__}: %s")
        super().__init__(params, defaults)

    @functools.cached_property
    def description(self) -> ops.OptimizerDescription:
        """What the compiled module says of the optimizer."""
        try:
            found: ops.OptimizerDescription = getattr(ops, self._hyperparameters_class)
        except AttributeError:
            raise TypeError(
                f"{type(self).__name__}: _hyperparameters_class must name a class of the compiled "
                f"module, got {getattr(self, '_hyperparameters_class', None)!r}"
            ) from None
        return found

    def state_spec_of(self, group: dict[str, Any]) -> ops.StateSpec:
        """Returns what the parameters of a group keep in their states."""
        spec: ops.StateSpec = self.description.state_spec(type(self).__name__, group)
        return spec

    # Groups.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as torch.optim.Optimizer does.

        Args:
            param_group: ``params`` and the options that differ from the defaults.

        Raises:
            TypeError: If an option is of a wrong type.
            ValueError: If a parameter is listed twice, or an option can't be used. The group has
                not been added then, nor after an interrupt.
            RuntimeError: If ``differentiable`` is true; likewise.
        """
        count = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            self.check_options(group, f"{type(self).__name__}: %s of group {count}")
            self._check_unique(group["params"], count)
            spec = self.state_spec_of(group)
            for param in group["params"]:
                check_flattened(spec, param)
        except BaseException:  # also an interrupt, after which a notebook goes on
            del self.param_groups[count:]
            raise

    def _check_unique(self, params: list[Tensor], group_index: int) -> None:
        first_index: dict[Tensor, int] = {}
        for index, param in enumerate(params):
            if first_index.setdefault(param, index) != index:
                raise ValueError(
                    f"{type(self).__name__}: param {index} of group {group_index} must be listed "
                    f"once, got it as param {first_index[param]} already"
                )

    def check_options(self, options: dict[str, Any], where: str) -> None:
        """Checks the options of a group, whoever wrote them; ``where`` has ``%s`` for the name.

        A group may come from a file or a class that knows torch's options alone: those that torch's
        class does not have are then as the optimizer was constructed.
        """
        for option in self.description.options:
            if option.on_load in ("kept", "kept if missing") and option.name in self.defaults:
                options.setdefault(option.name, self.defaults[option.name])
        check_group(self.description, options, where)

    def _check_groups(self) -> None:
        """Checks what a loop may have written into the groups."""
        for index, group in enumerate(self.param_groups):
            self.check_options(group, f"{type(self).__name__}: %s of group {index}")

    def _check_params(self, operation: str) -> None:
        """Checks that an operation can read the parameters of all groups."""
        for index, group in enumerate(self.param_groups):
            check_params(group, f"{type(self).__name__}.{operation}: %s of group {index}")
