"""What all optimizers share: the step, what a scaler asks of it, and the states that it makes."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy
from torch.optim import optimizer as torch_optimizer

from amp_ext import ops
from amp_ext.hand_over import (
    NOTHING_WAS_LOOKED_AT,
    HandedAttribute,
    HandOver,
    Look,
    drop_handed,
    handed_by_attributes,
    sum_of_flags,
)
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.optim.saved_optimizer import SavedOptimizer
from amp_ext.optim.state_store import Place, made_states, whole_master
from amp_ext.optim.step_plan import StepPlan
from amp_ext.sharding import local_tensor

__all__ = ["FusedOptimizer"]

# Errors of a device or an allocator, by which a step is refused that may succeed later.
_REFUSALS = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)

_HOW_TO_GO_ON = "load a checkpoint into the model, and into the optimizer with load_state_dict()"


class FusedOptimizer(SavedOptimizer):
    """Steps all parameters of all groups in one fused launch.

    A subclass has the signature that names its options, names its buffers and checks what is its
    own; the formula is a functor of the compiled module. float16 and bfloat16 parameters have a
    float32 master in their state, ``state[param]["master_param"]``, unless the group says
    ``master_weights=False``. Buffers have the group's ``state_dtype`` (float64 for float64
    parameters), or the parameter's with ``state_dtype=None``, or they are codes of 8 bits under
    keys of their own.

    A gradient scaler hands over ``grad_scale`` and ``found_inf`` for one step: gradients are
    unscaled inside the kernel, and a step whose ``found_inf`` is not 0 writes nothing at all,
    without a look from the host. :mod:`amp_ext.hand_over` says how.

    A state that was written in place or replaced by another tensor is always seen. Steps go on from
    a master that was, unless its parameter was written, too: then the parameter goes before it
    wherever it is not the master, rounded.

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
            parameter's. "8bit-bf16": Adam's first moments in 8 bits, as ratios to the roots of the
            second, and these in bfloat16. "8bit": second moments in 8 bits as well, with an
            exponent for each 32 elements of a row; in bfloat16 where a parameter has less than
            4096 elements, one dimension, rows that 32 does not divide, or is not contiguous. Both
            keep the moments of SGD and Lion in 8 bits with such exponents, or in bfloat16.
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

    Raises:
        TypeError: If an option is of a wrong type.
        ValueError: If an option is out of range, or a parameter is listed twice.
        RuntimeError: If ``differentiable`` is true.
    """

    _step_supports_amp_scaling = True
    _plan: StepPlan | None = None
    _rounded_params: Any = None  # of the last plan, for the next one
    _scaled_grads: Any = None  # likewise
    _has_warned_of_hooks = False
    _hand_over: HandOver | None = None  # of the scaler whose step this is
    grad_scale = HandedAttribute("Scale of the gradients, one float32, while a scaler steps.")
    found_inf = HandedAttribute("Not 0 if a gradient is inf or NaN, while a scaler steps.")

    #: Norm of the unscaled gradients at the last step, one float32 on the parameters' device, which
    #: later steps write anew: clone it to keep it. None without ``max_grad_norm``.
    grad_norm: Tensor | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets scalers unscale the gradients before a step that a class has written itself.

        It would read them scaled, and need not skip what overflowed. A class whose step does both,
        say by that of its parent alone, sets ``_step_supports_amp_scaling`` itself. A wrapper that
        is mixed in, as Lightning's, hands over to the step of the optimizer that it wraps.
        """
        super().__init_subclass__(**kwargs)
        if "step" in vars(cls) and "_step_supports_amp_scaling" not in vars(cls):
            cls._step_supports_amp_scaling = False

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        """Checks the options and adds the parameters.

        Args:
            params: Parameters or groups, as for torch.optim.Optimizer.
            defaults: Options of the groups, as :func:`options_of` takes them from a signature.
        """
        self.grad_norm = None  # of the instance: a wrapper made of this class shall not hide it
        super().__init__(params, defaults)

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
            Place(kept, param, group_index, index)
            for group_index, group in enumerate(self.param_groups)
            for kept in [self._kept(group)]
            for index, param in enumerate(group["params"])
            if param.requires_grad
        ]
        for place in trainable:
            if is_lazy(place.param):
                raise RuntimeError(
                    f"{type(self).__name__}.init_state: param of {place} must have a shape, got a "
                    "lazy parameter: run the model once first"
                )
            place.kept.check_is_stepped(place.listed(), "init_state")
        made, _ = made_states(self.state, trainable)
        self.state.update(made)  # at once
        if made:
            self.rebuild()  # it would go on with a state that was erased

    # The plan.

    def rebuild(self) -> None:
        """Forgets all parameters and states until the next step, which looks them up again.

        A step notices by itself what was replaced; this frees at once what was, such as states that
        were moved to another device to make room. It is remembered which parameters were written
        since their masters were.
        """
        if self._plan is not None:
            rounded_params, scaled_grads = self._plan.rounded_params(), self._plan.scaled_grads()
            self._rounded_params, self._scaled_grads = rounded_params, scaled_grads
            self._plan = None

    def _take_plan(self, operation: str) -> StepPlan:
        """Returns the plan for the groups and states as they are, which has their parameters.

        It is this thread's until :meth:`_let_go`. The mark of a thread that was interrupted before
        that does not keep this thread out.

        Args:
            operation: What the plan is for, for the error.

        Raises:
            RuntimeError: If another thread has it, the last step failed amid its launches, or the
                params of a group are others when they are read again.
            TypeError, ValueError: If an option or the params of a group are not as they must be.
        """
        thread = threading.get_ident()
        user = self.__dict__.setdefault("_thread_in_plan", thread)  # at once, for other threads
        if user != thread:
            raise RuntimeError(
                f"{type(self).__name__}.{operation}: must be called by one thread at a time, got a "
                f"call by thread {thread} while thread {user} is in one"
            )
        try:
            if self._progress:
                raise RuntimeError(
                    f"{type(self).__name__}.{operation}: parameters must be as a whole step leaves "
                    f"them, got a step that failed: {self._progress}; {_HOW_TO_GO_ON}"
                )
            plan = self._plan
            try:
                is_current = plan is not None and plan.take_params(
                    self.state, self.param_groups, self._deciding_options()
                )
            except (KeyError, TypeError, ValueError, RuntimeError):  # of an option
                is_current = False
            if plan is None or not is_current:
                self.rebuild()
                self._check_params(operation)
                self._check_groups()
                deciding = self._deciding_options()
                plan = StepPlan(
                    type(self).__name__,
                    self.param_groups,
                    [self._kept(group) for group in self.param_groups],
                    deciding,
                    self._rounded_params,
                    self._scaled_grads,
                )
                if not plan.take_params(self.state, self.param_groups, deciding):  # it steps none
                    raise RuntimeError(
                        f"{type(self).__name__}.{operation}: params of each group must be a list, "
                        "got other parameters when they were read again"
                    )
                self._progress = plan.progress  # before: an interrupt may come
                self._plan = plan
        except BaseException:
            self._let_go()
            raise
        return plan

    def _let_go(self) -> None:
        """Drops what refers to parameters and gradients, and lets other threads in."""
        if self._plan is not None:
            self._plan.let_go()
        self.__dict__.pop("_thread_in_plan", None)

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
                if optimizer._hand_over is None:  # torch's scaler leaves what it has set
                    drop_handed(optimizer)
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
                its parameter, or this is a second step within one of a scaler; nothing has been
                written then. If a launch is refused, with a note on how many parameters have been
                stepped: each of them with its states and its master. Unless it is none, later steps
                are refused until ``load_state_dict``.
            ValueError: If a part of a state is missing; nothing has been written then.
            AssertionError: If nothing had a gradient when a scaler looked, and something has now.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        hand_over = self._hand_over
        if hand_over is None:  # torch's scaler sets attributes, or somebody by hand
            hand_over = handed_by_attributes(self)
        if hand_over.is_spent:
            raise RuntimeError(
                f"{type(self).__name__}: a step of the gradient scaler must step the optimizer "
                "once, got a second step with the same gradients"
            )
        found_inf = hand_over.found_inf
        if found_inf is not None and not isinstance(found_inf, Tensor):
            if found_inf:
                return loss
            self._check_no_grads()
            found_inf = None
        plan = self._take_plan("step")
        try:
            self._step(plan, hand_over, found_inf)
        except Exception as error:
            self._note_what_is_stepped(error)
            raise
        finally:
            self._let_go()
        return loss

    def _step(self, plan: StepPlan, hand_over: HandOver, found_inf: Tensor | int | None) -> None:
        """Updates all parameters that have a gradient."""
        max_grad_norm = self._for_all_groups("max_grad_norm")
        skip_nonfinite = self._for_all_groups("skip_nonfinite")
        grad_scale, look = hand_over.grad_scale, hand_over.look
        if max_grad_norm is not None and not max_grad_norm >= 0.0:
            self._check_groups()
        has_hooks = look is not None and self._has_step_pre_hooks()
        if has_hooks and grad_scale is not None and plan.with_shards().gradients_were_written():
            self._warn_of_hooks()
        if look is not None and not look.found_infs:
            self._check_no_grads()
        elif has_hooks and isinstance(found_inf, Tensor) and not plan.sharded_over:
            # A hook may have written gradients, and no version shows a write through ``.data``.
            hand_over.look = self._look(plan, found_inf, grad_scale)
            if hand_over.look.found_infs:
                found_inf = sum_of_flags(hand_over.look.found_infs, found_inf.device)
        sum_of_squares = None
        if max_grad_norm is not None and plan.sharded_over:
            if look is not None:
                sum_of_squares = look.sum_of_squares
            if sum_of_squares is None and plan.first_param is not None:  # no scaler has looked
                device = plan.first_param.device
                nothing = torch.zeros((), dtype=torch.float32, device=device)
                sum_of_squares = self._look(plan, nothing, None).sum_of_squares
        hyperparameters = self._hyperparameters_of_groups()  # first: it refuses
        if max_grad_norm is None:
            self.grad_norm = None
        elif self.grad_norm is None and plan.first_param is not None:
            with outside_inference_mode():
                device = plan.first_param.device
                self.grad_norm = torch.zeros((), dtype=torch.float32, device=device)
        if sum_of_squares is not None and self.grad_norm is not None:
            # The kernels write it only where this rank has something to step.
            self.grad_norm.copy_(_norm(sum_of_squares, grad_scale), non_blocking=True)
        # Which says in the hand-over that it is spent, before it writes.
        plan.with_shards().step(
            hyperparameters,
            grad_scale,
            found_inf,
            max_grad_norm,
            sum_of_squares,
            self.grad_norm,
            skip_nonfinite,
            plan,
            self.state,
            hand_over,
        )

    def _note_what_is_stepped(self, error: Exception) -> None:
        """Says of an error of torch, whose type and text clients know, what it has left."""
        if self._progress:
            note = f"{self._progress}; {_HOW_TO_GO_ON}: until then it refuses to step"
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
        if any(param.grad is not None for group in self.param_groups for param in group["params"]):
            raise AssertionError(NOTHING_WAS_LOOKED_AT)

    # A scaler: see amp_ext.hand_over.

    def look_at_gradients(self, found_inf: Tensor, grad_scale: Tensor | None = None) -> Look:
        """Looks for inf and NaN in all gradients, for a scaler.

        If parameters are sharded, all ranks have to call this together.

        Args:
            found_inf: One float32; copied, not written.
            grad_scale: One float32, or None. Without a finite inverse it counts as an overflow.

        Returns:
            What was found: for each device that holds a gradient a copy of ``found_inf``, set to 1
            if one there is inf or NaN; with shards, if one is on any rank.
        """
        plan = self._take_plan("look_at_gradients")
        try:
            return self._look(plan, found_inf, grad_scale)
        finally:
            self._let_go()

    def _look(self, plan: StepPlan, found_inf: Tensor, grad_scale: Tensor | None) -> Look:
        """Looks for inf and NaN in all gradients."""
        sums_squares = self._for_all_groups("max_grad_norm") is not None
        results = plan.with_shards().check_finite(
            found_inf, grad_scale, sums_squares, self._for_all_groups("skip_nonfinite")
        )
        first_nonfinites = {result.found_inf.device: result.first_nonfinite for result in results}
        if not plan.sharded_over:
            found_infs = {result.found_inf.device: result.found_inf for result in results}
            return Look(found_infs, first_nonfinites)
        flags, sum_of_squares = plan.sharded_over.all_reduce(
            found_inf,
            [result.found_inf for result in results],
            [(result.partition, result.sum_of_squares) for result in results],
            sums_squares=sums_squares,
        )
        return Look(flags, first_nonfinites, sum_of_squares if sums_squares else None)

    def accept_hand_over(self, hand_over: HandOver | None) -> None:
        """Takes what the next step needs of a scaler.

        Args:
            hand_over: For one step, in place of ``grad_scale`` and ``found_inf``; None ends it.
        """
        last, self._hand_over = self._hand_over, hand_over
        if hand_over is not None or last is None:
            return
        if last.is_spent:
            drop_handed(self)  # a scale that was set before is in the product
        elif last.look is not None:
            self.rebuild()  # it remembers a look that no step has used

    # Masters.

    def refresh_masters(self) -> None:
        """Takes parameters that were changed behind their masters over into them, at once.

        Needed only after a write that torch does not count: through ``.data``, by a step of
        torch's optimizers with ``fused=True``, by ``torch._foreach_lerp_`` on a GPU. Other writes
        (``model.load_state_dict``, an in-place operation) are noticed by the next step. Masters
        that round to their parameter keep their extra bits. Split masters need none of it.
        """
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
            params = [param for group in self.param_groups for param in group["params"]]
        return [whole_master(param, self.state.get(param, {})) for param in params]


# A scaler asks for it at every step; kept, that costs 2 µs instead of 30.
setattr(FusedOptimizer.step, "__signature__", inspect.signature(FusedOptimizer.step))  # noqa: B010


def _is_profiled() -> bool:
    """Returns whether anybody wants to know when a step begins and ends."""
    monitor = sys.modules.get("torch.profiler._cupti_monitor")
    return ops.is_profiled() or getattr(monitor, "_monitor_singleton", None) is not None


def _norm(sum_of_squares: Tensor, grad_scale: Tensor | None) -> Tensor:
    """Returns the norm of the unscaled gradients, as the kernels compute it."""
    if grad_scale is None:
        return sum_of_squares.sqrt()
    inv_scale = grad_scale.double().reciprocal().float()
    return sum_of_squares.sqrt() * inv_scale.to(sum_of_squares, non_blocking=True)
