"""The kernels of amp_ext as functions over lists of tensors.

All tensors of a call are on one device, the CPU or a GPU, and are float32, float64, float16 or
bfloat16. Any dense or strided layout will do; tensors that are written may not share memory.
Elements are computed in float32, those of float64 parameters in float64, and rounded once to the
nearest number of the stored dtype, unless ``dither`` is given. Nothing synchronises the host with a
GPU.

Inside ``torch.compile`` every function but those that convert states (:func:`split_fp32`,
:func:`quantize_ratios` and the like) is one operator of the graph (:mod:`amp_ext.compiled_ops`).

Every function raises RuntimeError on bad input, before anything is written, and names the
argument, its index, what is wanted and what came. If a GPU refuses a launch after others, torch's
error says how many tensors were written; each of them is whole, with its states and its step.

Options of a step, which :func:`adam_`, :func:`sgd_` and the others have in common:

* ``params``: Parameters of any shapes. Updated in place.
* ``grads``: Gradients of the parameters' shapes, only read but for ``write_back_grads``.
* ``steps``: Steps taken so far, one float32 each. Incremented; from 2^24 on to the next float32.
* ``timestep``: Number of this step, from 1, of a caller who counts: in place of ``steps``.
* ``master_params``: float32 masters of 16-bit parameters, or None. Updated in place; the parameter
  becomes the rounded master. Where a master does not round to its parameter before the step, it
  becomes the parameter first. Instead, the lower parts of split masters (:func:`split_fp32`),
  whose upper parts the parameters are.
* ``lr``: Learning rate; as a tensor, one element, read on its device.
* ``weight_decay``: Weight decay per step, before the learning rate.
* ``maximize``: Ascends instead.
* ``decoupled_weight_decay``: Shrinks parameters (AdamW) instead of adding to gradients.
* ``grad_scale``: One number, the loss scale that the gradients still carry, or None.
* ``found_inf``: One number, or None. If it is not 0, nothing at all is written.
* ``clip_value``: Largest magnitude of an unscaled gradient, after ``max_grad_norm``.
* ``max_grad_norm``: Norm to keep all unscaled gradients together below.
* ``sum_of_squares``: One float64, of the gradients as they are (:func:`check_finite_`). Without it,
  ``max_grad_norm`` costs a look at all gradients; with ``skip_nonfinite`` leave it to that look,
  which counts finite elements only.
* ``grad_norm``: One float32. Set to the norm of the unscaled gradients if there is a
  ``max_grad_norm``.
* ``write_back_grads``: Stores the unscaled, clipped gradients, in their dtype.
* ``skip_nonfinite``: Leaves every element alone whose gradient is inf or NaN, and leaves those out
  of the norm.
* ``dither``: Rounds what would freeze otherwise in the right proportion of steps up and down: in 16
  or 8 bits, parameters without a master, second moments, small and large ratios to them, momenta in
  8 bits, and first moments of a decay of 0.99 and more.
  Asks for ``steps`` or a ``timestep``, on whose number the rounding depends.
* ``global_offsets``: Where the first element of each parameter stands in the whole of which it is a
  part, for the dither to be that of the whole; None: each is the whole.
* ``exponents``: For moments in 8 bits that have groups (:func:`quantize_blockwise`), uint8, one for
  each 32 elements; empty for a parameter without such. Updated in place.

Buffers have the parameters' shapes and are float32, bfloat16 or in the parameter's dtype; float64
for float64 parameters. Or they have codes of 8 bits, beside gradients of the parameter's dtype:
first moments int8 (:func:`quantize_ratios`) beside second moments in bfloat16 or uint8, and where
there is no second moment uint8 (both :func:`quantize_blockwise`, in the order of the parameter's
memory); no moments beside a maximum. They are updated in place.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from amp_ext.binary import load_binary
from amp_ext.compiled_ops import OPERATORS, named_arguments, operation
from amp_ext.plain_numbers import timestep_of

if TYPE_CHECKING:
    from amp_ext import _C as _C

    binary = _C  # which __getattr__ gives, and what follows
    StateSpec = _C.StateSpec
    ParamRef = _C.ParamRef
    OptimizerDescription = _C.OptimizerDescription
    OptionDescription = _C.OptionDescription
    InspectedStep = _C.InspectedStep
    NormStatistics = _C.NormStatistics
    Plan = _C.Plan
    WeightAverages = _C.WeightAverages

__all__ = [
    "OptimizerType",
    "OptimizerWorkspace",
    "adam_",
    "average_weights_",
    "check_finite_",
    "clip_grads_",
    "count_nonfinite",
    "cpu_isa",
    "dequantize_blockwise",
    "dequantize_ratios",
    "join_fp32",
    "lion_",
    "optimizer_update_",
    "quantize_blockwise",
    "quantize_ratios",
    "refresh_masters_",
    "sgd_",
    "split_fp32",
    "unscale_",
    "update_scale_",
]

if not TYPE_CHECKING:
    _C = load_binary()


Function = TypeVar("Function", bound=Callable[..., Any])


def __getattr__(name: str) -> Any:
    """Gives the scaler and the optimizers what the binary has beside the operations.

    The files of operations that this one takes in get all of it.
    """
    if name == "binary":
        return _C
    if not name.startswith("_") and hasattr(_C, name):
        return getattr(_C, name)
    raise AttributeError(f"module 'amp_ext.ops' has no attribute {name!r}")


def step_operation(function: Function) -> Function:
    """Makes the step of an optimizer of its signature, which is all that names its arguments.

    The body holds checks that the compiled operation of the same name does not make.
    """
    parameters = inspect.signature(function).parameters.values()
    lists = [p.name for p in parameters if p.annotation.startswith("Sequence[Tensor]")]
    lists.remove("exponents")  # a schema has no further lists that may be absent
    by_name = named_arguments(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        arguments = by_name(*args, **kwargs)
        timestep = arguments.pop("timestep")
        if timestep is not None:
            arguments["timestep"] = timestep_of(function.__name__, timestep)
        getattr(_C, function.__name__)(**arguments)

    return operation(writes=(*lists, "grad_norm"), without=("exponents",))(run)  # type: ignore[return-value]


def cpu_isa() -> str:
    """Returns the instruction set of the CPU kernels: "avx512", "avx2" or "plain".

    It is the widest that the processor has, or the one that the environment variable
    ``AMP_EXT_CPU_ISA`` names when the first kernel runs.
    """
    return _C.cpu_isa()


def is_profiled() -> bool:
    """Returns whether a profiler or an observer of torch's wants to know when something begins."""
    return _C.is_profiled()


@operation(writes=("found_inf", "sum_of_squares", "first_nonfinite"))
def check_finite_(
    tensors: Sequence[Tensor],
    found_inf: Tensor,
    *,
    grad_scale: Tensor | None = None,
    sum_of_squares: Tensor | None = None,
    first_nonfinite: Tensor | None = None,
) -> None:
    """Reports any inf or NaN among tensors, which it only reads, and sums their squares.

    The sum is taken in one fixed order, whatever the number of threads: the same bits every run.
    A square too large or too small for float32 counts in full.

    Args:
        tensors: Tensors of any shapes and dtypes; expanded ones too.
        found_inf: One float32. Set to 1 when an element is inf or NaN, otherwise left as it is.
        grad_scale: One float32, the loss scale, or None. A scale whose inverse is not finite (0 or
            1e-39) counts as an overflow: its gradients can't be unscaled.
        sum_of_squares: One float64, or None. Set to the sum over all elements.
        first_nonfinite: One int64, or None. Lowered to the index of the first tensor that holds an
            inf or NaN, if it was larger.

    Raises:
        RuntimeError: If a dtype is not floating, or the tensors differ in device.

    Reference:
        Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """
    _C.check_finite_(tensors, found_inf, grad_scale, sum_of_squares, first_nonfinite)


@operation(writes=())
def count_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Counts the infs and NaNs of each tensor.

    Args:
        tensors: Tensors of any shapes and dtypes, only read.

    Returns:
        int64 of shape ``[len(tensors)]``, on the tensors' device.

    Raises:
        RuntimeError: If a dtype is not floating, or the tensors differ in device.
    """
    return _C.count_nonfinite(tensors)


@OPERATORS["count_nonfinite"].register_fake
def _(tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device if tensors else "cpu"
    return torch.empty(len(tensors), dtype=torch.int64, device=device)


@operation(writes=("grads",))
def clip_grads_(grads: Sequence[Tensor], total_norm: Tensor, *, max_norm: float) -> None:
    """Scales gradients down to a norm, given the one that they have.

    Args:
        grads: Gradients of any shapes and dtypes. Multiplied in place by
            ``max_norm / (total_norm + 1e-6)``; nothing is written where that is 1 or more.
        total_norm: One float32 or float64, the norm of all gradients together. float64 gradients
            are multiplied in float64 if it is one, all others in float32.
        max_norm: Norm to keep below.

    Raises:
        RuntimeError: If a dtype is not floating, or the tensors differ in device or overlap.

    Reference:
        Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks",
        2013.
    """
    _C.clip_grads_(grads, total_norm, max_norm)


@operation(writes=("grads", "found_inf", "first_nonfinite"))
def unscale_(
    grads: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    *,
    first_nonfinite: Tensor | None = None,
) -> None:
    """Multiplies gradients by ``inv_scale`` and reports any inf or NaN among them.

    Args:
        grads: Gradients of any shapes and dtypes. Updated in place.
        inv_scale: One float32, 1 / loss scale. One that is not finite counts as an overflow.
        found_inf: One float32. Set to 1 when a gradient is inf or NaN before the multiplication,
            otherwise left as it is.
        first_nonfinite: One int64, or None. Lowered to the index of the first such gradient, if it
            was larger.

    Raises:
        RuntimeError: If a dtype is not floating, or the tensors differ in device or overlap.

    Reference:
        Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """
    _C.unscale_(grads, inv_scale, found_inf, first_nonfinite)


@operation(writes=("scale", "growth_tracker", "hysteresis_tracker"))
def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_infs: Sequence[Tensor],
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float = 0.0,
    max_scale: float = math.inf,
    hysteresis: int = 1,
    hysteresis_tracker: Tensor | None = None,
    dynamic: bool = True,
) -> None:
    """Lets the loss scale follow the overflows of one iteration.

    Args:
        scale: One float32. Multiplied by ``backoff_factor`` if a flag is not 0, by
            ``growth_factor`` when the count of clean iterations equals ``growth_interval``, unless
            that gives inf.
        growth_tracker: One int32, the number of clean iterations since the scale last changed.
        found_infs: Flags of one float32 each; anything but 0 is an overflow.
        growth_factor: Factor of growth, above 1.
        backoff_factor: Factor after an overflow, below 1.
        growth_interval: Clean iterations until the scale grows.
        min_scale: What a backoff does not fall below.
        max_scale: What a growth does not exceed.
        hysteresis: Number of overflows since the last growth of which the last backs off; every
            one after it does so too.
        hysteresis_tracker: One int32, overflows left until one backs off, or None if
            ``hysteresis`` is 1. Refilled by a growth only.
        dynamic: If false, the scale stays as it is.

    Raises:
        RuntimeError: If a tensor is not one element of its dtype on the device of ``scale``.

    Reference:
        Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """
    _C.update_scale_(
        scale,
        growth_tracker,
        found_infs,
        hysteresis_tracker,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
        dynamic=dynamic,
    )


@step_operation
def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor] | None = None,
    *,
    max_exp_avg_sqs: Sequence[Tensor] | None = None,
    master_params: Sequence[Tensor] | None = None,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    clip_value: float | None = None,
    max_grad_norm: float | None = None,
    sum_of_squares: Tensor | None = None,
    grad_norm: Tensor | None = None,
    write_back_grads: bool = False,
    skip_nonfinite: bool = False,
    denominator_floor: float = 0.0,
    dither: bool = False,
    timestep: int | None = None,
    global_offsets: Sequence[int] | None = None,
    exponents: Sequence[Tensor] | None = None,
) -> None:
    """Takes one step of Adam, AdamW or AMSGrad for all parameters.

    Args:
        params: As all that are not listed here, an option of a step; see the module.
        exp_avgs: First moments.
        exp_avg_sqs: Second moments.
        steps: Given, unless there is a ``timestep``.
        max_exp_avg_sqs: Largest second moments so far; given, this is AMSGrad.
        beta1: Decay of the first moments, per step.
        beta2: Decay of the second moments, per step.
        eps: Added to the root of the second moment.
        denominator_floor: Least value of the corrected second moment, under the root.

    Raises:
        RuntimeError: If lists differ in length, or tensors in shape, device or dtype, or overlap.

    Reference:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015. Loshchilov and Hutter,
        "Decoupled Weight Decay Regularization", 2019. Reddi, Kale and Kumar, "On the Convergence of
        Adam and Beyond", 2018.
    """


@step_operation
def lion_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    steps: Sequence[Tensor] | None = None,
    master_params: Sequence[Tensor] | None = None,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float = 0.0,
    maximize: bool = False,
    decoupled_weight_decay: bool = True,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    clip_value: float | None = None,
    max_grad_norm: float | None = None,
    sum_of_squares: Tensor | None = None,
    grad_norm: Tensor | None = None,
    write_back_grads: bool = False,
    skip_nonfinite: bool = False,
    dither: bool = False,
    timestep: int | None = None,
    global_offsets: Sequence[int] | None = None,
    exponents: Sequence[Tensor] | None = None,
) -> None:
    """Takes one step of Lion for all parameters.

    Args:
        params: As all that are not listed here, an option of a step; see the module.
        exp_avgs: Averages of gradients.
        steps: Not needed; counted where they are given.
        beta1: Decay of the average whose sign is the step.
        beta2: Decay of ``exp_avgs``, per step.

    Raises:
        RuntimeError: If lists differ in length, or tensors in shape, device or dtype, or overlap.

    Reference:
        Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
    """


@step_operation
def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    momentum_buffers: Sequence[Tensor] | None = None,
    steps: Sequence[Tensor] | None = None,
    master_params: Sequence[Tensor] | None = None,
    lr: float | Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    clip_value: float | None = None,
    max_grad_norm: float | None = None,
    sum_of_squares: Tensor | None = None,
    grad_norm: Tensor | None = None,
    write_back_grads: bool = False,
    skip_nonfinite: bool = False,
    dither: bool = False,
    timestep: int | None = None,
    global_offsets: Sequence[int] | None = None,
    exponents: Sequence[Tensor] | None = None,
) -> None:
    """Takes one step of stochastic gradient descent for all parameters.

    Args:
        params: As all that are not listed here, an option of a step; see the module.
        momentum_buffers: Running sums of gradients, zeros at first. Given if and only if
            ``momentum`` is not 0.
        steps: Needed with ``dampening`` only, which the first step does not apply, unless there is
            a ``timestep``.
        momentum: Decay of the momentum buffer, per step.
        dampening: Share of the gradient that is kept out of the momentum buffer.
        nesterov: Looks ahead along the momentum.

    Raises:
        RuntimeError: If lists differ in length, or tensors in shape, device or dtype, or overlap.

    Reference:
        Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in
        deep learning", 2013, in torch's form: the learning rate multiplies the whole update.
    """
    if (momentum_buffers is None) != (momentum == 0):
        raise RuntimeError(
            "sgd_: momentum_buffers must be given if and only if momentum is not 0, got momentum "
            f"{momentum}"
        )


@operation(writes=("averages", "counters"))
def average_weights_(
    averages: Sequence[Tensor],
    params: Sequence[Tensor],
    counters: Tensor,
    *,
    master_params: Sequence[Tensor] | None = None,
    step_applied: Tensor | None = None,
    global_offsets: Sequence[int] | None = None,
    decay: float | None = 0.999,
    every: int = 1,
    warmup: bool = False,
) -> None:
    """Averages weights over the steps that have landed, one of which has just been taken.

    The first average is a copy. Later ones move by ``1 - decay`` towards the weights, as
    ``torch.lerp`` does. Averages in bfloat16 are dithered, by the number of the average.

    Args:
        averages: float32 or bfloat16, dense, of the parameters' shapes. Updated in place.
        params: Weights of any shapes.
        counters: Two int64, 0 before the first call: steps that have landed, and averages that were
            taken. Advanced.
        master_params: float32 masters of 16-bit parameters, or the lower parts of split ones: these
            are averaged. None: the parameters are.
        step_applied: One float32, or None. If it is 0, the step was skipped: nothing is written.
        global_offsets: Where the first element of each parameter stands in the whole of which it is
            a part, for the dither; None: each is the whole.
        decay: What an average keeps of itself each time, from 0 to 1; None: all weights count the
            same.
        every: Takes an average at each such step that has landed.
        warmup: Limits the decay to (1 + n) / (10 + n) after n averages.

    Raises:
        RuntimeError: If a number is out of range, lists have different lengths, or a tensor is on
            another device, of another shape or of a dtype that is not named here.

    Reference:
        Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992.
    """
    _C.average_weights_(
        averages,
        params,
        counters,
        master_params,
        step_applied,
        global_offsets,
        decay,
        every,
        warmup,
    )


@operation(writes=("master_params",))
def refresh_masters_(params: Sequence[Tensor], master_params: Sequence[Tensor]) -> None:
    """Takes parameters that were changed behind their masters over into them.

    Args:
        params: float16 or bfloat16 parameters, only read.
        master_params: Their float32 masters. Where a master does not round to its parameter, it
            becomes the parameter; elsewhere it keeps its extra bits.

    Raises:
        RuntimeError: If lists differ in length, or tensors in shape or device.
    """
    _C.refresh_masters_(params, master_params)


# Conversions of states, and another contract over the same kernels. Both call this module.
from amp_ext.converted_states import (  # noqa: E402
    dequantize_blockwise,
    dequantize_ratios,
    join_fp32,
    quantize_blockwise,
    quantize_ratios,
    split_fp32,
)
from amp_ext.optimizer_update import (  # noqa: E402
    OptimizerType,
    OptimizerWorkspace,
    optimizer_update_,
)
