"""Steps parameters during the backward pass, so that gradients never exist all at once."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from amp_ext import ops
from amp_ext.amp_protocol import AmpStepContext, GradScan, takes_released_gradients
from amp_ext.nonfinite import params_of
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.grad_norms import norms_of_grads
from amp_ext.optim.state_store import PlacedParam, States, StepTensors, init_states
from amp_ext.optim.step_plan import place_params
from amp_ext.sharding import is_dtensor, is_flattened, local_grad, local_tensor

__all__ = ["GradientRelease", "release_gradients"]


def release_gradients(
    optimizer: FusedOptimizer,
    scaler: torch.amp.GradScaler | None = None,
    replicated: bool | None = None,
) -> GradientRelease:
    """Makes an optimizer step each parameter inside ``backward()``, as soon as it has its gradient.

    The gradient is freed at once, so that a model with 16-bit parameters needs 2 bytes less for
    each of them, and one with float32 parameters 4 bytes less. The training loop stays as it is:
    ``backward()`` does the work, and ``step`` and ``update`` complete the iteration.

    While gradients are finite, the results have the same bits as without this call. After an
    overflow they differ: each parameter whose own gradient is finite has already been stepped, and
    only the others are skipped.

    An iteration ends with ``step`` (with a scaler: with ``update``). If a batch is given up after
    some of its gradients were used, call ``optimizer.zero_grad()``; a warning says how many
    parameters have been stepped. The options of the groups are read at the first gradient of an
    iteration and must stay unchanged until its end.

    Args:
        optimizer: An optimizer of ``amp_ext.optim``.
        scaler: The ``amp_ext.GradScaler`` that scales the losses, or None without scaling.
        replicated: False asserts that in a run of several ranks the parameters are not replicas of
            each other. Hooks run before DistributedDataParallel reduces gradients, so replicas
            would drift apart, and several ranks are refused unless the parameters are DTensors.

    Returns:
        The handle, also a context manager. The optimizer keeps it alive.

    Raises:
        TypeError: If ``optimizer`` or ``scaler`` is of another class.
        ValueError: If ``replicated`` is True.
        RuntimeError: If the optimizer clips by the norm of all gradients, has a norm guard, writes
            gradients back, or releases its gradients already; if the scaler has a process group; or
            if the parameters are replicas, flattened by FSDP1, or sharded while there is a scaler.

    Example:
        >>> release = amp_ext.optim.release_gradients(optimizer, scaler)
        >>> for x, y in data:
        ...     scaler.scale(loss_of(x, y)).backward()
        ...     scaler.step(optimizer)
        ...     scaler.update()
        ...     optimizer.zero_grad()

    Reference:
        Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources",
        2023, which fuses the gradient computation and the update.
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            "release_gradients: optimizer must be one of amp_ext.optim, got "
            f"{type(optimizer).__name__}"
        )
    if scaler is not None and not takes_released_gradients(scaler):
        raise TypeError(
            "release_gradients: scaler must be an amp_ext.GradScaler or None, got "
            f"{type(scaler).__module__}.{type(scaler).__qualname__}"
        )
    if replicated not in (None, False):
        raise ValueError(
            f"release_gradients: replicated must be None or False, got {replicated!r}. Replicated "
            "parameters would drift apart, because hooks run before gradients are reduced."
        )
    if optimizer.gradient_release is not None:
        raise RuntimeError(
            "release_gradients: this optimizer releases its gradients already. Call remove() of "
            "the first release before."
        )
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    return GradientRelease(optimizer, scaler, replicated is False)


class GradientRelease:
    """The handle from :func:`release_gradients`."""

    def __init__(self, optimizer: FusedOptimizer, scaler: Any, are_different: bool) -> None:
        """Registers the hooks.

        Args:
            optimizer: The optimizer.
            scaler: An enabled scaler, or None.
            are_different: True if parameters may differ between ranks.
        """
        self._optimizer = weakref.ref(optimizer)  # the optimizer refers to this object
        self._scaler = scaler
        self._are_different = are_different
        self._name = type(optimizer).__name__
        self._compiled = ops.GradientRelease(self._name, scaler)
        self._is_paused = False
        self._known: tuple[Any, ...] = ()  # inputs of the list of parameters below
        self._params: list[PlacedParam] = []
        self._hooks: dict[int, Any] = {}  # handles, by the id of the parameter
        self._norms: dict[int, Tensor] = {}  # norms of gradients in this iteration, by id
        self._check_scaler_ranks()
        if optimizer.offload is not None:
            optimizer.offload.synchronize()
        self._check_options(optimizer)
        self._place_params(optimizer)
        optimizer.gradient_release = self

    def remove(self) -> None:
        """Removes the hooks: later backward passes accumulate gradients, and ``step`` uses them."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.gradient_release is self:
            self.give_up()
            optimizer.gradient_release = None

    def __enter__(self) -> GradientRelease:
        """Returns the handle; leaving the context calls :meth:`remove`."""
        return self

    def __exit__(self, *_: Any) -> None:
        """Calls :meth:`remove`."""
        self.remove()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Accumulates gradients as usual inside this context, for all but the last micro-batch."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    # Hooks.

    def _hook(self, param: Tensor) -> None:
        """Registers the hook of a parameter that requires a gradient, unless it has one."""
        if id(param) in self._hooks:
            # torch.utils.swap_tensors, which Module.to may call, leaves autograd's half of the
            # hooks with the other tensor. Setting the dict again installs it.
            hooks = param._post_accumulate_grad_hooks
            param._post_accumulate_grad_hooks = hooks
            return
        if not param.requires_grad:
            return
        reference = weakref.ref(self)  # otherwise a cycle through autograd would keep all alive

        def on_gradient(param: Tensor) -> None:
            release = reference()
            if release is not None and not release._is_paused:
                release._on_gradient(param)

        self._hooks[id(param)] = param.register_post_accumulate_grad_hook(on_gradient)

    def _on_gradient(self, param: Tensor) -> None:
        """Steps a parameter and frees its gradient."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if optimizer._plan.averages_are_in:
            optimizer.check_weights_are_in(f"{self._name}: a step in the backward pass")
        offload, plan = optimizer.offload, optimizer._plan.compiled
        if optimizer.track_grad_norms and param.grad is not None:
            scale = None if self._scaler is None else self._scaler._scale
            self._norms[id(param)] = norms_of_grads([param.grad], scale, param.grad.device)[0]
        if offload is None:
            self._compiled.on_gradient(plan, self, optimizer, param)
            return
        inner = offload.inner

        def step(host: Tensor) -> None:
            self._compiled.on_gradient(inner._plan.compiled, self, inner, host)

        def copy_and_step() -> None:
            try:
                self._compiled.open(plan, self)
            except RuntimeError:
                offload.raise_error()  # the cause, if a step in the thread has failed
                raise
            offload.step_in_backward(param, step)

        self._compiled.in_turn(copy_and_step)

    @property
    def _owner(self) -> FusedOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _stepped(self) -> FusedOptimizer:
        """Returns the optimizer that hooks step: with offloaded states, the inner one."""
        optimizer = self._owner
        return optimizer if optimizer.offload is None else optimizer.offload.inner

    def _place_params(self, optimizer: FusedOptimizer) -> None:
        """Checks and lists the parameters of all groups, if anything about them has changed."""
        has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        settings = optimizer.track_grad_norms, has_ranks and not self._are_different
        beside = optimizer._stored_beside
        ids = [[id(beside(param)) for param in group["params"]] for group in optimizer.param_groups]
        known = *settings, ids
        if known == self._known:
            return
        specs = [optimizer.state_spec_of(group) for group in optimizer.param_groups]
        _, params, rows = place_params(self._name, optimizer, specs)
        for placed in params:
            self._check_param(placed, *settings)
        for placed in params:
            self._hook(placed.param)
        self._compiled.register_params([(*row[:2], beside(row[2]), *row[3:]) for row in rows])
        self._params = [placed._replace(param=beside(placed.param)) for placed in params]
        self._known = known

    # The compiled hook calls the methods below.

    def _begin(self) -> None:
        """Begins an iteration."""
        optimizer = self._owner
        self._check_no_guard(optimizer)
        self._check_scaler_ranks()
        _check_can_step()
        scale = grad_scale = None if self._scaler is None else self._scaler._scale
        if optimizer.offload is not None:
            grad_scale = optimizer.offload.begin_backward(scale)
        self._place_params(optimizer)
        plan = optimizer._plan.compiled
        self._compiled.begin(plan, optimizer, self._stepped(), scale, grad_scale)

    def _shard(self, param: Tensor) -> tuple[Tensor, Tensor | None]:
        return local_tensor(param), local_grad(param, self._name)

    def _init_state(self, index: int) -> tuple[States, list[StepTensors]]:
        stepped, placed = self._stepped(), self._params[index]
        spec = stepped.state_spec_of(stepped.param_groups[placed.group_index])
        return init_states(stepped.state, [placed._replace(spec=spec)])

    # The optimizer and the scaler call the methods below.

    def scan(self) -> GradScan:
        """Steps parameters that still have gradients, and returns what all hooks have found."""
        optimizer = self._owner
        self._end_backward()
        self._check_options(optimizer)
        for param in params_of(optimizer):
            if param.grad is not None:
                self._hook(param)
                self._on_gradient(param)
        self._end_backward()
        flags, firsts = self._compiled.collect(self._stepped()._plan.compiled)
        found_infs = {flag.device: flag for flag in flags}
        first_nonfinites = {first.device: first for first in firsts}
        return GradScan(found_infs, first_nonfinites, counts_tensors=True)

    def step(self, amp_context: AmpStepContext, found_inf: Tensor | int | None) -> None:
        """Completes the iteration in ``optimizer.step()``: norms, reports, and late gradients."""
        scale, scan = amp_context.grad_scale, amp_context.scan
        has_scale = scale is not None or amp_context.found_inf is not None
        self._compiled.check_caller_of_step(has_scale, scan is not None)
        if scan is None:
            scan = self.scan()
        stepped, offload = self._stepped(), self._owner.offload
        if offload is not None and isinstance(found_inf, Tensor):
            scale, found_inf = offload.read([scale, found_inf])
        plan = stepped._plan.compiled
        stepped._call_plan("step", plan.step, amp_context, scale, found_inf, None, None, has_scale)
        self._compiled.complete(plan)
        if offload is not None:
            offload.complete_backward()
        self._report_norms()

    def _report_norms(self) -> None:
        """Stores the norms that the hooks have found as those of the step."""
        optimizer, found = self._owner, self._norms
        self._norms = {}
        params = params_of(optimizer) if optimizer.track_grad_norms else []
        norms = [found.get(id(param)) for param in params]
        for norm in norms:
            if norm is not None and norm.is_cuda:  # a hook may have run on another stream
                norm.record_stream(torch.cuda.current_stream(norm.device))
        # The norm of a norm is the norm itself.
        optimizer._plan.grad_norms = (
            norms_of_grads(norms, None, params[0].device) if norms else None
        )

    def give_up(self) -> None:
        """Ends an iteration whose batch is given up, and warns if parameters were stepped."""
        self._norms = {}
        self._end_backward(is_given_up=True)
        warning = self._compiled.give_up(self._stepped()._plan.compiled)
        if warning:
            warnings.warn(warning, stacklevel=3)

    def forget(self) -> None:
        """Drops all states, which the next hooks take again from the optimizer."""
        self._compiled.forget(self._stepped()._plan.compiled)

    def _end_backward(self, is_given_up: bool = False) -> None:
        """Waits for the steps of offloaded parameters, which run in a thread."""
        offload = self._owner.offload
        if offload is not None:
            offload.end_backward(is_given_up)

    def check_scaler(self, scaler: Any, operation: str) -> None:
        """Refuses an operation of a scaler that does not fit: another one, or ``unscale_``."""
        self._compiled.check_scaler(scaler, operation)

    # Checks.

    def _check_options(self, optimizer: FusedOptimizer) -> None:
        """Refuses options that need all gradients at once, or gradients that stay."""
        self._check_no_guard(optimizer)
        self._compiled.check_options(optimizer._plan.compiled, optimizer)

    def _check_no_guard(self, optimizer: FusedOptimizer) -> None:
        if optimizer.norm_guard is not None:
            raise RuntimeError(
                f"{self._name}: gradients can't be released with a norm_guard, which needs all "
                "gradients at once. Remove the guard."
            )

    def _check_scaler_ranks(self) -> None:
        """Refuses a scaler whose ranks must agree before any of them steps."""
        if self._scaler is not None and self._scaler._reduces_over() is not None:
            raise RuntimeError(
                f"{self._name}: gradients can't be released with a scaler that has a "
                "process_group, which needs all gradients at once. Construct the scaler without it."
            )

    def _check_param(
        self, placed: PlacedParam, tracks_grad_norms: bool, are_replicas: bool
    ) -> None:
        param, wrong = placed.param, None
        if is_flattened(param):
            wrong = "FSDP1 has flattened it. Use fully_shard"
        elif is_dtensor(param):
            mesh: Any = param.device_mesh  # type: ignore[attr-defined]
            if self._scaler is not None:
                wrong = (
                    "it is sharded, and no hook knows the ranks that must skip together. Train in "
                    "bfloat16, which needs no scaler"
                )
            elif tracks_grad_norms:
                wrong = "it is sharded. Set optimizer.track_grad_norms = False"
            elif mesh.device_type != param.device.type:
                wrong = (
                    "it is offloaded, and its gradient may still be on the way. Use fully_shard "
                    "without CPUOffloadPolicy"
                )
        elif are_replicas:
            wrong = (
                "there are several ranks, whose replicas would drift apart, because hooks run "
                "before DistributedDataParallel reduces. Use fully_shard, or pass replicated=False "
                "if the ranks train different models"
            )
        if wrong is not None:
            raise RuntimeError(
                f"{self._name}: param of {placed}: its gradient can't be released: {wrong}."
            )


def _check_can_step() -> None:
    """Refuses compiled autograd and the capture of CUDA graphs, where no hook can step."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled_autograd, "in_compiled_autograd_region", False):
        raise RuntimeError(
            "release_gradients: compiled autograd does not run hooks one by one. Disable it, or "
            "call release.remove() first."
        )
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "release_gradients: parameters can't be stepped while a CUDA graph is captured. Call "
            "release.remove() before the capture."
        )
