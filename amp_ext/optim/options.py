"""Whether the options of a group are what the signature of its optimizer says."""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_ext.ops import OptionDescription
from amp_ext.optim.moments import CODED_STATES
from amp_ext.plain_numbers import is_number, plain, with_plain_numbers

__all__ = [
    "check_are_there",
    "check_as_torch",
    "check_types",
    "check_values",
    "defaults_of",
    "options_of",
    "with_plain_options",
]

Options = dict[str, Any]


def options_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the options among the arguments of a constructor, given its ``locals()``."""
    others = ("self", "params", "__class__")
    return {name: value for name, value in arguments.items() if name not in others}


def check_as_torch(description: Any, defaults: Options) -> None:
    """Checks the ranges of defaults whose types are right, in torch's words.

    Args:
        description: The class of the compiled module that describes the optimizer.
        defaults: Its options as it is constructed.

    Raises:
        ValueError: If one is out of the range that torch checks.
    """
    tuples = {
        each.name: defaults[each.name] for each in description.options if each.kind == "numbers"
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


def check_are_there(described: Iterable[OptionDescription], options: Options, where: str) -> None:
    """Checks that a group has all options that a step reads: no default stands in for one.

    Args:
        described: The options of the optimizer.
        options: Those of the group.
        where: What messages say, with ``%s`` for the name: "Adam: %s of group 1".

    Raises:
        ValueError: If one is missing. torch raises a KeyError, which would print this in quotes.
    """
    for option in described:
        if option.is_read and option.name not in options:
            raise ValueError(f"{where % option.name} must be there, got {list(options)}")


def defaults_of(kind: type) -> Options:
    """Returns what the options of a class are where its constructor is not told."""
    return {
        name: parameter.default
        for name, parameter in _parameters(kind).items()
        if parameter.default is not parameter.empty
    }


def with_plain_options(kind: type, options: Options) -> Options:
    """Returns a copy of the options of a group, and of what stands beside them, without numpy."""
    annotations = _annotations(kind)
    return {
        name: with_plain_numbers(_plain(value, annotations.get(name, "")))
        for name, value in options.items()
    }


def check_types(kind: type, options: Options, where: str) -> None:
    """Checks the types of options by the annotations of a constructor.

    Writes numbers of numpy back as those of Python.

    Args:
        kind: The class of the optimizer.
        options: Those of a group, or the defaults. What no signature names is left alone.
        where: What messages say, with ``%s`` for the name: "Adam: %s of group 1".

    Raises:
        TypeError: If an option is of a wrong type.
    """
    for name, annotation in _annotations(kind).items():
        if name not in options:
            continue
        given = options[name]
        value = _plain(given, annotation)
        fits, wanted = _TYPES[annotation]
        if not fits(value):
            raise TypeError(f"{where % name} must be {wanted}, got {_shown(given)}")
        if value is not given:
            options[name] = value


def check_values(kind: type, options: Options, where: str, not_negative: Collection[str]) -> None:
    """Checks the values of options whose types are right; stores ``state_dtype`` by its name.

    Ranges of options that torch has are left to it: it checks them as defaults only, so that a
    group may well have others. What no step has a use for is refused in every group.

    Args:
        kind: The class of the optimizer.
        options: Those of a group, or the defaults.
        where: What messages say, with ``%s`` for the name.
        not_negative: Names of numbers that must be 0 or more.

    Raises:
        ValueError: If a number is NaN or negative, a tensor has other than one element, or
            ``state_dtype`` or ``rounding`` is not one.
        RuntimeError: If ``differentiable`` is true.
    """
    for name, annotation in _annotations(kind).items():
        if name not in options:
            continue
        value, wanted = options[name], _TYPES[annotation][1]
        if name in not_negative:
            wanted = wanted.replace("a number", "a number of at least 0")
            fits = value is None or value >= 0.0
        else:
            fits = all(_has_sense(number) for number in _numbers(value, annotation))
        if not fits:
            raise ValueError(f"{where % name} must be {wanted}, got {_shown(value)}")
    rounding = options["rounding"]
    if rounding not in ("dither", "nearest", None):
        raise ValueError(f"{where % 'rounding'} must be {_A_ROUNDING}, got {_shown(rounding)}")
    options["state_dtype"] = _name_of_state_dtype(options["state_dtype"], where % "state_dtype")
    if options.get("differentiable"):
        raise RuntimeError(
            f"{where % 'differentiable'} must be False, got True: a fused kernel is not "
            "differentiable; torch.optim's optimizers are"
        )


def _name_of_state_dtype(dtype: Any, what: str) -> str | None:
    """Returns what a group has; distributed checkpoints refuse a torch.dtype there."""
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    if dtype is None or (isinstance(dtype, str) and dtype in (*names.values(), *CODED_STATES)):
        return dtype
    if isinstance(dtype, torch.dtype) and dtype in names:
        return names[dtype]
    why = ""
    if dtype in (torch.float16, "float16"):
        why = ", in which second moments of small gradients are 0"
    raise ValueError(
        f"{what} must be torch.float32, torch.bfloat16, '8bit-bf16', '8bit' or None, got "
        f"{_shown(dtype)}{why}"
    )


@functools.cache
def _annotations(kind: type) -> dict[str, str]:
    """Returns the options of a class whose types are checked here, as they are written."""
    return {
        name: parameter.annotation
        for name, parameter in _parameters(kind).items()
        if isinstance(parameter.annotation, str) and parameter.annotation in _TYPES
    }


@functools.cache
def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    """Returns the options that the constructors of a class name."""
    return {
        parameter.name: parameter
        for base in reversed(kind.__mro__)
        if "__init__" in vars(base)
        for parameter in inspect.signature(vars(base)["__init__"]).parameters.values()
        if parameter.name not in ("self", "params")
    }


def _is_tensor_or_number(value: Any) -> bool:
    return isinstance(value, (Tensor, bool)) or is_number(value)


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool) or is_number(value)


def _are_two(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_tensor_or_number, value))


_A_ROUNDING = "'dither', 'nearest' or None"
_TWO_NUMBERS = "tuple[float | Tensor, float | Tensor]"

# What fits an annotation, and its name in messages. As to torch, a bool is a number, a tensor of
# one element will do for any number that torch knows, and 0, 1 and None are flags.
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "float": (_is_tensor_or_number, "a number"),
    "float | Tensor": (_is_tensor_or_number, "a number or a tensor of one element"),
    "float | None": (lambda value: value is None or is_number(value), "a number or None"),
    "bool": (_is_flag, "True or False"),
    "bool | None": (_is_flag, "True, False or None"),
    "bool | Literal['split', 'split8']": (
        lambda value: _is_flag(value) or value in ("split", "split8"),
        "True, False, 'split' or 'split8'",
    ),
    "Literal['dither', 'nearest'] | None": (
        lambda value: value is None or isinstance(value, str),
        _A_ROUNDING,
    ),
    _TWO_NUMBERS: (_are_two, "two numbers or two tensors of one element"),
}


def _plain(value: Any, annotation: str) -> Any:
    """Returns an option without numbers of numpy."""
    is_list = isinstance(value, (Sequence, Tensor)) or hasattr(value, "ndim")
    if annotation == _TWO_NUMBERS and is_list and not isinstance(value, str):
        return tuple(map(plain, value))
    return plain(value)


def _numbers(value: Any, annotation: str) -> tuple[Any, ...]:
    return value if annotation == _TWO_NUMBERS else (value,)


def _has_sense(number: Any) -> bool:
    """Returns whether it is neither NaN, which the host sees, nor a tensor of several elements."""
    if isinstance(number, Tensor):
        return number.numel() == 1
    return not (is_number(number) and math.isnan(number))


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of sizes {tuple(value.shape)}"
    return reprlib.repr(value)
