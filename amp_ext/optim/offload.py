"""Keeps the states of an optimizer in host memory, and steps its parameters there."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy

from amp_ext import ops
from amp_ext.amp_protocol import AmpStepContext
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.nonfinite import name_of_param, params_of
from amp_ext.optim.formats import StateSpec, fits_blocks
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.host_buffers import (
    BUFFERS,
    Chunks,
    HookBuffers,
    HostCopy,
    Layout,
    Seen,
    aligned_bytes,
    is_dense,
    set_grad,
    strided,
)
from amp_ext.optim.state_bytes import MASTER_BYTES, bytes_of_moment
from amp_ext.optim.state_store import PlacedParam, init_states
from amp_ext.optim.transport import CudaTransport, Transport, available_host_memory
from amp_ext.sharding import is_dtensor, is_flattened

__all__ = ["OffloadedStates", "offload_states"]

#: Bytes of gradients that are copied and stepped together. A larger gradient is a chunk of its own.
CHUNK_BYTES = 32 << 20
_MOMENT_DTYPES: dict[Any, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
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
    device = optimizer._first_device()
    if device.type != "cuda":
        raise RuntimeError(
            f"offload_states: the parameters must be on a GPU, got {device}. States of parameters "
            "on the CPU are in host memory anyway."
        )
    return OffloadedStates(optimizer, CudaTransport(device, pinned), threads)


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
        #: An optimizer of the same class, whose parameters are the host copies.
        self.inner = _inner_of(optimizer)
        self._hosts: dict[Tensor, HostCopy] = {}  # by the parameter on the device
        self._layout: Layout | None = None
        self._ring = torch.empty(0, dtype=torch.uint8)
        self._hook_buffers = HookBuffers(self._ring, 0)
        #: Results of the last step, on the device of the parameters.
        self.reports: dict[str, Tensor] = {}
        self._error: BaseException | None = None  # error of a step in the backward pass
        self._has_raised = False  # whether such an error was raised in this iteration
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._pid = 0
        self._is_unfinished = False  # hooks or an interrupt may have left work in the thread
        self._users: dict[str, int] = {}  # the thread that is inside step(), under "step"
        self._check_memory(optimizer)
        self._prepare()
        self._convert_states(optimizer, self.inner.state, self.host_of)
        optimizer.rebuild()  # drops the plan's references to the old states
        self._end_iteration(optimizer)
        optimizer.offload = self

    @outside_inference_mode()
    def remove(self) -> None:
        """Moves the states back to the device of the parameters, where later steps run."""
        optimizer = self._optimizer()
        if optimizer is None or optimizer.offload is not self:
            return
        self._end_iteration(optimizer)
        self._prepare()
        self._convert_states(optimizer, optimizer.state, lambda param: param)
        optimizer.rebuild()
        optimizer.offload = None
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

    @staticmethod
    def _end_iteration(optimizer: FusedOptimizer) -> None:
        """Ends an iteration of released gradients, in which the place of states can't change."""
        if optimizer.gradient_release is not None:
            optimizer.gradient_release.give_up()

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
        optimizer = self._owner
        self._await_thread()
        params = params_of(optimizer)
        self._allocate_hosts(optimizer)
        if [*map(id, self._hosts)] != [*map(id, params)]:
            self._hosts = {param: self._hosts[param] for param in params}
        self._fetch()
        inner = self.inner
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
            inner._plan.reset("")
        inner._plan.compiled.track_step_applied()

    def _allocate_hosts(self, optimizer: FusedOptimizer) -> None:
        """Allocates the host copies of new parameters, all in one block of memory."""
        new: list[Tensor] = []
        for group_index, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                host = self._hosts.get(param)
                if not _needs_copy(optimizer, param):
                    if host is None:
                        empty = torch.empty(0, dtype=param.dtype)
                        self._hosts[param] = HostCopy(empty, is_copy=False)
                elif (
                    host is None
                    or not (host.is_copy and host.fits(param))
                    or param.device != self._transport.device
                ):
                    self._check_param(param, f"group {group_index}, param {index}")
                    new.append(param)
        if not new:
            return
        slab = self._transport.allocate(sum(map(aligned_bytes, new)))
        offset = 0
        for param in new:
            view = strided(slab, offset, param.dtype, param.shape, param.stride())
            # The tensor in ``data`` has a version counter of its own.
            self._hosts[param] = HostCopy(view.data.requires_grad_(param.requires_grad))
            offset += aligned_bytes(param)

    def _fetch(self) -> None:
        """Copies parameters that were written since the last step into their host copies."""
        written = [
            (param, host)
            for param, host in self._hosts.items()
            if host.is_copy and host.seen != Seen.of(param)
        ]
        if not written:
            return
        seen = [Seen.of(param) for param, _ in written]
        self._transport.begin()
        for param, host in written:
            self._transport.copy_down(host.tensor, param)
        self._transport.wait(self._transport.record_down())
        for (_, host), now in zip(written, seen, strict=True):
            increment_version(host.tensor)  # lets the inner optimizer refresh the master
            host.seen = now

    def _share_states(self, optimizer: FusedOptimizer, *params: Tensor) -> None:
        """Gives the optimizer the states that the inner optimizer has created."""
        for param in params or self._hosts:
            host = self._hosts[param].tensor
            if host in self.inner.state and param not in optimizer.state:
                optimizer.state[param] = self.inner.state[host]

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
        self.inner.init_state()
        self._share_states(self._owner)

    def refresh_masters(self) -> None:
        """Copies all parameters into host memory, and updates the masters there."""
        for host in self._hosts.values():
            host.seen = None
        self.synchronize()
        self.inner.refresh_masters()

    def master_params(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Returns the masters in host memory; without masters, the host copies of parameters."""
        return self.inner.master_params([self.host_of(param) for param in params])

    def forget(self) -> None:
        """Drops what the inner optimizer knows of parameters and states."""
        self._await_thread()
        self.inner.rebuild()

    # Steps.

    @outside_inference_mode()
    def step(
        self,
        amp_context: AmpStepContext,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        sum_of_squares: Tensor | None,
        max_norm: Tensor | None,
        is_of_scaler: bool,
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
            found = found_inf, sum_of_squares
            self._step(amp_context, is_of_scaler, grad_scale, *found, max_norm=max_norm)
        finally:
            if self._users.get("step") == thread:
                del self._users["step"]

    def _step(
        self,
        amp_context: AmpStepContext,
        is_of_scaler: bool,
        grad_scale: Tensor | None,
        *found: Tensor | None,
        max_norm: Tensor | None,
    ) -> None:
        optimizer = self._owner
        self._check_can_step(optimizer)
        prepare = optimizer._plan.compiled.prepare_copied_step
        found = optimizer._call_plan("step", prepare, grad_scale, *found, is_of_scaler)
        self._prepare()
        inputs = self._read_inputs([grad_scale, *found, max_norm])
        chunks = self._chunks()
        self._transport.begin()
        self._run(lambda: self._step_on_host(amp_context, inputs, chunks))
        self.report()

    def _step_on_host(
        self, amp_context: AmpStepContext, inputs: list[Tensor | None], chunks: Chunks
    ) -> None:
        """Steps the host copies. Runs in the thread, where no interrupt can stop it."""
        inner, optimizer = self.inner, self._owner
        try:
            step = inner._plan.compiled.step
            inner._call_plan("step", step, amp_context, *inputs, True, chunks)
            self._share_states(optimizer)
            plan, had_scale = optimizer._plan.compiled, inputs[0] is not None
            optimizer._call_plan("step", plan.remember_copied_step, had_scale)
        except BaseException:
            self._share_failure(optimizer)
            raise
        finally:
            self._transport.join(self._transport.record_up())
            for host in self._hosts.values():
                host.tensor.grad = None

    def _share_failure(self, optimizer: FusedOptimizer) -> None:
        """Refuses further operations after an error between the launches of a step."""
        if self.inner._plan.compiled.failure:
            optimizer._plan.reset(self.inner._plan.compiled.failure)

    def _read_inputs(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Copies the inputs of a step and the learning rates that are tensors in one copy."""
        rates = [group["lr"] for group in self.inner.param_groups]
        read = self.read([*inputs, *(rate if isinstance(rate, Tensor) else None for rate in rates)])
        for group, rate in zip(self.inner.param_groups, read[len(inputs) :], strict=True):
            if rate is not None:
                group["lr"] = rate
        return read[: len(inputs)]

    def read(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
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

    def _chunks(self) -> Chunks:
        """Returns the chunks of a step, with host memory for all gradients of a chunk."""
        grads = [param.grad for param in self._hosts]
        layout = self._layout
        if layout is None or not layout.fits(grads):
            layout = Layout(grads, self._chunk_bytes)
            layout.place(self._reserve(layout.buffer_bytes))
            self._layout = layout
        layout.close_gaps(grads)
        increment_version(self._ring)  # the gradients are new, although their memory is not
        return Chunks(self._transport, layout, list(self._hosts.items()), grads)

    def _buffer_bytes(self, sizes: list[int]) -> int:
        """Returns the bytes of a buffer for gradients of these sizes: a chunk, or the largest."""
        return min(sum(sizes), max([self._chunk_bytes, *sizes]))

    def _reserve(self, buffer_bytes: int) -> Tensor:
        """Returns the memory of the buffers for gradients, each of at least ``buffer_bytes``."""
        if self._ring.numel() < buffer_bytes * BUFFERS:
            self._ring = self._transport.allocate(buffer_bytes * BUFFERS)
            self._layout = None  # its gradients are in the old buffers
        return self._ring

    def report(self) -> None:
        """Copies the results of the step to the device."""
        device = self._transport.device
        for name in ("grad_norm", "step_applied"):
            found = getattr(self.inner._plan.compiled, name)
            if found is None:
                self.reports.pop(name, None)
                continue
            if name not in self.reports or self.reports[name].shape != found.shape:
                self.reports[name] = torch.empty_like(found, device=device)
            self.reports[name].copy_(found, non_blocking=True)

    # Steps in the backward pass, for released gradients.

    @outside_inference_mode()
    def begin_backward(self, grad_scale: Tensor | None) -> Tensor | None:
        """Prepares the inner optimizer for the hooks, and returns the loss scale on the host.

        Args:
            grad_scale: The loss scale, one float32, or None.
        """
        self._prepare()
        self._has_raised = False
        return self._read_inputs([grad_scale])[0]

    @outside_inference_mode()
    def step_in_backward(self, param: Tensor, step: Callable[[Tensor], None]) -> None:
        """Steps a parameter in the thread once its gradient has arrived, and frees the gradient.

        A later call raises an error of the thread.

        Args:
            param: The parameter.
            step: Steps the host copy with which it is called, which then has the gradient.

        Raises:
            RuntimeError: If the gradient is sparse or part of a graph, or if the parameter was
                frozen when the iteration began.
        """
        self.raise_error()
        host, grad = self._hosts.get(param), param.grad
        if host is None or grad is None:
            return
        wrong = None
        if not host.is_copy:
            wrong = "a parameter was unfrozen within an iteration. Unfreeze it after step()"
        elif grad.layout is not torch.strided:
            wrong = "the step does not support sparse gradients. Call to_dense()"
        elif grad.requires_grad:
            wrong = (
                "released gradients can't be part of a graph. Call backward() without "
                "create_graph=True, or release.remove() first"
            )
        if wrong is not None:
            raise RuntimeError(f"{self._name}: {wrong}.")
        if not is_dense(grad):
            grad = grad.contiguous()
        if self._hook_buffers.buffer_bytes < aligned_bytes(grad):
            sizes = [aligned_bytes(each.tensor) for each in self._hosts.values()]
            widened = -(-grad.element_size() // param.element_size())  # float32 gradients
            buffer_bytes = widened * self._buffer_bytes(sizes)
            self._hook_buffers = HookBuffers(self._reserve(buffer_bytes), buffer_bytes)
        view = self._hook_buffers.place(grad)
        increment_version(view)
        self._transport.begin()
        self._transport.copy_down(view, grad)
        arrived = self._transport.record_down()
        # The copy reads the gradient, so the list keeps it until the thread has seen the event.
        work = functools.partial(self._step_one, param, host, view, [grad], arrived, step)
        increment_version(param)
        host.seen = Seen.of(param)
        self._hook_buffers.futures[self._hook_buffers.index] = self._submit(work)
        param.grad = None

    def _step_one(
        self,
        param: Tensor,
        host: HostCopy,
        view: Tensor,
        grads: list[Tensor],
        arrived: Any,
        step: Callable[[Tensor], None],
    ) -> None:
        """Steps one parameter. Runs in the thread."""
        optimizer, is_stepped = self._optimizer(), False
        try:
            self._transport.wait(arrived)
            grads.clear()
            set_grad(host.tensor, view)
            step(host.tensor)
            if optimizer is not None:
                self._share_states(optimizer, param)
            is_stepped = True
            if host.seen != Seen.of(param):
                name = name_of_param(optimizer, [*map(id, self._hosts)].index(id(param)))
                raise RuntimeError(
                    f"{self._name}: {name} was written after its gradient was released, before "
                    "step() had copied it back. Write parameters after step() or zero_grad()."
                )
            self._transport.copy_up(param, host.tensor)
        except BaseException as error:
            self._error = self._error or error
            if is_stepped:
                self.inner._plan.reset("a parameter that could not be copied back")
            if optimizer is not None:
                self._share_failure(optimizer)
        finally:
            host.tensor.grad = None

    def end_backward(self, is_given_up: bool = False) -> None:
        """Waits for the steps of all hooks, and makes the current stream wait for the last copy.

        Raises an error that occurred in the thread.

        Args:
            is_given_up: True if the batch is given up, so that the first error is enough.
        """
        self._await_thread()
        if is_given_up and self._has_raised:
            self._error = None
        self.raise_error()

    def complete_backward(self) -> None:
        """Completes an iteration: registers what was stepped, and copies the results up."""
        optimizer = self._owner
        optimizer._call_plan("step", optimizer._plan.compiled.remember_copied_step, False)
        self.report()

    def raise_error(self) -> None:
        """Raises the error of a step in the thread, if there is one that was not raised yet."""
        error, self._error = self._error, None
        if error is not None:
            self._has_raised = True
            raise error

    # The thread.

    def _submit(self, work: Callable[[], None]) -> concurrent.futures.Future[None]:
        if self._pool is None or self._pid != os.getpid():  # a fork copies no threads
            self._start_thread()
        assert self._pool is not None
        self._is_unfinished = True
        return self._pool.submit(work)

    def _run(self, work: Callable[[], None]) -> None:
        """Runs a step in the thread. An interrupt is raised after the step."""
        try:
            error = self._submit(work).exception()
            self._is_unfinished = False
        finally:
            self._await_thread()  # an interrupt has ended the line above
        if error is not None:
            raise error

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

    def _await_thread(self) -> None:
        """Waits for steps of hooks, and for a step that an interrupt has left running."""
        if self._is_unfinished and self._pool is not None and self._pid == os.getpid():
            self._pool.submit(int).result()
            self._transport.begin()
            self._transport.join(self._transport.record_up())
        self._is_unfinished = False

    # Checks.

    def _check_alone(self, optimizer: FusedOptimizer) -> None:
        """Refuses an optimizer with features that need its states on the device."""
        wrong = None
        if optimizer.offload is not None:
            wrong = "its states are offloaded already. Call remove() of the first offload before"
        elif optimizer._plan.weight_averages:
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
        elif not is_dense(param):
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
        states, sizes = 0, []
        for group_index, group in enumerate(optimizer.param_groups):
            spec = optimizer.state_spec_of(group)
            for index, param in enumerate(group["params"]):
                if not _needs_copy(optimizer, param):
                    continue
                self._check_param(param, f"group {group_index}, param {index}")
                sizes.append(aligned_bytes(param))
                states += _state_bytes(optimizer, spec, param)
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
