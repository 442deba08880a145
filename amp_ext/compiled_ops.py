"""The operations as ``torch.compile`` takes them: whole, with what each of them writes declared.

``operation`` makes an operator of a function of :mod:`amp_ext.ops`, by its signature, as
``torch.ops.amp_ext.adam``. Inside a compiled region the function calls its operator; elsewhere it
runs directly, which costs 40 µs less. A schema has no optional lists that are written: whether one
is given is an argument of its own. A learning rate is two as well, a number and a tensor.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

#: The operators by their names, without namespace.
OPERATORS: dict[str, Any] = {}

_LIST = "Sequence[Tensor] | None"
_NUMBER_OR_TENSOR = "float | Tensor"

# What an operator takes for an argument of a function: its names behind the argument's, and types.
_TYPES: dict[str, dict[str, Any]] = {
    "Tensor": {"": Tensor},
    "Tensor | None": {"": Tensor | None},
    "Sequence[Tensor]": {"": Sequence[Tensor]},
    "Sequence[int] | None": {"": Sequence[int] | None},
    _LIST: {"": Sequence[Tensor], "_given": bool},
    _NUMBER_OR_TENSOR: {"": float, "_tensor": Tensor | None},
    "float | None": {"": float | None},
    "float": {"": float},
    "int": {"": int},
    "int | None": {"": int | None},
    "bool": {"": bool},
    "None": {"": None},
}


def __getattr__(name: str) -> Any:
    """Gives the operators as attributes: ``compiled_ops.adam``."""
    if name in OPERATORS:
        return OPERATORS[name]
    raise AttributeError(f"module 'amp_ext.compiled_ops' has no attribute {name!r}")


def named_arguments(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Returns a function of the same signature that returns its arguments by name.

    So Python itself checks a call, in its own words, which name the function.
    """
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    head = inspect.Signature(bare)
    body = ", ".join(f"{parameter.name!r}: {parameter.name}" for parameter in bare)
    namespace: dict[str, Any] = {"inf": math.inf}  # a default
    exec(f"def {function.__name__}{head}: return {{{body}}}", namespace)
    return namespace[function.__name__]


def operation(
    *, writes: Collection[str], without: Collection[str] = ()
) -> Callable[[Function], Function]:
    """Registers a function of lists of tensors as an operator, which it calls inside a graph.

    Args:
        writes: The arguments that the function writes.
        without: Arguments that an operator does not have; a call that gives one is not compiled.

    Raises:
        KeyError: If an argument has a type that operators have not.
    """

    def decorate(function: Function) -> Function:
        name = function.__name__.rstrip("_")
        signature = inspect.signature(function)
        types = {p.name: p.annotation for p in signature.parameters.values()}
        types = {argument: type_ for argument, type_ in types.items() if argument not in without}
        by_name = named_arguments(function)

        def refusal(count: int, names: tuple[str, ...]) -> str:
            """Returns why Python refuses a call with so many arguments and these names, or ""."""
            try:
                by_name(*range(count), **dict.fromkeys(names))
            except TypeError as error:
                return str(error)
            return ""

        # Called and not traced, as by `torch.compiler.assume_constant_result`, which would import
        # dynamo for a second. Traced, a wrong call is refused too, but in dynamo's words.
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

        def kernel(*values: Any) -> Any:  # torch leaves out the last ones that are the defaults
            return function(**_deep(types, iter(values)))

        # Arguments behind all tensors have defaults, so that more of them can come.
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
    """Returns the values that an operator takes for an argument."""
    value, type_ = arguments[argument], types[argument]
    if type_ == _NUMBER_OR_TENSOR:
        return [0.0, value] if isinstance(value, Tensor) else [value, None]
    if type_ == _LIST:
        return [[], False] if value is None else [value, True]
    return [value]


def _deep(types: dict[str, str], values: Any) -> dict[str, Any]:
    """Returns the arguments of a function for the values that its operator was given."""
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
