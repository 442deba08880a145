"""What all optimizers share: the step, what a scaler asks of it, and the states that it makes."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy
from torch.optim import optimizer as torch_optimizer

from amp_ext import ops
from amp_ext.amp_protocol import NO_CLOSURE, NOTHING_WAS_SCANNED, AmpStepContext, sum_of_flags
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.nonfinite import params_of
from amp_ext.optim.amp_context import GradScaleAttribute, context_from_attributes, drop_amp_context
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.state_store import PlacedParam, fp32_master, init_states
from amp_ext.optim.step_plan import StepPlan
from amp_ext.optim.watched_optimizer import WatchedOptimizer
from amp_ext.sharding import local_tensor

__all__ = ["FusedOptimizer"]

# Errors of a device or an allocator, by which a step is refused that may succeed later.
_REFUSALS = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)


class FusedOptimizer(WatchedOptimizer):
    """Steps all parameters of all groups in one fused launch.

    A subclass has the signature that names its options, names its buffers and checks what is its
    own; the formula is a functor of the compiled module. float16 and bfloat16 parameters have a
    float32 master in their state, ``state[param]["master_param"]``, unless the group says
    ``master_weights=False``. Buffers have the group's ``state_dtype`` (float64 for float64
    parameters), or the parameter's with ``state_dtype=None``, or they are codes of 8 bits under
    keys of their own.

    A gradient scaler hands over ``grad_scale`` and ``found_inf`` for one step: gradients are
    unscaled inside the kernel, and a step whose ``found_inf`` is not 0 writes nothing at all,
    without a look from the host. :mod:`amp_ext.amp_protocol` says how.

    A state that was written in place or replaced by another tensor is always seen. Steps go on from
    a master that was written. If its parameter was written, too, the parameter wins in each element
    that differs from the rounded master.

    Options of a step, by which the groups of all optimizers may differ:

    Args:
        params: Parameters or groups of them; float32, float64, float16 or bfloat16.
        lr: Learning rate; as a tensor, one element, read on its device at each step.
        weight_decay: Weight decay per step, before the learning rate.
        maximize: Ascends instead.
        decoupled_weight_decay: Shrinks parameters (as AdamW) instead of adding to gradients.
        master_weights: Keeps a float32 master of every float16 and bfloat16 parameter. "split":
            of 16 more bits, which with the parameter are the float32 (of float16 from 2^-16 on,
            to 2^-40 below); it follows a parameter that is written from outside. "split8": of 8
            more bits, within 2^-15 of the float32.
        state_dtype: torch.float32 or torch.bfloat16, the dtype of the buffers, or None for the
            parameter's. "8bit-bf16": first moments in 8 bits, as ratios to the roots of the
            second, and these in bfloat16. "8bit": second moments in 8 bits as well, with an
            exponent for each 32 elements of a row; in bfloat16 where a parameter has less than
            4096 elements, one dimension, rows that 32 does not divide, or is not contiguous. Both
            keep a first moment without a second one, as that of SGD and Lion, in 8 bits with such
            exponents, or in bfloat16.
        rounding: How numbers are rounded that are stored in fewer bits: "nearest"; or "dither",
            which makes a number between two that can be stored the upper one in as many steps as it
            is near to it, so that small changes are not lost: of second moments, of moments in 8
            bits, of first moments in bfloat16 that keep 0.99 or more of themselves, of parameters
            without a master, and of those with a "split8" one. AMSGrad's maximum and all others are
            rounded to nearest. None dithers unless ``state_dtype`` is None, which asks for what
            torch does. A group that dithers counts its steps in all states.
        max_grad_norm: Norm to keep the unscaled gradients of all groups together below, inside the
            step; the norm is then in ``grad_norm``. None measures and clips nothing, 0 makes every
            gradient 0. The same in all groups.
        clip_value: Largest magnitude of an element of the unscaled gradients, after the norm.
        skip_nonfinite: Leaves every element alone whose gradient is inf or NaN, and leaves those
            out of the norm. Under a gradient scaler such a step is skipped whole all the same. The
            same in all groups.
        write_back_grads: Leaves the unscaled, clipped gradients in ``.grad``; without it, a step
            leaves ``.grad`` as the backward pass made it.
        foreach: Accepted for drop-in use; there is one path.
        fused: Likewise.
        differentiable: Must be False.
        track_grad_norms: Lets every step keep the norm of each gradient, in ``grad_norms``. Of the
            optimizer and no option of a group; the attribute of this name may change at any time.
        norm_guard: A :class:`~amp_ext.optim.NormGuard`, which skips steps whose gradients have a
            norm far above those before, or clips them; likewise.

    Raises:
        TypeError: If an option is of a wrong type.
        ValueError: If an option is out of range, or a parameter is listed twice, or the guard is
            that of another optimizer.
        RuntimeError: If ``differentiable`` is true.
    """

    _step_supports_amp_scaling = True
    _has_warned_of_hooks = False
    _amp_context: AmpStepContext | None = None  # of the scaler whose step this is
    grad_scale = GradScaleAttribute("Scale of the gradients, one float32, while a scaler steps.")
    found_inf = GradScaleAttribute("Not 0 if a gradient is inf or NaN, while a scaler steps.")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets scalers unscale the gradients before a step that a class has written itself.

        Such a step would read scaled gradients, and need not skip after an overflow. A class whose
        step does both, as one that only calls its parent's, sets ``_step_supports_amp_scaling``
        itself. A wrapper that is mixed in, as Lightning's, hands over to the step of the optimizer
        that it wraps.
        """
        super().__init_subclass__(**kwargs)
        if "step" in vars(cls) and "_step_supports_amp_scaling" not in vars(cls):
            cls._step_supports_amp_scaling = False

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        track_grad_norms: bool = False,
        norm_guard: NormGuard | None = None,
    ) -> None:
        """Checks the options and adds the parameters.

        Args:
            params: Parameters or groups, as for torch.optim.Optimizer.
            defaults: Options of the groups, as :func:`options_of` takes them from a signature.
            track_grad_norms: See the attribute.
            norm_guard: Likewise.
        """
        self._plan = StepPlan(type(self).__name__, self.description)
        super().__init__(params, defaults, track_grad_norms, norm_guard)

    # States.

    def init_state(self) -> None:
        """Creates every state that a first step would create, and does not step.

        All parameters that require a gradient get one; states that are there stay as they are.
        Counters and moments are 0 and masters are the values of their parameters, so that training
        goes on with the bits that it has without this call.

        To be called before ``torch.distributed.checkpoint`` reads an optimizer that has not stepped
        yet: it would take a step of its own, with gradients of 0, and leave every counter at 1.

        Raises:
            RuntimeError: If a step would refuse the dtype or the device of a parameter, or one is
                lazy and has no shape yet. Nothing has been created then.
            TypeError, ValueError: If a step would refuse an option of a group, or what is left of a
                state; likewise.
        """
        self._check_params("init_state")
        self._check_groups()
        trainable = [
            PlacedParam(spec, param, group_index, index)
            for group_index, group in enumerate(self.param_groups)
            for spec in [self.state_spec_of(group)]
            for index, param in enumerate(group["params"])
            if param.requires_grad
        ]
        for placed in trainable:
            if is_lazy(placed.param):
                raise RuntimeError(
                    f"{type(self).__name__}.init_state: param of {placed} must have a shape, got a "
                    "lazy parameter: run the model once first"
                )
            placed.spec.check_is_stepped(placed.registered(), "init_state")
        made, _ = init_states(self.state, trainable)
        if made:
            ops.put_states(self.state, made)
            self.rebuild()  # the plan would go on with a state that was erased

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Lays hooks and the profiler around a step, when the first optimizer of a class is made.

        Torch's own announces every step to a profiler that most often is not there, which takes as
        long as the rest of a small step.

        Args:
            func: The ``step`` of the class.
        """
        as_torch = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer: FusedOptimizer = args[0]
            try:
                if (
                    torch.compiler.is_compiling()
                    or optimizer._has_step_pre_hooks()
                    or _is_profiled()
                ):
                    return as_torch(*args, **kwargs)
                returned = func(*args, **kwargs)
                for hooks in (
                    optimizer._optimizer_step_post_hooks,
                    torch_optimizer._global_optimizer_post_hooks,
                ):
                    for hook in hooks.values():
                        hook(optimizer, args, kwargs)
            except BaseException:
                if optimizer._amp_context is None:  # torch's scaler leaves what it has set
                    drop_amp_context(optimizer)
                raise
            return returned

        return step

    @_disable_dynamo  # a compiled program steps around it; loads the compiler when called
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient.

        Args:
            closure: Evaluates the model again, with gradients enabled, and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: If a gradient is sparse or complex, a tensor of the state does not fit
                its parameter, this is a second step within one of a scaler, or there is a
                closure while a scaler has handed over a scale; nothing has been
                written then. If a launch is refused, with a note on how many parameters have been
                stepped: each of them with its states and its master. If any was, later steps are
                refused until ``load_state_dict``.
            ValueError: If a part of a state is missing; nothing has been written then.
            AssertionError: If nothing had a gradient when a scaler looked, and something has now.
        """
        amp_context = self._amp_context
        if amp_context is None:  # torch's scaler sets attributes, or somebody by hand
            amp_context = context_from_attributes(self)
        loss = None
        if closure is not None:
            if amp_context.grad_scale is not None:
                raise RuntimeError(NO_CLOSURE)  # its gradients would carry no scale
            with torch.enable_grad():
                loss = closure()
        if amp_context.is_used:
            raise RuntimeError(
                f"{type(self).__name__}: a step of the gradient scaler must step the optimizer "
                "once, got a second step with the same gradients"
            )
        found_inf = amp_context.found_inf
        if found_inf is not None and not isinstance(found_inf, Tensor):
            if found_inf:
                found_inf = torch.ones((), device=self._first_device())
            else:
                self._check_no_grads()
                found_inf = None
        try:
            self._step(amp_context, found_inf)
        except Exception as error:
            self._note_what_is_stepped(error, amp_context)
            raise
        return loss

    def _step(self, amp_context: AmpStepContext, found_inf: Tensor | int | None) -> None:
        """Updates all parameters that have a gradient."""
        plan, grad_scale = self._plan, amp_context.grad_scale
        guard = plan.norm_guard
        if guard is not None:
            guard.warn_if_blind()  # by the steps before: it may raise
        sums: tuple[Tensor | None, Tensor | None] = None, None
        if amp_context.scan is not None:
            has_hooks = self._has_step_pre_hooks()
            written = has_hooks and self._ask_plan("step", plan.compiled.gradients_were_written)
            if written and grad_scale is not None:
                self._warn_of_hooks()
            if not amp_context.scan.found_infs:
                self._check_no_grads()
            elif (
                has_hooks
                and isinstance(found_inf, Tensor)
                and not plan.sharded_over
                and self._ranks_of_guard() is None
            ):
                # A hook may have written gradients, and no version shows a write through ``.data``.
                amp_context.scan = self._scan(found_inf, grad_scale)
                if amp_context.scan.found_infs:
                    found_inf = sum_of_flags(amp_context.scan.found_infs, found_inf.device)
            sums = amp_context.scan.sum_of_squares, amp_context.scan.squares_of_params
        if guard is not None and sums[0] is None and guard.ranks() is not None:
            sums = self._sums_over_ranks(grad_scale)  # also of a rank that inspects nothing
        inspection = None
        if plan.inspects_next and self._has_grads():
            inspection = self._inspect(grad_scale, found_inf, sums[0], is_in_step=True)
        # It says in the hand-over that it is spent, before it writes.
        arguments = amp_context, grad_scale, found_inf
        if not self._ask_plan("step", plan.compiled.step, *arguments, *sums):
            sums = self._sums_over_ranks(grad_scale)
            self._ask_plan("step", plan.compiled.step, *arguments, *sums)
        if inspection is not None:
            plan.inspection, plan.inspects_next = inspection, False

    def _sums_over_ranks(self, grad_scale: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Looks at the gradients for a norm over ranks that no scaler has measured."""
        scan = self._scan(torch.zeros((), device=self._first_device()), grad_scale)
        return scan.sum_of_squares, scan.squares_of_params

    def _note_what_is_stepped(self, error: Exception, amp_context: AmpStepContext) -> None:
        """Adds to an error of torch, whose type and text stay, how far the step has come."""
        if amp_context.is_used:
            note = self._plan.compiled.note_of_failure
        elif isinstance(error, _REFUSALS) or "allocate memory" in str(error):
            note = "nothing has been stepped; parameters and states are as before"
        else:
            return
        if hasattr(error, "add_note"):
            error.add_note(f"{type(self).__name__}.step: {note}")

    def _has_step_pre_hooks(self) -> bool:
        """Returns whether a hook has run before this step, one of its own or of all optimizers."""
        return bool(self._optimizer_step_pre_hooks or torch_optimizer._global_optimizer_pre_hooks)

    def _warn_of_hooks(self) -> None:
        """Warns once: no default class of torch shows scaled gradients to its hooks."""
        if not self._has_warned_of_hooks:
            self._has_warned_of_hooks = True
            warnings.warn(
                f"{type(self).__name__}: a hook before the step has written gradients that carry "
                "the scale of the gradient scaler; set optimizer._step_supports_amp_scaling = "
                "False to have them unscaled before it, as for torch's optimizers without fused",
                stacklevel=2,
            )

    def _check_no_grads(self) -> None:
        """Refuses gradients that came after a scaler has looked and found none: nobody checked."""
        if self._has_grads():
            raise AssertionError(NOTHING_WAS_SCANNED)

    def _has_grads(self) -> bool:
        return any(param.grad is not None for param in params_of(self))

    # A scaler: see amp_ext.amp_protocol.

    def set_amp_context(self, amp_context: AmpStepContext | None) -> None:
        """Takes what the next step needs of a scaler.

        Args:
            amp_context: For one step, in place of ``grad_scale`` and ``found_inf``; None ends it.
        """
        last, self._amp_context = self._amp_context, amp_context
        if amp_context is not None or last is None:
            return
        if last.is_used:
            drop_amp_context(self)  # a scale that was set before was multiplied in
        elif last.scan is not None:
            self.rebuild()  # the plan remembers a look that no step has used

    # Masters.

    def refresh_masters(self) -> None:
        """Takes parameters that were changed behind their masters over into them, at once.

        Needed only after a write that torch does not count: through ``.data``, by a step of
        torch's optimizers with ``fused=True``, by ``torch._foreach_lerp_`` on a GPU. Other writes
        (``model.load_state_dict``, an in-place operation) are noticed by the next step. Masters
        that round to their parameter keep their extra bits. Split masters need none of it.

        Raises:
            RuntimeError: If averages of the weights are in the parameters.
        """
        self._plan.compiled.check_not_swapped_in("refresh_masters")
        self._check_params("refresh_masters")
        pairs = [
            (param, self.state[param]["master_param"])
            for group in self.param_groups
            for param in group["params"]
            if "master_param" in self.state.get(param, {})
        ]
        ops.refresh_masters_(
            [local_tensor(param) for param, _ in pairs],
            [local_tensor(master) for _, master in pairs],
        )

    @outside_inference_mode()
    def master_params(self, params: Iterable[Tensor] | None = None) -> list[Tensor]:
        """Returns the float32 master of every parameter, and parameters that have none themselves.

        For averages of weights, which lose small changes in 16 bits. The tensors are those that
        the next steps write, without autograd: read them, and ask anew after ``load_state_dict``.
        States that are missing are created, as :meth:`init_state` does. A parameter that was
        changed by hand shows in its master after the next step or :meth:`refresh_masters`. Split
        masters come as decoded copies.

        Args:
            params: Parameters in the order wanted, as ``model.parameters()``; those of other
                optimizers stand for themselves. None for all parameters, group by group.

        Example:
            >>> average = copy.deepcopy(model).float()
            >>> for x, y in data:
            ...     train_step(x, y)  # ends in optimizer.step()
            ...     masters = optimizer.master_params(model.parameters())
            ...     with torch.no_grad():
            ...         for mean, master in zip(average.parameters(), masters):
            ...             mean.lerp_(master, 0.001)
        """
        self.init_state()
        if params is None:
            params = params_of(self)
        return [fp32_master(param, self.state.get(param, {})) for param in params]


# A scaler asks for it at every step; kept, that costs 2 µs instead of 30.
setattr(FusedOptimizer.step, "__signature__", inspect.signature(FusedOptimizer.step))  # noqa: B010


def _is_profiled() -> bool:
    """Returns whether anybody wants to know when a step begins and ends."""
    monitor = sys.modules.get("torch.profiler._cupti_monitor")
    return ops.is_profiled() or getattr(monitor, "_monitor_singleton", None) is not None
