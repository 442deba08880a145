"""Keeps the states of an optimizer in host memory, and steps its parameters there."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy

from amp_ext import ops
from amp_ext.amp_protocol import AmpStepContext
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.nonfinite import params_of
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.state_store import PlacedParam, init_states
from amp_ext.optim.transport import CudaTransport, Transport, available_host_memory
from amp_ext.optim.weight_average import has_average
from amp_ext.sharding import is_dtensor, is_flattened

__all__ = ["OffloadedStates", "offload_states"]

#: Bytes of gradients that are copied and stepped together. A larger gradient is a chunk of its own.
CHUNK_BYTES = 32 << 20
#: Chunks in host memory at a time: one is stepped while the next one arrives.
_BUFFERS = 2
_ALIGNMENT = 64  # bytes
# Bytes of an element: of the master of a 16-bit parameter, and of a moment. None: as the parameter.
_MASTER_BYTES: dict[Any, int] = {True: 4, "split": 2, "split8": 1, False: 0}
_MOMENT_BYTES: dict[Any, int | None] = {"float32": 4, "bfloat16": 2, None: None}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def offload_states(
    optimizer: FusedOptimizer, pinned: bool = True, threads: int | None = None
) -> OffloadedStates:
    """Moves the masters and moments of an optimizer into host memory, where the CPU steps them.

    The GPU keeps only parameters and gradients. The training loop stays as it is, and the results
    have the same bits as without this call. In each step the gradients are copied into host memory,
    the CPU updates a host copy of the parameters, and the new parameters are copied back. ``step``
    returns when the last copy back has started, and makes the current stream wait for it; the CPU
    waits for the GPU in each step.

    Call it before the first step or after a load. New states are created in host memory.

    Args:
        optimizer: An optimizer of ``amp_ext.optim`` with float32, float16 or bfloat16 parameters on
            one GPU.
        pinned: Pins the host copies of the parameters and the buffers for gradients. Without it,
            copies are slower and run one after another. States are never copied, so they are
            ordinary memory.
        threads: Number of CPU threads of a step, or None for ``torch.get_num_threads()``. The
            calling thread waits during a step, so its own threads do not compete.

    Returns:
        The handle, also a context manager. The optimizer keeps it alive.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If ``threads`` is less than 1.
        RuntimeError: If the optimizer releases its gradients, has averages of its weights, writes
            gradients back or is offloaded already; if a parameter is a DTensor, flattened by FSDP1,
            lazy, float64, not dense in memory or not on the GPU of the others; or if there is too
            little host memory.

    Example:
        >>> optimizer = amp_ext.optim.AdamW(model.parameters(), master_weights="split")
        >>> offload = amp_ext.optim.offload_states(optimizer)
        >>> for x, y in data:
        ...     loss_of(x, y).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    Reference:
        Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021.
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            "offload_states: optimizer must be one of amp_ext.optim, got "
            f"{type(optimizer).__name__}"
        )
    if not isinstance(pinned, bool):
        raise TypeError(f"offload_states: pinned must be a bool, got {pinned!r}")
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool)):
        raise TypeError(f"offload_states: threads must be an int or None, got {threads!r}")
    if threads is not None and threads < 1:
        raise ValueError(f"offload_states: threads must be at least 1, got {threads}")
    device = optimizer._first_device()
    if device.type != "cuda":
        raise RuntimeError(
            f"offload_states: the parameters must be on a GPU, got {device}. States of parameters "
            "on the CPU are in host memory anyway."
        )
    return OffloadedStates(optimizer, CudaTransport(device, pinned), threads)


class _Seen(NamedTuple):
    """Tells whether a parameter was written."""

    address: int
    version: int

    @classmethod
    def of(cls, param: Tensor) -> _Seen:
        return cls(param.data_ptr(), param._version)


class _Host:
    """The host copy of a parameter, and the parameter as it was when both were equal."""

    def __init__(self, tensor: Tensor, is_copy: bool = True) -> None:
        self.tensor = tensor
        self.is_copy = is_copy  # False if `tensor` is empty, because the parameter is frozen
        self.seen: _Seen | None = None  # None if the parameter has to be copied

    def fits(self, param: Tensor) -> bool:
        """Returns True if the parameter has still the dtype and layout of the copy."""
        ours = self.tensor
        return (ours.dtype, ours.shape, ours.stride()) == (
            param.dtype,
            param.shape,
            param.stride(),
        )


class OffloadedStates:
    """The handle from :func:`offload_states`.

    An inner optimizer of the same class has the host copies as parameters. Each state is one dict,
    which both optimizers have under their own parameter.
    """

    @outside_inference_mode()
    def __init__(
        self,
        optimizer: FusedOptimizer,
        transport: Transport,
        threads: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Moves the states that exist.

        Args:
            optimizer: The optimizer.
            transport: Copies between the device of the parameters and the host.
            threads: As for :func:`offload_states`.
            chunk_bytes: Bytes of gradients that are copied and stepped together.
        """
        self._name = type(optimizer).__name__
        self._check_alone(optimizer)
        self._optimizer = weakref.ref(optimizer)  # the optimizer refers to this object
        self._transport = transport
        self._threads = threads
        self._chunk_bytes = chunk_bytes
        self._inner = _inner_of(optimizer)
        self._hosts: dict[Tensor, _Host] = {}  # by the parameter on the device
        self._layout: _Layout | None = None
        self._ring = torch.empty(0, dtype=torch.uint8)
        #: Results of the last step, on the device of the parameters.
        self.reports: dict[str, Tensor] = {}
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._pid = 0
        self._is_unfinished = False  # an interrupt may have left work in the thread
        self._users: dict[str, int] = {}  # the thread that is inside step(), under "step"
        self._check_memory(optimizer)
        self._prepare()
        self._convert_states(optimizer, self._inner.state, self.host_of)
        optimizer.rebuild()  # drops the plan's references to the old states
        optimizer.offload = self

    @outside_inference_mode()
    def remove(self) -> None:
        """Moves the states back to the device of the parameters, where later steps run."""
        optimizer = self._optimizer()
        if optimizer is None or optimizer.offload is not self:
            return
        self._prepare()
        self._convert_states(optimizer, optimizer.state, lambda param: param)
        optimizer.rebuild()
        optimizer.offload = None
        self._inner.state.clear()
        self._hosts.clear()
        self._transport.close()
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> OffloadedStates:
        """Returns the handle; leaving the context calls :meth:`remove`."""
        return self

    def __exit__(self, *_: Any) -> None:
        """Calls :meth:`remove`."""
        self.remove()

    # Host copies of parameters.

    def host_of(self, param: Tensor) -> Tensor:
        """Returns the host copy of a parameter, or the parameter itself if it has no copy.

        Args:
            param: A parameter of the optimizer, which has no copy if it is frozen; or another one.
        """
        host = self._hosts.get(param)
        return host.tensor if host is not None and host.is_copy else param

    def synchronize(self) -> None:
        """Brings the host copies and the inner optimizer up to date, outside a step."""
        with outside_inference_mode():
            self._prepare()

    def _prepare(self) -> None:
        """Makes the inner optimizer equal to the optimizer: parameters, options and states."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self._await_thread()
        params = params_of(optimizer)
        self._allocate_hosts(optimizer)
        if [*map(id, self._hosts)] != [*map(id, params)]:
            self._hosts = {param: self._hosts[param] for param in params}
        self._fetch()
        inner = self._inner
        inner.param_groups = [
            {**group, "params": [self._hosts[param].tensor for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        states: defaultdict[Tensor, Any] = defaultdict(dict)
        for param, host in self._hosts.items():
            if param in optimizer.state:
                states[host.tensor] = optimizer.state[param]
            if host.is_copy and host.tensor.requires_grad != param.requires_grad:
                host.tensor.requires_grad_(param.requires_grad)
        if len(states) != len(inner.state) or any(
            inner.state.get(host) is not state for host, state in states.items()
        ):
            inner.state = states
        if inner._plan.compiled.failure:  # the optimizer has recovered by a load
            inner._plan.begin_anew("")
        compiled, guard = inner._plan.compiled, optimizer.norm_guard
        compiled.set_guard(None if guard is None else guard.statistics)
        compiled.tracks_grad_norms = optimizer.track_grad_norms
        compiled.track_step_applied()

    def _allocate_hosts(self, optimizer: FusedOptimizer) -> None:
        """Allocates the host copies of new parameters, all in one block of memory."""
        new: list[Tensor] = []
        for group_index, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                host = self._hosts.get(param)
                if not _needs_copy(optimizer, param):
                    if host is None:
                        empty = torch.empty(0, dtype=param.dtype)
                        self._hosts[param] = _Host(empty, is_copy=False)
                elif (
                    host is None
                    or not (host.is_copy and host.fits(param))
                    or param.device != self._transport.device
                ):
                    self._check_param(param, f"group {group_index}, param {index}")
                    new.append(param)
        if not new:
            return
        slab = self._transport.allocate(sum(map(_aligned_bytes, new)))
        offset = 0
        for param in new:
            view = _strided(slab, offset, param.dtype, param.shape, param.stride())
            # The tensor in ``data`` has a version counter of its own.
            self._hosts[param] = _Host(view.data.requires_grad_(param.requires_grad))
            offset += _aligned_bytes(param)

    def _fetch(self) -> None:
        """Copies parameters that were written since the last step into their host copies."""
        written = [
            (param, host)
            for param, host in self._hosts.items()
            if host.is_copy and host.seen != _Seen.of(param)
        ]
        if not written:
            return
        seen = [_Seen.of(param) for param, _ in written]
        self._transport.begin()
        for param, host in written:
            self._transport.copy_down(host.tensor, param)
        self._transport.wait(self._transport.record_down())
        for (_, host), now in zip(written, seen, strict=True):
            increment_version(host.tensor)  # lets the inner optimizer refresh the master
            host.seen = now

    def _share_states(self, optimizer: FusedOptimizer) -> None:
        """Gives the optimizer the states that the inner optimizer has created."""
        for param, host in self._hosts.items():
            if host.tensor in self._inner.state and param not in optimizer.state:
                optimizer.state[param] = self._inner.state[host.tensor]

    def _convert_states(
        self,
        optimizer: FusedOptimizer,
        states: dict[Tensor, Any],
        beside: Callable[[Tensor], Tensor],
    ) -> None:
        """Moves existing states to the device of the tensors that ``beside`` returns."""
        placed = [
            PlacedParam(optimizer.state_spec_of(group), beside(param), group_index, index)
            for group_index, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group["params"])
            if states.get(beside(param))
        ]
        changed, _ = init_states(states, placed)
        ops.put_states(states, changed)

    # Operations of the optimizer that read or write states.

    def init_state(self) -> None:
        """Creates missing states in host memory."""
        self.synchronize()
        self._inner.init_state()
        optimizer = self._optimizer()
        assert optimizer is not None
        self._share_states(optimizer)

    def refresh_masters(self) -> None:
        """Copies all parameters into host memory, and updates the masters there."""
        for host in self._hosts.values():
            host.seen = None
        self.synchronize()
        self._inner.refresh_masters()

    def master_params(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Returns the masters in host memory; without masters, the host copies of parameters."""
        return self._inner.master_params([self.host_of(param) for param in params])

    def forget(self) -> None:
        """Drops what the inner optimizer knows of parameters and states."""
        self._await_thread()
        self._inner.rebuild()

    # Steps.

    @outside_inference_mode()
    def step(
        self,
        amp_context: AmpStepContext,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        sum_of_squares: Tensor | None,
        squares_of_params: Tensor | None,
    ) -> None:
        """Updates all parameters that have a gradient; see ``FusedOptimizer.step``."""
        thread = threading.get_ident()
        try:
            user = self._users.setdefault("step", thread)  # atomic
            if user != thread:
                raise RuntimeError(
                    f"{self._name}.step: thread {thread} called the optimizer while thread {user} "
                    "was inside a call of it. Let one thread at a time use it, for example with a "
                    "lock."
                )
            self._step(amp_context, grad_scale, found_inf, sum_of_squares, squares_of_params)
        finally:
            if self._users.get("step") == thread:
                del self._users["step"]

    def _step(
        self,
        amp_context: AmpStepContext,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        sum_of_squares: Tensor | None,
        squares_of_params: Tensor | None,
    ) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
        self._check_can_step(optimizer)
        found_inf, sum_of_squares, squares_of_params = optimizer._ask_plan(
            "step",
            optimizer._plan.compiled.prepare_copied_step,
            grad_scale,
            found_inf,
            sum_of_squares,
            squares_of_params,
        )
        self._prepare()
        inputs = [grad_scale, found_inf, sum_of_squares, squares_of_params]
        rates = [group["lr"] for group in self._inner.param_groups]
        read = self._read([*inputs, *(rate if _is_tensor(rate) else None for rate in rates)])
        for group, rate in zip(self._inner.param_groups, read[len(inputs) :], strict=True):
            if rate is not None:
                group["lr"] = rate
        chunks = self._chunks()
        self._transport.begin()
        self._run(lambda: self._step_on_host(amp_context, read[: len(inputs)], chunks))
        self._report()

    def _step_on_host(
        self, amp_context: AmpStepContext, inputs: list[Tensor | None], chunks: _Chunks
    ) -> None:
        """Steps the host copies. Runs in the thread, where no interrupt can stop it."""
        inner, optimizer = self._inner, self._optimizer()
        assert optimizer is not None
        try:
            inner._ask_plan("step", inner._plan.compiled.step, amp_context, *inputs, chunks)
            self._share_states(optimizer)
            plan, had_scale = optimizer._plan.compiled, inputs[0] is not None
            optimizer._ask_plan("step", plan.remember_copied_step, had_scale)
        except BaseException:
            if inner._plan.compiled.failure:
                optimizer._plan.begin_anew(inner._plan.compiled.failure)
            raise
        finally:
            self._transport.join(self._transport.record_up())
            for host in self._hosts.values():
                host.tensor.grad = None

    def _read(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Copies small tensors into host memory, in one copy."""
        present = [tensor for tensor in tensors if tensor is not None]
        if not present:
            return list(tensors)
        device = self._transport.device
        flat = torch.cat([each.detach().reshape(-1).to(device, torch.float64) for each in present])
        parts = iter(flat.cpu().split([tensor.numel() for tensor in present]))
        return [
            None if each is None else next(parts).to(each.dtype).reshape(each.shape)
            for each in tensors
        ]

    def _chunks(self) -> _Chunks:
        """Returns the chunks of a step, with host memory for all gradients of a chunk."""
        grads = [param.grad for param in self._hosts]
        layout = self._layout
        if layout is None or not layout.fits(grads):
            layout = _Layout(grads, self._chunk_bytes)
            size = layout.buffer_bytes * _BUFFERS
            if self._ring.numel() < size:
                self._ring = self._transport.allocate(size)
            layout.place(self._ring)
            self._layout = layout
        layout.close_gaps(grads)
        increment_version(self._ring)  # the gradients are new, although their memory is not
        return _Chunks(self._transport, layout, list(self._hosts.items()), grads)

    def _report(self) -> None:
        """Copies the norms of the step to the device."""
        device = self._transport.device
        for name in ("grad_norm", "grad_norms", "step_applied"):
            found = getattr(self._inner._plan.compiled, name)
            if found is None:
                self.reports.pop(name, None)
                continue
            if name not in self.reports or self.reports[name].shape != found.shape:
                self.reports[name] = torch.empty_like(found, device=device)
            self.reports[name].copy_(found, non_blocking=True)

    # The thread.

    def _run(self, work: Callable[[], None]) -> None:
        """Runs a step in the thread. An interrupt is raised after the step."""
        if self._pool is None or self._pid != os.getpid():  # a fork copies no threads
            self._start_thread()
        assert self._pool is not None
        self._is_unfinished = True
        try:
            error = self._pool.submit(work).exception()
            self._is_unfinished = False
        finally:
            self._await_thread()  # an interrupt has ended the line above
        if error is not None:
            raise error

    def _start_thread(self) -> None:
        threads, before = self._threads, torch.get_num_threads()
        initializer = None if threads is None else lambda: torch.set_num_threads(threads)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "amp_ext offload", initializer)
        self._pid = os.getpid()
        if threads is not None:
            self._pool.submit(int).result()
            torch.set_num_threads(before)  # for threads that start later; ours keeps its number

    def _await_thread(self) -> None:
        """Waits for a step that an interrupt has left running."""
        if self._is_unfinished and self._pool is not None and self._pid == os.getpid():
            self._pool.submit(int).result()
        self._is_unfinished = False

    # Checks.

    def _check_alone(self, optimizer: FusedOptimizer) -> None:
        """Refuses an optimizer with features that need its states on the device."""
        wrong = None
        if optimizer.offload is not None:
            wrong = "its states are offloaded already. Call remove() of the first offload before"
        elif optimizer.gradient_release is not None:
            wrong = "it releases its gradients. Call release.remove() first"
        elif has_average(optimizer):
            wrong = "it has a WeightAverage, which reads the states. Call average.remove() first"
        elif optimizer._plan.compiled.failure:
            wrong = "an earlier step failed. Load a checkpoint into the model and the optimizer"
        if wrong is not None:
            raise RuntimeError(f"offload_states: this {self._name} can't be offloaded: {wrong}.")

    def _check_param(self, param: Tensor, place: str) -> None:
        wrong = None
        if is_dtensor(param):
            wrong = "is a DTensor. Use fully_shard with CPUOffloadPolicy for sharded parameters"
        elif is_flattened(param):
            wrong = "is flattened by FSDP1. Use FSDP's own CPUOffload"
        elif is_lazy(param):
            wrong = "is a lazy parameter, which has no shape yet. Run the model once first"
        elif param.device != self._transport.device:
            wrong = f"must be on {self._transport.device}, got {param.device}"
        elif param.dtype not in _DTYPES:
            wrong = f"must be Float, Half or BFloat16, got {param.dtype}"
        elif param.is_inference():
            wrong = "is an inference tensor. Create it outside torch.inference_mode()"
        elif not _is_dense(param):
            wrong = "must be dense in memory, got a view with gaps or overlaps"
        if wrong is not None:
            raise RuntimeError(f"{self._name}: offload_states: param of {place} {wrong}.")

    def _check_can_step(self, optimizer: FusedOptimizer) -> None:
        for index, group in enumerate(optimizer.param_groups):
            if group.get("write_back_grads"):
                raise RuntimeError(
                    f"{self._name}.step: write_back_grads of group {index} must be False while "
                    "states are offloaded, because gradients are not copied back."
                )
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self._name}.step: a step with offloaded states can't be captured in a CUDA "
                "graph, because the CPU takes it. Call offload.remove() before the capture."
            )

    def _check_memory(self, optimizer: FusedOptimizer) -> None:
        """Refuses to offload if the host has too little memory for parameters and states."""
        available = available_host_memory()
        if available is None:
            return
        params, states, largest, total = 0, 0, 0, 0
        for group_index, group in enumerate(optimizer.param_groups):
            spec = optimizer.state_spec_of(group)
            for index, param in enumerate(group["params"]):
                if not _needs_copy(optimizer, param):
                    continue
                self._check_param(param, f"group {group_index}, param {index}")
                params += _aligned_bytes(param)
                largest = max(largest, _aligned_bytes(param))
                total += _aligned_bytes(param)
                states += _state_bytes(spec, param)
        buffers = _BUFFERS * min(total, max(largest, self._chunk_bytes))
        needed = params + states + buffers
        if needed > available:
            raise RuntimeError(
                f"offload_states: the host needs {_gib(needed)} GiB ({_gib(states)} for states, "
                f"{_gib(params)} for copies of parameters, {_gib(buffers)} for gradients), but "
                f"only {_gib(available)} GiB are available. Choose smaller states with "
                "master_weights and state_dtype, or a machine with more memory."
            )


class _Layout:
    """The chunks of a step, and the place of each gradient in the memory of its chunk."""

    def __init__(self, grads: list[Tensor | None], chunk_bytes: int) -> None:
        self._kinds = list(map(_kind, grads))
        self._gaps = [
            index for index, grad in enumerate(grads) if grad is not None and not _is_dense(grad)
        ]
        #: Index after the last parameter of each chunk.
        self.ends: list[int] = []
        self._places: list[tuple[int, int]] = []  # chunk and offset in its memory
        self.buffer_bytes = offset = 0
        for index, grad in enumerate(grads):
            size = 0 if grad is None else _aligned_bytes(grad)
            if offset and offset + size > chunk_bytes:
                self.ends.append(index)
                offset = 0
            self._places.append((len(self.ends), offset))
            offset += size
            self.buffer_bytes = max(self.buffer_bytes, offset)
        self.ends.append(len(grads))
        #: Host memory of each gradient.
        self.views: list[Tensor | None] = []

    def fits(self, grads: list[Tensor | None]) -> bool:
        """Returns True if these gradients have the dtypes and layouts of this layout's."""
        return self._kinds == list(map(_kind, grads))

    def close_gaps(self, grads: list[Tensor | None]) -> None:
        """Replaces gradients that have gaps or overlaps in memory by contiguous copies."""
        for index in self._gaps:
            grad = grads[index]
            grads[index] = None if grad is None else grad.contiguous()

    def place(self, ring: Tensor) -> None:
        """Places the gradients in host memory of ``_BUFFERS * buffer_bytes`` bytes."""
        for index, kind in enumerate(self._kinds):
            chunk, offset = self._places[index]
            if kind is None:
                self.views.append(None)
                continue
            dtype, shape, stride = kind
            if index in self._gaps:
                stride = torch.empty(shape, device="meta").stride()
            start = chunk % _BUFFERS * self.buffer_bytes + offset
            self.views.append(_strided(ring, start, dtype, shape, stride))


class _Chunks:
    """Copies the gradients of each chunk down, and the updated parameters up.

    The compiled step calls the methods, in the thread.
    """

    def __init__(
        self,
        transport: Transport,
        layout: _Layout,
        params: list[tuple[Tensor, _Host]],
        grads: list[Tensor | None],
    ) -> None:
        self.ends = layout.ends
        self._transport = transport
        self._params, self._grads, self._views = params, grads, layout.views
        self._events: list[Any] = []
        for (_, host), view in zip(params, layout.views, strict=True):
            if view is not None and view.dtype != host.tensor.dtype:
                host.tensor.grad_dtype = view.dtype
            host.tensor.grad = view

    def begin(self, chunk: int) -> None:
        """Waits for the gradients of a chunk, while those of the next one are copied."""
        while len(self._events) < min(chunk + _BUFFERS, len(self.ends)):
            for index in self._indices(len(self._events)):
                grad, view = self._grads[index], self._views[index]
                if grad is not None and view is not None:
                    self._transport.copy_down(view, grad)
            self._events.append(self._transport.record_down())
        self._transport.wait(self._events[chunk])

    def end(self, chunk: int) -> None:
        """Starts the copies of the updated parameters."""
        for index in self._indices(chunk):
            if self._grads[index] is None:
                continue
            self._grads[index] = None
            param, host = self._params[index]
            self._transport.copy_up(param, host.tensor)
            increment_version(param)
            host.seen = _Seen.of(param)

    def _indices(self, chunk: int) -> range:
        return range(self.ends[chunk - 1] if chunk else 0, self.ends[chunk])


def _inner_of(optimizer: FusedOptimizer) -> FusedOptimizer:
    """Returns an optimizer of the same class without parameters."""
    kind = type(optimizer)
    inner: FusedOptimizer = kind.__new__(kind)
    FusedOptimizer.__setstate__(
        inner,
        {"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": []},
    )
    return inner


def _needs_copy(optimizer: FusedOptimizer, param: Tensor) -> bool:
    """Returns False for a frozen parameter, which no step reads."""
    return param.requires_grad or param.grad is not None or param in optimizer.state


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _state_bytes(spec: ops.StateSpec, param: Tensor) -> int:
    """Returns the bytes of a parameter's state, without its step counter."""
    numel, moments = param.numel(), len(spec.names)
    size = _MASTER_BYTES[spec.master_weights] * numel if param.dtype != torch.float32 else 0
    if spec.state_dtype in _MOMENT_BYTES:
        return size + moments * numel * (_MOMENT_BYTES[spec.state_dtype] or param.element_size())
    has_blocks = ops.fits_blocks(param, True)
    in_blocks = numel + numel // 32 if has_blocks else 2 * numel
    if moments < 2:
        return size + moments * in_blocks
    return size + numel + (in_blocks if spec.state_dtype == "8bit" else 2 * numel)


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-_bytes(tensor) // _ALIGNMENT) * _ALIGNMENT


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


def _is_dense(tensor: Tensor) -> bool:
    return tensor.numel() == 0 or torch.empty_like(tensor, device="meta").stride() == (
        tensor.stride()
    )


def _kind(grad: Tensor | None) -> tuple[torch.dtype, torch.Size, tuple[int, ...]] | None:
    return None if grad is None else (grad.dtype, grad.shape, grad.stride())


def _strided(
    slab: Tensor, offset: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    """Returns a view of a tensor's layout on bytes of a slab."""
    numel = shape.numel()
    flat = slab[offset : offset + numel * dtype.itemsize].view(dtype)
    return flat.as_strided(shape, stride)
