"""The kernels of amp_ext as functions over lists of tensors.

All tensors of a call are on one device, the CPU or a GPU, and are float32, float64, float16 or
bfloat16. Any dense or strided layout will do; tensors that are written may not share memory.
Elements are computed in float32, those of float64 parameters in float64, and rounded once to the
nearest number of the stored dtype. Nothing synchronises the host with a GPU.

Inside ``torch.compile`` every function is one operator of the graph (:mod:`amp_ext.compiled_ops`).

Every function raises RuntimeError on bad input, before anything is written, and names the
argument, its index, what is wanted and what came.
"""

from __future__ import annotations

import enum
import importlib.util
import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from amp_ext import _C

__all__ = [
    "OptimizerType",
    "OptimizerWorkspace",
    "adam_",
    "check_finite_",
    "clip_grads_",
    "count_nonfinite",
    "cpu_isa",
    "optimizer_update_",
    "refresh_masters_",
    "sgd_",
    "unscale_",
    "update_scale_",
]

_REBUILD = (
    "pip install --no-build-isolation --force-reinstall --no-deps --no-cache-dir <amp_ext's folder>"
)


class _BrokenBinary:
    """Stands for a compiled module that does not load: importing works, the first use explains."""

    def __init__(self, reason: str, cause: ImportError | None = None) -> None:
        self._reason = reason
        self._cause = cause

    def __getattr__(self, name: str) -> NoReturn:
        raise ImportError(self._reason) from self._cause


def _build_info() -> dict[str, Any]:
    """Returns what the build has noted beside the binary; nothing if that can't be read."""
    try:
        info = json.loads(Path(__file__).with_name("_build_info.json").read_text())
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def _load_binary() -> Any:
    """Imports the compiled module, unless it was built for another torch."""
    built = _build_info()
    built_for = f"torch {built.get('torch')} and Python {built.get('python')}"
    running = f"torch {torch.__version__} and Python {platform.python_version()}"
    if built.get("torch", torch.__version__) != torch.__version__:
        return _BrokenBinary(
            f"amp_ext was built for {built_for}; you run {running}. Rebuild: {_REBUILD}"
        )
    if importlib.util.find_spec("amp_ext._C") is None:
        return _BrokenBinary(
            "amp_ext's compiled module amp_ext._C is not there for this Python "
            f"({running}{f'; it was built for {built_for}' if built else ''}). Build it: {_REBUILD}"
        )
    try:
        from amp_ext import _C
    except ImportError as error:
        was = f"It was built for {built_for}; you run {running}" if built else f"You run {running}"
        return _BrokenBinary(
            f"amp_ext's compiled module does not load: {error}. {was}. Rebuild: {_REBUILD}", error
        )
    return _C


if not TYPE_CHECKING:
    _C = _load_binary()


_CLASSES = (
    "AdamHyperparameters",
    "GradientOptions",
    "LookResult",
    "NO_TENSOR",
    "Plan",
    "ScalerMonitor",
    "SgdHyperparameters",
)


def __getattr__(name: str) -> Any:
    """Gives the scaler and the optimizers the classes of the binary that they hold."""
    if name in _CLASSES:
        return getattr(_C, name)
    raise AttributeError(f"module 'amp_ext.ops' has no attribute {name!r}")


def split_lr(lr: float | Tensor) -> tuple[float, Tensor | None]:
    """Returns a learning rate as kernels take it: a tensor travels apart from the numbers."""
    return (0.0, lr) if isinstance(lr, Tensor) else (lr, None)


def limit_of(clip_value: float | None) -> float:
    """Returns the limit that kernels clip to."""
    return math.inf if clip_value is None else clip_value


def cpu_isa() -> str:
    """Returns the instruction set of the CPU kernels: "avx2" or "plain".

    It is the widest that the processor has, or the one that the environment variable
    ``AMP_EXT_CPU_ISA`` names when the first kernel runs.
    """
    return _C.cpu_isa()


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
    if torch.compiler.is_compiling():
        torch.ops.amp_ext.check_finite(
            tensors, found_inf, grad_scale, sum_of_squares, first_nonfinite
        )
        return
    _C.check_finite_(tensors, found_inf, grad_scale, sum_of_squares, first_nonfinite)


def count_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Counts the infs and NaNs of each tensor.

    Args:
        tensors: Tensors of any shapes and dtypes, only read.

    Returns:
        int64 of shape ``[len(tensors)]``, on the tensors' device.

    Raises:
        RuntimeError: If a dtype is not floating, or the tensors differ in device.
    """
    if torch.compiler.is_compiling():
        return torch.ops.amp_ext.count_nonfinite(tensors)
    return _C.count_nonfinite(tensors)


def clip_grads_(grads: Sequence[Tensor], total_norm: Tensor, *, max_norm: float) -> None:
    """Scales gradients down to a norm, given the one that they have.

    Args:
        grads: Gradients of any shapes and dtypes. Multiplied in place by
            ``max_norm / (total_norm + 1e-6)``; nothing is written where that is 1 or more.
        total_norm: One float32, the norm of all gradients together.
        max_norm: Norm to keep below.

    Raises:
        RuntimeError: If a dtype is not floating, or the tensors differ in device or overlap.

    Reference:
        Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks",
        2013.
    """
    if torch.compiler.is_compiling():
        torch.ops.amp_ext.clip_grads(grads, total_norm, max_norm)
        return
    _C.clip_grads_(grads, total_norm, max_norm)


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
    if torch.compiler.is_compiling():
        torch.ops.amp_ext.unscale(grads, inv_scale, found_inf, first_nonfinite)
        return
    _C.unscale_(grads, inv_scale, found_inf, first_nonfinite)


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
    monitor: _C.ScalerMonitor | None = None,
    slots: Sequence[int] | None = None,
    first_nonfinites: Sequence[Tensor | None] | None = None,
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
        monitor: Where the update is reported, or None.
        slots: For each flag the number of its optimizer's report in the monitor.
        first_nonfinites: For each flag one int64 or None, as a look left it: the number of the
            first bad gradient. Reported and reset.

    Raises:
        RuntimeError: If a tensor is not one element of its dtype on the device of ``scale``.

    Reference:
        Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """
    if torch.compiler.is_compiling() and monitor is None:
        torch.ops.amp_ext.update_scale(
            *(scale, growth_tracker, found_infs, growth_factor, backoff_factor, growth_interval),
            *(min_scale, max_scale, hysteresis, hysteresis_tracker, dynamic),
        )
        return
    options = _C.LossScaleHyperparameters(
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=max_scale,
        hysteresis=hysteresis,
        dynamic=dynamic,
    )
    looks = [
        _C.LookResult(
            found_inf=found_inf,
            first_nonfinite=None if first_nonfinites is None else first_nonfinites[i],
            slot=0 if slots is None else slots[i],
        )
        for i, found_inf in enumerate(found_infs)
    ]
    _C.update_scale_(scale, growth_tracker, looks, options, hysteresis_tracker, monitor)


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
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
) -> None:
    """Takes one step of Adam, AdamW or AMSGrad for all parameters.

    Args:
        params: Parameters of any shapes. Updated in place.
        grads: Gradients of the parameters' shapes, only read but for ``write_back_grads``.
        exp_avgs: First moments of the parameters' shapes, float32 or the parameter's dtype, float64
            for float64 parameters. Updated in place.
        exp_avg_sqs: Second moments, likewise.
        steps: Steps taken so far, one float32 each. Incremented.
        max_exp_avg_sqs: Largest second moments so far, likewise; given, this is AMSGrad.
        master_params: float32 masters of 16-bit parameters, or None. Updated in place; the
            parameter becomes the rounded master. Where a master does not round to its parameter
            before the step, it becomes the parameter first.
        lr: Learning rate; as a tensor, one element, read on its device.
        beta1: Decay of the first moments, per step.
        beta2: Decay of the second moments, per step.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay per step, before the learning rate.
        maximize: Ascends instead.
        decoupled_weight_decay: Shrinks parameters (AdamW) instead of adding to gradients (Adam).
        grad_scale: One number, the loss scale that the gradients still carry, or None.
        found_inf: One number, or None. If it is not 0, nothing at all is written.
        clip_value: Largest magnitude of an unscaled gradient, after ``max_grad_norm``.
        max_grad_norm: Norm to keep all unscaled gradients together below.
        sum_of_squares: One float64, of the gradients as they are (:func:`check_finite_`). Without
            it, ``max_grad_norm`` costs a look at all gradients; with ``skip_nonfinite`` leave it
            to that look, which counts finite elements only.
        grad_norm: One float32. Set to the norm of the unscaled gradients if there is a
            ``max_grad_norm``.
        write_back_grads: Stores the unscaled, clipped gradients, in their dtype.
        skip_nonfinite: Leaves every element alone whose gradient is inf or NaN, and leaves those
            out of the norm.
        denominator_floor: Least value of the corrected second moment, under the root.

    Raises:
        RuntimeError: If lists differ in length, or tensors in shape, device or dtype, or overlap.

    Reference:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015. Loshchilov and Hutter,
        "Decoupled Weight Decay Regularization", 2019. Reddi, Kale and Kumar, "On the Convergence of
        Adam and Beyond", 2018.
    """
    lr_number, lr_tensor = split_lr(lr)
    if torch.compiler.is_compiling():
        torch.ops.amp_ext.adam(
            *(params, grads, exp_avgs, exp_avg_sqs, steps),
            *(max_exp_avg_sqs or [], master_params or [], lr_number, lr_tensor),
            *(beta1, beta2, eps, weight_decay, maximize, decoupled_weight_decay),
            *(grad_scale, found_inf, clip_value, max_grad_norm, sum_of_squares, grad_norm),
            *(write_back_grads, skip_nonfinite, denominator_floor),
        )
        return
    options = _C.AdamHyperparameters(
        lr=lr_number,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        denominator_floor=denominator_floor,
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        clip_value=limit_of(clip_value),
        write_back_grads=write_back_grads,
    )
    gradient_options = _C.GradientOptions(
        grad_scale=grad_scale,
        found_inf=found_inf,
        max_grad_norm=max_grad_norm,
        sum_of_squares=sum_of_squares,
        grad_norm=grad_norm,
        skip_nonfinite=skip_nonfinite,
    )
    _C.adam_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        steps,
        max_exp_avg_sqs,
        master_params,
        options,
        lr_tensor,
        gradient_options,
    )


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
) -> None:
    """Takes one step of stochastic gradient descent for all parameters.

    Args:
        params: Parameters of any shapes. Updated in place.
        grads: Gradients of the parameters' shapes, only read but for ``write_back_grads``.
        momentum_buffers: Running sums of gradients of the parameters' shapes, float32 or the
            parameter's dtype, float64 for float64 parameters; zeros at first. Updated in place.
            Given if and only if ``momentum`` is not 0.
        steps: Steps taken so far, one float32 each. Incremented. Needed with ``dampening`` only,
            which the first step does not apply.
        master_params: float32 masters of 16-bit parameters, or None. Updated in place; the
            parameter becomes the rounded master. Where a master does not round to its parameter
            before the step, it becomes the parameter first.
        lr: Learning rate; as a tensor, one element, read on its device.
        momentum: Decay of the momentum buffer, per step.
        dampening: Share of the gradient that is kept out of the momentum buffer.
        weight_decay: Weight decay per step, before the learning rate.
        nesterov: Looks ahead along the momentum.
        maximize: Ascends instead.
        decoupled_weight_decay: Shrinks parameters instead of adding to gradients.
        grad_scale: One number, the loss scale that the gradients still carry, or None.
        found_inf: One number, or None. If it is not 0, nothing at all is written.
        clip_value: Largest magnitude of an unscaled gradient, after ``max_grad_norm``.
        max_grad_norm: Norm to keep all unscaled gradients together below.
        sum_of_squares: One float64, of the gradients as they are (:func:`check_finite_`). Without
            it, ``max_grad_norm`` costs a look at all gradients; with ``skip_nonfinite`` leave it
            to that look, which counts finite elements only.
        grad_norm: One float32. Set to the norm of the unscaled gradients if there is a
            ``max_grad_norm``.
        write_back_grads: Stores the unscaled, clipped gradients, in their dtype.
        skip_nonfinite: Leaves every element alone whose gradient is inf or NaN, and leaves those
            out of the norm.

    Raises:
        RuntimeError: If lists differ in length, or tensors in shape, device or dtype, or overlap.

    Reference:
        Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in
        deep learning", 2013, in torch's form: the learning rate multiplies the whole update.
    """
    lr_number, lr_tensor = split_lr(lr)
    if torch.compiler.is_compiling():
        torch.ops.amp_ext.sgd(
            *(params, grads, momentum_buffers or [], steps or [], master_params or []),
            *(lr_number, lr_tensor),
            *(momentum, dampening, weight_decay, nesterov, maximize, decoupled_weight_decay),
            *(grad_scale, found_inf, clip_value, max_grad_norm, sum_of_squares, grad_norm),
            *(write_back_grads, skip_nonfinite),
        )
        return
    if (momentum_buffers is None) != (momentum == 0):
        raise RuntimeError(
            "sgd_: momentum_buffers must be given if and only if momentum is not 0, got momentum "
            f"{momentum}"
        )
    options = _C.SgdHyperparameters(
        lr=lr_number,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        clip_value=limit_of(clip_value),
        write_back_grads=write_back_grads,
    )
    gradient_options = _C.GradientOptions(
        grad_scale=grad_scale,
        found_inf=found_inf,
        max_grad_norm=max_grad_norm,
        sum_of_squares=sum_of_squares,
        grad_norm=grad_norm,
        skip_nonfinite=skip_nonfinite,
    )
    _C.sgd_(
        params,
        grads,
        momentum_buffers,
        steps,
        master_params,
        options,
        lr_tensor,
        gradient_options,
    )


class OptimizerType(enum.Enum):
    """What :func:`optimizer_update_` does: plain descent, descent with momentum, or AdamW."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"


class OptimizerWorkspace:
    """Device memory that updates need beside the tensors, to be kept from one to the next.

    Updates that may run at the same time, on two streams or threads, need one each.

    Attributes:
        grad_norm: Norm of the gradients of the last update that had a ``max_grad_norm``, one
            float32 on their device, which the next one writes anew; None before.
    """

    def __init__(self) -> None:
        """Holds nothing yet; memory is taken at the first update."""
        self.grad_norm: Tensor | None = None
        self._scratch = _C.StepScratch()

    def _grad_norm_on(self, device: torch.device) -> Tensor:
        """Returns the norm's memory, which becomes ``grad_norm`` when an update has written it."""
        if self.grad_norm is None or self.grad_norm.device != device:
            return torch.zeros((), dtype=torch.float32, device=device)
        return self.grad_norm


def optimizer_update_(
    optimizer_type: OptimizerType,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    velocities: Sequence[Tensor] | None = None,
    exp_avgs: Sequence[Tensor] | None = None,
    exp_avg_sqs: Sequence[Tensor] | None = None,
    master_params: Sequence[Tensor] | None = None,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    timestep: int,
    clip_value: float | None = None,
    max_grad_norm: float | None = None,
    workspace: OptimizerWorkspace | None = None,
) -> None:
    """Takes one step of an optimizer for people who keep their own loop and buffers.

    It is the classic contract of CUDA training code: weight decay is decoupled for all three, an
    element whose gradient is inf or NaN is left alone, and Adam's denominator is
    ``sqrt(max(v, 1e-12)) + eps`` with the corrected second moment v. :func:`adam_` and :func:`sgd_`
    have every option.

    Args:
        optimizer_type: SGD: ``p -= lr * g``; MOMENTUM: ``v = beta1 * v + g; p -= lr * v``; ADAM.
        params: Parameters of any shapes. Updated in place, after ``p *= 1 - lr * weight_decay``.
        grads: Gradients of the parameters' shapes, only read.
        velocities: MOMENTUM: running sums of the parameters' shapes, zeros at first; float32 or the
            parameter's dtype, float64 for float64 parameters. Updated in place.
        exp_avgs: ADAM: first moments, likewise.
        exp_avg_sqs: ADAM: second moments, likewise.
        master_params: float32 masters of 16-bit parameters, or None. Updated in place.
        lr: Learning rate; as a tensor, one element, read on its device.
        beta1: Decay of the velocity or of the first moment, per step.
        beta2: Decay of the second moment, per step.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay per step, before the learning rate.
        timestep: Number of this step, from 1, for Adam's bias corrections.
        clip_value: Largest magnitude of a gradient's element, after ``max_grad_norm``.
        max_grad_norm: Norm to keep all gradients together below, over their finite elements.
        workspace: Memory to use again; None takes new memory at each call.

    Raises:
        RuntimeError: If ``timestep`` is below 1, a buffer is missing or too many, or lists and
            tensors do not fit each other.

    Example::

        workspace = ops.OptimizerWorkspace()
        for timestep, batch in enumerate(batches, start=1):
            grads = torch.autograd.grad(loss_of(batch), params)
            ops.optimizer_update_(
                ops.OptimizerType.MOMENTUM, params, grads, velocities=velocities,
                lr=0.1, timestep=timestep, workspace=workspace,
            )

    Reference:
        As :func:`adam_` and :func:`sgd_`.
    """
    if not isinstance(optimizer_type, OptimizerType):
        raise RuntimeError(
            "optimizer_update_: optimizer_type must be an OptimizerType, got "
            f"{type(optimizer_type).__name__}"
        )
    if not isinstance(timestep, int) or timestep < 1:
        raise RuntimeError(
            f"optimizer_update_: timestep must be an int of at least 1, got {timestep}"
        )
    buffers = {"velocities": velocities, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    needed = _BUFFERS_OF[optimizer_type]
    for name, tensors in buffers.items():
        if (tensors is not None) != (name in needed):
            wanted = "given" if name in needed else "None"
            got = "None" if tensors is None else f"{len(tensors)} tensors"
            raise RuntimeError(
                f"optimizer_update_: {name} must be {wanted} for {optimizer_type}, got {got}"
            )
    workspace = workspace or OptimizerWorkspace()
    grad_norm = None
    if max_grad_norm is not None and len(params) > 0:
        grad_norm = workspace._grad_norm_on(params[0].device)
    lr_number, lr_tensor = split_lr(lr)
    common: dict[str, Any] = {
        "lr": lr_number,
        "weight_decay": weight_decay,
        "decoupled_weight_decay": True,
        "clip_value": limit_of(clip_value),
    }
    options = _C.GradientOptions(
        max_grad_norm=max_grad_norm,
        grad_norm=grad_norm,
        skip_nonfinite=True,
        scratch=workspace._scratch,
    )
    if optimizer_type is OptimizerType.ADAM:
        assert exp_avgs is not None
        assert exp_avg_sqs is not None
        adam = _C.AdamHyperparameters(
            **common,
            timestep=float(timestep),
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            denominator_floor=1e-12,
        )
        _C.adam_(
            *(params, grads, exp_avgs, exp_avg_sqs, None, None, master_params),
            *(adam, lr_tensor, options, "optimizer_update_"),
        )
    else:
        momentum = beta1 if optimizer_type is OptimizerType.MOMENTUM else 0.0
        sgd = _C.SgdHyperparameters(**common, momentum=momentum)
        _C.sgd_(
            *(params, grads, velocities, None, master_params, sgd, lr_tensor, options),
            *("optimizer_update_", "velocities"),
        )
    if grad_norm is not None:
        workspace.grad_norm = grad_norm


_BUFFERS_OF = {
    OptimizerType.SGD: (),
    OptimizerType.MOMENTUM: ("velocities",),
    OptimizerType.ADAM: ("exp_avgs", "exp_avg_sqs"),
}


def refresh_masters_(params: Sequence[Tensor], master_params: Sequence[Tensor]) -> None:
    """Takes parameters that were changed behind their masters over into them.

    Args:
        params: float16 or bfloat16 parameters, only read.
        master_params: Their float32 masters. Where a master does not round to its parameter, it
            becomes the parameter; elsewhere it keeps its extra bits.

    Raises:
        RuntimeError: If lists differ in length, or tensors in shape or device.
    """
    if torch.compiler.is_compiling():
        torch.ops.amp_ext.refresh_masters(params, master_params)
        return
    _C.refresh_masters_(params, master_params)
