"""The kernels of amp_ext as functions over lists of tensors.

All tensors of a call are on one device, the CPU or a GPU, and are float32, float64, float16 or
bfloat16. They may have any dense or strided layout. Tensors that are written must not share memory.
Elements are computed in float32, or in float64 for float64 parameters. Results are rounded to the
nearest value of the stored dtype, unless ``dither`` is given. No function synchronizes with a GPU.

Inside ``torch.compile`` every function is one operator of the graph (:mod:`amp_ext.compiled_ops`),
except those that convert states, such as :func:`split_fp32` and :func:`quantize_ratios`.

Invalid input raises RuntimeError before anything is written. If a GPU refuses one launch after
others have run, torch's error says how many tensors were written, e.g. 3 of 8; each of these is
completely updated, with its states and its step counter.

Options that :func:`adam_`, :func:`sgd_` and the other steps have in common:

* ``params``: Parameters of any shapes. Updated in place.
* ``grads``: Gradients of the parameters' shapes. Only read, unless ``write_back_grads`` is set.
* ``steps``: Number of steps taken so far, one float32 for each parameter. Incremented by 1, or from
  2^24 on to the next float32, because adding 1 has no effect there.
* ``timestep``: Number of this step, from 1; replaces ``steps`` if the caller counts the steps.
* ``master_params``: float32 masters of 16-bit parameters, or residuals from :func:`split_fp32`, or
  None. Updated in place; the parameter becomes the rounded master. A master that does not round to
  its parameter is out of date, and is first set to the parameter.
* ``lr``: Learning rate. A tensor must have one element and is read on its device.
* ``weight_decay``: Weight decay coefficient, before multiplication by the learning rate.
* ``maximize``: Maximizes the objective instead of minimizing it.
* ``decoupled_weight_decay``: Shrinks parameters (as AdamW) instead of adding to gradients.
* ``cautious_weight_decay``: Shrinks only elements that the update does not move away from 0 (Chen
  et al., "Cautious Weight Decay", arXiv 2510.12402). Needs ``decoupled_weight_decay``.
* ``grad_scale``: One number, the loss scale that the gradients carry, or None.
* ``found_inf``: One number, or None. If it is not 0, nothing at all is written.
* ``clip_value``: Largest magnitude of an unscaled gradient element, applied after
  ``max_grad_norm``.
* ``max_grad_norm``: Largest norm of all unscaled gradients together.
* ``sum_of_squares``: One float64 from :func:`check_finite_`, the sum over the gradients before they
  are unscaled. Without it, ``max_grad_norm`` costs a scan of all gradients. Must be None with
  ``skip_nonfinite``, because :func:`check_finite_` does not leave out inf and NaN.
* ``grad_norm``: One float32, set to the norm of the unscaled gradients if ``max_grad_norm`` is set.
* ``write_back_grads``: Stores the unscaled, clipped gradients, in their dtype.
* ``skip_nonfinite``: Does not update elements whose gradient is inf or NaN, and leaves them out of
  the norm.
* ``dither``: Rounds up and down in turn, so that small changes are not lost: a value 30 % of the
  way between two storable ones is rounded up in 30 % of the steps. Applies to parameters without a
  master or with an 8-bit residual; to second moments in 16 or 8 bits and momenta in 8 bits; and to
  first moments with a decay of 0.99 or more, or with a small or large 8-bit ratio. Requires
  ``steps`` or ``timestep``, because the rounding depends on the number of the step.
* ``global_offsets``: For shards, the index of each shard's first element in the full tensor, so
  that a shard is dithered like the full tensor. None if all parameters are full tensors.
* ``exponents``: uint8 exponents of moments from :func:`quantize_blockwise`, one for each block of
  32 elements; an empty tensor for a parameter without them. Updated in place.

Buffers, such as moments, have the parameters' shapes and are updated in place. They are float32,
bfloat16 or of the parameter's dtype, and float64 for float64 parameters.

Moments may also be quantized to 8 bits, except in AMSGrad, if the gradients have the parameter's
dtype. First moments are then int8 codes from :func:`quantize_ratios`, with second moments in
bfloat16 or uint8; the momenta of SGD and Lion are uint8. All uint8 moments are codes from
:func:`quantize_blockwise`, in the parameter's memory order.
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
from amp_ext.compiled_ops import OPERATORS, arguments_of, operation
from amp_ext.plain_numbers import timestep_of

if TYPE_CHECKING:
    from amp_ext import _C as _C

    extension = _C  # returned by __getattr__, like the classes below
    BufferDescription = _C.BufferDescription
    Shard = _C.Shard
    CompiledStepper = _C.CompiledStepper

__all__ = [
    "OptimizerType",
    "OptimizerWorkspace",
    "adam_",
    "average_params_",
    "check_finite_",
    "clip_grads_",
    "count_nonfinite",
    "cpu_isa",
    "dequantize_blockwise",
    "dequantize_ratios",
    "join_fp32",
    "lion_",
    "muon_",
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
    """Returns other objects of the compiled module, for the scaler and the optimizers.

    ``ops.extension`` is the compiled module itself, for the files of operations imported below.
    """
    if name == "extension":
        return _C
    if not name.startswith("_") and hasattr(_C, name):
        return getattr(_C, name)
    raise AttributeError(f"module 'amp_ext.ops' has no attribute {name!r}")


def step_operation(function: Function) -> Function:
    """Returns an operator that runs the checks in a function, and then the compiled step.

    The compiled operation has the same name and arguments as the function.
    """
    parameters = inspect.signature(function).parameters.values()
    lists = [p.name for p in parameters if p.annotation.startswith("Sequence[Tensor]")]
    lists.remove("exponents")  # the operator does not have this argument
    by_name = arguments_of(function)

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

    This is the widest set that the processor supports, unless the environment variable
    ``AMP_EXT_CPU_ISA`` names another one when the first kernel runs.
    """
    return _C.cpu_isa()


@operation(writes=("found_inf", "sum_of_squares", "first_nonfinite"))
def check_finite_(
    tensors: Sequence[Tensor],
    found_inf: Tensor,
    *,
    grad_scale: Tensor | None = None,
    sum_of_squares: Tensor | None = None,
    first_nonfinite: Tensor | None = None,
) -> None:
    """Checks tensors for inf and NaN, and sums their squares. The tensors are only read.

    The order of the sum is fixed, so it has the same bits in every run and for every number of
    threads. Squares too large or too small for float32 count in full.

    Args:
        tensors: Tensors of any shapes and dtypes; expanded tensors too.
        found_inf: One float32. Set to 1 if an element is inf or NaN, otherwise unchanged.
        grad_scale: One float32, the loss scale, or None. A scale whose inverse is not finite, such
            as 0 or 1e-39, counts as an overflow.
        sum_of_squares: One float64, or None. Set to the sum over all elements.
        first_nonfinite: One int64, or None. Lowered to the index of the first tensor that holds inf
            or NaN.

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
        The counts, int64 of shape ``[len(tensors)]``, on the tensors' device.

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
    """Scales gradients down to a largest norm; the caller passes their present norm.

    Args:
        grads: Gradients of any shapes and dtypes. Multiplied in place by
            ``min(1, max_norm / (total_norm + 1e-6))``.
        total_norm: One float32 or float64, the norm of all gradients together. Gradients are
            multiplied in float32, except float64 gradients with a float64 norm.
        max_norm: Largest norm.

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
    """Multiplies gradients by ``inv_scale`` and checks them for inf and NaN.

    Args:
        grads: Gradients of any shapes and dtypes. Updated in place.
        inv_scale: One float32, 1 / loss scale. If it is not finite, that counts as an overflow.
        found_inf: One float32. Set to 1 if a gradient is inf or NaN before the multiplication,
            otherwise unchanged.
        first_nonfinite: One int64, or None. Lowered to the index of the first gradient that has inf
            or NaN.

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
    """Updates the loss scale after one iteration: reduces it after an overflow, or lets it grow.

    Args:
        scale: One float32. Multiplied by ``backoff_factor`` after an overflow, and by
            ``growth_factor`` (unless that gives inf) after ``growth_interval`` clean iterations.
        growth_tracker: One int32, the number of clean iterations since the scale last changed.
        found_infs: Flags, one float32 each; a flag that is not 0 is an overflow.
        growth_factor: Factor by which the scale grows, above 1.
        backoff_factor: Factor by which the scale falls after an overflow, below 1.
        growth_interval: Number of clean iterations until the scale grows.
        min_scale: Smallest value to which the scale can fall.
        max_scale: Largest value to which the scale can grow.
        hysteresis: The scale falls at the ``hysteresis``-th overflow since it last grew, e.g. the
            third, and at each later one.
        hysteresis_tracker: One int32, the number of overflows left until the scale falls, or None
            if ``hysteresis`` is 1. Only a growth resets it.
        dynamic: If false, the scale does not change.

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
    cautious_weight_decay: bool = False,
) -> None:
    """Takes one step of Adam, AdamW or AMSGrad for all parameters.

    Args:
        params: Parameters. See the module for this and all arguments that are not listed here.
        exp_avgs: First moments.
        exp_avg_sqs: Second moments.
        steps: Step counters. Required unless ``timestep`` is given.
        max_exp_avg_sqs: Largest second moments so far. If given, the step is a step of AMSGrad.
        beta1: Decay of the first moments, per step.
        beta2: Decay of the second moments, per step.
        eps: Added to the square root of the second moment.
        denominator_floor: Smallest value of the bias-corrected second moment under the square root.

    Raises:
        RuntimeError: If lists differ in length, or tensors differ in shape, device or dtype, or
            overlap.

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
    cautious_weight_decay: bool = False,
) -> None:
    """Takes one step of Lion for all parameters.

    Args:
        params: Parameters. See the module for this and all arguments that are not listed here.
        exp_avgs: Moving averages of the gradients.
        steps: Step counters. Not required; incremented if given.
        beta1: Decay of the average whose sign is the direction of the step.
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
    cautious_weight_decay: bool = False,
) -> None:
    """Takes one step of stochastic gradient descent for all parameters.

    Args:
        params: Parameters. See the module for this and all arguments that are not listed here.
        momentum_buffers: Running sums of the gradients, zeros at first. Given if and only if
            ``momentum`` is not 0.
        steps: Step counters. Required if ``dampening`` is not 0, unless ``timestep`` is given,
            because the first step does not apply ``dampening``.
        momentum: Decay of the momentum buffer, per step.
        dampening: Fraction of the gradient that is not added to the momentum buffer.
        nesterov: Uses Nesterov momentum.

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


@operation(
    writes=(
        "params",
        "momentum_buffers",
        "steps",
        "master_params",
        "grad_norm",
        "skipped_matrices",
    ),
    without=("exponents",),
)
def muon_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    steps: Sequence[Tensor] | None = None,
    master_params: Sequence[Tensor] | None = None,
    lr: float | Tensor,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: Sequence[float] = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    transposed: bool = False,
    flatten: bool | None = None,
    scratch_bytes: int = 2**28,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    clip_value: float | None = None,
    max_grad_norm: float | None = None,
    sum_of_squares: Tensor | None = None,
    grad_norm: Tensor | None = None,
    skip_nonfinite: bool = False,
    dither: bool = False,
    skipped_matrices: Tensor | None = None,
    exponents: Sequence[Tensor] | None = None,
    cautious_weight_decay: bool = False,
) -> None:
    """Takes one step of Muon for all parameters, which are matrices.

    Args:
        params: Parameters in float32, float16 or bfloat16. See the module for this and all
            arguments that are not listed here.
        momentum_buffers: Running averages of the gradients, float32, bfloat16 or 8 bits.
        steps: Step counters. Required with ``dither``, incremented if given.
        momentum: Decay of the momentum buffer, per step.
        nesterov: Uses Nesterov momentum.
        ns_coefficients: The numbers a, b, c of the iteration ``X = aX + (bG + cGG)X``, or those of
            several steps one after another; the last three are repeated.
        eps: Smallest norm by which an update is divided before the iteration.
        ns_steps: Number of steps of the iteration.
        adjust_lr_fn: See :class:`amp_ext.optim.Muon`, also for the next three.
        transposed: See there.
        flatten: See there.
        scratch_bytes: See there.
        skip_nonfinite: Counts gradient elements that are inf or NaN as 0.
        skipped_matrices: One int64. Increased by the number of matrices whose iteration was not
            finite; they stay as they were.

    Raises:
        RuntimeError: If lists differ in length, or tensors in shape, device or dtype, or a
            parameter is not a matrix.
        ValueError: If an option of the iteration is invalid.

    Reference:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    arguments = dict(locals())
    numbers = list(arguments.pop("ns_coefficients"))
    triples = [tuple(numbers[i : i + 3]) for i in range(0, len(numbers), 3)]
    names = ("eps", "ns_steps", "adjust_lr_fn", "transposed", "flatten", "scratch_bytes")
    matrix_options = {name: arguments.pop(name) for name in names} | {"ns_coefficients": triples}
    _C.muon_(**arguments, matrix_options=matrix_options)


@operation(writes=("master_params",))
def refresh_masters_(params: Sequence[Tensor], master_params: Sequence[Tensor]) -> None:
    """Updates masters whose parameters were changed by something other than a step.

    Args:
        params: float16 or bfloat16 parameters, only read.
        master_params: The float32 masters of ``params``. A master that does not round to its
            parameter is set to the parameter; other masters keep their extra bits.

    Raises:
        RuntimeError: If lists differ in length, or tensors in shape or device.
    """
    _C.refresh_masters_(params, master_params)


@operation(writes=("averages",))
def average_params_(
    averages: Sequence[Tensor],
    params: Sequence[Tensor],
    weight: Tensor,
    number: Tensor,
    *,
    residuals: Sequence[Tensor] | None = None,
    global_offsets: Sequence[int] | None = None,
) -> None:
    """Moves averages towards parameters: ``average += weight * (param - average)``.

    Args:
        averages: Averages of the parameters' shapes, float32, or bfloat16, which is dithered.
            Dense. Updated in place.
        params: Parameters, or their float32 masters. Only read.
        weight: One float64 on the device of the averages, such as 1 - decay. 0 changes nothing, for
            example after a skipped step.
        number: One float64, the number of this average. The first one, 1, copies the parameters.
            The dithering varies with the number.
        residuals: Residuals of split masters from :func:`split_fp32`, and an empty tensor for each
            parameter without one; or None. The joined masters are averaged.
        global_offsets: For shards, the index of each shard's first element in the full tensor.

    Raises:
        RuntimeError: If lists differ in length, or tensors in shape or device.

    Reference:
        Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992.
    """
    _C.average_params_(averages, params, weight, number, residuals, global_offsets)


# The modules of these functions import amp_ext.ops, so amp_ext.ops imports them last.
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
