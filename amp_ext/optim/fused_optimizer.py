"""The base class of all optimizers: options, states, steps, and state dicts."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy

from amp_ext import ops
from amp_ext.amp_protocol import (
    NO_CLOSURE,
    NOTHING_WAS_SCANNED,
    ScanResult,
    sum_of_flags,
)
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.optim.checkpoints import operation_of, read_state_dict, saved_state_dict
from amp_ext.optim.formats import StateSpec
from amp_ext.optim.grad_norms import norms_of_grads
from amp_ext.optim.norm_guard import NormGuard
from amp_ext.optim.options import (
    DESCRIPTIONS,
    OPTIONAL,
    OptimizerDescription,
    check_defaults,
    check_group,
    check_unique,
    defaults_of,
)
from amp_ext.optim.state_store import (
    PlacedParam,
    check_flattened,
    fp32_master,
    init_states,
    put_states,
)
from amp_ext.optim.step_hooks import has_step_pre_hooks, with_step_hooks
from amp_ext.optim.stepper import Stepper
from amp_ext.params import check_params, names_of_params, params_of
from amp_ext.saved_dicts import check_is_dict
from amp_ext.sharding import local_grads, local_tensor

__all__ = ["FusedOptimizer"]

# Errors of a device or an allocator. After such an error, a later step may succeed.
_REFUSALS = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)


class FusedOptimizer(torch.optim.Optimizer):
    """Steps the parameters of all groups in one launch for each device.

    A subclass declares the options in the signature of its constructor, and names its formula in
    ``_hyperparameters_class``. float16 and bfloat16 parameters have a float32 master in their
    state, ``state[param]["master_param"]``, unless the group has ``master_weights=False``. Buffers,
    such as moments, have the group's ``state_dtype`` (float64 for float64 parameters). Buffers
    quantized to 8 bits have other keys.

    As with torch's fused optimizers, a gradient scaler sets the attributes ``grad_scale`` and
    ``found_inf`` for one step. The kernel unscales the gradients, and changes no parameter or state
    if ``found_inf`` is not 0; the host does not wait for the flag of a GPU.

    A step reads state tensors that were written in place or replaced, and continues from the
    new values. A master element that does not round to its parameter is replaced by the parameter.

    All optimizers have these options, and the groups of an optimizer may differ in them:

    Args:
        params: Parameters or groups of them; float32, float64, float16 or bfloat16.
        lr: Learning rate; a tensor must have one element, and is read on its device at each step.
        weight_decay: Weight decay coefficient, before multiplication by the learning rate.
        maximize: Maximizes the objective instead of minimizing it.
        decoupled_weight_decay: Shrinks parameters (as AdamW) instead of adding to gradients.
        cautious_weight_decay: Shrinks only elements that the update does not move away from 0: with
            ``u`` as what the step subtracts from the parameter ``x`` (the master, if there is one),
            elements with ``u * x >= 0``. Needs ``decoupled_weight_decay``.
        master_weights: Keeps a float32 master of every float16 and bfloat16 parameter. "split"
            stores only the 16 bits that the parameter lacks: both together are the exact master
            (for float16 parameters below 2^-16, within 2^-40), even after other code writes the
            parameter. "split8" stores only 8 of these bits, with a relative error of the master of
            at most 2^-15.
        state_dtype: Dtype of the buffers: torch.float32, torch.bfloat16, or None for the
            parameter's dtype. "8bit-bf16" stores first moments in 8 bits, as ratios to the roots of
            the second moments, and second moments in bfloat16. "8bit" stores second moments in 8
            bits as well, with one exponent for each 32 elements of a row. Second moments stay in
            bfloat16 if the parameter is not contiguous, or has fewer than 4096 elements, only one
            dimension, or rows that are not a multiple of 32. SGD and Lion have no second moments:
            both settings store their first moments like the second moments of "8bit".
        rounding: Rounding of values stored in 16 or 8 bits: "nearest" or "dither". With "dither", a
            value 30 % of the way between two storable ones is rounded up in 30 % of the steps, so
            that small changes are not lost. Applies to second moments, moments in 8 bits, bfloat16
            first moments with a decay of 0.99 or more, and parameters without a master or with a
            "split8" one. All other values, such as AMSGrad's maximum, are rounded to nearest. None
            means "nearest" if ``state_dtype`` is None, as in torch, otherwise "dither". A group
            that dithers has a step counter in every state.
        max_grad_norm: Clips the norm of the unscaled gradients of all groups together to this
            value, inside the step; the norm before clipping is then in ``grad_norm``. None neither
            measures nor clips, 0 makes every gradient 0. Must be the same in all groups.
        clip_value: Clips each unscaled gradient element to this magnitude, after clipping by norm.
        skip_nonfinite: Does not update elements whose gradient is inf or NaN, and leaves them out
            of the norm. A gradient scaler still skips the whole step. Must be the same in all
            groups.
        write_back_grads: Stores the unscaled, clipped gradients in ``.grad``; otherwise a step
            leaves ``.grad`` as the backward pass made it.
        foreach: Accepted for compatibility with torch; there is only one implementation.
        fused: Accepted for compatibility with torch; there is only one implementation.
        differentiable: Must be False.
        track_grad_norms: Stores the norm of each gradient in ``grad_norms`` at every step. Belongs
            to the optimizer, not to a group; the attribute may be set at any time.
        norm_guard: A :class:`~amp_ext.optim.NormGuard`, which skips or clips steps whose gradient
            norm is an outlier. Belongs to the optimizer; the attribute may be set at any time.

    Raises:
        TypeError: If an option is of a wrong type.
        ValueError: If an option is out of range, a parameter is listed twice, or the guard belongs
            to another optimizer.
        RuntimeError: If ``differentiable`` is true.
    """

    # Name of the formula in the compiled module.
    _hyperparameters_class: ClassVar[str]
    # Maps the names that amp_ext.memory has for the optimizer to the 8-bit formats of its states.
    _state_formats: ClassVar[dict[str, tuple[str, ...]]]
    # Options that the class sets in every group, whatever a file says.
    _fixed_options: ClassVar[dict[str, Any]] = {}

    _step_supports_amp_scaling = True
    _has_warned_of_hooks = False
    #: The handle from :func:`~amp_ext.optim.release_gradients`, or None.
    gradient_release: Any = None
    #: The handle from :func:`~amp_ext.optim.offload_states`, or None.
    offload: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Marks a subclass that defines ``step``, so that scalers unscale the gradients before it.

        Otherwise its step would read scaled gradients, and might write after an overflow. A
        subclass whose step unscales and skips, for example in its parent's step, sets
        ``_step_supports_amp_scaling`` to True itself. A ``step`` inherited from a wrapper such as
        Lightning's calls the step that it wraps, and is not marked.
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
            defaults: Default options of the groups, from :func:`options_of`.
            track_grad_norms: See the attribute.
            norm_guard: See the attribute.
        """
        self._stepper = Stepper(type(self).__name__, self.description.hyperparameters)
        self.track_grad_norms = track_grad_norms
        if isinstance(params, (set, frozenset)):
            raise TypeError(
                f"{type(self).__name__}: params must be ordered, such as a list, got "
                f"{type(params).__name__}"
            )
        check_defaults(self.description, defaults, f"{type(self).__name__}: %s")
        super().__init__(params, defaults)
        self.norm_guard = norm_guard

    # Options and groups.

    @property
    def description(self) -> OptimizerDescription:
        """The options and buffers of the optimizer's formula."""
        name = getattr(self, "_hyperparameters_class", None)
        if name not in DESCRIPTIONS:
            raise TypeError(
                f"{type(self).__name__}: _hyperparameters_class must be one of "
                f"{[*DESCRIPTIONS]}, got {name!r}"
            )
        return DESCRIPTIONS[name]

    def description_of(self, group: Mapping[str, Any]) -> OptimizerDescription:
        """Returns the options and buffers of the formula of a group."""
        return self.description

    def state_spec_of(self, group: dict[str, Any]) -> StateSpec:
        """Returns the specification of the states that the parameters of a group have."""
        return StateSpec.of(type(self).__name__, self.description_of(group), group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as torch.optim.Optimizer does.

        Args:
            param_group: ``params`` and the options that differ from the defaults.

        Raises:
            TypeError: If an option has the wrong type.
            ValueError: If a parameter is listed twice, or an option can't be used.
            RuntimeError: If ``differentiable`` is true. After an error, the group is not added.
        """
        count = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            self.check_options(group, f"{type(self).__name__}: %s of group {count}")
            check_unique(group["params"], f"{type(self).__name__}: param %d of group {count}")
            spec = self.state_spec_of(group)
            for param in group["params"]:
                check_flattened(spec, param)
        except Exception:
            del self.param_groups[count:]
            raise

    def check_options(self, options: dict[str, Any], where: str) -> None:
        """Adds missing options to a group, and checks all of its options.

        A group from a file, or from code that knows only torch's options, may lack options of
        amp_ext, which get the values that the optimizer was constructed with.

        Args:
            options: The group; missing options are written into it.
            where: Start of errors, with ``%s`` for the name of the option.
        """
        description = self.description_of(options)
        for option in description.options:
            if option.on_load in ("kept", "kept if missing") and option.name in self.defaults:
                options.setdefault(option.name, self.defaults[option.name])
        check_group(description, options, where)

    def _check_groups(self) -> None:
        """Checks the options that a training loop may have written into the groups."""
        for index, group in enumerate(self.param_groups):
            self.check_options(group, f"{type(self).__name__}: %s of group {index}")
        for name in ("max_grad_norm", "skip_nonfinite"):  # the norm is that of all gradients
            values = [group[name] for group in self.param_groups]
            if any(value != values[0] for value in values):
                raise ValueError(
                    f"{type(self).__name__}: {name} must be the same in all groups, got {values}"
                )

    def _check_params(self, operation: str) -> None:
        """Checks that an operation can read the parameters of all groups."""
        for index, group in enumerate(self.param_groups):
            check_params(group, f"{type(self).__name__}.{operation}: %s of group {index}")

    # States.

    def init_state(self) -> None:
        """Creates every state that a first step would create, without taking a step.

        Every parameter that requires a gradient gets a state; existing states stay as they are.
        Training continues with the same bits as without this call.

        Call it before ``torch.distributed.checkpoint`` reads an optimizer that has not stepped yet.
        Otherwise torch takes a step with gradients of 0, which leaves every counter at 1.

        Raises:
            RuntimeError: If a step would refuse the dtype or the device of a parameter, or a lazy
                parameter has no shape yet.
            TypeError, ValueError: If a step would refuse an option of a group, or a state lacks a
                part. Nothing has been created after any error.
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
                    f"{type(self).__name__}.init_state: param of {placed} is a lazy parameter, "
                    "which has no shape yet. Run the model once first."
                )
            placed.check_is_stepped("init_state")
        if self.offload is not None:
            self.offload.init_state()
            return
        put_states(self.state, init_states(self.state, trainable))

    def _stored_beside(self, param: Tensor) -> Tensor:
        """Returns the tensor on whose device the state of a parameter is.

        Args:
            param: The parameter, which is returned unless states are offloaded.
        """
        return param if self.offload is None else self.offload.host_of(param)

    def check_weights_are_in(self, operation: str) -> None:
        """Raises an error if the parameters hold their averages.

        Args:
            operation: Start of the error.
        """
        if self._stepper.averages_are_in:
            raise RuntimeError(
                f"{operation}: the parameters hold their averages, because a WeightAverage.swap() "
                "is active. Leave the swap first."
            )

    # Masters.

    def refresh_masters(self) -> None:
        """Updates masters whose parameters were changed by something other than a step.

        Needed only after a write that does not change the tensor's version counter: through
        ``.data``, by a step of torch's optimizers with ``fused=True``, or by
        ``torch._foreach_lerp_`` on a GPU. The next step reads other writes by itself. Masters
        that round to their parameter keep their extra bits. Split masters need no update, because
        they contain the parameter.

        Raises:
            RuntimeError: If averages of the weights are in the parameters.
        """
        self.check_weights_are_in(f"{type(self).__name__}.refresh_masters")
        self._check_params("refresh_masters")
        if self.offload is not None:
            self.offload.synchronize(rereads=True)
        pairs = [
            (self._stored_beside(param), self.state[param]["master_param"])
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
        """Returns the float32 master of each parameter, or the parameter itself if it has none.

        Use the masters for averages of weights, because 16-bit weights lose small changes. The
        returned tensors are detached. Do not write them: later steps do. Call this method again
        after ``load_state_dict``. Missing states are created, as by :meth:`init_state`. A change of
        a parameter by other code shows in its master after the next step or
        :meth:`refresh_masters`. For a split master, a joined copy is returned.

        Args:
            params: Parameters in the order wanted, such as ``model.parameters()``. For a parameter
                of another optimizer, the parameter itself is returned. None for all parameters,
                group by group.

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
        if self.offload is not None:
            return self.offload.inner.master_params(map(self.offload.host_of, params))
        return [fp32_master(param, self.state.get(param, {})) for param in params]

    # Steps.

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the step of a class, so that it runs the hooks of the optimizer.

        torch calls this when the first optimizer of a class is constructed.

        Args:
            func: The ``step`` of the class.
        """
        return with_step_hooks(func)

    # Keeps step() out of compiled graphs, and delays the import of dynamo until the first call.
    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient.

        Args:
            closure: Evaluates the model again, with gradients enabled, and returns the loss.

        Returns:
            The return value of the closure, or None without a closure.

        Raises:
            RuntimeError: If a gradient is sparse or complex, a state does not fit its parameter, or
                there is a closure while a scaler steps; nothing has been written then. Also if a
                kernel launch fails: the note then says how many parameters were completely stepped,
                e.g. 3 of 8.
            ValueError: If a part of a state is missing; nothing has been written then.
            AssertionError: If no parameter had a gradient when a scaler scanned them, and one has
                now.
        """
        stepper, attributes = self._stepper, vars(self)
        grad_scale, found_inf = attributes.get("grad_scale"), attributes.get("found_inf")
        # Without a scale, the last scan is that of a step which was given up.
        scan = None if grad_scale is None else stepper.last_scan
        if self.gradient_release is not None:  # before a closure runs backward()
            self.gradient_release.check_step(grad_scale is not None or found_inf is not None, scan)
        loss = None
        if closure is not None:
            if grad_scale is not None:
                raise RuntimeError(NO_CLOSURE)  # a closure's gradients would not be scaled
            with torch.enable_grad():
                loss = closure()
        if found_inf is not None and not isinstance(found_inf, Tensor):
            if found_inf:
                found_inf = torch.ones((), device=self._first_device())
            else:
                self._check_no_grads()
                found_inf = None
        try:
            if self.gradient_release is not None:
                self.gradient_release.step(scan)
            else:
                self._step(grad_scale, found_inf, scan)
        except Exception as error:
            self._note_what_is_stepped(error)
            raise
        stepper.last_scan = None
        return loss

    def _step(
        self, grad_scale: Tensor | None, found_inf: Tensor | None, scan: ScanResult | None
    ) -> None:
        """Updates all parameters that have a gradient."""
        stepper = self._stepper
        guard = stepper.norm_guard
        is_of_scaler = grad_scale is not None or found_inf is not None
        sum_of_squares: Tensor | None = None
        max_norm: Tensor | None = None
        if scan is not None:
            has_hooks = has_step_pre_hooks(self)
            written = (has_hooks or guard is not None) and stepper.grads_were_written(self)
            if written and has_hooks and grad_scale is not None:
                self._warn_of_hooks()
            sum_of_squares = scan.sum_of_squares
            if not scan.found_infs:
                self._check_no_grads()
            elif (
                (has_hooks or written)
                and found_inf is not None
                and not stepper.norm_spans_ranks(self)
            ):
                # Hooks may write gradients through ``.data``, which changes no version counter.
                again, found_inf = self._scan_again(found_inf, grad_scale)
                scan.found_infs.update(again.found_infs)  # the dict that the scaler's update reads
                sum_of_squares = again.sum_of_squares
        if guard is not None:
            if sum_of_squares is None:
                scan, found_inf = self._scan_again(found_inf, grad_scale)
                sum_of_squares = scan.sum_of_squares
            skips = any(group["skip_nonfinite"] for group in self.param_groups)
            inputs = grad_scale, found_inf, sum_of_squares, skips
            found_inf, max_norm = guard.judge(self._first_device(), *inputs)
        stepper.grad_norms = None
        # The gradients are read before the step, which may write them.
        norms = self._grad_norms(grad_scale) if stepper.tracks_grad_norms else None
        arguments = grad_scale, found_inf, sum_of_squares, max_norm, is_of_scaler
        if self.offload is not None:
            self.offload.step(*arguments)
        else:
            self.take_step(None, *arguments)
        if norms is not None:
            stepper.grad_norms, stepper.normed_params = norms, params_of(self)

    def take_step(
        self,
        params: Sequence[Tensor] | None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        sum_of_squares: Tensor | None = None,
        max_norm: Tensor | None = None,
        is_of_scaler: bool = False,
    ) -> int:
        """Updates some or all parameters, without hooks of the step.

        A thread that steps all parameters while another thread steps some is refused; one that
        steps some waits. Missing states are created.

        Args:
            params: The parameters to update, those that have a gradient and are in a group; None
                for all.
            grad_scale: The scale that the gradients carry, one float32, or None.
            found_inf: One float32, or None. If it is not 0, nothing is written.
            sum_of_squares: The sum of squares of all scaled gradients, one float64. None if the
                step needs no norm, or computes the sum from the gradients of all parameters.
            max_norm: One float64, a limit of the norm besides ``max_grad_norm``; or None.
            is_of_scaler: True if a scaler takes the step. Otherwise a gradient is refused that a
                step with a scale has used before.

        Returns:
            The number of parameters that had a gradient.
        """
        stepper = self._stepper
        if stepper.averages_are_in:
            self.check_weights_are_in(f"{type(self).__name__}.step")
        inputs = grad_scale, found_inf, sum_of_squares, max_norm, is_of_scaler
        answer = stepper.compiled.step(self.state, self.param_groups, *inputs, params)
        return answer if isinstance(answer, int) else stepper.take_slowly(self, params, *inputs)

    def take_scan(
        self,
        params: Sequence[Tensor] | None,
        found_inf: Tensor | None = None,
        grad_scale: Tensor | None = None,
        sums_squares: bool = False,
    ) -> list[tuple[Tensor, Tensor, int, Tensor | None]]:
        """Scans the gradients of some or all parameters on this rank, without writing them.

        Args:
            params: The parameters, or None for all.
            found_inf: The flag before the scan, one float32; None stands for 0.
            grad_scale: The scale that the gradients carry, one float32, or None. A scale without a
                finite inverse counts as an overflow.
            sums_squares: Sums the squares even if the step does not clip by the norm.

        Returns:
            For each device and process groups over which parameters are sharded: a flag, one
            float32; one int64, the index of the first parameter whose gradient has inf or NaN,
            which later scans lower; the number of the process groups; and the sum of squares, one
            float64 or None.
        """
        inputs = params, found_inf, grad_scale, sums_squares
        found = self._stepper.compiled.scan(self.param_groups, *inputs)
        return self._stepper.scan_slowly(self, *inputs)[0] if found is None else found

    def _grad_norms(self, grad_scale: Tensor | None) -> Tensor | None:
        """Returns the norm of each gradient; None if the optimizer has no parameters."""
        grads, sharded_over = local_grads(self, f"{type(self).__name__}.step")
        if not grads:
            return None
        norms = norms_of_grads(grads, grad_scale, self._first_device())
        return sharded_over.norms_of_whole(params_of(self), norms) if sharded_over else norms

    def _note_what_is_stepped(self, error: Exception) -> None:
        """Adds a note about the number of stepped parameters to an error of a step."""
        compiled = self._stepper.compiled
        progress, compiled.progress = compiled.progress, ""  # no later error may report it
        if progress:
            note = (
                f"the step failed after updating {progress}. Load a checkpoint into the model and "
                "the optimizer with load_state_dict()."
            )
        elif isinstance(error, _REFUSALS) or "allocate memory" in str(error):
            note = "no parameter or state was changed. Free memory if it ran out, then step again."
        else:
            return
        if hasattr(error, "add_note"):
            error.add_note(f"{type(self).__name__}.step: {note}")

    def _warn_of_hooks(self) -> None:
        """Warns once about a hook that wrote scaled gradients.

        torch's optimizers without ``fused`` never show scaled gradients to their hooks.
        """
        if not self._has_warned_of_hooks:
            self._has_warned_of_hooks = True
            warnings.warn(
                f"{type(self).__name__}: a step pre-hook has changed gradients that still carry "
                "the loss scale. Set optimizer._step_supports_amp_scaling = False to unscale the "
                "gradients before the hook.",
                stacklevel=2,
            )

    def _check_no_grads(self) -> None:
        """Raises an error if a parameter has a gradient now, but had none in the scaler's scan."""
        if any(param.grad is not None for param in params_of(self)):
            raise AssertionError(NOTHING_WAS_SCANNED)

    # Methods that a scaler calls.

    def scan_gradients(self, grad_scale: Tensor | None = None) -> ScanResult:
        """Finds inf and NaN in all gradients, and keeps the result until the next step.

        If parameters are sharded, all ranks have to call this together.

        Args:
            grad_scale: One float32, or None. A scale without a finite inverse counts as an
                overflow.

        Returns:
            The result of the scan. Each device with gradients has a flag. If parameters are
            sharded, the gradients of all ranks count.
        """
        release = self.gradient_release
        scan: ScanResult = self._scan(None, grad_scale) if release is None else release.scan()
        self._stepper.last_scan = scan
        return scan

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets all gradients, as torch.optim.Optimizer does.

        Ends an iteration whose gradients were released, if its batch is given up.

        Args:
            set_to_none: Sets gradients to None instead of filling them with 0.
        """
        super().zero_grad(set_to_none)
        if self.gradient_release is not None:
            self.gradient_release.give_up()

    def _scan(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> ScanResult:
        if self._stepper.averages_are_in:
            self.check_weights_are_in(f"{type(self).__name__}.scan_gradients")
        return self._stepper.scan_all(self, found_inf, grad_scale)

    def _scan_again(
        self, found_inf: Tensor | None, grad_scale: Tensor | None
    ) -> tuple[ScanResult, Tensor | None]:
        """Returns a scan for the step, and ``found_inf`` with its flags if there is a scaler."""
        scan = self._scan(found_inf, grad_scale)
        # Ranks have agreed on found_inf, and one rank alone must not change it.
        is_alone = found_inf is not None and not self._stepper.norm_spans_ranks(self)
        if is_alone and scan.found_infs:
            return scan, sum_of_flags(scan.found_infs, found_inf.device)  # type: ignore
        return scan, found_inf

    def _first_device(self) -> torch.device:
        """Returns the device of the first parameter, or the CPU on a rank without parameters."""
        return next((param.device for param in params_of(self)), torch.device("cpu"))

    # Reports of steps. The stepper stores them, because a wrapper that copies the attributes of
    # this object shares it.

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the unscaled gradients at the last step, one float32 on the parameters' device.

        Later steps overwrite the tensor, so clone it to keep the value. None without
        ``max_grad_norm``, unless norms are tracked or there is a guard.
        """
        grad_norm, norms = self._report("grad_norm"), self._stepper.grad_norms
        if grad_norm is None and norms is not None:
            grad_norm = norms.double().square().nansum().sqrt().float()
        return grad_norm

    @property
    def grad_norms(self) -> Tensor | None:
        """Norms of the unscaled gradients of all parameters at the last step.

        float32 of shape ``[parameters]`` in the order of the groups, on the device of the first
        parameter. NaN for a parameter without a gradient, inf for a norm that is not finite in
        float32. None unless norms are tracked.
        """
        return self._stepper.grad_norms

    @property
    def track_grad_norms(self) -> bool:
        """Whether every step keeps the norm of each gradient, which takes a pass over them.

        Raises:
            TypeError: If set to anything but a bool.
        """
        return self._stepper.tracks_grad_norms

    @track_grad_norms.setter
    def track_grad_norms(self, tracks: bool) -> None:
        if not isinstance(tracks, bool):
            raise TypeError(
                f"{type(self).__name__}: track_grad_norms must be a bool, got {tracks!r}"
            )
        self._stepper.tracks_grad_norms = tracks

    @property
    def norm_guard(self) -> NormGuard | None:
        """The guard that judges the norm of the gradients before each step, or None.

        Raises:
            TypeError: If set to anything but a NormGuard or None.
            ValueError: If set to the guard of another optimizer.
        """
        return self._stepper.norm_guard

    @norm_guard.setter
    def norm_guard(self, guard: NormGuard | None) -> None:
        if guard is not None and not isinstance(guard, NormGuard):
            raise TypeError(
                f"{type(self).__name__}: norm_guard must be a NormGuard or None, got {guard!r}"
            )
        if guard is not None:
            guard.attach(self)  # or raises
            self.track_step_applied()
        last, self._stepper.norm_guard = self._stepper.norm_guard, guard
        if last is not None and last is not guard:
            last.attach(None)
            self._stepper.earlier_guards.append(last)

    def named_grad_norms(self) -> dict[str, float]:
        """Returns ``grad_norms`` by the names of the parameters. Waits for a GPU.

        A parameter has the name from ``named_parameters()``, or its position: "group 0, param 3".
        The dict omits parameters without a gradient, and parameters that were removed since.

        Raises:
            RuntimeError: If no step has been taken since ``track_grad_norms`` was set, or since
                ``load_state_dict``.
        """
        stepped = self._stepper.normed_params
        grad_norms = self.grad_norms
        if grad_norms is None or len(grad_norms) != len(stepped):
            raise RuntimeError(
                f"{type(self).__name__}.named_grad_norms: no step has recorded gradient norms "
                "yet. Set optimizer.track_grad_norms = True before a step."
            )
        names = dict(zip(map(id, params_of(self)), names_of_params(self), strict=True))
        norms = zip(stepped, grad_norms.tolist(), strict=True)
        return {
            names[id(param)]: norm
            for param, norm in norms
            if id(param) in names and not math.isnan(norm)
        }

    def track_step_applied(self) -> None:
        """Makes every later step write to :attr:`step_applied` whether it was applied."""
        self._stepper.compiled.tracks_step_applied = True

    @property
    def step_applied(self) -> Tensor | None:
        """1 if the last step was applied, 0 if it was skipped or no parameter had a gradient.

        One float32 on the device of the first parameter; later steps overwrite it. None before the
        first step after :meth:`track_step_applied`.
        """
        return self._report("step_applied")

    def _report(self, name: str) -> Tensor | None:
        if self.offload is None:
            report: Tensor | None = getattr(self._stepper.compiled, name)
            return report
        report = getattr(self.offload.inner._stepper.compiled, name)
        return None if report is None else report.to(self._first_device(), non_blocking=True)

    # State dicts, pickles and copies.

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Returns the states and the groups in the layout of torch.optim.Optimizer.

        numpy numbers in the groups become Python numbers, because ``weights_only=True`` refuses
        them. If FullyShardedDataParallel flattens a parameter with ``use_orig_params=True``, its
        16-bit states are float32 in the dict, because FSDP saves a state in one dtype. A load
        restores their bits.

        Raises:
            TypeError, ValueError: If the params of a group can't be read twice, or a state belongs
                to no parameter of a group.
        """
        self.check_weights_are_in(f"{type(self).__name__}.state_dict")
        self._check_params("state_dict")
        if self.offload is not None:
            self.offload.synchronize()
        return saved_state_dict(self, super().state_dict)

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of its namesake in torch.optim.

        Tensors are copied to the device and layout of their parameters, and buffers get the
        configured dtype. Options that torch does not have stay as configured; an option of torch
        that the file lacks gets the value that torch assumes. Masters that the file lacks are made
        from the parameters, so load the model first. Files of FusedAdam of apex and of
        TransformerEngine, which count the steps of a whole group, are accepted.

        Args:
            state_dict: From ``state_dict()``.

        Raises:
            KeyError: If the dict is not the state dict of an optimizer.
            TypeError: If ``state_dict`` is not a dict, or an option has the wrong type.
            ValueError: If the dict does not fit the groups, another class wrote it, or a part is
                missing. Nothing has been changed after any error.
        """
        self.check_weights_are_in(f"{type(self).__name__}.load_state_dict")
        check_is_dict(operation_of(self), state_dict)
        if self.offload is not None:
            self._check_params("load_state_dict")
            self.offload.synchronize()
        # torch's method would cast every state to the dtype of its parameter, so run only its
        # hooks, in torch's order.
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        state = read_state_dict(self, state_dict)
        self.__setstate__(state)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the contents for a pickle or a copy."""
        self.check_weights_are_in(f"{type(self).__name__}.__getstate__")
        state: dict[str, Any] = super().__getstate__()
        if self.track_grad_norms:
            state["track_grad_norms"] = True
        if self.norm_guard is not None:
            state["norm_guard"] = self.norm_guard
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores an optimizer from a pickle, a copy or a checkpoint; adds missing options."""
        defaults = state.get("defaults", vars(self).get("defaults", {}))
        otherwise = defaults_of(type(self))
        for name in OPTIONAL:  # files of earlier releases may lack some options
            if name in otherwise:
                defaults.setdefault(name, otherwise[name])
        for group in state["param_groups"]:
            for name, value in defaults.items():
                group.setdefault(name, value)
        state = dict(state)
        state.pop("_progress", None)  # pickles of earlier releases have it
        tracks = state.pop("track_grad_norms", False)
        guard = state.pop("norm_guard", None)
        if "_stepper" not in vars(self):
            name = type(self).__name__
            state["_stepper"] = Stepper(name, self.description.hyperparameters)
        # torch's method stores everything in one assignment.
        super().__setstate__(state)
        self._stepper.compiled.forget_masters()
        self._stepper.forget_scan()
        self._stepper.grad_norms = None
        if self.offload is not None:
            self.offload.inner._stepper.compiled.forget_masters()
        if tracks:
            self.track_grad_norms = True
        if guard is not None:  # in a shallow copy, the guard still belongs to the original
            self.norm_guard = guard if guard.is_free_for(self) else copy.deepcopy(guard)


# Stored, because torch's scaler reads this signature at every step: 2 µs instead of 30 µs.
setattr(FusedOptimizer.step, "__signature__", inspect.signature(FusedOptimizer.step))  # noqa: B010
