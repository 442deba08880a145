"""Keeps the states of an optimizer in host memory, and steps its parameters there."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy

from amp_ext import ops
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.optim.formats import StateSpec, fits_blocks
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.host_buffers import (
    BUFFERS,
    GradBuffers,
    HostCopy,
    aligned_bytes,
    is_dense,
    strided,
)
from amp_ext.optim.state_bytes import MASTER_BYTES, bytes_of_moment
from amp_ext.optim.state_store import PlacedParam, init_states, put_states
from amp_ext.optim.transport import CudaTransport, Transport, available_host_memory
from amp_ext.sharding import is_dtensor, is_flattened, local_grad, local_tensor

__all__ = ["OffloadedStates", "offload_states"]

#: Bytes of gradients that are copied and stepped together. A larger gradient is a chunk of its own.
CHUNK_BYTES = 32 << 20
_MOMENT_DTYPES: dict[Any, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Step = Callable[[list[Tensor]], Any]  # steps host copies that have their gradients


def offload_states(
    optimizer: FusedOptimizer,
    pinned: bool = True,
    threads: int | None = None,
    *,
    transport: Transport | None = None,
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
        transport: Copies between the device of the parameters and the host, for tests and for other
            devices than a GPU. None copies on two CUDA streams.

    Returns:
        The handle, also a context manager. The optimizer keeps it alive.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If ``threads`` is less than 1.
        RuntimeError: If the optimizer has averages of its weights, writes gradients back or is
            offloaded already; if a parameter is a DTensor, flattened by FSDP1, lazy, float64, not
            dense in memory or not on the GPU of the others; or if there is too little host memory.

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
    if transport is None:
        device = optimizer._first_device()
        if device.type != "cuda":
            raise RuntimeError(
                f"offload_states: the parameters must be on a GPU, got {device}. States of "
                "parameters on the CPU are in host memory anyway; a test may pass a transport."
            )
        transport = CudaTransport(device, pinned)
    return OffloadedStates(optimizer, transport, threads)


class OffloadedStates:
    """The handle from :func:`offload_states`.

    An inner optimizer of the same class has the host copies as parameters. Each state is one dict,
    which both optimizers have under their own parameter. Copies of a DTensor's shard are DTensors.
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
        if optimizer.offload is not None:
            raise RuntimeError(
                f"offload_states: the states of this {self._name} are offloaded already. Call "
                "remove() of the first offload before."
            )
        self._optimizer = weakref.ref(optimizer)  # the optimizer refers to this object
        self._transport, self._threads, self._chunk_bytes = transport, threads, chunk_bytes
        #: An optimizer of the same class, whose parameters are the host copies.
        self.inner = _inner_of(optimizer)
        self._hosts: dict[Tensor, HostCopy] = {}  # by the parameter on the device
        self._buffers = GradBuffers(transport)
        # For each group, a learning rate that is a tensor, its version, and its value on the host.
        self._rates: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._pid = 0
        self._work: concurrent.futures.Future[None] | None = None  # the last work of the thread
        self._error: BaseException | None = None  # the first error of the thread
        self._updated = 0  # parameters that the thread has stepped in this step
        self.progress = ""  # how far the last step came, if it failed: "3 of 8 parameters"
        self._lock = threading.RLock()  # held by a step or a hook
        self._check_memory(optimizer)
        self.synchronize()
        self._convert_states(self.inner.state, self.host_of)
        if optimizer.gradient_release is not None:
            optimizer.gradient_release.give_up()  # the place of states can't change in an iteration
        optimizer.offload = self
        self._move_averages()

    @outside_inference_mode()
    def remove(self) -> None:
        """Moves the states back to the device of the parameters, where later steps run."""
        optimizer = self._optimizer()
        if optimizer is None or optimizer.offload is not self:
            return
        if optimizer.gradient_release is not None:
            optimizer.gradient_release.give_up()
        self.synchronize()
        self._convert_states(optimizer.state, lambda param: param)
        optimizer.offload = None
        self._move_averages()
        self.inner.state.clear()
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

    @property
    def _owner(self) -> FusedOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    # Host copies of parameters.

    def host_of(self, param: Tensor) -> Tensor:
        """Returns the host copy of a parameter, or the parameter itself if it has no copy.

        Args:
            param: A parameter of the optimizer, which has no copy if it is frozen; or another one.
        """
        host = self._hosts.get(param)
        return host.tensor if host is not None and host.is_copy else param

    @outside_inference_mode()
    def synchronize(self) -> None:
        """Makes the inner optimizer equal to the optimizer: parameters, options and states."""
        self._settle()
        self.progress = ""
        optimizer, inner = self._owner, self.inner
        self._allocate_hosts(optimizer)
        self._fetch()
        self._rates.clear()
        inner.param_groups = []
        for index, group in enumerate(optimizer.param_groups):
            hosts = [self._hosts[param] for param in group["params"]]
            for param, host in zip(group["params"], hosts, strict=True):
                host.group = index
                host.tensor.requires_grad_(host.is_copy and param.requires_grad)
            tensors = [host.tensor for host in hosts]
            inner.param_groups.append({**self._options_of(index), "params": tensors})
        states, hosts_of = optimizer.state, self._hosts.items()
        known = {host.tensor: states[param] for param, host in hosts_of if param in states}
        inner.state = defaultdict(dict, known)
        inner.track_step_applied()

    def _options_of(self, index: int) -> dict[str, Any]:
        """Returns the options of a group, with its learning rate in host memory."""
        options = {**self._owner.param_groups[index]}
        del options["params"]
        rate = options["lr"]
        if isinstance(rate, Tensor):
            known = self._rates.get(index)
            if known is None or known[0] is not rate or known[1] != rate._version:
                known = self._rates[index] = rate, rate._version, _on_host(rate)
            options["lr"] = known[2]
        return options

    def _allocate_hosts(self, optimizer: FusedOptimizer) -> None:
        """Allocates the host copies of new parameters, all in one block of memory."""
        hosts: dict[Tensor, Any] = {}
        for group_index, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                host = self._hosts.get(param)
                if host is not None and host.is_copy and not host.fits(param):
                    host = None
                if not _needs_copy(optimizer, param):
                    host = HostCopy(param, None) if host is None else host
                elif host is None or not host.is_copy or param.device != self._transport.device:
                    self._check_param(param, f"group {group_index}, param {index}")
                    host = None
                hosts[param] = host
        new = [param for param, host in hosts.items() if host is None]
        size = sum(aligned_bytes(local_tensor(param)) for param in new)
        slab = self._transport.allocate(size) if new else torch.empty(0, dtype=torch.uint8)
        offset = 0
        for param in new:
            local = local_tensor(param)
            view = strided(slab, offset, local.dtype, local.shape, local.stride())
            hosts[param] = HostCopy(param, view)
            offset += aligned_bytes(local)
        self._hosts = {param: host for param, host in hosts.items() if host is not None}
        if new and optimizer.offload is self:
            self._move_averages()

    def _fetch(self) -> None:
        """Copies parameters that were written since the last step into their host copies."""
        hosts = self._hosts.items()
        written = [(param, host) for param, host in hosts if host.is_copy and host.writes(param)]
        if not written:
            return
        self._transport.begin()
        for param, host in written:
            host.see(param)
            self._transport.copy_down(host.local, local_tensor(param))
        self._transport.wait(self._transport.record_down())
        # The inner optimizer refreshes masters of parameters that were written.
        increment_version([tensor for _, host in written for tensor in (host.tensor, host.local)])

    def _share_states(self, params: Iterable[Tensor]) -> None:
        """Gives the optimizer the states that the inner optimizer has created."""
        ours, states = self.inner.state, self._owner.state
        for param in params:
            state = ours.get(self._hosts[param].tensor)
            if state and states.get(param) is not state:
                states[param] = state

    def _convert_states(
        self, states: dict[Tensor, Any], beside: Callable[[Tensor], Tensor]
    ) -> None:
        """Moves existing states to the device of the tensors that ``beside`` returns."""
        optimizer = self._owner
        placed = [
            PlacedParam(optimizer.state_spec_of(group), beside(param), group_index, index)
            for group_index, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group["params"])
            if states.get(beside(param))
        ]
        put_states(states, init_states(states, placed))

    def _move_averages(self) -> None:
        """Moves averages of the weights to the masters."""
        for average in self._owner._stepper.weight_averages:
            average.move_to_states()

    # Operations of the optimizer that read or write states.

    def init_state(self) -> None:
        """Creates missing states in host memory."""
        self.synchronize()
        self.inner.init_state()
        self._share_states(self._hosts)

    def refresh_masters(self) -> None:
        """Copies all parameters into host memory, and updates the masters there."""
        for host in self._hosts.values():
            host.forget()
        self.synchronize()
        self.inner.refresh_masters()

    def forget(self) -> None:
        """Forgets to which values masters were rounded, because states have been loaded."""
        self._settle()
        self.inner._stepper.compiled.forget_masters()

    def master_params(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Returns the masters in host memory; without masters, the host copies of parameters."""
        return self.inner.master_params([self.host_of(param) for param in params])

    # Steps.

    @outside_inference_mode()
    def step(
        self,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        sum_of_squares: Tensor | None,
        max_norm: Tensor | None,
        is_of_scaler: bool,
    ) -> None:
        """Updates all parameters that have a gradient; see ``FusedOptimizer.take_step``."""
        optimizer, inner, stepper = self._owner, self.inner, self._owner._stepper
        self._check_can_step(optimizer)
        with self._lock:
            self.synchronize()
            stepper.check_grads(optimizer, is_of_scaler)
            found_inf, sum_of_squares = self._scan(grad_scale, found_inf, sum_of_squares)
            grads = [(each, self._grad_of(each)) for each in self._hosts if each.grad is not None]
            found_inf = _on_host(found_inf)
            others = _on_host(sum_of_squares), _on_host(max_norm), is_of_scaler
            grad_scale = _on_host(grad_scale)
            self._reserve(dict(grads))
            try:  # a step that is skipped checks all parameters, and creates missing states
                for param, grad in grads:
                    self._hosts[param].set_grad(self._buffers.like(grad))
                inner.take_step(None, grad_scale, torch.ones(()), *others)
            finally:
                for param, _ in grads:
                    self._hosts[param].set_grad(None)
            self._share_states(param for param, _ in grads)
            if found_inf is None or not found_inf:
                inputs = grad_scale, found_inf, *others
                self._step_in_chunks(grads, lambda hosts: inner.take_step(hosts, *inputs))
            if grad_scale is not None:
                stepper.mark_scaled(optimizer)
            stepper.compiled.forget_scan()  # a later step would take its sum for its own

    def _scan(
        self, grad_scale: Tensor | None, found_inf: Tensor | None, sum_of_squares: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns found_inf and the sum of squares, after a scan if a step would scan gradients."""
        optimizer, stepper = self._owner, self._owner._stepper
        clips = any(group["max_grad_norm"] is not None for group in optimizer.param_groups)
        lacks_sum = clips and sum_of_squares is None
        if stepper.norm_spans_ranks(optimizer):
            if lacks_sum:
                sum_of_squares = optimizer._scan(None, grad_scale).sum_of_squares
        elif lacks_sum or (found_inf is not None and stepper.grads_were_written(optimizer)):
            for flag, _, _, total in optimizer.take_scan(None, None, grad_scale, clips):
                found_inf = None if found_inf is None else found_inf + flag
                sum_of_squares = total if lacks_sum else sum_of_squares
        return found_inf, sum_of_squares

    def _step_in_chunks(self, grads: list[tuple[Tensor, Tensor]], step: Step) -> None:
        """Steps the parameters of one chunk after the other."""
        chunk: list[tuple[Tensor, Tensor]] = []
        size = self._updated = 0
        self._transport.begin()
        try:
            for param, grad in grads:
                if chunk and size + aligned_bytes(grad) > self._chunk_bytes:
                    self._send(chunk, step)
                    chunk, size = [], 0
                chunk.append((param, grad))
                size += aligned_bytes(grad)
            if chunk:
                self._send(chunk, step)
            self._settle()
        except Exception as error:
            with contextlib.suppress(Exception):
                self._settle()  # the chunks that were sent before are stepped
            if self._updated:
                self.progress = f"{self._updated} of {len(grads)} parameters"
            elif hasattr(error, "add_note"):
                error.add_note(f"{self._name}.step: no parameter was changed.")
            raise

    def _send(self, chunk: list[tuple[Tensor, Tensor]], step: Step) -> None:
        """Copies gradients down. Once they have arrived, the thread steps their parameters."""
        self._buffers.begin(sum(aligned_bytes(grad) for _, grad in chunk))
        views = []
        for _, grad in chunk:
            views.append(self._buffers.place(grad))
            self._transport.copy_down(views[-1], grad)
        arrived = self._transport.record_down()
        for param, _ in chunk:
            # Autograd refuses to read a saved parameter from now on.
            increment_version([param, local_tensor(param)] if is_dtensor(param) else param)
            self._hosts[param].see(param)
        self._work = self._submit(functools.partial(self._step_chunk, chunk, views, arrived, step))
        self._buffers.is_used_by(self._work)
        if self._error is not None:
            self._settle()

    def _step_chunk(
        self, chunk: list[tuple[Tensor, Tensor]], views: list[Tensor], arrived: Any, step: Step
    ) -> None:
        """Steps host copies, and starts the copies of the new parameters. Runs in the thread."""
        params = [param for param, _ in chunk]
        hosts = [self._hosts[param] for param in params]
        if self._error is not None:
            return  # nothing is stepped after an error, until it is raised
        try:
            self._transport.wait(arrived)
            chunk.clear()  # frees the gradients, if hooks have released them
            for host, view in zip(hosts, views, strict=True):
                host.set_grad(view)
            step([host.tensor for host in hosts])
            self._updated += len(hosts)
            self._share_states(params)
            for param, host in zip(params, hosts, strict=True):
                self._transport.copy_up(local_tensor(param), host.local)
        except BaseException as error:
            self._error = self._error or error
            for host in hosts:
                host.forget()  # the next step goes on from the parameter
        finally:
            for host in hosts:
                host.set_grad(None)

    def _grad_of(self, param: Tensor) -> Tensor:
        """Returns the gradient of this rank's shard, without gaps in memory."""
        name = f"grad of {self._place_of(param)}"
        grad = local_grad(param, f"{self._name}.step: {name}")
        assert grad is not None
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{self._name}: the step does not support sparse gradients: {name}. Call "
                "to_dense()."
            )
        return grad if is_dense(grad) else grad.contiguous()

    def _reserve(self, grads: Mapping[Tensor, Tensor]) -> None:
        """Makes buffers that are large enough for a chunk, and for each gradient."""
        copies = [(param, host.local) for param, host in self._hosts.items() if host.is_copy]
        sizes = [aligned_bytes(grads.get(param, local)) for param, local in copies]
        self._buffers.reserve(self._buffer_bytes(sizes))

    def _buffer_bytes(self, sizes: list[int]) -> int:
        """Returns the bytes of a buffer for gradients of these sizes: a chunk, or the largest."""
        return min(sum(sizes), max([self._chunk_bytes, *sizes]))

    # Steps in the backward pass, for released gradients.

    def begin_backward(self, grad_scale: Tensor | None) -> Tensor | None:
        """Prepares the inner optimizer for the hooks, and returns the loss scale on the host.

        Args:
            grad_scale: The loss scale, one float32, or None.
        """
        with self._lock:
            self.synchronize()
            self.inner._check_groups()  # or the thread would find a wrong option
            return _on_host(grad_scale)

    @outside_inference_mode()
    def step_in_backward(
        self, param: Tensor, step: Callable[[FusedOptimizer, Tensor], Any]
    ) -> bool:
        """Steps a parameter in the thread once its gradient has arrived.

        Args:
            param: The parameter.
            step: Steps the host copy of the parameter, which then has the gradient.

        Returns:
            False if the parameter is in no group.

        Raises:
            RuntimeError: If the gradient is sparse, or if the parameter was frozen when the
                iteration began. Also an error of an earlier step in the thread.
        """
        host = self._hosts.get(param)
        if host is None:
            return False
        if not host.is_copy:
            raise RuntimeError(
                f"{self._name}: a parameter was unfrozen within an iteration. Unfreeze it after "
                "step()."
            )
        grad = self._grad_of(param)
        group, options = self.inner.param_groups[host.group], self._options_of(host.group)

        def step_with_options(hosts: list[Tensor]) -> None:
            group.update(options)  # in the thread, as earlier gradients have earlier options
            step(self.inner, hosts[0])

        with self._lock:
            if not self._buffers.fits(grad):
                self._reserve({param: grad})
            self._transport.begin()
            self._send([(param, grad)], step_with_options)
        return True

    def end_backward(self, stepped: Iterable[Tensor]) -> None:
        """Waits for the steps of hooks, and makes the current stream wait for the last copy.

        Args:
            stepped: The parameters of the hooks.

        Raises:
            RuntimeError: If a parameter was written after its gradient was released. Also the first
                error of the thread.
        """
        self._settle()
        known = [each for each in stepped if each in self._hosts and self._hosts[each].is_known]
        for param in [param for param in known if self._hosts[param].writes(param)]:
            writes, counter = self._hosts[param].writes(param), _version_counter_of(param)
            # Views of one tensor share a version, which the hook of each of them increases.
            beside = sum(_version_counter_of(each) == counter for each in known) - 1
            if not 0 <= writes <= beside:
                self._hosts[param].forget()
                raise RuntimeError(
                    f"{self._name}: {self._place_of(param)} was written after its gradient was "
                    "released, before step() had copied it back. Write parameters after step() or "
                    "zero_grad()."
                )
            self._hosts[param].see(param)

    # The thread.

    def _submit(self, work: Callable[[], None]) -> concurrent.futures.Future[None]:
        if self._pool is None or self._pid != os.getpid():  # a fork copies no threads
            self._start_thread()
        assert self._pool is not None
        return self._pool.submit(work)

    def _start_thread(self) -> None:
        threads, before = self._threads, torch.get_num_threads()

        def set_threads() -> None:
            # In a new thread, torch and our engine set the number when they first run, to the one
            # that any thread has set last. So both run before it is set.
            torch.get_num_threads()
            ops.count_nonfinite([torch.zeros(1)])
            torch.set_num_threads(before if threads is None else threads)

        self._pool = concurrent.futures.ThreadPoolExecutor(1, "amp_ext offload", set_threads)
        self._pid = os.getpid()
        self._pool.submit(int).result()
        torch.set_num_threads(before)  # for threads that start later; ours keeps its number

    def _settle(self) -> None:
        """Waits for the thread and lets the current stream wait for its copies; raises its error.

        The thread may have work of hooks, and of a step that an interrupt has ended.
        """
        if self._work is not None and self._pid == os.getpid():
            self._work.result()
            self._transport.begin()
            self._transport.join(self._transport.record_up())
        self._work = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    # Checks.

    def _place_of(self, param: Tensor) -> str:
        group_index = self._hosts[param].group
        params = self._owner.param_groups[group_index]["params"]
        return f"group {group_index}, param {[*map(id, params)].index(id(param))}"

    def _check_param(self, param: Tensor, place: str) -> None:
        wrong = None
        if is_flattened(param):
            wrong = "is flattened by FSDP1. Use FSDP's own CPUOffload, or fully_shard"
        elif is_lazy(param):
            wrong = "is a lazy parameter, which has no shape yet. Run the model once first"
        elif param.device != self._transport.device:
            wrong = f"must be on {self._transport.device}, got {param.device}"
        elif param.dtype not in _DTYPES:
            wrong = f"must be Float, Half or BFloat16, got {param.dtype}"
        elif param.is_inference():
            wrong = "is an inference tensor. Create it outside torch.inference_mode()"
        elif not is_dense(local_tensor(param)):
            wrong = "must be dense in memory, got a view with gaps or overlaps"
        if wrong is not None:
            raise RuntimeError(f"{self._name}: offload_states: param of {place} {wrong}.")

    def _check_can_step(self, optimizer: FusedOptimizer) -> None:
        if any(group.get("write_back_grads") for group in optimizer.param_groups):
            raise RuntimeError(
                f"{self._name}.step: write_back_grads must be False while states are offloaded, "
                "because gradients are not copied back."
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
        states, sizes = 0, []
        for group_index, group in enumerate(optimizer.param_groups):
            spec = optimizer.state_spec_of(group)
            for index, param in enumerate(group["params"]):
                if not _needs_copy(optimizer, param):
                    continue
                self._check_param(param, f"group {group_index}, param {index}")
                sizes.append(aligned_bytes(local_tensor(param)))
                states += _state_bytes(optimizer, spec, local_tensor(param))
        params, buffers = sum(sizes), BUFFERS * self._buffer_bytes(sizes)
        needed = params + states + buffers
        if needed > available:
            raise RuntimeError(
                f"offload_states: the host needs {_gib(needed)} GiB ({_gib(states)} for states, "
                f"{_gib(params)} for copies of parameters, {_gib(buffers)} for gradients), but "
                f"only {_gib(available)} GiB are available. Choose smaller states with "
                "master_weights and state_dtype, or a machine with more memory."
            )


def _inner_of(optimizer: FusedOptimizer) -> FusedOptimizer:
    """Returns an optimizer of the same class without parameters."""
    kind = type(optimizer)
    inner: FusedOptimizer = kind.__new__(kind)
    FusedOptimizer.__setstate__(
        inner,
        {"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": []},
    )
    return inner


def _on_host(scalar: Any) -> Any:
    """Returns a copy of a small tensor in host memory, after the work of the device; or None."""
    return None if scalar is None else scalar.detach().to("cpu", copy=True)


def _version_counter_of(param: Tensor) -> int:
    return int(ops.binary.version_counter_of(local_tensor(param)))


def _needs_copy(optimizer: FusedOptimizer, param: Tensor) -> bool:
    """Returns False for a frozen parameter, which no step reads."""
    return param.requires_grad or param.grad is not None or param in optimizer.state


def _state_bytes(optimizer: FusedOptimizer, spec: StateSpec, param: Tensor) -> int:
    """Returns the bytes of a parameter's state, without its step counter."""
    numel, has_blocks = param.numel(), fits_blocks(param)
    dtype = _MOMENT_DTYPES.get(spec.state_dtype, spec.state_dtype) or param.dtype
    buffers = optimizer.description.buffers[: len(spec.names)]
    size = sum(bytes_of_moment(numel, dtype, each.code, has_blocks) for each in buffers)
    return (
        size if param.dtype == torch.float32 else size + numel * MASTER_BYTES[spec.master_weights]
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
