"""Steps parameters during the backward pass, so that gradients never exist all at once."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy

from amp_ext.amp_protocol import ScanResult, to_device
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.grad_norms import norms_of_grads
from amp_ext.params import name_in_groups, params_of
from amp_ext.sharding import is_dtensor, is_flattened

_WRONG_SCALER = (
    "the gradients of this optimizer are released with another scaler, or without one. Pass this "
    "scaler when you release them."
)


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
    parameters have been stepped. An option of a group that changes, such as ``lr``, counts from the
    next gradient on; if states are offloaded, from the next iteration on.

    Args:
        optimizer: An optimizer of ``amp_ext.optim``.
        scaler: The ``amp_ext.GradScaler`` that scales the losses, or None without scaling.
        replicated: False asserts that the parameters are no replicas of those of other ranks, and
            not in DistributedDataParallel. Hooks run before DistributedDataParallel reduces
            gradients, so a process with a process group is refused unless the parameters are
            DTensors.

    Returns:
        The handle, also a context manager. The optimizer keeps it alive.

    Raises:
        TypeError: If ``optimizer`` or ``scaler`` is of another class.
        ValueError: If ``replicated`` is True.
        RuntimeError: If the optimizer clips by the norm of all gradients, has a norm guard, writes
            gradients back, has a ``step`` of its own, or releases its gradients already; if the
            scaler has a process group; or if the parameters are released by another optimizer,
            replicas, flattened by FSDP1, or sharded while there is a scaler.

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
    is_ours = getattr(scaler, "_takes_released_gradients", False)
    if scaler is not None and not (is_ours and isinstance(scaler, torch.amp.GradScaler)):
        kind = type(scaler)
        raise TypeError(
            "release_gradients: scaler must be an amp_ext.GradScaler or None, got "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    if replicated not in (None, False):
        raise ValueError(
            f"release_gradients: replicated must be None or False, got {replicated!r}. Hooks run "
            "before gradients are reduced, so replicas would drift apart."
        )
    if optimizer.gradient_release is not None:
        raise RuntimeError(
            "release_gradients: this optimizer releases its gradients already. Call remove() of "
            "the first release before."
        )
    is_enabled = scaler is not None and scaler.is_enabled()
    return GradientRelease(optimizer, scaler if is_enabled else None, replicated is False)


class _Hook:
    """The hook of one parameter.

    A strong reference to the release would keep the optimizer alive through autograd.
    """

    def __init__(self, release: GradientRelease) -> None:
        self.release = weakref.ref(release)

    @_disable_dynamo  # a compiled function may call backward()
    def __call__(self, param: Tensor) -> None:
        release = self.release()
        if release is not None and not release._is_paused:
            release._on_gradient(param)

    def is_of_other(self, release: GradientRelease, param: Tensor) -> bool:
        """Returns True if another optimizer still steps the parameter with this hook."""
        mine = self.release()
        owner = None if mine is None or mine is release else mine._optimizer()
        return owner is not None and any(each is param for each in params_of(owner))


class GradientRelease(contextlib.AbstractContextManager["GradientRelease"]):
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
        self._handles: list[Any] = []
        self._is_paused = False
        self._is_open = False  # True from the first gradient of an iteration to its scan
        self._scale: Tensor | None = None  # the loss scale of this iteration, where steps run
        self._last_scale: tuple[Tensor, int] | None = None  # before its update, and its version
        # The parameters that were stepped in this iteration, with the norms of their gradients.
        self._stepped: dict[Tensor, Tensor | None] = {}
        # The flag of each gradient, and for each device the index of the first nonfinite one.
        self._found_infs: list[Tensor] = []
        self._first_nonfinites: dict[torch.device, Tensor] = {}
        self._settings: Any = None  # whether norms are tracked, and whether there may be ranks
        self._check(optimizer)
        for param in params_of(optimizer):
            self._hook(param)
        optimizer.gradient_release = self

    def remove(self) -> None:
        """Removes the hooks: later backward passes accumulate gradients, and ``step`` uses them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.gradient_release is self:
            self.give_up()
            optimizer.gradient_release = None

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
        if any(hook.release() is self for hook in _hooks_of(param)):
            # torch.utils.swap_tensors, which Module.to may call, leaves autograd's half of the
            # hooks with the other tensor. Setting the dict again installs it.
            param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
        elif param.requires_grad and not is_lazy(param):
            self._check_param(param)
            self._handles.append(param.register_post_accumulate_grad_hook(_Hook(self)))

    def _on_gradient(self, param: Tensor) -> None:
        """Steps a parameter and frees its gradient, unless the parameter is in no group."""
        optimizer, grad = self._optimizer(), param.grad
        if optimizer is None or grad is None:
            return
        if optimizer._stepper.averages_are_in:
            optimizer.check_weights_are_in(f"{self._name}: a step in the backward pass")
        if not self._is_open:  # two threads may both begin
            self._begin(optimizer)
        if param in self._stepped:
            raise RuntimeError(
                f"{self._name}: {name_in_groups(self._owner, param)} got another gradient after "
                f"{self._progress()} had been stepped in this iteration. Run all but its last "
                "backward() inside release.paused(). End an iteration with step() (with a scaler, "
                "update()), or with optimizer.zero_grad() if its batch is given up."
            )
        if grad.requires_grad:
            raise RuntimeError(
                f"{self._name}: released gradients can't be part of a graph. Call backward() "
                "without create_graph=True, or release.remove() first."
            )
        if optimizer.offload is None:
            is_stepped = self._step(optimizer, param)
        else:
            is_stepped = optimizer.offload.step_in_backward(param, self._step)
        if is_stepped:
            norm = None
            if optimizer.track_grad_norms:
                scale = None if self._scaler is None else self._scaler._scale
                norm = norms_of_grads([grad], scale, grad.device)[0]
            self._stepped[param] = norm
            param.grad = None

    def _step(self, optimizer: FusedOptimizer, param: Tensor) -> bool:
        """Steps a parameter that has its gradient; returns False if it is in no group.

        Args:
            optimizer: The optimizer; if states are offloaded, the inner one.
            param: The parameter, or its host copy.
        """
        scale = self._scale
        if scale is None:
            return optimizer.take_step([param]) > 0
        found = optimizer.take_scan([param], None, scale)
        if not found:
            return False
        found_inf, first_nonfinite, *_ = found[0]
        optimizer.take_step([param], scale, found_inf, is_of_scaler=True)
        self._first_nonfinites[found_inf.device] = first_nonfinite
        self._found_infs.append(found_inf)
        return True

    def _begin(self, optimizer: FusedOptimizer) -> None:
        """Begins an iteration."""
        self._check(optimizer)
        scale = None if self._scaler is None else self._scaler._scale
        if self._scaler is not None:
            if scale is None:
                raise RuntimeError(
                    f"{self._name}: the gradients are not scaled. Call scaler.scale(loss)."
                    "backward() with the scaler with which they are released."
                )
            last = self._last_scale
            if last is not None and last[0] is scale and last[1] == scale._version:
                raise RuntimeError(
                    f"{self._name}: a gradient arrived after step(), before the scaler's update(). "
                    "Call scaler.update() after each scaler.step()."
                )
        offload = optimizer.offload
        self._scale = scale if offload is None else offload.begin_backward(scale)
        self._last_scale = None
        self._is_open = True

    @property
    def _owner(self) -> FusedOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _progress(self) -> str:
        return f"{len(self._stepped)} of {len(params_of(self._owner))} parameters"

    # The optimizer and the scaler call the methods below.

    @outside_inference_mode()
    def scan(self) -> ScanResult:
        """Steps parameters that still have gradients, and returns what all hooks have found."""
        optimizer = self._owner
        self._end_backward()
        self._check(optimizer)
        for param in params_of(optimizer):
            if param.grad is not None:
                self._hook(param)
                self._on_gradient(param)
        self._end_backward()
        if self._is_open and self._scaler is not None:
            scale = self._scaler._scale
            self._last_scale = scale, scale._version
        self._is_open = False
        flags = defaultdict(list)
        for found_inf in self._found_infs:
            flags[found_inf.device].append(_on_current_stream(found_inf))
        self._found_infs = []
        found_infs = {device: torch.stack(each).sum() for device, each in flags.items()}
        return ScanResult(found_infs, dict(self._first_nonfinites), counts_tensors=True)

    def check_step(self, has_scaler: bool, scan: ScanResult | None) -> None:
        """Refuses a step of another scaler, and one without the scaler of the release."""
        if self._scaler is None and has_scaler:
            raise RuntimeError(f"{self._name}.step: {_WRONG_SCALER}")
        if self._scaler is not None and scan is None:
            raise RuntimeError(
                f"{self._name}.step: the gradients of this optimizer are released with a scaler, "
                "which did not call this step. Call scaler.step(optimizer) with that scaler. To "
                "create states without a step, call optimizer.init_state()."
            )

    @outside_inference_mode()
    def step(self, scan: ScanResult | None) -> None:
        """Completes the iteration in ``optimizer.step()``: steps late gradients, and reports."""
        optimizer = self._owner
        scan = self.scan() if scan is None else scan
        for param in params_of(optimizer):
            if param.grad is not None:
                self._on_gradient(param)
        stepped = optimizer if optimizer.offload is None else optimizer.offload.inner
        stepped.take_step(None, is_of_scaler=True)  # without gradients, for its reports
        applied = stepped._stepper.compiled.step_applied
        if applied is not None and self._stepped:
            skipped = [to_device(flag, applied.device) for flag in scan.found_infs.values()]
            applied.copy_(sum(skipped, torch.zeros_like(applied)) == 0)
        params = params_of(optimizer)
        optimizer._stepper.grad_norms, optimizer._stepper.normed_params = None, params
        if optimizer.track_grad_norms and params:
            norms = [self._stepped.get(param) for param in params]
            found = [None if norm is None else _on_current_stream(norm) for norm in norms]
            # The norm of a norm is the norm.
            optimizer._stepper.grad_norms = norms_of_grads(found, None, params[0].device)
        self._stepped = {}

    def give_up(self) -> None:
        """Ends an iteration whose batch is given up, and warns if parameters were stepped."""
        progress = self._progress() if self._stepped else ""
        try:
            self._end_backward()
        finally:
            self._is_open, self._stepped, self._found_infs = False, {}, []
        if progress:
            warnings.warn(
                f"{self._name}.zero_grad: the iteration ended without step(). {progress} had been "
                "stepped in its backward pass and stay so.",
                stacklevel=3,
            )

    def _end_backward(self) -> None:
        """Waits for the steps of offloaded parameters, which run in a thread."""
        if self._owner.offload is not None:
            self._owner.offload.finish(self._stepped)

    def check_scaler(self, scaler: Any, operation: str) -> None:
        """Refuses an operation of a scaler that does not fit: another one, or ``unscale_``."""
        if scaler is not self._scaler:
            raise RuntimeError(f"GradScaler.{operation}: {_WRONG_SCALER}")
        if operation == "unscale_":
            raise RuntimeError(
                "GradScaler.unscale_ needs all gradients at once, but this optimizer releases them "
                "during backward(). Call remove() of the release first. If you step a wrapper, "
                "pass the optimizer itself to scaler.step()."
            )

    # Checks.

    def _check(self, optimizer: FusedOptimizer) -> None:
        """Refuses what can't work when each gradient is used and freed before the next one."""
        scaler, groups = self._scaler, optimizer.param_groups
        compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
        reads_scaled = type(optimizer) if scaler is None else optimizer
        refused = {
            "a norm_guard": optimizer.norm_guard is not None,
            "max_grad_norm (clip_value works)": any(
                group["max_grad_norm"] is not None for group in groups
            ),
            "write_back_grads": any(group.get("write_back_grads") for group in groups),
            "a scaler that has a process_group": (
                scaler is not None and scaler._reduces_over() is not None
            ),
            "the step() of a subclass, or _step_supports_amp_scaling = False": (
                not reads_scaled._step_supports_amp_scaling
            ),
            "compiled autograd": getattr(compiled_autograd, "in_compiled_autograd_region", False),
            "the capture of a CUDA graph": (
                torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            ),
        }
        for what, is_wrong in refused.items():
            if is_wrong:
                raise RuntimeError(
                    f"{self._name}: gradients can't be released with {what}, because each is used "
                    "and freed before the next one exists. Do without, or call release.remove()."
                )
        has_ranks = dist.is_available() and dist.is_initialized() and not self._are_different
        settings = optimizer.track_grad_norms, has_ranks
        if settings != self._settings:
            self._settings = settings
            for param in params_of(optimizer):
                self._check_param(param)

    def _check_param(self, param: Any) -> None:
        """Refuses a parameter whose gradient no hook can use."""
        tracks_grad_norms, has_ranks = self._settings
        is_sharded, has_scaler = is_dtensor(param), self._scaler is not None
        is_on_mesh = not is_sharded or param.device_mesh.device_type == param.device.type
        refused = {
            "FSDP1 has flattened it. Use fully_shard": is_flattened(param),
            "its ranks must skip together. Train in bfloat16, which needs no scaler": (
                is_sharded and has_scaler
            ),
            "it is sharded. Set optimizer.track_grad_norms = False": (
                is_sharded and tracks_grad_norms
            ),
            "it may still be on the way. Use fully_shard without CPUOffloadPolicy": not is_on_mesh,
            "DistributedDataParallel would reduce it too late. Use fully_shard, or pass "
            "replicated=False if this model is no replica": has_ranks and not is_sharded,
            "another optimizer releases it. Call remove() of that release": any(
                hook.is_of_other(self, param) for hook in _hooks_of(param)
            ),
        }
        for why, is_wrong in refused.items():
            if is_wrong:
                name = name_in_groups(self._owner, param)
                raise RuntimeError(
                    f"{self._name}: the gradient of {name} can't be released: {why}."
                )


def _hooks_of(param: Tensor) -> list[_Hook]:
    """Returns the hooks of releases that a parameter has."""
    hooks = param._post_accumulate_grad_hooks or {}
    return [hook for hook in hooks.values() if isinstance(hook, _Hook)]


def _on_current_stream(found: Tensor) -> Tensor:
    """Returns what a hook, maybe on another stream, has found, for use on the current stream."""
    if found.is_cuda:
        found.record_stream(torch.cuda.current_stream(found.device))
    return found
