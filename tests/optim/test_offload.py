"""Optimizers whose states are in host memory, over a transport that copies late and unordered."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F16, F32, F64
from harness.optimizer_cases import (
    assert_same_bits,
    bits_of,
    give_grads,
    grads_of,
    make_params,
    params_of,
    through_a_file,
    trained,
    twins,
)
from harness.reference import same_bits
from harness.rows import rows
from harness.transports import DelayedTransport
from torch import Tensor, nn

import amp_ext
from amp_ext.optim import (
    AdamW,
    NormGuard,
    WeightAverage,
    offload,
    offload_states,
    release_gradients,
)
from amp_ext.optim.offload import OffloadedStates
from amp_ext.optim.transport import CudaTransport

SHAPES = [(130, 32), (127, 33), (5, 7), (), (0, 32), (4096,)]

FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (F32, {}),
    "fp32-bf16": (F32, {"state_dtype": BF16, "rounding": "dither"}),
    "bf16": (BF16, {}),
    "fp16": (F16, {}),
    "bf16-split-bf16": (BF16, {"master_weights": "split", "state_dtype": BF16}),
    "fp16-split": (F16, {"master_weights": "split"}),
    "bf16-split8-8bit": (BF16, {"master_weights": "split8", "state_dtype": "8bit"}),
    "bf16-alone-narrow": (BF16, {"master_weights": False, "state_dtype": None}),
    "fp32-8bit-bf16": (F32, {"state_dtype": "8bit-bf16"}),
}
each_form = pytest.mark.parametrize(("dtype", "kept"), rows(FORMS))


def offloaded(optimizer: Any, chunk_bytes: int = 3000, **options: Any) -> OffloadedStates:
    return OffloadedStates(optimizer, DelayedTransport(), chunk_bytes=chunk_bytes, **options)


def transport_of(optimizer: Any) -> DelayedTransport:
    return optimizer.offload._transport


def beside_offloaded(
    name: str = "AdamW",
    options: dict[str, Any] | None = None,
    dtype: torch.dtype = F32,
    shapes: Any = SHAPES,
    **more: Any,
) -> tuple[Any, Any]:
    """Returns equal optimizers, of which the first is offloaded."""
    options = {"lr": 0.05} if options is None else options
    first, second = cases.pair(name, options | more, dtype, shapes=shapes)
    offloaded(first)
    return first, second


def without_amsgrad(options: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    if "8bit" in str(kept.get("state_dtype")):
        return {key: value for key, value in options.items() if key != "amsgrad"} | kept
    return options | kept


def assert_trains_alike(
    optimizers: tuple[Any, Any], steps: int, scalers: Any = None, overflows: bool = False
) -> None:
    for step in range(steps):
        give_grads(*optimizers)
        for optimizer, scaler in zip(optimizers, scalers or (None, None), strict=True):
            if scaler is None:
                optimizer.step()
                continue
            scale = float(scaler.scale(torch.zeros(())) * 0 + scaler.get_scale())
            for grad in grads_of(optimizer):
                grad.mul_(scale)
            if overflows and step % 4 == 1:
                params_of(optimizer)[1].grad[2, 1] = float("inf")
            scaler.step(optimizer)
            scaler.update()
    assert_same_bits(*optimizers)
    if scalers:
        assert scalers[0].get_scale() == scalers[1].get_scale()


def scalers_of(kind: Any) -> list[Any]:
    return [kind("cpu", init_scale=1024.0, growth_interval=5) for _ in range(2)]


# Bits.


@pytest.mark.parametrize("clip", rows({"free": {}, "clip": {"max_grad_norm": 2.0}}))
@pytest.mark.parametrize("scaled", rows({"alone": False, "scaler": True}))
@each_form
@cases.few_optimizers
def test_bits_are_those_of_training_without_offload(
    name: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    kept: dict[str, Any],
    scaled: bool,
    clip: dict[str, Any],
) -> None:
    optimizers = beside_offloaded(name, without_amsgrad(options, kept) | clip, dtype)
    scalers = scalers_of(amp_ext.GradScaler) if scaled else None
    assert_trains_alike(optimizers, 10, scalers, overflows=scaled)
    # Both go on alike without the offload.
    optimizers[0].offload.remove()
    assert optimizers[0].offload is None
    assert_trains_alike(optimizers, 2, scalers)


def test_torch_scaler_steps_alike() -> None:
    optimizers = beside_offloaded(dtype=F32, max_grad_norm=1.0)
    assert_trains_alike(optimizers, 8, scalers_of(torch.amp.GradScaler), overflows=True)


@pytest.mark.parametrize("options", rows({
    "tensor-lr": {"lr": torch.tensor(0.1)},
    "tensor-lr-fp64": {"lr": torch.tensor([0.1], dtype=F64)},
    "clip-value": {"clip_value": 0.1, "lr": 0.1},
    "nonfinite": {"skip_nonfinite": True, "lr": 0.1},
    "maximize": {"maximize": True, "lr": 0.1},
    "capturable": {"capturable": True, "lr": 0.1},
}))  # fmt: skip
def test_options_work_as_without_offload(options: dict[str, Any]) -> None:
    optimizers = beside_offloaded("AdamW", options, F16)
    assert_trains_alike(optimizers, 6, scalers_of(amp_ext.GradScaler), overflows=True)


def test_gradients_of_unusual_layouts_are_copied() -> None:
    optimizers = beside_offloaded(shapes=[(6, 8), (2, 3, 4, 5), (7,)])
    for optimizer in optimizers:
        params_of(optimizer)[1].data = params_of(optimizer)[1].data.to(
            memory_format=torch.channels_last
        )
    grads = [torch.randn(8, 6).t(), torch.randn(2, 3, 4, 5), torch.randn(()).expand(7)]
    for _ in range(3):
        for optimizer in optimizers:
            for param, grad in zip(params_of(optimizer), grads, strict=True):
                param.grad = grad
            optimizer.step()
    assert_same_bits(*optimizers)


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 30])
def test_size_of_chunks_changes_no_bit(chunk_bytes: int) -> None:
    optimizers = cases.pair("AdamW", {"lr": 0.05}, F16, shapes=SHAPES)
    transport = offloaded(optimizers[0], chunk_bytes)._transport
    events, record = [], transport.record_down
    transport.record_down = lambda: events.append(record()) or events[-1]
    assert_trains_alike(optimizers, 3)
    assert len(events) == 3 * (6 if chunk_bytes == 1 else 1)


@pytest.mark.parametrize(("threads", "expected"), [(None, 3), (1, 1), (2, 2)])
def test_threads_change_no_bit_and_no_other_number_of_threads(
    threads: int | None, expected: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        optimizers = cases.pair("AdamW", {"lr": 0.05}, F16, shapes=[(300, 300)])
        offloaded(optimizers[0], threads=threads)
        assert_trains_alike(optimizers, 2)
        found: list[int] = []
        work = optimizers[0].offload._submit(lambda: found.append(torch.get_num_threads()))
        work.result()
        assert found == [expected]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# What moves.


def test_moves_only_gradients_down_and_parameters_up() -> None:
    optimizer = AdamW(make_params(BF16, shapes=SHAPES))
    offloaded(optimizer)
    calls = transport_of(optimizer).calls
    assert [*filter("begin".__ne__, calls)] == ["down"] * len(SHAPES)
    calls.clear()
    for param in params_of(optimizer)[1:3]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert sorted({*calls}) == ["begin", "down", "up"]
    assert (calls.count("down"), calls.count("up")) == (2, 2)


def test_skipped_step_moves_nothing() -> None:
    optimizer = AdamW(make_params(F16))
    offloaded(optimizer)
    scaler = amp_ext.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    give_grads(optimizer)
    params_of(optimizer)[0].grad[0] = float("nan")
    before, calls = bits_of(params_of(optimizer)), transport_of(optimizer).calls
    calls.clear()
    scaler.step(optimizer)
    scaler.update()
    assert_same_bits(params_of(optimizer), before)
    assert not calls
    assert scaler.get_scale() == 2.0


@each_form
def test_memory_of_the_host_is_counted_exactly(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kept: dict[str, Any]
) -> None:
    optimizer = AdamW(make_params(dtype, shapes=[(256, 64), (64, 33)]), **kept)
    offloaded(optimizer, 1000)
    optimizer.init_state()
    states = sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for key, tensor in state.items()
        if key != "step"
    )
    give_grads(optimizer)
    optimizer.step()
    needed = states + transport_of(optimizer).allocated
    for available in (needed - 1, needed):
        other = AdamW(twins(optimizer), **kept)
        monkeypatch.setattr(offload, "available_host_memory", lambda: available)  # noqa: B023
        if available < needed:
            with pytest.raises(RuntimeError, match=r"the host needs \d\.\d GiB"):
                offloaded(other, 1000)
            assert other.offload is None
        else:
            offloaded(other, 1000)


def test_available_memory_is_below_that_of_the_machine() -> None:
    from amp_ext.optim.transport import available_host_memory

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = available_host_memory()
    assert found is not None
    assert 0 < found <= pages


class FakeCuda:
    """Streams that run nothing late, and a log of what waits for what."""

    def __init__(self, patch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.pinned: dict[int, int] = {}
        self.error = error
        self.streams = iter(("down", "up"))
        caller = FakeStream(self, "caller")
        for name, value in {
            "Stream": lambda device: FakeStream(self, next(self.streams)),
            "current_stream": lambda device: caller,
            "stream": lambda stream: contextlib.nullcontext(self.log.append(("on", stream.name))),
            "device": lambda device: contextlib.nullcontext(),
            "cudart": lambda: self,
            "synchronize": lambda device: self.log.append(("synchronize",)),
        }.items():
            patch.setattr(torch.cuda, name, value)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        self.pinned[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.pinned[address]


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append((self.name, "waits for", other.name))

    def wait_event(self, event: Any) -> None:
        self.cuda.log.append((self.name, "waits for", event.name))

    def record_event(self) -> Any:
        self.cuda.log.append(("record", self.name))
        host_waits = lambda: self.cuda.log.append(("host", "waits for", self.name))  # noqa: E731
        return types.SimpleNamespace(name=self.name, synchronize=host_waits)


@pytest.mark.parametrize("pinned", [True, False])
def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    optimizers = cases.pair("AdamW", {"lr": 0.05}, F16, shapes=[(40,), (5, 7)])
    cuda = FakeCuda(monkeypatch)
    transport = CudaTransport(torch.device("cpu"), pinned)
    OffloadedStates(optimizers[0], transport, chunk_bytes=1)
    assert_trains_alike(optimizers, 1)
    cuda.log.clear()
    assert_trains_alike(optimizers, 1)
    begin = [(each, "waits for", "caller") for each in ("down", "up")]
    down, up = [("on", "down"), ("record", "down")], [("on", "up")]
    wait = [("host", "waits for", "down")]
    end = [("record", "up"), ("caller", "waits for", "up")]
    of_thread = [*wait, *up]
    assert [each for each in cuda.log if each in of_thread] == [*wait, *up, *wait, *up]
    of_caller = [each for each in cuda.log if each not in of_thread]
    assert of_caller == [*begin, *down, *down, *begin, *end]
    assert sum(cuda.pinned.values()) == (4 * 128 if pinned else 0)
    optimizers[0].offload.remove()
    assert cuda.log[-1] == ("synchronize",)
    assert not cuda.pinned


def test_memory_that_can_not_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, error=2)
    transport = CudaTransport(torch.device("cpu"), True)
    optimizer = AdamW(make_params(F32))
    with pytest.raises(RuntimeError, match=r"can't be pinned \(CUDA error 2\). Raise the limit"):
        OffloadedStates(optimizer, transport)
    assert optimizer.offload is None
    cuda.pinned.clear()
    trained(optimizer)


# Everything else works as without.


def write_uncounted(optimizer: Any) -> None:
    for param in params_of(optimizer):
        param.data.mul_(0.5)
    optimizer.refresh_masters()


def edit_states(optimizer: Any) -> None:
    params = params_of(optimizer)
    for name, value in optimizer.state[params[0]].items():
        if name.startswith("exp_avg"):
            value.zero_()
    state = optimizer.state[params[1]]
    state.update({name: value.clone() for name, value in state.items()})
    optimizer.state[params[2]] = {}
    del optimizer.state[params[4]]


def load_a_model(optimizer: Any) -> None:
    params = params_of(optimizer)
    file = {str(index): torch.full_like(param, 0.1) for index, param in enumerate(params)}
    nn.ParameterList(params).load_state_dict(file)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "clamp": lambda optimizer: [param.clamp_(-0.3, 0.3) for param in params_of(optimizer)],
    "one": lambda optimizer: params_of(optimizer)[1].mul_(2),
    "replace": lambda optimizer: [
        setattr(param, "data", param.data * 0.5) for param in params_of(optimizer)
    ],
    "load": load_a_model,
    "uncounted": write_uncounted,
    "states": edit_states,
    "order": lambda optimizer: optimizer.param_groups[0]["params"].reverse(),
}


@each_form
@pytest.mark.parametrize("change", rows(CHANGES))
def test_what_changes_between_steps_counts_as_without_offload(
    dtype: torch.dtype, kept: dict[str, Any], change: Callable[[Any], Any]
) -> None:
    optimizers = beside_offloaded(dtype=dtype, **kept)
    assert_trains_alike(optimizers, 3)
    for optimizer in optimizers:
        with torch.no_grad():
            change(optimizer)
    assert_trains_alike(optimizers, 3)


@each_form
def test_files_load_on_both_sides(dtype: torch.dtype, kept: dict[str, Any]) -> None:
    optimizers = beside_offloaded(dtype=dtype, **kept)
    assert_trains_alike(optimizers, 3)
    files = [through_a_file(optimizer.state_dict()) for optimizer in optimizers]
    assert files[0].keys() == files[1].keys()
    assert files[0]["param_groups"] == files[1]["param_groups"]
    others = beside_offloaded(dtype=dtype, **kept)
    for other, file, optimizer in zip(others, reversed(files), optimizers, strict=True):
        with torch.no_grad():
            for param, trained_param in zip(params_of(other), params_of(optimizer), strict=True):
                param.copy_(trained_param)
        other.load_state_dict(file)
    assert_same_bits(*others)
    assert_trains_alike(others, 3)
    # The float32 form of a split master needs the parameter beside it.
    dicts = [amp_ext.optim.float32_state_dict(optimizer) for optimizer in others]
    for left, right in zip(*(each["state"].values() for each in dicts), strict=True):
        assert all(same_bits(left[key], right[key]) for key in right)


@each_form
def test_masters_are_those_without_offload(dtype: torch.dtype, kept: dict[str, Any]) -> None:
    optimizers = beside_offloaded(dtype=dtype, **kept)
    for _ in range(2):
        masters = [optimizer.master_params() for optimizer in optimizers]
        assert all(map(same_bits, *masters))
        assert_trains_alike(optimizers, 2)


def test_offload_can_begin_and_end_at_any_time() -> None:
    optimizers = cases.pair("AdamW", {"lr": 0.05}, F16)
    for _ in range(2):
        assert_trains_alike(optimizers, 2)
        with offloaded(optimizers[0]):
            assert_trains_alike(optimizers, 2)
        assert optimizers[0].offload is None
    assert_trains_alike(optimizers, 2)


def test_groups_and_options_may_change() -> None:
    optimizers = beside_offloaded(dtype=F16)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]
    assert_trains_alike(optimizers, 2)
    added = make_params(BF16)
    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
        scheduler.step()
        optimizer.add_param_group({"params": twins(added), "weight_decay": 0.5})
        params_of(optimizer)[0].requires_grad_(False)
    assert_trains_alike(optimizers, 2)
    for optimizer in optimizers:
        optimizer.param_groups[0]["state_dtype"] = "bfloat16"
        del optimizer.param_groups[1]
    assert_trains_alike(optimizers, 2)
    assert len(optimizers[0].offload._hosts) == len(params_of(optimizers[0]))


def test_frozen_parameters_take_no_memory_until_they_are_trained() -> None:
    trained_params, frozen = make_params(F16, shapes=[(40,)]), make_params(F64, shapes=[(4096,)])
    frozen[0].requires_grad_(False)
    optimizer = AdamW([*trained_params, *frozen])
    offloaded(optimizer)
    assert transport_of(optimizer).allocated == 128
    with torch.no_grad():
        frozen[0].zero_()
    trained_params[0].grad = torch.ones_like(trained_params[0])
    optimizer.step()
    assert optimizer.master_params()[1].data_ptr() == frozen[0].data_ptr()
    assert [*optimizer.state] == trained_params
    frozen[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="param 1 must be Float, Half or BFloat16"):
        optimizer.step()

    optimizers = cases.pair("AdamW", {"lr": 0.05}, F16)
    for optimizer in optimizers:
        params_of(optimizer)[1].requires_grad_(False)
    offloaded(optimizers[0])
    for trains in (False, True):
        for _ in range(2):
            give_grads(*optimizers)
            for optimizer in optimizers:
                params_of(optimizer)[1].requires_grad_(trains)
                if not trains:
                    params_of(optimizer)[1].grad = None
                optimizer.step()
    assert_same_bits(*optimizers)


def test_gradients_may_change_their_dtype() -> None:
    optimizers = beside_offloaded(dtype=BF16, shapes=[(8,)])
    for dtype in (BF16, F32, BF16):
        for optimizer in optimizers:
            (param,) = params_of(optimizer)
            param.grad = None
            param.grad_dtype = dtype
            param.grad = torch.full((8,), 0.3, dtype=dtype)
            optimizer.step()
    assert_same_bits(*optimizers)


@pytest.mark.parametrize("swaps", [False, True])
def test_parameters_may_be_converted(swaps: bool) -> None:
    models = [nn.Linear(40, 5)]
    models.append(copy.deepcopy(models[0]))
    optimizers = tuple(AdamW(model.parameters(), lr=0.05) for model in models)
    offloaded(optimizers[0])
    assert_trains_alike(optimizers, 2)
    with cases.swapping(swaps):
        for optimizer, model in zip(optimizers, models, strict=True):
            optimizer.zero_grad()
            model.bfloat16()
    assert_trains_alike(optimizers, 2)


def test_parameters_moved_to_another_device_are_refused() -> None:
    optimizer = AdamW(make_params(F32, shapes=[(3,)]))
    offloaded(optimizer)
    trained(optimizer)
    optimizer.offload._transport.device = torch.device("meta")
    with pytest.raises(RuntimeError, match="param of group 0, param 0 must be on meta, got cpu"):
        optimizer.state_dict()


@pytest.mark.parametrize(("action", "max_grad_norm"), [("skip", 1.0), ("clip", None)])
def test_norms_guard_and_reports_are_those_without_offload(
    action: Literal["skip", "clip"], max_grad_norm: float | None
) -> None:
    optimizers = beside_offloaded(shapes=[(40, 3), (5,), (7, 2)], max_grad_norm=max_grad_norm)
    for optimizer in optimizers:
        optimizer.track_grad_norms = True
        optimizer.norm_guard = NormGuard(warmup_steps=4, window=8, action=action)
    scalers = scalers_of(amp_ext.GradScaler)
    for step in range(20):
        give_grads(*optimizers)
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.scale(torch.zeros(()))
            for grad in grads_of(optimizer):
                grad.mul_(scaler.get_scale() * (100 if step == 15 else 1))
            if step == 10:
                params_of(optimizer)[1].grad = None
            scaler.step(optimizer)
            scaler.update()
        ours_, plain = optimizers
        for name in ("grad_norm", "grad_norms", "step_applied"):
            assert same_bits(getattr(ours_, name), getattr(plain, name))
        assert ours_.named_grad_norms() == plain.named_grad_norms()
        assert bool(ours_.step_applied) is (step != 15 or action == "clip")
    assert optimizers[0].norm_guard.stats() == optimizers[1].norm_guard.stats()
    assert optimizers[0].norm_guard.stats().outliers == 1
    assert_same_bits(*optimizers)
    optimizers[0].offload.remove()
    assert_trains_alike(optimizers, 3, scalers)
    assert optimizers[0].norm_guard.stats() == optimizers[1].norm_guard.stats()


def test_norm_that_the_step_measures_itself_skips_under_a_scaler() -> None:
    optimizers = beside_offloaded(max_grad_norm=0.5)
    for optimizer in optimizers:
        optimizer.track_step_applied()
    for bad in (float("inf"), 1.0):
        give_grads(*optimizers)
        for optimizer in optimizers:
            params_of(optimizer)[0].grad[0, 0] = bad
            optimizer.found_inf = torch.zeros(())  # as after unscale_() of torch's scaler
            optimizer.step()
            del optimizer.found_inf
            assert bool(optimizer.step_applied) is (bad == 1.0)
    assert_same_bits(*optimizers)


def test_unscaled_and_clipped_gradients_step_alike() -> None:
    optimizers = beside_offloaded()
    scalers = scalers_of(amp_ext.GradScaler)
    for _ in range(3):
        give_grads(*optimizers)
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.scale(torch.zeros(()))
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params_of(optimizer), 0.5)
            scaler.step(optimizer)
            scaler.update()
    assert_same_bits(*optimizers)


def test_hooks_that_write_gradients_count() -> None:
    optimizers = beside_offloaded(max_grad_norm=1.0)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs: [each.mul_(3) for each in grads_of(optimizer)] and None
        )
    assert_trains_alike(optimizers, 3)


def test_step_inside_an_autocast_scope_leaves_no_stale_weight() -> None:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.ones_(linear.weight)
    optimizer = amp_ext.optim.SGD(linear.parameters(), lr=1.0)
    offloaded(optimizer)
    with torch.autocast("cpu", BF16):
        output = linear(torch.ones(1, 1))
        (-output.float().sum()).backward()
        optimizer.step()
        assert linear(torch.ones(1, 1)).item() == 2.0


def test_hooks_after_the_step_see_the_new_parameters() -> None:
    optimizers = beside_offloaded(dtype=BF16)
    seen: list[list[dict[str, Tensor]]] = []
    for optimizer in optimizers:
        optimizer.register_step_post_hook(
            lambda optimizer, args, kwargs: seen.append(bits_of(optimizer))
        )
    assert_trains_alike(optimizers, 3)
    for index in range(0, 6, 2):
        assert_same_bits(seen[index], seen[index + 1])


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_that_accumulate_in_place_are_read_anew(scaled: bool) -> None:
    optimizers = beside_offloaded(dtype=F16, max_grad_norm=1.0)
    scalers = scalers_of(amp_ext.GradScaler)
    for _ in range(4):
        parts = [[torch.randn_like(p) for p in params_of(optimizers[0])] for _ in range(2)]
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            for part in parts:
                torch.autograd.backward(params_of(optimizer), [each.clone() for each in part])
            if scaled:
                scaler.scale(torch.zeros(()))
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert_same_bits(*optimizers)


def test_step_bumps_the_versions_of_parameters() -> None:
    optimizer = AdamW(make_params(F32, shapes=[(3,)]))
    offloaded(optimizer)
    param = params_of(optimizer)[0]
    loss = (param * param).sum()
    give_grads(optimizer)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_step_in_other_modes_of_autograd(mode: Any) -> None:
    optimizers = beside_offloaded(dtype=BF16)
    for _ in range(2):
        give_grads(*optimizers)
        for optimizer in optimizers:
            with mode():
                optimizer.step()
    assert_trains_alike(optimizers, 2)


# Errors.


def test_gradients_that_still_carry_the_scale_are_refused() -> None:
    optimizer = AdamW(make_params(F16))
    offloaded(optimizer)
    scaler = amp_ext.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    give_grads(optimizer)
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="still carries the loss scale"):
        optimizer.step()
    give_grads(optimizer)
    optimizer.step()


@pytest.mark.parametrize(("change", "words"), rows({
    "sparse": (
        lambda params, optimizer: setattr(params[1], "grad", torch.zeros(3, 5).to_sparse()),
        "sparse gradients: grad of group 0, param 1",
    ),
    "state": (
        lambda params, optimizer: optimizer.state[params[-1]].pop("exp_avg"),
        "exp_avg",
    ),
    "option": (
        lambda params, optimizer: optimizer.param_groups[0].update(clip_value=-1.0),
        "clip_value",
    ),
    "write-back": (
        lambda params, optimizer: optimizer.param_groups[0].update(write_back_grads=True),
        "write_back_grads must be False while states are offloaded",
    ),
}))  # fmt: skip
def test_refused_step_changes_nothing(change: Any, words: str) -> None:
    optimizer = AdamW(make_params(F32, shapes=[(16385,), (3, 5), (7,)]))
    offloaded(optimizer)
    trained(optimizer)
    give_grads(optimizer)
    change(params_of(optimizer), optimizer)
    before, calls = bits_of(optimizer), transport_of(optimizer).calls
    calls.clear()
    with pytest.raises((RuntimeError, ValueError), match=words):
        optimizer.step()
    assert_same_bits(optimizer, before)
    assert "up" not in calls


@contextlib.contextmanager
def failing_copies(transport: DelayedTransport, name: str, after: int) -> Any:
    """Makes a copy fail after the first ``after`` ones."""
    copies = 0

    def copy_(*tensors: Any) -> None:
        nonlocal copies
        copies += 1
        if copies > after:
            raise torch.OutOfMemoryError("the bus is gone")
        getattr(DelayedTransport, name)(transport, *tensors)

    setattr(transport, name, copy_)
    try:
        yield
    finally:
        delattr(transport, name)


@pytest.mark.parametrize(("name", "after", "progress"), [
    ("copy_down", 0, ""),
    ("copy_down", 4, "4 of 6 parameters"),
    ("copy_up", 0, "1 of 6 parameters"),
    ("copy_up", 3, "4 of 6 parameters"),
])  # fmt: skip
def test_error_in_the_thread_says_what_was_stepped(name: str, after: int, progress: str) -> None:
    optimizers = cases.pair("AdamW", {"lr": 0.05}, F16, shapes=[(40,)] * 6)
    offloaded(optimizers[0], chunk_bytes=1)
    assert_trains_alike(optimizers, 1)
    file, params = through_a_file(optimizers[0].state_dict()), twins(optimizers[0])
    before = bits_of(optimizers[0])
    give_grads(*optimizers)
    with (
        failing_copies(transport_of(optimizers[0]), name, after),
        pytest.raises(torch.OutOfMemoryError, match="the bus is gone") as raised,
    ):
        optimizers[0].step()
    note = "".join(raised.value.__notes__)
    if not progress:
        assert "no parameter was changed" in note
        assert_same_bits(optimizers[0], before)
        optimizers[1].step()
        optimizers[0].step()
        assert_same_bits(*optimizers)
        return
    assert f"the step failed after updating {progress}" in note
    with torch.no_grad():
        for param, saved in zip(params_of(optimizers[0]), params, strict=True):
            param.copy_(saved)
    optimizers[0].load_state_dict(file)
    assert_same_bits(optimizers[0], before)
    for grad in grads_of(optimizers[0]):
        grad.add_(0)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_bits(*optimizers)


def test_second_offload_is_refused() -> None:
    optimizers = beside_offloaded()
    give_grads(*optimizers)
    with pytest.raises(RuntimeError, match="are offloaded already"):
        offloaded(optimizers[0])
    assert_trains_alike(optimizers, 2)


@each_form
@pytest.mark.parametrize("first", ["average", "offload"])
def test_averages_are_those_without_offload(
    dtype: torch.dtype, kept: dict[str, Any], first: str
) -> None:
    optimizers = cases.pair("AdamW", {"lr": 0.05} | kept, dtype, shapes=SHAPES)
    if first == "offload":
        offloaded(optimizers[0])
    averages = [WeightAverage(optimizer, decay=0.5) for optimizer in optimizers]
    if first == "average":
        offloaded(optimizers[0])

    def assert_alike(steps: int) -> None:
        assert_trains_alike(optimizers, steps, scalers_of(amp_ext.GradScaler), overflows=True)
        assert all(map(same_bits, *(average.averages for average in averages)))

    assert_alike(3)
    for optimizer in optimizers:
        with torch.no_grad():
            params_of(optimizer)[2].mul_(0.5)
        params_of(optimizer)[1].requires_grad_(False)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=dtype))]})
    assert_alike(2)
    for average, optimizer in zip(averages, optimizers, strict=True):
        with average.swap():
            assert same_bits(params_of(optimizer)[0], averages[1].averages[0].to(dtype))
    assert_alike(2)
    optimizers[0].offload.remove()
    assert_alike(2)


@pytest.mark.parametrize(("change", "words"), rows({
    "fp64": (
        lambda each: each.add_param_group({"params": make_params(F64)}),
        "param of group 1, param 0 must be Float, Half or BFloat16",
    ),
    "lazy": (
        lambda each: each.add_param_group({"params": [nn.UninitializedParameter()]}),
        "lazy parameter",
    ),
    "gaps": (
        lambda each: each.add_param_group({"params": [nn.Parameter(torch.ones(4, 4)[:, ::2])]}),
        "must be dense in memory",
    ),
    "device": (
        lambda each: each.add_param_group({"params": [nn.Parameter(torch.ones(1, device="meta"))]}),
        "must be on cpu, got meta",
    ),
}))  # fmt: skip
def test_offload_is_refused(change: Callable[[Any], Any], words: str) -> None:
    optimizer = AdamW(make_params(F32))
    made = change(optimizer)
    with pytest.raises(RuntimeError, match=words):
        offloaded(optimizer)
    assert optimizer.offload is None
    del made


def test_arguments_are_checked() -> None:
    optimizer = AdamW(make_params(F32))
    for arguments, error, words in (
        ([torch.optim.SGD(make_params(F32))], TypeError, "must be one of amp_ext.optim, got SGD"),
        ([optimizer, 1], TypeError, "pinned must be a bool, got 1"),
        ([optimizer, True, 1.5], TypeError, "threads must be an int or None, got 1.5"),
        ([optimizer, True, True], TypeError, "threads must be an int or None, got True"),
        ([optimizer, True, 0], ValueError, "threads must be at least 1, got 0"),
        ([optimizer], RuntimeError, "must be on a GPU, got cpu"),
    ):
        with pytest.raises(error, match=words):
            offload_states(*arguments)


# Released gradients. test_gradient_release.py runs all its tests with offloaded states, too.


def give_in_backward(optimizer: Any, seed: int = 0, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    params = params_of(optimizer)
    grads = [torch.randn(p.shape, generator=generator).to(p.dtype) * scale for p in params]
    torch.autograd.backward(params, grads)


def released(first_offloads: bool = True, **options: Any) -> tuple[Any, Any]:
    """Returns equal optimizers, of which the first is offloaded and releases its gradients."""
    optimizers = cases.pair("AdamW", {"lr": 0.05} | options, F16, shapes=[(40,)] * 6)
    if first_offloads:
        offloaded(optimizers[0], chunk_bytes=1)
    release_gradients(optimizers[0])
    if not first_offloads:
        offloaded(optimizers[0], chunk_bytes=1)
    return optimizers


def iterate(*optimizers: Any, seed: int = 0) -> None:
    for optimizer in optimizers:
        give_in_backward(optimizer, seed)
        optimizer.step()
        optimizer.zero_grad()


def test_offload_and_release_begin_and_end_in_any_order() -> None:
    for first_offloads in (True, False):
        for first_removed in ("offload", "gradient_release"):
            optimizers = released(first_offloads)
            iterate(*optimizers)
            getattr(optimizers[0], first_removed).remove()
            iterate(*optimizers, seed=1)
            (optimizers[0].offload or optimizers[0].gradient_release).remove()
            iterate(*optimizers, seed=2)
            assert_same_bits(*optimizers)


def test_steps_go_on_after_hooks_have_enlarged_the_buffers() -> None:
    optimizers = cases.pair("AdamW", {"lr": 0.05}, F32, shapes=[(40,), (900,)])
    offloaded(optimizers[0], chunk_bytes=1)
    small = [(params_of(optimizer)[0], optimizer) for optimizer in optimizers]
    for param, optimizer in small:
        scaler = amp_ext.GradScaler("cpu", init_scale=8.0)
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
    with release_gradients(optimizers[0]):
        iterate(*optimizers)
    for param, optimizer in small:
        param.sum().backward()  # not scaled, unlike the last gradient in the small buffers
        optimizer.step()
    assert_same_bits(*optimizers)


def test_offload_that_ends_in_an_iteration_gives_up_its_batch() -> None:
    optimizers = released()
    for optimizer in optimizers:
        torch.autograd.backward(params_of(optimizer)[:3], [torch.ones(40, dtype=F16)] * 3)
    with pytest.warns(UserWarning, match="3 of 6 parameters had been stepped"):
        optimizers[0].offload.remove()
    optimizers[1].step()
    optimizers[1].zero_grad()
    assert_same_bits(*optimizers)
    iterate(*optimizers)
    assert_same_bits(*optimizers)


@pytest.mark.parametrize("scaled", rows({"alone": False, "scaler": True}))
def test_calls_between_backward_and_step_see_what_was_stepped(scaled: bool) -> None:
    optimizers = cases.pair("AdamW", {"lr": 0.05}, F16, shapes=[(40,)] * 6)
    offloaded(optimizers[0], chunk_bytes=1)
    scalers = scalers_of(amp_ext.GradScaler) if scaled else [None, None]
    for optimizer, scaler in zip(optimizers, scalers, strict=True):
        release_gradients(optimizer, scaler)
        for _ in range(2):
            scale = 1.0 if scaler is None else float(scaler.scale(torch.ones(())))
            give_in_backward(optimizer, scale=scale)
            optimizer.state_dict()  # waits for the thread
            assert len(optimizer.state) == 6
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    assert_same_bits(*optimizers)


def test_parameters_written_between_iterations_are_noticed_by_hooks() -> None:
    optimizers = released(master_weights="split")
    for seed in range(3):
        iterate(*optimizers, seed=seed)
        with torch.no_grad():
            for optimizer in optimizers:
                params_of(optimizer)[1].clamp_(-0.1, 0.1)
    assert_same_bits(*optimizers)


def test_gradients_of_another_dtype_or_layout_are_released() -> None:
    optimizers = cases.pair("AdamW", {"lr": 0.05}, BF16, shapes=[(40, 3), (5,)])
    offloaded(optimizers[0], chunk_bytes=1)
    release_gradients(optimizers[0])
    for _ in range(2):
        for optimizer in optimizers:
            one, two = params_of(optimizer)
            one.grad_dtype = F32
            one.grad = torch.arange(240.0).view(40, 6)[:, ::2] / 240
            two.grad = torch.ones(5, dtype=BF16).expand(5)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(*optimizers)


@pytest.mark.parametrize("name", ["copy_down", "copy_up"])
def test_error_of_a_copy_during_backward_is_raised_once(name: str) -> None:
    optimizers = released()
    iterate(*optimizers)
    saved = through_a_file(optimizers[0].state_dict()), twins(optimizers[0])

    def backward_and_step() -> None:
        with failing_copies(transport_of(optimizers[0]), name, after=3):
            give_in_backward(optimizers[0])
            optimizers[0].step()

    with pytest.raises(torch.OutOfMemoryError, match="the bus is gone"):
        backward_and_step()
    with pytest.warns(UserWarning, match=r"[3-6] of 6 parameters had been stepped"):
        optimizers[0].zero_grad()
    with torch.no_grad():
        for param, before in zip(params_of(optimizers[0]), saved[1], strict=True):
            param.copy_(before)
    optimizers[0].load_state_dict(saved[0])
    with warnings.catch_warnings(record=True):
        optimizers[0].zero_grad()
    iterate(*optimizers, seed=1)
    assert_same_bits(*optimizers)


@pytest.mark.parametrize("is_stepped", [False, True])
def test_parameter_written_before_its_copy_is_refused(is_stepped: bool) -> None:
    optimizers = released()
    iterate(*optimizers)
    gate, transport = threading.Event(), transport_of(optimizers[0])
    wait = transport.wait
    transport.wait = lambda event: gate.wait(60) and wait(event)
    param = params_of(optimizers[0])[2]
    torch.autograd.backward([param], [torch.ones_like(param)])
    if is_stepped:
        gate.set()
        optimizers[0].offload._work.result()
    with torch.no_grad():
        param.clamp_(-0.1, 0.1)
    gate.set()
    with pytest.raises(RuntimeError, match="group 0, param 2 was written after its gradient was"):
        optimizers[0].step()


@pytest.mark.parametrize("replaced_before", [False, True])
def test_views_of_one_tensor_may_get_new_data_between_released_iterations(replaced_before) -> None:
    """They have one version counter, which each of their steps increases."""
    buffer = torch.ones(8, dtype=BF16)
    params = [nn.Parameter(buffer[:4]), nn.Parameter(buffer[4:])]
    optimizer = AdamW(params, lr=0.5)
    if replaced_before:
        params[0].data = torch.ones(4, dtype=BF16)
    offloaded(optimizer)
    release_gradients(optimizer)
    for step in range(3):
        sum(param.float().sum() for param in params).backward()
        optimizer.step()
        params[0].data = torch.full((4,), float(step), dtype=BF16)
    assert params[0].tolist() == [2.0] * 4
    assert (params[1] < 0.0).all()


# Copies, threads and processes.


@cases.COPIES
def test_copy_of_an_optimizer_is_not_offloaded(copied: Callable[[Any], Any]) -> None:
    optimizers = beside_offloaded(dtype=F16)
    assert_trains_alike(optimizers, 2)
    pair = copied(optimizers[0]), optimizers[1]
    assert pair[0].offload is None
    assert_trains_alike(pair, 2)


def test_thread_ends_with_the_optimizer() -> None:
    optimizer = AdamW(make_params(F32))
    offloaded(optimizer)
    trained(optimizer)
    (thread,) = optimizer.offload._pool._threads
    alive = weakref.ref(optimizer)
    assert thread.is_alive()
    del optimizer
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert alive() is None


_PROGRAM = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
from harness.optimizer_cases import make_params, trained
from harness.transports import DelayedTransport
from amp_ext.optim import AdamW
from amp_ext.optim.offload import OffloadedStates
torch.set_num_threads(1)
optimizer = AdamW(make_params(torch.float32, shapes=[(100,)] * 5))
transport = DelayedTransport()
OffloadedStates(optimizer, transport, chunk_bytes=1)
trained(optimizer)
{rest}
"""


@pytest.mark.slow
@pytest.mark.parametrize("rest", rows({
    "exit": "print('end')",
    "fork": """
child = os.fork()
if child == 0:
    OffloadedStates.begin = None
    optimizer.offload._transport = DelayedTransport()
    trained(optimizer)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
trained(optimizer)
print('end')""",
    "exit-in-backward": """
import torch
from amp_ext.optim import release_gradients
from harness.optimizer_cases import params_of
release_gradients(optimizer)
optimizer.zero_grad()
transport.down.delay = 0.2
params = params_of(optimizer)
torch.autograd.backward(params, [torch.ones_like(param) for param in params])
print('end')""",
}))  # fmt: skip
def test_processes_end(rest: str) -> None:
    program = _PROGRAM.format(tests=os.path.dirname(os.path.dirname(__file__)), rest=rest)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
