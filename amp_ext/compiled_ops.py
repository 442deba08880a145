"""Registers the operations for ``torch.compile``, as operators that declare what they write.

The decorator ``operation`` derives an operator such as ``torch.ops.amp_ext.adam`` from a function
of :mod:`amp_ext.ops`. Inside a compiled region the function calls its operator; elsewhere it runs
directly, which saves 40 µs. Operators can't write optional lists, so such an argument becomes two:
a list, and a bool that is true if the list was given. A learning rate becomes a number and a
tensor.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

#: Maps the names of the operators, without namespace, to the operators.
OPERATORS: dict[str, Any] = {}

_LIST = "Sequence[Tensor] | None"
_NUMBER_OR_TENSOR = "float | Tensor"

# Maps the annotation of a function's argument to the operator's arguments that replace it, by the
# suffixes of their names: "lr: float | Tensor" becomes "lr: float" and "lr_tensor: Tensor | None".
_TYPES: dict[str, dict[str, Any]] = {
    "Tensor": {"": Tensor},
    "Tensor | None": {"": Tensor | None},
    "Sequence[Tensor]": {"": Sequence[Tensor]},
    "Sequence[int] | None": {"": Sequence[int] | None},
    _LIST: {"": Sequence[Tensor], "_given": bool},
    _NUMBER_OR_TENSOR: {"": float, "_tensor": Tensor | None},
    "float | None": {"": float | None},
    "Sequence[float]": {"": Sequence[float]},
    "str | None": {"": str | None},
    "bool | None": {"": bool | None},
    "float": {"": float},
    "int": {"": int},
    "int | None": {"": int | None},
    "bool": {"": bool},
    "None": {"": None},
}


def __getattr__(name: str) -> Any:
    """Returns an operator by its name, as in ``compiled_ops.adam``."""
    if name in OPERATORS:
        return OPERATORS[name]
    raise AttributeError(f"module 'amp_ext.compiled_ops' has no attribute {name!r}")


def arguments_of(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Returns a function that returns the arguments of a right call by their names."""
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}

    def by_name(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}

    return by_name


def operation(
    *, writes: Collection[str], without: Collection[str] = ()
) -> Callable[[Function], Function]:
    """Returns a decorator that registers a function as an operator, for use in compiled graphs.

    Args:
        writes: Names of the arguments that the function writes.
        without: Names of the arguments that the operator lacks. A call that passes one of them runs
            the function itself.

    Raises:
        KeyError: If an argument has a type that operators don't support.
    """

    def decorate(function: Function) -> Function:
        name = function.__name__.rstrip("_")
        signature = inspect.signature(function)
        types = {p.name: p.annotation for p in signature.parameters.values()}
        types = {argument: type_ for argument, type_ in types.items() if argument not in without}
        by_name = arguments_of(function)

        def refusal(count: int, names: tuple[str, ...]) -> str:
            """Returns the message of a TypeError for these arguments, or "" if they fit."""
            try:
                signature.bind(*range(count), **dict.fromkeys(names))
            except TypeError as error:
                return f"{function.__name__}() {error}"
            return ""

        # Dynamo calls this function instead of tracing it, so that a wrong call raises a TypeError.
        # `torch.compiler.assume_constant_result` would import dynamo, which takes a second.
        refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                if refused := refusal(len(args), tuple(kwargs)):
                    raise TypeError(refused)
                arguments = by_name(*args, **kwargs)
                if all(arguments[argument] is None for argument in without):
                    flat = [v for argument in types for v in _flat(types, argument, arguments)]
                    return getattr(torch.ops.amp_ext, name)(*flat)
            return function(*args, **kwargs)

        def kernel(*values: Any) -> Any:  # torch omits trailing arguments that have default values
            return function(**_deep(types, iter(values)))

        # Only arguments after the last tensor have defaults in the operator: later releases append
        # there.
        last = max(i for i, type_ in enumerate(types.values()) if "Tensor" in type_)
        flat_parameters = [
            inspect.Parameter(
                argument + suffix,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                annotation=flat_type,
                default=signature.parameters[argument].default
                if i > last
                else inspect.Parameter.empty,
            )
            for i, (argument, type_) in enumerate(types.items())
            for suffix, flat_type in _TYPES[type_].items()
        ]
        returned = _TYPES[signature.return_annotation][""]
        kernel.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            flat_parameters, return_annotation=returned
        )
        OPERATORS[name] = torch.library.custom_op(f"amp_ext::{name}", kernel, mutates_args=writes)
        return run  # type: ignore[return-value]

    return decorate


def _flat(types: dict[str, str], argument: str, arguments: dict[str, Any]) -> list[Any]:
    """Returns the values that the operator takes for one argument of the function."""
    value, type_ = arguments[argument], types[argument]
    if type_ == _NUMBER_OR_TENSOR:
        return [0.0, value] if isinstance(value, Tensor) else [value, None]
    if type_ == _LIST:
        return [[], False] if value is None else [value, True]
    return [value]


def _deep(types: dict[str, str], values: Any) -> dict[str, Any]:
    """Inverse of :func:`_flat`: returns the arguments of the function."""
    arguments = {}
    for (argument, type_), value in zip(types.items(), values, strict=False):
        if type_ == _NUMBER_OR_TENSOR:
            tensor = next(values)
            arguments[argument] = value if tensor is None else tensor
        elif type_ == _LIST:
            arguments[argument] = value if next(values) else None
        else:
            arguments[argument] = value
    return arguments
