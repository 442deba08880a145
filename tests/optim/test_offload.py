"""Optimizers whose states are in host memory, over a transport that copies late and unordered."""

from __future__ import annotations

import contextlib
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
from torch import nn

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
from amp_ext.optim.transport import Transport, available_host_memory

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
each_scaling = pytest.mark.parametrize("scaled", rows({"alone": False, "scaler": True}))


def offloaded(optimizer: Any, chunk_bytes: int = 3000, **options: Any) -> OffloadedStates:
    return OffloadedStates(optimizer, DelayedTransport(), chunk_bytes=chunk_bytes, **options)


def transport_of(optimizer: Any) -> DelayedTransport:
    return optimizer.offload._transport


def beside_offloaded(
    name: str = "AdamW",
    options: dict[str, Any] | None = None,
    dtype: torch.dtype = F32,
    shapes: Any = SHAPES,
    chunk_bytes: int = 3000,
    **more: Any,
) -> tuple[Any, Any]:
    """Returns equal optimizers, of which the first is offloaded."""
    first, second = cases.pair(name, {"lr": 0.05} | (options or {}) | more, dtype, shapes=shapes)
    offloaded(first, chunk_bytes)
    return first, second


def without_amsgrad(options: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    if "8bit" in str(kept.get("state_dtype")):
        return {key: value for key, value in options.items() if key != "amsgrad"} | kept
    return options | kept


def scalers_of(kind: Any, scaled: bool = True) -> list[Any]:
    return [kind("cpu", init_scale=1024.0, growth_interval=5) if scaled else None for _ in range(2)]


def scaled_up(optimizer: Any, scaler: Any, factor: float = 1.0) -> None:
    scaler.scale(torch.zeros(()))
    for grad in grads_of(optimizer):
        grad.mul_(scaler.get_scale() * factor)


def step_with(optimizer: Any, scaler: Any) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def assert_trains_alike(
    optimizers: tuple[Any, Any],
    steps: int,
    scalers: Any = (None, None),
    overflows: bool = False,
    prepare: Callable[[Any, int], Any] = lambda optimizer, step: None,
) -> None:
    """Trains two optimizers with equal gradients; ``prepare`` may change them before each step."""
    for step in range(steps):
        give_grads(*optimizers)
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            with torch.no_grad():
                prepare(optimizer, step)
            if scaler is not None:
                scaled_up(optimizer, scaler)
                if overflows and step % 4 == 1:
                    params_of(optimizer)[1].grad[2, 1] = float("inf")
            step_with(optimizer, scaler)
    assert_same_bits(*optimizers)
    if scalers[0] is not None:
        assert scalers[0].get_scale() == scalers[1].get_scale()


# Bits.


@pytest.mark.parametrize("clip", rows({"free": {}, "clip": {"max_grad_norm": 2.0}}))
@each_scaling
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
    scalers = scalers_of(amp_ext.GradScaler, scaled)
    assert_trains_alike(optimizers, 10, scalers, overflows=scaled)
    # Both go on alike without the offload.
    optimizers[0].offload.remove()
    assert optimizers[0].offload is None
    assert_trains_alike(optimizers, 2, scalers)


def test_torch_scaler_steps_alike() -> None:
    optimizers = beside_offloaded(max_grad_norm=1.0)
    assert_trains_alike(optimizers, 8, scalers_of(torch.amp.GradScaler), overflows=True)


@pytest.mark.parametrize("options", rows({
    "tensor-lr": {"lr": torch.tensor(0.1)},
    "tensor-lr-fp64": {"lr": torch.tensor([0.1], dtype=F64)},
    "clip-value": {"clip_value": 0.1},
    "nonfinite": {"skip_nonfinite": True},
    "maximize": {"maximize": True},
    "capturable": {"capturable": True},
}))  # fmt: skip
def test_options_work_as_without_offload(options: dict[str, Any]) -> None:
    optimizers = beside_offloaded("AdamW", options, F16)
    assert_trains_alike(optimizers, 6, scalers_of(amp_ext.GradScaler), overflows=True)


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 30])
def test_size_of_chunks_changes_no_bit(chunk_bytes: int) -> None:
    optimizers = beside_offloaded(dtype=F16, chunk_bytes=chunk_bytes)
    transport, chunks = transport_of(optimizers[0]), []
    copy_down = transport.copy_down
    transport.copy_down = lambda copies: chunks.append(len(copies)) or copy_down(copies)
    assert_trains_alike(optimizers, 1)
    assert [*filter(None, chunks)] == ([1, 1, 4] if chunk_bytes == 1 else [6])


@pytest.mark.parametrize(("threads", "expected"), [(None, 3), (1, 1), (2, 2)])
def test_threads_change_no_bit_and_no_other_number_of_threads(
    threads: int | None, expected: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        optimizers = cases.pair("AdamW", {"lr": 0.05}, F16, shapes=[(300, 300)])
        pool = offloaded(optimizers[0], threads=threads)._pool
        assert_trains_alike(optimizers, 2)
        assert pool.submit(torch.get_num_threads).result() == expected
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# What moves.


def test_only_gradients_move_down_and_parameters_up_and_nothing_if_a_step_is_skipped() -> None:
    optimizer, scaler = AdamW(make_params(BF16, shapes=SHAPES)), scalers_of(amp_ext.GradScaler)[0]
    offloaded(optimizer)
    calls = transport_of(optimizer).calls
    assert calls == ["down"] * len(SHAPES)
    for bad, expected in ((1.0, ["down", "down", "up", "up"]), (float("nan"), [])):
        for param in params_of(optimizer)[1:3]:
            param.grad = torch.full_like(param, bad)
        scaled_up(optimizer, scaler)
        before = bits_of(params_of(optimizer))
        calls.clear()
        step_with(optimizer, scaler)
        assert sorted(calls) == expected
    assert_same_bits(params_of(optimizer), before)
    assert scaler.get_scale() == 512.0


@each_form
def test_memory_of_the_host_is_counted_exactly(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kept: dict[str, Any]
) -> None:
    optimizer = AdamW(make_params(dtype, shapes=[(256, 64), (64, 33)]), **kept)
    offloaded(optimizer, 1000)
    trained(optimizer, 1)
    states = [state.items() for state in optimizer.state.values()]
    moments = sum(each.nbytes for items in states for key, each in items if key != "step")
    needed = moments + transport_of(optimizer).allocated
    for available in (needed, needed - 1):
        monkeypatch.setattr(offload, "available_host_memory", lambda: available)  # noqa: B023
        other = AdamW(twins(optimizer), **kept)
        refused = contextlib.nullcontext()
        if available < needed:
            refused = pytest.raises(RuntimeError, match=r"the host needs \d\.\d GiB")
        with refused:
            offloaded(other, 1000)
        assert (other.offload is None) == (available < needed)
    optimizer.add_param_group({"params": make_params(F32, shapes=[(needed,)])})
    with pytest.raises(RuntimeError, match=r"the host needs \d\.\d GiB"):
        optimizer.state_dict()


def test_available_memory_is_below_that_of_the_machine() -> None:
    found = available_host_memory()
    assert found is not None
    assert 0 < found <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class FakeCuda:
    """Streams that run nothing late, and a log of what waits for what."""

    def __init__(self, patch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.log: list[str] = []
        self.pinned: dict[int, int] = {}
        streams = [self.stream(name) for name in ("down", "up", "caller")]
        cudart = types.SimpleNamespace(
            cudaHostRegister=lambda at, size, flags: self.pinned.update({at: size}) or error,
            cudaHostUnregister=self.pinned.pop,
        )
        for name, value in {
            "Stream": lambda device: streams.pop(0),
            "current_stream": lambda device: streams[-1],
            "stream": lambda stream: contextlib.nullcontext(self.log.append(f"on {stream.name}")),
            "device": lambda device: contextlib.nullcontext(),
            "cudart": lambda: cudart,
            "synchronize": lambda device: self.log.append("synchronize"),
        }.items():
            patch.setattr(torch.cuda, name, value)

    def stream(self, name: str) -> Any:
        def wait_stream(other: Any) -> None:
            self.log.append(f"{name} waits for {other.name}")

        event = types.SimpleNamespace(synchronize=lambda: self.log.append(f"host waits for {name}"))
        return types.SimpleNamespace(name=name, wait_stream=wait_stream, record_event=lambda: event)


@pytest.mark.parametrize("pinned", [True, False])
def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    optimizers = cases.pair("AdamW", {"lr": 0.05}, F16, shapes=[(40,), (5, 7)])
    cuda = FakeCuda(monkeypatch)
    OffloadedStates(optimizers[0], Transport(torch.device("cpu"), pinned), chunk_bytes=1)
    assert_trains_alike(optimizers, 1)
    cuda.log.clear()
    assert_trains_alike(optimizers, 1)
    of_thread = ["host waits for down", "on up"]
    assert [each for each in cuda.log if each in of_thread] == of_thread * 2
    of_caller = [each for each in cuda.log if each not in of_thread]
    begin = ["down waits for caller", "up waits for caller", "on down"]
    assert of_caller == [*begin, *begin, "caller waits for up"]
    assert sum(cuda.pinned.values()) == (4 * 128 if pinned else 0)
    optimizers[0].offload.remove()
    assert cuda.log[-1] == "synchronize"
    assert not cuda.pinned


def test_memory_that_can_not_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, optimizer = FakeCuda(monkeypatch, error=2), AdamW(make_params(F32))
    with pytest.raises(RuntimeError, match=r"can't be pinned \(CUDA error 2\). Raise the limit"):
        OffloadedStates(optimizer, Transport(torch.device("cpu"), True))
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
    assert_trains_alike(optimizers, 6, prepare=lambda each, step: step == 3 and change(each))


def change_layouts(optimizer: Any, step: int) -> None:
    params = params_of(optimizer)
    if step == 1:
        params[1].data = params[1].data.to(memory_format=torch.channels_last)
    params[0].grad = params[0].grad.t().contiguous().t()
    params[1].grad = params[1].grad.contiguous()
    params[2].grad = params[2].grad.flip(0) if step % 2 else torch.ones(7).expand(7)


def change_dtypes(optimizer: Any, step: int) -> None:
    for param in params_of(optimizer):
        param.grad_dtype = None  # any
        param.grad = param.grad.to(BF16 if step % 2 else F32)


def write_in_hooks(optimizer: Any, step: int) -> None:
    if step == 0:
        optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs: [each.mul_(3) for each in grads_of(optimizer)] and None
        )


def change_groups(optimizer: Any, step: int) -> None:
    group, params = optimizer.param_groups[0], params_of(optimizer)
    group["lr"] *= 0.5
    if step == 2:
        torch.manual_seed(0)
        optimizer.add_param_group({"params": make_params(BF16), "weight_decay": 0.5})
        params[0].requires_grad_(False)
    elif step == 4:
        group["state_dtype"] = "bfloat16"
        del optimizer.param_groups[1]


def freeze(optimizer: Any, step: int) -> None:
    param = params_of(optimizer)[1]
    param.requires_grad_(step in (2, 3, 5))
    if not param.requires_grad:
        param.grad = None


def convert(swaps: bool) -> Callable[[Any, int], None]:
    def convert_at_2(optimizer: Any, step: int) -> None:
        if step == 2:
            with cases.swapping(swaps):
                nn.ParameterList(params_of(optimizer)).bfloat16()

    return convert_at_2


def step_in(mode: Any) -> Callable[[Any, int], None]:
    def wrap_step(optimizer: Any, step: int) -> None:
        if step == 0:
            optimizer.step = mode()(optimizer.step)

    return wrap_step


LOOPS: dict[str, tuple[torch.dtype, Callable[[Any, int], Any]]] = {
    "layouts": (F32, change_layouts),
    "dtypes": (BF16, change_dtypes),
    "written in hooks": (F32, write_in_hooks),
    "groups": (F16, change_groups),
    "frozen": (F16, freeze),
    "converted": (F32, convert(swaps=False)),
    "swapped": (F32, convert(swaps=True)),
    "no_grad": (BF16, step_in(torch.no_grad)),
    "inference_mode": (BF16, step_in(torch.inference_mode)),
}


@each_scaling
@pytest.mark.parametrize(("dtype", "prepare"), rows(LOOPS))
def test_loops_train_as_without_offload(
    dtype: torch.dtype, prepare: Callable[[Any, int], Any], scaled: bool
) -> None:
    optimizers = beside_offloaded(dtype=dtype, shapes=[(6, 8), (2, 3, 4, 5), (7,)])
    assert_trains_alike(optimizers, 6, scalers_of(amp_ext.GradScaler, scaled), prepare=prepare)
    assert len(optimizers[0].offload._hosts) == len(params_of(optimizers[0]))


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
        assert all(map(same_bits, *(optimizer.master_params() for optimizer in optimizers)))
        assert_trains_alike(optimizers, 2)


def test_offload_can_begin_and_end_at_any_time() -> None:
    optimizers = cases.pair("AdamW", {"lr": 0.05}, F16)
    for _ in range(2):
        assert_trains_alike(optimizers, 2)
        with offloaded(optimizers[0]):
            assert_trains_alike(optimizers, 2)
        assert optimizers[0].offload is None
    assert_trains_alike(optimizers, 2)


def test_frozen_parameters_take_no_memory_until_they_are_trained() -> None:
    params = [*make_params(F16, shapes=[(40,)]), *make_params(F64, shapes=[(4096,)])]
    params[1].requires_grad_(False)
    optimizer = AdamW(params)
    offloaded(optimizer)
    assert transport_of(optimizer).allocated == 3 * 128  # a copy, and two buffers
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert optimizer.master_params()[1].data_ptr() == params[1].data_ptr()
    assert [*optimizer.state] == params[:1]
    params[1].requires_grad_(True)
    with pytest.raises(RuntimeError, match="param 1 must be Float, Half or BFloat16"):
        optimizer.step()


def test_parameters_moved_to_another_device_are_refused() -> None:
    optimizer = AdamW(make_params(F32, shapes=[(3,)]))
    offloaded(optimizer)
    trained(optimizer)
    optimizer.zero_grad()
    with cases.swapping(True):
        nn.ParameterList(params_of(optimizer)).to("meta")
    with pytest.raises(RuntimeError, match="param of group 0, param 0 must be on cpu, got meta"):
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
            scaled_up(optimizer, scaler, 100 if step == 15 else 1)
            if step == 10:
                params_of(optimizer)[1].grad = None
            step_with(optimizer, scaler)
        mine, plain = optimizers
        for name in ("grad_norm", "grad_norms", "step_applied"):
            assert same_bits(getattr(mine, name), getattr(plain, name))
        assert mine.named_grad_norms() == plain.named_grad_norms()
        assert bool(mine.step_applied) is (step != 15 or action == "clip")
    mine.offload.remove()
    for _ in range(2):
        assert mine.norm_guard.stats() == plain.norm_guard.stats()
        assert mine.norm_guard.stats().outliers == 1
        assert_trains_alike(optimizers, 3, scalers)


def test_norm_that_the_step_measures_itself_skips_under_a_scaler() -> None:
    optimizers = beside_offloaded(max_grad_norm=0.5)
    for bad in (float("inf"), 1.0):
        give_grads(*optimizers)
        for optimizer in optimizers:
            optimizer.track_step_applied()
            params_of(optimizer)[0].grad[0, 0] = bad
            optimizer.found_inf = torch.zeros(())  # as after unscale_() of torch's scaler
            optimizer.step()
            del optimizer.found_inf
            assert bool(optimizer.step_applied) is (bad == 1.0)
    assert_same_bits(*optimizers)


def test_unscaled_and_clipped_gradients_step_alike() -> None:
    optimizers, scalers = beside_offloaded(), scalers_of(amp_ext.GradScaler)
    for _ in range(3):
        give_grads(*optimizers)
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaled_up(optimizer, scaler)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params_of(optimizer), 0.5)
            step_with(optimizer, scaler)
    assert_same_bits(*optimizers)


def test_step_inside_an_autocast_scope_leaves_no_stale_weight() -> None:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.ones_(linear.weight)
    optimizer = amp_ext.optim.SGD(linear.parameters(), lr=1.0)
    offloaded(optimizer)
    with torch.autocast("cpu", BF16):
        (-linear(torch.ones(1, 1)).float().sum()).backward()
        optimizer.step()
        assert linear(torch.ones(1, 1)).item() == 2.0


def test_hooks_after_the_step_see_the_new_parameters() -> None:
    optimizers, seen = beside_offloaded(dtype=BF16), []
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda each, args, kwargs: seen.append(bits_of(each)))
    assert_trains_alike(optimizers, 3)
    for mine, plain in zip(seen[::2], seen[1::2], strict=True):
        assert_same_bits(mine, plain)


@each_scaling
def test_gradients_that_accumulate_in_place_are_read_anew(scaled: bool) -> None:
    optimizers = beside_offloaded(dtype=F16, max_grad_norm=1.0)
    for _ in range(4):
        parts = [[torch.randn_like(p) for p in params_of(optimizers[0])] for _ in range(2)]
        for optimizer, scaler in zip(
            optimizers, scalers_of(amp_ext.GradScaler, scaled), strict=True
        ):
            for part in parts:
                torch.autograd.backward(params_of(optimizer), [each.clone() for each in part])
            if scaler is not None:
                scaler.scale(torch.zeros(()))
            step_with(optimizer, scaler)
            optimizer.zero_grad(set_to_none=False)
    assert_same_bits(*optimizers)


def test_step_bumps_the_versions_of_parameters() -> None:
    optimizer = AdamW(make_params(F32, shapes=[(3,)]))
    offloaded(optimizer)
    loss = params_of(optimizer)[0].square().sum()
    trained(optimizer, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
            with pytest.raises(RuntimeError, match="the parameters hold their averages"):
                optimizer.step()
    assert_alike(2)
    optimizers[0].offload.remove()
    assert_alike(2)


# Errors.


def test_gradients_that_still_carry_the_scale_are_refused() -> None:
    optimizer, (scaler, _) = AdamW(make_params(F16)), scalers_of(amp_ext.GradScaler)
    offloaded(optimizer)
    give_grads(optimizer)
    scaler.scale(torch.zeros(()))
    step_with(optimizer, scaler)
    with pytest.raises(RuntimeError, match="still carries the loss scale"):
        optimizer.step()
    trained(optimizer)


@pytest.mark.parametrize(("change", "words"), rows({
    "sparse": (
        lambda params, optimizer: setattr(params[1], "grad", torch.zeros(3, 5).to_sparse()),
        "sparse gradients: grad of group 0, param 1",
    ),
    "state": (lambda params, optimizer: optimizer.state[params[-1]].pop("exp_avg"), "exp_avg"),
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
    copied = 0

    def copy_(copies: Any) -> Any:
        nonlocal copied
        copied += len(copies)
        if copied > after:
            raise torch.OutOfMemoryError("the bus is gone")
        return getattr(DelayedTransport, name)(transport, copies)

    setattr(transport, name, copy_)
    try:
        yield
    finally:
        delattr(transport, name)


def load_back(optimizer: Any, file: Any, params: Any) -> None:
    """Loads what an optimizer and its parameters were before an error."""
    with torch.no_grad():
        for param, before in zip(params_of(optimizer), params, strict=True):
            param.copy_(before)
    optimizer.load_state_dict(file)


@pytest.mark.parametrize(("name", "after", "progress"), [
    ("copy_down", 0, ""),
    ("copy_down", 4, "4 of 6 parameters"),
    ("copy_up", 0, "1 of 6 parameters"),
    ("copy_up", 3, "4 of 6 parameters"),
])  # fmt: skip
def test_error_in_the_thread_says_what_was_stepped(name: str, after: int, progress: str) -> None:
    optimizers = beside_offloaded(dtype=F16, shapes=[(40,)] * 6, chunk_bytes=1)
    assert_trains_alike(optimizers, 1)
    saved = through_a_file(optimizers[0].state_dict()), twins(optimizers[0])
    before = bits_of(optimizers[0])
    give_grads(*optimizers)
    with (
        failing_copies(transport_of(optimizers[0]), name, after),
        pytest.raises(torch.OutOfMemoryError, match="the bus is gone") as raised,
    ):
        optimizers[0].step()
    note = "".join(raised.value.__notes__)
    if progress:
        assert f"the step failed after updating {progress}" in note
        load_back(optimizers[0], *saved)
    else:
        assert "no parameter or state was changed" in note
    assert_same_bits(optimizers[0], before)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_bits(*optimizers)


@pytest.mark.parametrize(("added", "words"), rows({
    "fp64": (make_params(F64), "param of group 1, param 0 must be Float, Half or BFloat16"),
    "lazy": ([nn.UninitializedParameter()], "lazy parameter"),
    "gaps": ([nn.Parameter(torch.ones(4, 4)[:, ::2])], "must be dense in memory"),
    "device": ([nn.Parameter(torch.ones(1, device="meta"))], "must be on cpu, got meta"),
    "twice": ([], "are offloaded already"),
}))  # fmt: skip
def test_offload_is_refused(added: list[nn.Parameter], words: str) -> None:
    optimizers = cases.pair("AdamW", {"lr": 0.05}, F32)
    if added:
        optimizers[0].add_param_group({"params": added})
    else:
        offloaded(optimizers[0])
    before = optimizers[0].offload
    with pytest.raises(RuntimeError, match=words):
        offloaded(optimizers[0])
    assert optimizers[0].offload is before
    del optimizers[0].param_groups[1:]
    assert_trains_alike(optimizers, 2)


@pytest.mark.parametrize(("arguments", "error", "words"), rows({
    "optimizer": ((torch.optim.SGD,), TypeError, "must be one of amp_ext.optim, got SGD"),
    "threads": ((AdamW, True, 1.5), ValueError, "threads must be None or an int of at least 1"),
    "bool": ((AdamW, True, True), ValueError, "an int of at least 1, got True"),
    "none": ((AdamW, True, 0), ValueError, "an int of at least 1, got 0"),
    "cpu": ((AdamW,), RuntimeError, "must be on a GPU, got cpu"),
}))  # fmt: skip
def test_arguments_are_checked(arguments: Any, error: type[Exception], words: str) -> None:
    kind, *others = arguments
    with pytest.raises(error, match=words):
        offload_states(kind(make_params(F32)), *others)


# Released gradients. test_gradient_release.py runs all its tests with offloaded states, too.


def give_in_backward(optimizer: Any, seed: int = 0, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    params = params_of(optimizer)
    grads = [torch.randn(p.shape, generator=generator).to(p.dtype) * scale for p in params]
    torch.autograd.backward(params, grads)


def released(first_offloads: bool = True, **options: Any) -> tuple[Any, Any]:
    """Returns equal optimizers, of which the first is offloaded and releases its gradients."""
    optimizers = cases.pair("AdamW", {"lr": 0.05} | options, F16, shapes=[(40,)] * 6)
    for offloads in (first_offloads, not first_offloads):
        if offloads:
            offloaded(optimizers[0], chunk_bytes=1)
        else:
            release_gradients(optimizers[0])
    return optimizers


def iterate(*optimizers: Any, seed: int = 0) -> None:
    for optimizer in optimizers:
        give_in_backward(optimizer, seed)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("first_offloads", [True, False])
@pytest.mark.parametrize("first_removed", ["offload", "gradient_release"])
def test_offload_and_release_begin_and_end_in_any_order(
    first_offloads: bool, first_removed: str
) -> None:
    optimizers = released(first_offloads)
    iterate(*optimizers)
    getattr(optimizers[0], first_removed).remove()
    iterate(*optimizers, seed=1)
    (optimizers[0].offload or optimizers[0].gradient_release).remove()
    iterate(*optimizers, seed=2)
    assert_same_bits(*optimizers)


def test_steps_go_on_after_hooks_have_enlarged_the_buffers() -> None:
    optimizers = beside_offloaded(shapes=[(40,)], chunk_bytes=1)
    small = [(params_of(optimizer)[0], optimizer) for optimizer in optimizers]
    for param, optimizer in small:
        scaler = amp_ext.GradScaler("cpu", init_scale=8.0)
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
        torch.manual_seed(0)
        optimizer.add_param_group({"params": make_params(F32, shapes=[(900,)])})
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


@each_scaling
def test_calls_between_backward_and_step_see_what_was_stepped(scaled: bool) -> None:
    optimizers = beside_offloaded(dtype=F16, shapes=[(40,)] * 6, chunk_bytes=1)
    for optimizer, scaler in zip(optimizers, scalers_of(amp_ext.GradScaler, scaled), strict=True):
        release_gradients(optimizer, scaler)
        for _ in range(2):
            scale = 1.0 if scaler is None else float(scaler.scale(torch.ones(())))
            give_in_backward(optimizer, scale=scale)
            optimizer.state_dict()  # waits for the thread
            assert len(optimizer.state) == 6
            step_with(optimizer, scaler)
    assert_same_bits(*optimizers)


def test_parameters_written_between_iterations_are_noticed_by_hooks() -> None:
    optimizers = released(master_weights="split")
    for seed in range(3):
        iterate(*optimizers, seed=seed)
        with torch.no_grad():
            for optimizer in optimizers:
                params_of(optimizer)[1].clamp_(-0.1, 0.1)
    assert_same_bits(*optimizers)


def test_parameters_may_be_unfrozen_within_an_iteration() -> None:
    optimizers = cases.pair("AdamW", {"lr": 0.05}, F16, shapes=[(40,)] * 6)
    for optimizer in optimizers:
        params_of(optimizer)[3].requires_grad_(False)
    offloaded(optimizers[0])
    release_gradients(optimizers[0])
    for optimizer in optimizers:
        params = params_of(optimizer)
        torch.autograd.backward(params[:3], [torch.ones(40, dtype=F16)] * 3)
        params[3].requires_grad_(True)
        torch.autograd.backward(params[3:], [torch.ones(40, dtype=F16)] * 3)
        optimizer.step()
    assert_same_bits(*optimizers)


def test_gradients_of_another_dtype_or_layout_are_released() -> None:
    optimizers = beside_offloaded(dtype=BF16, shapes=[(40, 3), (5,)], chunk_bytes=1)
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
    with (
        failing_copies(transport_of(optimizers[0]), name, after=3),
        pytest.raises(torch.OutOfMemoryError, match="the bus is gone"),
    ):
        iterate(optimizers[0])
    with pytest.warns(UserWarning, match=r"[3-6] of 6 parameters had been stepped"):
        optimizers[0].zero_grad()
    load_back(optimizers[0], *saved)
    with warnings.catch_warnings(record=True):
        optimizers[0].zero_grad()
    iterate(*optimizers, seed=1)
    assert_same_bits(*optimizers)


@pytest.mark.parametrize("is_stepped", [False, True])
def test_parameter_written_before_its_copy_is_refused(is_stepped: bool) -> None:
    optimizers = released()
    iterate(*optimizers)
    gate, transport = threading.Event(), transport_of(optimizers[0])
    copy_up = transport.copy_up
    transport.copy_up = lambda copies: gate.wait(60) and copy_up(copies)
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


def test_thread_and_memory_end_with_the_optimizer_or_the_offload() -> None:
    for is_removed in (False, True):
        optimizer = AdamW(make_params(F32))
        offload = offloaded(optimizer)
        trained(optimizer)
        (thread,) = offload._pool._threads
        alive = [weakref.ref(optimizer), weakref.ref(optimizer.offload._buffers[0])]
        assert thread.is_alive()
        if is_removed:
            offload.remove()
        else:
            del offload
        del optimizer
        gc.collect()
        thread.join(10)
        assert not thread.is_alive()
        assert [each() for each in alive] == [None, None]


_PROGRAM = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
from harness.optimizer_cases import make_params, params_of, trained
from harness.transports import DelayedTransport
from amp_ext.optim import AdamW, release_gradients
from amp_ext.optim.offload import OffloadedStates
torch.set_num_threads(1)
optimizer = AdamW(make_params(torch.float32, shapes=[(100,)] * 5))
transport = DelayedTransport()
OffloadedStates(optimizer, transport, chunk_bytes=1)
trained(optimizer)
if {in_backward}:
    release_gradients(optimizer)
    optimizer.zero_grad()
    transport.down.delay = 0.2
    params = params_of(optimizer)
    torch.autograd.backward(params, [torch.ones_like(param) for param in params])
print("end")
"""


@pytest.mark.slow
@pytest.mark.parametrize("in_backward", [False, True])
def test_processes_end(in_backward: bool) -> None:
    tests = os.path.dirname(os.path.dirname(__file__))
    program = _PROGRAM.format(tests=tests, in_backward=in_backward)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
