"""Steps parameters during the backward pass, so that gradients never exist all at once."""

from __future__ import annotations

import contextlib
import operator
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
from amp_ext.nonfinite import name_of_param, params_of
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.state_store import Local, PlacedParam, States, init_states
from amp_ext.sharding import (
    ShardedOver,
    global_offset,
    is_dtensor,
    is_flattened,
    local_grad,
    local_tensor,
)

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
        self._compiled = ops.GradientRelease(self._name)
        self._is_paused = False
        self._known: tuple[Any, ...] = ()  # inputs of the lists of parameters below
        self._params: list[Tensor] = []  # as hooks step them: with offloaded states, host copies
        self._places: list[tuple[int, int]] = []  # group and index in it of each parameter
        self._specs: list[ops.StateSpec] = []  # specs of the groups' states
        self._hooks: dict[int, Any] = {}  # handles, by the id of the parameter
        self._options: list[dict[str, Any]] = []  # options of the groups at the begin
        self._states_of_scaler: Any = None  # replaced by each update of the scaler
        self._scan: GradScan | None = None
        self._check_scaler_ranks()
        if optimizer.offload is not None:
            optimizer.offload.synchronize()
        self._compiled.check_options(optimizer._plan.compiled, optimizer)
        self._place_params(optimizer)
        optimizer.gradient_release = self

    def remove(self) -> None:
        """Removes the hooks: later backward passes accumulate gradients, and ``step`` uses them."""
        optimizer = self._optimizer()
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
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
        offload = optimizer.offload
        if offload is None:
            self._compiled.on_gradient(optimizer._plan.compiled, self, optimizer, param)
            return
        with offload.hooks:
            self._compiled.open(optimizer._plan.compiled, self)
            inner = offload.inner
            offload.step_in_backward(
                param,
                lambda host: self._compiled.on_gradient(inner._plan.compiled, self, inner, host),
            )

    def _stepped(self) -> FusedOptimizer:
        """Returns the optimizer that hooks step: with offloaded states, the inner one."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer if optimizer.offload is None else optimizer.offload.inner

    def _begin(self) -> None:
        """Begins an iteration. The compiled hook calls this with its lock."""
        optimizer, scaler = self._optimizer(), self._scaler
        if optimizer is None:
            return
        if self._compiled.is_collected and not self._is_over():
            raise RuntimeError(
                f"{self._name}: a gradient arrived after step(), before the scaler's update(). "
                "Call scaler.update() after each scaler.step()."
            )
        self._check_scaler_ranks()
        _check_can_step()
        scale = None
        if scaler is not None:
            scale, self._states_of_scaler = scaler._scale, scaler._per_optimizer_states
            if scale is None:
                raise RuntimeError(
                    f"{self._name}: the gradients are not scaled. Call "
                    "scaler.scale(loss).backward() with the scaler of release_gradients()."
                )
        if optimizer.offload is not None:
            scale = optimizer.offload.begin_backward(scale)
        self._place_params(optimizer)
        self._options = [_options_in(group) for group in optimizer.param_groups]
        self._scan = None
        stepped = self._stepped()
        self._compiled.begin(stepped._plan.compiled, stepped, scale)

    def _place_params(self, optimizer: FusedOptimizer) -> None:
        """Checks and lists the parameters of all groups, if anything about them has changed."""
        params, has_ranks = params_of(optimizer), dist.is_available() and dist.is_initialized()
        self._specs = [optimizer.state_spec_of(group) for group in optimizer.param_groups]
        known: tuple[Any, ...] = (
            [len(group["params"]) for group in optimizer.param_groups],
            optimizer.track_grad_norms,
            has_ranks and dist.get_world_size() > 1 and not self._are_different,
        )
        stepped = [optimizer._stored_beside(param) for param in params]
        if known == self._known and all(map(operator.is_, stepped, self._params)):
            return
        places = [
            (group_index, index)
            for group_index, group in enumerate(optimizer.param_groups)
            for index in range(len(group["params"]))
        ]
        rows, sharded_over = [], ShardedOver()
        for param, here, (group_index, index) in zip(params, stepped, places, strict=True):
            name = f"{self._name}: param of group {group_index}, param {index}"
            self._check_param(param, name, *known[1:])
            partition, first = None, 0
            if is_dtensor(param):
                partition, first = sharded_over.add(param, name), global_offset(param)
            rows.append((group_index, index, here, partition, first))
        for param in params:
            self._hook(param)
        self._compiled.register_params(rows)
        self._known, self._params, self._places = known, stepped, places

    # The compiled hook calls the methods below.

    def _shard(self, param: Tensor) -> tuple[Tensor, Tensor | None]:
        return local_tensor(param), local_grad(param, self._name)

    def _init_state(self, index: int) -> tuple[States, list[Local]]:
        group, index_in_group = self._places[index]
        placed = PlacedParam(self._specs[group], self._params[index], group, index_in_group)
        return init_states(self._stepped().state, [placed])

    def _warn_of_write(self, index: int) -> None:
        name = name_of_param(self._optimizer(), index)
        warnings.warn(self._compiled.warning_of_write(self._name, name), stacklevel=2)

    # The end of an iteration.

    def scan(self) -> GradScan:
        """Steps parameters that still have gradients, and returns what all hooks have found."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._end_backward(optimizer)
        if self._compiled.is_open:  # else the next gradient reads the options
            self._check_options(optimizer)
        for param in params_of(optimizer):
            if param.grad is not None:
                self._hook(param)
                self._on_gradient(param)
        self._end_backward(optimizer)
        self._scan = GradScan({}, {})
        if not self._compiled.is_open:
            return self._scan
        flags, firsts, total, squares = self._compiled.collect(self._stepped()._plan.compiled)
        self._scan = GradScan(
            {flag.device: flag for flag in flags},
            {first.device: first for first in firsts},
            total,
            squares,
            counts_tensors=True,
        )
        return self._scan

    def step(self, amp_context: AmpStepContext, found_inf: Tensor | int | None) -> None:
        """Completes the iteration in ``optimizer.step()``: norms, reports, and late gradients."""
        optimizer, scan = self._optimizer(), amp_context.scan
        assert optimizer is not None
        if self._scaler is None:
            if amp_context.grad_scale is not None or amp_context.found_inf is not None:
                self._compiled.throw_wrong_scaler(f"{self._name}.step")
            scan = self.scan()
        elif scan is None or scan is not self._scan:
            self._compiled.throw_without_scaler(f"{self._name}.step")
        elif any(param.grad is not None for param in params_of(optimizer)):
            raise RuntimeError(
                f"{self._name}.step: a hook before the step has set gradients, which released "
                "gradients do not allow. Change them in a hook of the parameter instead."
            )
        stepped, offload, grad_scale = self._stepped(), optimizer.offload, amp_context.grad_scale
        if offload is not None and isinstance(found_inf, Tensor):
            grad_scale, found_inf = offload.read([grad_scale, found_inf])
        plan = stepped._plan.compiled
        sums = scan.sum_of_squares, scan.squares_of_params
        stepped._ask_plan("step", plan.step, amp_context, grad_scale, found_inf, *sums)
        if self._compiled.is_collected:
            self._compiled.set_step_applied(plan)
        if self._scaler is None:
            self._compiled.end(plan)
        if offload is not None:
            offload.complete_backward()

    def give_up(self) -> None:
        """Ends an iteration whose batch is given up, and warns if parameters were stepped."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        self._end_backward(optimizer, is_given_up=True)
        warning = self._compiled.give_up(self._stepped()._plan.compiled)
        if warning:
            warnings.warn(warning, stacklevel=3)

    def forget(self) -> None:
        """Drops all states, which the next hooks take again from the optimizer."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._compiled.forget(self._stepped()._plan.compiled)

    def _end_backward(self, optimizer: FusedOptimizer, is_given_up: bool = False) -> None:
        """Waits for the steps of offloaded parameters, which run in a thread."""
        if optimizer.offload is not None:
            optimizer.offload.end_backward(is_given_up)

    def check_scaler(self, scaler: Any, operation: str) -> None:
        """Refuses an operation of a scaler that does not fit: another one, or ``unscale_``."""
        if scaler is not self._scaler:
            self._compiled.throw_wrong_scaler(f"GradScaler.{operation}")
        if operation == "unscale_":
            self._compiled.throw_needs_gradients("GradScaler.unscale_")

    def _is_over(self) -> bool:
        """Returns True if the scaler has been updated since the iteration began."""
        return self._scaler is None or (
            self._scaler._per_optimizer_states is not self._states_of_scaler
        )

    # Checks.

    def _check_scaler_ranks(self) -> None:
        """Refuses a scaler whose ranks must agree before any of them steps."""
        if self._scaler is not None and self._scaler._reduces_over() is not None:
            raise RuntimeError(
                f"{self._name}: gradients can't be released with a scaler that has a "
                "process_group, which needs all gradients at once. Construct the scaler without it."
            )

    def _check_param(
        self, param: Tensor, name: str, tracks_grad_norms: bool, are_replicas: bool
    ) -> None:
        wrong = None
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
            raise RuntimeError(f"{name}: its gradient can't be released: {wrong}.")

    def _check_options(self, optimizer: FusedOptimizer) -> None:
        """Refuses options that changed after parameters had been stepped with the old ones."""
        groups = [_options_in(group) for group in optimizer.param_groups]
        for index, (before, now) in enumerate(zip(self._options, groups, strict=False)):
            for name, value in before.items():
                if name not in now or not _is_same(now[name], value):
                    self._compiled.throw_changed(name, index)


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


def _options_in(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a group, with the version of each tensor among them."""
    return {
        name: (value, value._version) if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(before, tuple) and isinstance(before[0], Tensor):
        return isinstance(now, tuple) and now[0] is before[0] and now[1] == before[1]
    return now is before or bool(now == before)
