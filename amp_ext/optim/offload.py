"""Keeps the states of an optimizer in host memory, and steps its parameters there."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from amp_ext import ops
from amp_ext.inference_mode import outside_inference_mode
from amp_ext.optim.formats import is_16_bit
from amp_ext.optim.fused_optimizer import FusedOptimizer
from amp_ext.optim.muon import Muon
from amp_ext.optim.state_bytes import MASTER_BYTES
from amp_ext.optim.state_store import PlacedParam
from amp_ext.optim.transport import Transport, available_host_memory
from amp_ext.params import name_in_groups, params_of
from amp_ext.plain_numbers import is_count
from amp_ext.sharding import is_dtensor, is_flattened, local_grad, local_tensor


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
        TypeError: If ``optimizer`` is of another class.
        ValueError: If ``threads`` is no int of at least 1.
        RuntimeError: If the optimizer is offloaded already; if a parameter is flattened by FSDP1,
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
    if isinstance(optimizer, Muon):
        raise TypeError(
            "offload_states: optimizer must not be Muon, whose matrix products a CPU would take "
            "too long for. Use state_dtype='8bit' and master_weights='split' to save memory"
        )
    if threads is not None and not is_count(threads):
        raise ValueError(
            f"offload_states: threads must be None or an int of at least 1, got {threads!r}"
        )
    if transport is None:
        device = optimizer._first_device()
        if device.type != "cuda":
            raise RuntimeError(
                f"offload_states: the parameters must be on a GPU, got {device}. States of "
                "parameters on the CPU are in host memory anyway; a test may pass transport=."
            )
        transport = Transport(device, pinned)
    return OffloadedStates(optimizer, transport, threads)


class HostCopy:
    """A parameter in host memory, and what the parameter was when both were equal.

    Args:
        param: The parameter; for a DTensor, this rank's shard is copied.
        memory: Bytes in host memory, enough for the shard.
    """

    def __init__(self, param: Any, memory: Tensor) -> None:
        """Copies nothing yet."""
        self.param = param
        # The tensor in ``data`` has a version counter of its own.
        self.local = self.view(memory, param.dtype).data
        #: The parameter of the inner optimizer, a DTensor if the parameter is one.
        self.tensor = self.sharded(self.local)
        self.tensor.grad_dtype = None  # gradients may have another dtype
        self.seen = self.now()

    def view(self, memory: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the first bytes of memory in the layout of the shard."""
        local = local_tensor(self.param)
        return memory.view(dtype).as_strided(local.shape, local.stride())

    def sharded(self, local: Tensor) -> Any:
        """Returns a shard in host memory as a DTensor, if the parameter is one."""
        if not is_dtensor(self.param):
            return local
        return type(self.param.data)(local, self.param._spec, requires_grad=False)

    def counted(self) -> list[Tensor]:
        """Returns the tensors that count writes: a DTensor and its shard have a version each."""
        return [self.param, local_tensor(self.param)] if is_dtensor(self.param) else [self.param]

    def now(self) -> tuple[Any, Any, int]:
        """Returns the layout, the address and the version of the parameter: a write changes one."""
        local, spec = local_tensor(self.param), getattr(self.param, "_spec", None)
        layout = spec, local.device, local.dtype, local.shape, local.stride()
        address = local.untyped_storage()._cdata, local.data_ptr()
        return layout, address, sum(each._version for each in self.counted())

    def see(self) -> None:
        """Remembers that the copy has what is in the parameter now."""
        self.seen = self.now()
        # No later storage gets the address of one that has a reference.
        self.storage = StorageWeakRef(local_tensor(self.param).untyped_storage())


Grads = list[tuple[HostCopy, Tensor]]  # gradients, and the copies of their parameters
Step = Callable[[list[Tensor]], Any]  # steps host copies that have their gradients


class OffloadedStates(contextlib.AbstractContextManager["OffloadedStates"]):
    """The handle from :func:`offload_states`.

    An inner optimizer of the same class has the host copies as parameters, and takes the steps.
    Both optimizers have the same dict for the state of a parameter.
    """

    def __init__(
        self,
        optimizer: FusedOptimizer,
        transport: Transport,
        threads: int | None = None,
        chunk_bytes: int = 32 << 20,
    ) -> None:
        """Moves the states that exist.

        Args:
            optimizer: The optimizer.
            transport: Copies between the device of the parameters and the host.
            threads: As for :func:`offload_states`.
            chunk_bytes: Bytes of gradients that are copied and stepped together. A larger gradient
                is a chunk of its own.
        """
        self._name = type(optimizer).__name__
        if optimizer.offload is not None:
            raise RuntimeError(
                f"offload_states: the states of this {self._name} are offloaded already. Call "
                "remove() of the first offload before."
            )
        self._optimizer: Any = weakref.ref(optimizer)  # the optimizer refers to this object
        self._transport, self._chunk_bytes = transport, chunk_bytes
        self._hosts: dict[Tensor, HostCopy] = {}  # by the parameter on the device
        # Two buffers for gradients: the first one fills while the second one is stepped.
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._used = 0  # bytes of the first buffer
        self._work: Any = None  # the future of the last work of the thread
        self._work_of_second: Any = None  # the last that reads the second buffer
        self._stepped = 0  # parameters that the thread has stepped in this step
        self._pool = _pool_with(threads)
        #: An optimizer of the same class, whose parameters are the host copies.
        self.inner = copy.copy(optimizer)
        self.inner.track_step_applied()
        self.synchronize()
        self._move(optimizer, torch.device("cpu"), self)

    @outside_inference_mode()
    def remove(self) -> None:
        """Moves the states back to the device of the parameters, where later steps run."""
        optimizer = self._optimizer()
        if optimizer is None or optimizer.offload is not self:
            return
        self._move(optimizer, self._transport.device, None)
        self._transport.close()
        self._pool.shutdown()
        # These attributes refer to the host memory.
        del self.inner, self._hosts, self._buffers

    def __exit__(self, *_: Any) -> None:
        """Calls :meth:`remove`."""
        self.remove()

    @outside_inference_mode()
    def _move(self, optimizer: FusedOptimizer, device: torch.device, offload: Any) -> None:
        """Moves states and averages to a device, where steps with this offload run."""
        if optimizer.gradient_release is not None:
            optimizer.gradient_release.give_up()  # states can't move within an iteration
        self._settle()
        for param in self._hosts:
            state = optimizer.state.get(param, {})
            state.update({k: v.to(device) for k, v in state.items() if isinstance(v, Tensor)})
        optimizer.offload = offload
        for average in optimizer._stepper.weight_averages:
            average.move_to_states()

    # The inner optimizer.

    def host_of(self, param: Tensor) -> Tensor:
        """Returns the host copy of a parameter, or the parameter itself if it has no copy.

        Args:
            param: A parameter of the optimizer, which has no copy if it is frozen; or another one.
        """
        return self._hosts[param].tensor if param in self._hosts else param

    @outside_inference_mode()
    def synchronize(self, rereads: bool = False) -> None:
        """Makes the inner optimizer equal to the optimizer: parameters, options and states.

        Args:
            rereads: Copies all parameters, not only those that were written.
        """
        self._settle()
        optimizer, inner = self._optimizer(), self.inner
        self._copy_params(optimizer, rereads)
        inner.param_groups = []
        for group in optimizer.param_groups:
            # Nothing reads a frozen parameter.
            tensors = [
                self._hosts[param].tensor.requires_grad_(param.requires_grad)
                if param in self._hosts
                else torch.empty(0, dtype=param.dtype)
                for param in group["params"]
            ]
            inner.param_groups.append({**group, "lr": _on_host(group["lr"]), "params": tensors})
        states, hosts = optimizer.state, self._hosts.items()
        known = {host.tensor: states[param] for param, host in hosts if param in states}
        inner.state = defaultdict(dict, known)

    def _copy_params(self, optimizer: FusedOptimizer, rereads: bool) -> None:
        """Copies parameters that are new or were written since the last step into host memory."""
        hosts: dict[Tensor, Any] = {}
        written, new = [], []
        for group_index, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                host = self._hosts.get(param)
                is_used = param.requires_grad or param.grad is not None or param in optimizer.state
                if host is None and not is_used:
                    continue
                hosts[param] = host
                now: Any = None if host is None else host.now()
                if host is None or now[0] != host.seen[0]:  # another layout
                    spec = optimizer.state_spec_of(group)
                    new.append(PlacedParam(spec, param, group_index, index))
                elif rereads or now != host.seen:
                    written.append(host)
        if new:
            self._check(new)
            sizes = [_aligned_bytes(param) for param in hosts]
            buffer_size = min(sum(sizes), max([self._chunk_bytes, *sizes]))
            self._check_memory(new, buffer_size)
            self._reserve(buffer_size)
            # All copies are in one block of memory.
            sizes = [_aligned_bytes(placed.param) for placed in new]
            parts = self._transport.allocate(sum(sizes)).split(sizes)
            for (_, param, *_), memory in zip(new, parts, strict=True):
                hosts[param] = HostCopy(param, memory)
                written.append(hosts[param])
        if written:
            copies = [(host.local, local_tensor(host.param)) for host in written]
            self._transport.wait(self._copy_down(copies))
            for host in written:
                host.see()
                # The inner optimizer refreshes masters of parameters that were written.
                increment_version([host.tensor, host.local])
        self._hosts = hosts
        if new and optimizer.offload is self:
            for average in optimizer._stepper.weight_averages:
                average.move_to_states()

    def _share_states(self) -> None:
        """Gives the optimizer the states that the inner optimizer has created."""
        states = self._optimizer().state
        for param, host in self._hosts.items():
            if state := self.inner.state.get(host.tensor):
                states[param] = state

    def init_state(self) -> None:
        """Creates missing states in host memory."""
        self.synchronize()
        self.inner.init_state()
        self._share_states()

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
        optimizer, inner = self._optimizer(), self.inner
        stepper = optimizer._stepper
        self._check_can_step(optimizer)
        self.synchronize()
        stepper.check_grads(optimizer, is_of_scaler)
        # A scan, if a step on the device would scan: for the norm, or as a gradient has changed.
        is_clipped = any(group["max_grad_norm"] is not None for group in optimizer.param_groups)
        lacks_sum = is_clipped and sum_of_squares is None
        is_alone = found_inf is not None and not stepper.norm_spans_ranks(optimizer)
        flag: Any = found_inf
        if lacks_sum or (is_alone and stepper.grads_were_written(optimizer)):
            scan = stepper.scan_all(optimizer, found_inf, grad_scale, lacks_sum)
            flag = sum(scan.found_infs.values(), flag) if is_alone else flag
            sum_of_squares = scan.sum_of_squares if lacks_sum else sum_of_squares
        stepper.compiled.forget_scan()  # a later step would take its sum for its own
        scale, flag, *others = map(_on_host, (grad_scale, flag, sum_of_squares, max_norm))
        hosts = [host for host in self._hosts.values() if host.param.grad is not None]
        grads = [(host, self._grad_of(host)) for host in hosts]
        # A step that is skipped checks all parameters, and creates missing states.
        unread = [(host, host.view(self._buffers[0], grad.dtype)) for host, grad in grads]
        skipped = scale, torch.ones(()), *others, True
        _step_with(unread, lambda _: inner.take_step(params_of(inner), *skipped))
        self._share_states()
        if flag is None or not flag:
            inputs, self._stepped = (scale, flag, *others, True), 0
            try:
                self._send(grads, lambda tensors: inner.take_step(tensors, *inputs))
                self.finish(host.param for host, _ in grads)
            except Exception as error:
                with contextlib.suppress(Exception):
                    self._settle()  # the chunks that were sent before are stepped
                if self._stepped:
                    stepper.compiled.progress = f"{self._stepped} of {len(grads)} parameters"
                elif hasattr(error, "add_note"):
                    error.add_note(f"{self._name}.step: no parameter was changed.")
                raise
        if grad_scale is not None:
            stepper.mark_scaled(optimizer)

    def _send(self, grads: Grads, step: Step) -> None:
        """Copies gradients down, one buffer after the other; the thread steps what has arrived."""
        chunk: list[tuple[HostCopy, Tensor, Tensor]] = []
        for host, grad in grads:
            size = _aligned_bytes(grad)
            if self._used + size > len(self._buffers[0]):
                self._submit(chunk, step)
                if self._work_of_second is not None and self._work_of_second.exception():
                    self._settle()  # raises it
                chunk, self._used, self._work_of_second = [], 0, self._work
                self._buffers.reverse()
            chunk.append((host, grad, host.view(self._buffers[0][self._used :], grad.dtype)))
            self._used += size
        self._submit(chunk, step)

    def _copy_down(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Starts copies into host memory, and returns an event after them."""
        self._transport.begin()
        for host, source in copies:
            self._transport.copy_down(host, source)
        return self._transport.record_down()

    def _submit(self, chunk: list[tuple[HostCopy, Tensor, Tensor]], step: Step) -> None:
        """Starts the copies of gradients, and gives the thread the rest of the work."""
        before, arrived = self._work, [(host, view) for host, _, view in chunk]
        arrival = self._copy_down((view, grad) for _, grad, view in chunk)
        # Autograd refuses to read a saved parameter from now on.
        increment_version([each for host, _ in arrived for each in host.counted()])

        def run() -> None:
            if before is not None:
                before.result()  # nothing is stepped after an error, until it is raised
            self._transport.wait(arrival)
            chunk.clear()  # frees the gradients, if hooks have released them
            _step_with(arrived, step)
            self._stepped += len(arrived)
            for host, _ in arrived:
                self._transport.copy_up(local_tensor(host.param), host.local)

        self._work = self._pool.submit(run)

    def _settle(self) -> None:
        """Waits for the thread, lets the current stream wait for its copies, raises its error."""
        if self._work is None:
            return
        concurrent.futures.wait([self._work])  # after an interrupt here, the next call waits
        work, self._work, self._work_of_second, self._used = self._work, None, None, 0
        self._transport.join(self._transport.record_up())
        self._share_states()
        work.result()

    def _grad_of(self, host: HostCopy) -> Tensor:
        """Returns the gradient of this rank's shard, laid out in memory as the parameter."""
        grad: Any = local_grad(host.param, f"{self._name}.step: grad of a parameter")
        if grad.stride() != host.local.stride():
            grad = torch.empty_like(host.local, dtype=grad.dtype, device=grad.device).copy_(grad)
        self._reserve(_aligned_bytes(grad))
        return grad

    def _reserve(self, size: int) -> None:
        """Makes each of the two buffers for gradients at least ``size`` bytes large."""
        if size > len(self._buffers[0]):
            self._buffers = [*self._transport.allocate(2 * size).split(size)]
            self._used, self._work_of_second = 0, None

    # Steps in the backward pass, for released gradients. The hooks of all parameters on a GPU run
    # in one thread of autograd.

    def begin_backward(self, grad_scale: Tensor | None) -> Any:
        """Prepares the inner optimizer for the hooks, and returns the loss scale on the host.

        Args:
            grad_scale: The loss scale, one float32, or None.
        """
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
            RuntimeError: If the gradient is sparse. Also an error of an earlier step in the thread.
        """
        optimizer = self._optimizer()
        if param not in self._hosts:
            # The parameter was frozen when the iteration began, or is in no group.
            self.synchronize()
        host = self._hosts.get(param)
        if host is None:
            return False
        # The gradient of a DTensor is never sparse.
        optimizer._stepper.compiled.check_grads(optimizer.param_groups, True, params=[param])
        grads = [(host, self._grad_of(host))]
        self._send(grads, lambda tensors: [step(self.inner, tensor) for tensor in tensors])
        return True

    def finish(self, stepped: Iterable[Tensor]) -> None:
        """Waits for all steps, and makes the current stream wait for the last copy.

        Args:
            stepped: The parameters that were stepped.

        Raises:
            RuntimeError: If a parameter was written after its gradient was sent. Also the first
                error of the thread.
        """
        self._settle()
        hosts = [self._hosts[param] for param in stepped if param in self._hosts]
        # Views of one tensor share a version, which the step of each of them increases.
        counters = [ops.extension.version_counter_of(local_tensor(host.param)) for host in hosts]
        steps = Counter(counters)
        for host, counter in zip(hosts, counters, strict=True):
            now = host.now()
            writes = (now[2] - host.seen[2]) // len(host.counted())
            if now[:2] != host.seen[:2] or writes > steps[counter]:
                name = name_in_groups(self._optimizer(), host.param)
                raise RuntimeError(
                    f"{self._name}: param of {name} was written after its gradient was released, "
                    "before step() had copied it back. Write parameters after step() or "
                    "zero_grad()."
                )
            host.seen = now

    # Checks.

    def _check(self, new: list[PlacedParam]) -> None:
        for placed in new:
            param, wrong = placed.param, None
            if is_flattened(param):
                wrong = "is flattened by FSDP1. Use FSDP's own CPUOffload, or fully_shard"
            elif is_lazy(param):
                wrong = "is a lazy parameter, which has no shape yet. Run the model once first"
            elif param.device != self._transport.device:
                wrong = f"must be on {self._transport.device}, got {param.device}"
            elif param.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                wrong = f"must be Float, Half or BFloat16, got {param.dtype}"
            elif torch.empty_like(placed.local, device="meta").stride() != placed.local.stride():
                wrong = "must be dense in memory, got a view with gaps or overlaps"
            if wrong is not None:
                raise RuntimeError(f"{self._name}: offload_states: param of {placed} {wrong}.")

    def _check_memory(self, new: list[PlacedParam], buffer_size: int) -> None:
        """Refuses to offload if the host has too little memory for parameters and states."""
        available, params, states = available_host_memory(), 0, 0
        for placed in new:
            params += _aligned_bytes(placed.param)
            local = torch.empty_like(placed.local, device="meta")
            formats = placed.formats[: placed.spec.buffer_count]
            states += sum(each.empty(key, local).nbytes for each in formats for key in each.keys)
            if is_16_bit(local.dtype):
                states += local.numel() * MASTER_BYTES[placed.spec.master_weights]
        needed = params + states + 2 * (buffer_size - len(self._buffers[0]))
        if available is not None and needed > available:
            raise RuntimeError(
                f"offload_states: the host needs {needed / 2**30:.1f} GiB for states, copies of "
                f"parameters and gradients, but only {available / 2**30:.1f} GiB are available. "
                "Choose smaller states with master_weights and state_dtype, or a machine with more "
                "memory."
            )

    def _check_can_step(self, optimizer: FusedOptimizer) -> None:
        optimizer.check_weights_are_in(f"{self._name}.step")
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


def _pool_with(threads: int | None) -> concurrent.futures.ThreadPoolExecutor:
    """Starts a thread whose steps take a number of OpenMP threads."""
    before = torch.get_num_threads()

    def set_threads() -> None:
        # In a new thread, torch and our engine set the number when they first run, to the one that
        # any thread has set last. So both run before it is set.
        torch.get_num_threads()
        ops.count_nonfinite([torch.zeros(1)])
        torch.set_num_threads(before if threads is None else threads)

    pool = concurrent.futures.ThreadPoolExecutor(1, "amp_ext offload", set_threads)
    pool.submit(int).result()
    torch.set_num_threads(before)  # for threads that start later; ours keeps its number
    return pool


def _step_with(grads: Grads, step: Step) -> None:
    """Steps host copies with gradients in host memory."""
    try:
        for host, grad in grads:
            host.tensor.grad = host.sharded(grad)
        step([host.tensor for host, _ in grads])
    finally:
        for host, _ in grads:
            host.tensor.grad = None


def _on_host(scalar: Any) -> Any:
    """Returns a copy of a tensor in host memory, after the work of the device; or a number."""
    return scalar.detach().to("cpu", copy=True) if isinstance(scalar, Tensor) else scalar


def _aligned_bytes(tensor: Tensor) -> int:
    """Returns the bytes of this rank's shard, rounded up so that the next one is aligned."""
    return -(-local_tensor(tensor).nbytes // 64) * 64
