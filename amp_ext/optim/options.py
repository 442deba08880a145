"""The options of the optimizers, and their checks."""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.plain_numbers import is_number, plain, with_plain_numbers

__all__ = [
    "CODED_STATES",
    "CONFIGURED_OPTIONS",
    "DESCRIPTIONS",
    "NAMES_OF_OPTIONS",
    "OPTIONAL",
    "REFUSED_FLAGS",
    "OptimizerDescription",
    "check_defaults",
    "check_group",
    "check_unique",
    "defaults_of",
    "names_of_all_buffers",
    "options_of",
    "with_plain_options",
]

Options = dict[str, Any]

# Arguments of a constructor that are not options of a group.
_OF_THE_OPTIMIZER = ("self", "params", "track_grad_norms", "norm_guard")

#: The values of ``state_dtype`` that are not the name of a dtype.
CODED_STATES = ("8bit-bf16", "8bit")


# The allowed values of each type of option in words. "unused" flags of torch have no effect here.
_WANTED = {
    "learning rate": "a number or a tensor of one element",
    "number": "a number",
    "number from 0": "a number",
    "limit": "a number or None",
    "numbers": "two numbers or two tensors of one element",
    "flag": "True or False",
    "masters": "True, False, 'split' or 'split8'",
    "states": "torch.float32, torch.bfloat16, '8bit-bf16', '8bit' or None",
    "rounding": "'dither', 'nearest' or None",
    "count": "an integer of at least 0",
    "flag or none": "True, False or None",
    "algorithm": "'muon' or 'adamw'",
    "coefficients": "three numbers, a list of such triples, or 'polar_express'",
    "adjustment": "'original', 'match_rms_adamw', 'spectral_unclamped' or None",
    "unused flag": "True or False",
    "unused flag or none": "True, False or None",
    "refused flag": "True or False",
}
_WANTED_IN_RANGE = {
    "number from 0": "a number of at least 0",
    "limit": "a number of at least 0 or None",
}
# Options that are one of several texts, or None.
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "rounding": (None, "dither", "nearest"),
    "algorithm": ("muon", "adamw"),
    "adjustment": (None, "original", "match_rms_adamw", "spectral_unclamped"),
}
_BELOW_1 = math.nextafter(1.0, 0.0)


class OptionDescription(NamedTuple):
    """An option of a parameter group.

    Attributes:
        name: The key in the group.
        type: A key of the table of types above.
        on_load: How a load sets the option: "required" (the file must have it), "off if missing"
            (older versions of torch do not write it), "kept if missing" (torch has no such option)
            or "kept" (keeps the configured value, whatever the file says).
        refusal: Beginning of torch's error for a default outside [0, largest]; "" if torch accepts
            any value.
        largest: See ``refusal``.
    """

    name: str
    type: str
    on_load: str
    refusal: str = ""
    largest: float = math.inf

    @property
    def is_read(self) -> bool:
        """False for options of torch that have no effect here."""
        return "unused" not in self.type and self.type != "refused flag"


class OptimizerDescription:
    """What the optimizers of one formula have: options, and the names that the kernels know.

    Attributes:
        hyperparameters: The name of the formula in the compiled module.
        options: The options of a group.
        counts_from_buffer: True if torch stores no step count, so that a state without a buffer has
            taken no step so far.
    """

    def __init__(
        self,
        hyperparameters: str,
        own: Sequence[OptionDescription],
        flags_of_torch: str | None = "off if missing",
        decoupled_weight_decay: str = "kept if missing",
        counts_from_buffer: bool = False,
    ) -> None:
        """Adds the common options.

        Args:
            hyperparameters: See the attribute.
            own: The options that other optimizers lack.
            flags_of_torch: How a load sets the flags that torch's optimizers share; None if the
                optimizer has none of them.
            decoupled_weight_decay: How a load sets this option.
            counts_from_buffer: See the attribute.
        """
        self.hyperparameters = hyperparameters
        self.counts_from_buffer = counts_from_buffer
        option = OptionDescription
        kept = (
            option("master_weights", "masters", "kept"),
            option("state_dtype", "states", "kept"),
            option("rounding", "rounding", "kept"),
            option("max_grad_norm", "limit", "kept"),
            option("clip_value", "limit", "kept"),
            option("skip_nonfinite", "flag", "kept"),
        )
        # Part of the formula, so that a file decides, unless it is torch's or of before the option.
        cautious = option("cautious_weight_decay", "flag", "kept if missing")
        if flags_of_torch is None:
            self.options = (*own, cautious, *kept)
            return
        self.options = (
            option("lr", "learning rate", "required", "Invalid learning rate: "),
            option("weight_decay", "number", "required", "Invalid weight_decay value: "),
            option("maximize", "flag", flags_of_torch),
            option("decoupled_weight_decay", "flag", decoupled_weight_decay),
            cautious,
            *kept,
            option("write_back_grads", "flag", "kept"),
            *own,
            option("foreach", "unused flag or none", flags_of_torch),
            option("fused", "unused flag or none", flags_of_torch),
            option("differentiable", "refused flag", flags_of_torch),
        )

    @property
    def operation(self) -> str:
        """The name of the operation over lists, such as "adam_"."""
        return str(getattr(ops, self.hyperparameters).operation)

    @property
    def buffers(self) -> tuple[ops.BufferDescription, ...]:
        """The buffers of the formula, in its order."""
        found: tuple[ops.BufferDescription, ...] = getattr(ops, self.hyperparameters).buffers
        return found


_BETAS = OptionDescription(
    "betas", "numbers", "required", "Invalid beta parameter at index ", _BELOW_1
)
#: The descriptions of the optimizers, by the names of their hyperparameters.
DESCRIPTIONS = {
    each.hyperparameters: each
    for each in (
        OptimizerDescription(
            "AdamHyperparameters",
            (
                _BETAS,
                OptionDescription("eps", "number", "required", "Invalid epsilon value: "),
                OptionDescription("amsgrad", "flag", "off if missing"),
                OptionDescription("denominator_floor", "number from 0", "kept"),
                OptionDescription("capturable", "unused flag", "off if missing"),
            ),
            decoupled_weight_decay="off if missing",
        ),
        OptimizerDescription(
            "SgdHyperparameters",
            (
                OptionDescription("momentum", "number", "required", "Invalid momentum value: "),
                OptionDescription("dampening", "number", "required"),
                OptionDescription("nesterov", "flag", "off if missing"),
            ),
            counts_from_buffer=True,
        ),
        OptimizerDescription("LionHyperparameters", (_BETAS,), flags_of_torch="kept if missing"),
        OptimizerDescription(
            "MuonHyperparameters",
            (
                OptionDescription("algorithm", "algorithm", "kept"),
                OptionDescription(
                    "lr", "learning rate", "required", "Learning rate should be >= 0 but is: "
                ),
                OptionDescription(
                    "weight_decay", "number", "required", "weight_decay should be >= 0 but is: "
                ),
                OptionDescription(
                    "momentum", "number", "required", "momentum should be >= 0 but is: "
                ),
                OptionDescription("nesterov", "flag", "required"),
                OptionDescription("ns_coefficients", "coefficients", "required"),
                OptionDescription("eps", "number from 0", "required"),
                OptionDescription("ns_steps", "count", "required"),
                OptionDescription("adjust_lr_fn", "adjustment", "required"),
                OptionDescription("transposed", "flag", "kept"),
                OptionDescription("flatten", "flag or none", "kept"),
                OptionDescription("scratch_bytes", "count", "kept"),
            ),
            flags_of_torch=None,
            counts_from_buffer=True,
        ),
    )
}
_ALL_OPTIONS = [each for described in DESCRIPTIONS.values() for each in described.options]
#: Names of the options of all optimizers; of those that a load leaves as configured; and of the
#: flags that our optimizers refuse, such as "differentiable".
NAMES_OF_OPTIONS = [*dict.fromkeys(each.name for each in _ALL_OPTIONS)]
CONFIGURED_OPTIONS = [*dict.fromkeys(each.name for each in _ALL_OPTIONS if each.on_load == "kept")]
OPTIONAL = [*CONFIGURED_OPTIONS, "cautious_weight_decay"]  # options that files may lack
REFUSED_FLAGS = [*dict.fromkeys(each.name for each in _ALL_OPTIONS if each.type == "refused flag")]


def names_of_all_buffers() -> set[str]:
    """Returns the names of the buffers of all optimizers."""
    return {each.name for described in DESCRIPTIONS.values() for each in described.buffers}


def options_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the group options among the arguments of a constructor, given its ``locals()``."""
    others = (*_OF_THE_OPTIMIZER, "__class__")
    return {name: value for name, value in arguments.items() if name not in others}


def check_defaults(description: OptimizerDescription, defaults: Options, where: str) -> None:
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
    for option in description.options:
        if not option.refusal:
            continue
        value, is_tuple = defaults[option.name], option.type == "numbers"
        for index, each in enumerate(value if is_tuple else (value,)):
            if not 0.0 <= float(each) <= option.largest:
                place = f"{index}: " if is_tuple else ""
                raise ValueError(f"{option.refusal}{place}{format(each)}")
    is_sgd_with_nesterov = "dampening" in defaults and defaults["nesterov"]
    if is_sgd_with_nesterov and (not defaults["momentum"] or defaults["dampening"]):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")
    for name, numbers in tuples.items():
        if {type(number) for number in numbers} not in ({float}, {Tensor}):
            raise ValueError(f"{name} must be either both floats or both Tensors")
    _check_values(description, defaults, where)


def check_group(description: OptimizerDescription, group: Options, where: str) -> None:
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
    name, dtype = where % "state_dtype", group["state_dtype"]
    if dtype in CODED_STATES and group.get("amsgrad"):
        raise ValueError(
            f"{name} must be torch.float32, torch.bfloat16 or None with amsgrad, got "
            f"{_shown(dtype)}"
        )
    if group["cautious_weight_decay"] and not group.get("decoupled_weight_decay", True):
        raise ValueError(
            f"{where % 'cautious_weight_decay'} must be False for a decay that is added to "
            f"gradients, got {group['cautious_weight_decay']}. Set decoupled_weight_decay=True"
        )
    # Kernels with a split master weight support moments in float32 and bfloat16 only.
    form, is_used = group["master_weights"], group.get("momentum", True) and dtype is None
    dtypes = (getattr(param, "dtype", None) for param in group["params"])
    if isinstance(form, str) and is_used and torch.float16 in dtypes:
        raise ValueError(
            f"{name} must be torch.float32 or torch.bfloat16 for parameters in torch.float16 with "
            f"master_weights={form!r}, got None"
        )


def _check_types(description: OptimizerDescription, options: Options, where: str) -> None:
    for option in description.options:
        if option.name not in options:
            continue
        given = options[option.name]
        value = _plain(given, option.type)
        if not _TYPES[option.type](value):
            wanted = _WANTED[option.type]
            raise TypeError(f"{where % option.name} must be {wanted}, got {_shown(given)}")
        if value is not given:
            options[option.name] = value


def _check_values(description: OptimizerDescription, options: Options, where: str) -> None:
    for option in description.options:
        if not option.is_read or _fits(option.type, options[option.name]):
            continue
        value, kind = options[option.name], option.type
        is_half = kind == "states" and value in (torch.float16, "float16")
        why = ", in which second moments of small gradients are 0" if is_half else ""
        message = (
            f"{where % option.name} must be {_WANTED_IN_RANGE.get(kind, _WANTED[kind])}, got "
            f"{_shown(value)}{why}"
        )
        raise TypeError(message) if kind == "masters" else ValueError(message)
    # A name instead of a dtype, which distributed checkpoints can't store.
    if isinstance(options["state_dtype"], torch.dtype):
        options["state_dtype"] = str(options["state_dtype"]).removeprefix("torch.")
    for option in description.options:
        if option.type == "refused flag" and options.get(option.name):
            raise RuntimeError(
                f"{where % option.name} must be False, got True. Use an optimizer of torch.optim "
                f"for {option.name} steps."
            )


def _fits(kind: str, value: Any) -> bool:
    """Returns True if a step can use a value, which has the right type."""
    if kind == "masters":
        return not isinstance(value, str) or value in ("split", "split8")
    if kind == "states":
        names = ("float32", "bfloat16", *CODED_STATES)
        return value in (None, torch.float32, torch.bfloat16, *names)
    if kind in _CHOICES:
        return value in _CHOICES[kind]
    if kind == "coefficients":
        return value == "polar_express" if isinstance(value, str) else bool(value)
    if kind == "learning rate" and isinstance(value, Tensor):
        return value.numel() == 1  # reading it would wait for the device
    if kind in ("limit", "number from 0", "count"):
        return value is None or _number(value) >= 0.0
    if kind == "numbers":
        return not any(math.isnan(_number(each)) for each in value)
    return "flag" in kind or not math.isnan(_number(value))


def _number(value: Any) -> float:
    """Returns a number, or the element of a tensor; NaN if the tensor has several elements."""
    return math.nan if isinstance(value, Tensor) and value.numel() != 1 else float(value)


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


def with_plain_options(description: OptimizerDescription, options: Options) -> Options:
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


def _is_triple(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 3 and all(map(is_number, value))


# Maps the type of an option to a function that returns True for a value of this type. As in torch,
# a number may be a bool, or a tensor if torch has the option; a flag may be 0, 1 or None. Values of
# "states" are checked later.
_TYPES: dict[str, Callable[[Any], bool]] = {
    "learning rate": _is_tensor_or_number,
    "number": _is_tensor_or_number,
    "number from 0": _is_tensor_or_number,
    "numbers": lambda value: (
        isinstance(value, tuple) and len(value) == 2 and all(map(_is_tensor_or_number, value))
    ),
    "limit": lambda value: value is None or is_number(value),
    "flag": _is_flag,
    "unused flag": _is_flag,
    "unused flag or none": _is_flag,
    "refused flag": _is_flag,
    "masters": lambda value: _is_flag(value) or isinstance(value, str),
    "states": lambda value: True,
    "count": lambda value: is_number(value) and value == int(value),
    "flag or none": _is_flag,
    "coefficients": lambda value: (
        isinstance(value, str)
        or _is_triple(value)
        or (isinstance(value, (tuple, list)) and all(map(_is_triple, value)))
    ),
    **dict.fromkeys(_CHOICES, lambda value: value is None or isinstance(value, str)),
}


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of sizes {tuple(value.shape)}"
    return reprlib.repr(value)
