"""Checks the options of a parameter group against their description in the compiled module.

The compiled module checks the ranges. This file handles what only Python can pass: values of other
types, numpy numbers, and tensors in place of numbers. ``description`` is always the compiled
module's description of the optimizer.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_ext.plain_numbers import is_number, plain, with_plain_numbers

__all__ = [
    "CODED_STATES",
    "check_defaults",
    "check_group",
    "check_unique",
    "defaults_of",
    "options_of",
    "with_plain_options",
]

Options = dict[str, Any]

# Arguments of a constructor that are not options of a group.
_OF_THE_OPTIMIZER = ("self", "params", "track_grad_norms", "norm_guard")

#: The values of ``state_dtype`` that are not the name of a dtype.
CODED_STATES = ("8bit-bf16", "8bit")


def options_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the group options among the arguments of a constructor, given its ``locals()``."""
    others = (*_OF_THE_OPTIMIZER, "__class__")
    return {name: value for name, value in arguments.items() if name not in others}


def check_defaults(description: Any, defaults: Options, where: str) -> None:
    """Checks the options that an optimizer is constructed with, as :func:`check_group` does.

    Where torch checks the range of an option too, the error is torch's.
    """
    _check_types(description, defaults, where)
    if defaults.get("fused") and defaults["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    tuples = {
        each.name: defaults[each.name] for each in description.options if each.type == "numbers"
    }
    each_number = dict(defaults)
    for name, numbers in tuples.items():
        each_number |= {f"{name}[{index}]": number for index, number in enumerate(numbers)}
    for name, number in each_number.items():
        if isinstance(number, Tensor) and number.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element")
    description.check_as_torch(defaults, format)
    for name, numbers in tuples.items():
        if {type(number) for number in numbers} not in ({float}, {Tensor}):
            raise ValueError(f"{name} must be either both floats or both Tensors")
    _check_values(description, defaults, where)


def check_group(description: Any, group: Options, where: str) -> None:
    """Checks that a group has all options, and checks the types and values of the options.

    Replaces numpy numbers by Python numbers, and a dtype in ``state_dtype`` by its name.

    Args:
        description: Description of the optimizer.
        group: The options. Entries that the description does not list are ignored.
        where: Start of the error, with ``%s`` for the name of the option: "Adam: %s of group 1".

    Raises:
        TypeError: If an option is of a wrong type.
        ValueError: If an option is missing (torch raises a KeyError), or has an invalid value.
        RuntimeError: If a flag that must be False is true, such as ``differentiable``.
    """
    for option in description.options:
        if option.is_read and option.name not in group:
            raise ValueError(f"{where % option.name} must be present, got {list(group)}")
    _check_types(description, group, where)
    _check_values(description, group, where)


def _check_types(description: Any, options: Options, where: str) -> None:
    for option in description.options:
        if option.name not in options:
            continue
        given = options[option.name]
        value = _plain(given, option.type)
        fits = _TYPES[option.type](value)
        if not fits or (option.type == "numbers" and len(value) != option.count):
            raise TypeError(f"{where % option.name} must be {option.wanted}, got {_shown(given)}")
        if value is not given:
            options[option.name] = value


def _check_values(description: Any, options: Options, where: str) -> None:
    description.check_options(options, where, _shown)
    # A name instead of a dtype, which distributed checkpoints can't store.
    if isinstance(options["state_dtype"], torch.dtype):
        options["state_dtype"] = str(options["state_dtype"]).removeprefix("torch.")
    for option in description.options:
        if option.type == "refused flag" and options.get(option.name):
            raise RuntimeError(
                f"{where % option.name} must be False, got True. Use an optimizer of torch.optim "
                f"for {option.name} steps."
            )


def defaults_of(kind: type) -> Options:
    """Returns the default values of the options in the constructors of a class."""
    return {
        name: parameter.default
        for name, parameter in _parameters(kind).items()
        if parameter.default is not parameter.empty
    }


@functools.cache
def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    """Returns the options among the constructor parameters of a class and its bases."""
    return {
        parameter.name: parameter
        for base in reversed(kind.__mro__)
        if "__init__" in vars(base)
        for parameter in inspect.signature(vars(base)["__init__"]).parameters.values()
        if parameter.name not in _OF_THE_OPTIMIZER
    }


def check_unique(params: Iterable[Any], where: str) -> None:
    """Checks that a group lists each parameter once.

    Args:
        params: The parameters of the group.
        where: Start of errors, with ``%d`` for the index: "Adam: param %d of group 1".

    Raises:
        ValueError: If a parameter is listed twice.
    """
    first_index: dict[Any, int] = {}
    for index, param in enumerate(params):
        first = first_index.setdefault(param, index)
        if first != index:
            raise ValueError(
                f"{where % index} is already listed as param {first}. List each parameter once."
            )


def with_plain_options(description: Any, options: Options) -> Options:
    """Returns a copy of a group, with Python numbers in place of numpy's."""
    kinds = {each.name: each.type for each in description.options}
    return {
        name: with_plain_numbers(_plain(value, kinds.get(name, "")))
        for name, value in options.items()
    }


def _plain(value: Any, kind: str) -> Any:
    """Returns the value of an option of type ``kind``, with Python numbers in place of numpy's."""
    is_list = isinstance(value, (Sequence, Tensor)) or hasattr(value, "ndim")
    if kind == "numbers" and is_list and not isinstance(value, str):
        return tuple(map(plain, value))
    return plain(value)


def _is_tensor_or_number(value: Any) -> bool:
    return isinstance(value, (Tensor, bool)) or is_number(value)


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool) or is_number(value)


# Maps the type of an option to a function that returns True for a value of this type. As in torch,
# a number may be a bool, or a tensor if torch has the option; a flag may be 0, 1 or None. Values of
# "states" are checked later.
_TYPES: dict[str, Callable[[Any], bool]] = {
    "learning rate": _is_tensor_or_number,
    "number": _is_tensor_or_number,
    "numbers": lambda value: isinstance(value, tuple) and all(map(_is_tensor_or_number, value)),
    "limit": lambda value: value is None or is_number(value),
    "flag": _is_flag,
    "flag or none": _is_flag,
    "refused flag": _is_flag,
    "masters": lambda value: _is_flag(value) or isinstance(value, str),
    "states": lambda value: True,
    "rounding": lambda value: value is None or isinstance(value, str),
}


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of sizes {tuple(value.shape)}"
    return reprlib.repr(value)
