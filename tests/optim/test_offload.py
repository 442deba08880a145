"""Optimizers whose states are in host memory, over a transport that copies late and unordered."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F16, F32, F64
from harness.edge_shapes import threads as torch_threads
from harness.optimizer_cases import assert_same_bits, bits_of, give_grads, grads_of, params_of
from harness.reference import same_bits
from harness.rows import rows
from harness.transports import DelayedTransport
from torch import nn

import amp_ext
from amp_ext.optim import AdamW, NormGuard, WeightAverage, offload, release_gradients, transport

each_form = pytest.mark.parametrize(("dtype", "kept"), rows(cases.STORED_FORMS))


def offloaded(optimizer: Any, chunk_bytes: int = 3000, **options: Any) -> offload.OffloadedStates:
    return offload.OffloadedStates(
        optimizer, DelayedTransport(), chunk_bytes=chunk_bytes, **options
    )


def transport_of(optimizer: Any) -> DelayedTransport:
    return optimizer.offload._transport


def beside_offloaded(
    name: str = "AdamW",
    dtype: torch.dtype = F32,
    shapes: Any = cases.FORM_SHAPES,
    chunk_bytes: int = 3000,
    **options: Any,
) -> tuple[Any, Any]:
    """Returns equal optimizers, of which the first is offloaded."""
    first, second = cases.pair(name, {"lr": 0.05} | options, dtype, shapes=shapes)
    offloaded(first, chunk_bytes)
    return first, second


def without_amsgrad(options: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    if "8bit" in str(kept.get("state_dtype")):
        return {key: value for key, value in options.items() if key != "amsgrad"} | kept
    return options | kept


def scalers_of(kind: Any, scaled: bool = True) -> list[Any]:
    return [kind("cpu", init_scale=1024.0, growth_interval=5) if scaled else None for _ in range(2)]


def scaled_up(optimizer: Any, scaler: Any) -> None:
    scaler.scale(torch.zeros(()))
    for grad in grads_of(optimizer):
        grad.mul_(scaler.get_scale())


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
                    grads_of(optimizer)[0][..., 0] = float("inf")
                if step % 4 > 1 and all(grad.dtype != F16 for grad in grads_of(optimizer)):
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(params_of(optimizer), 5.0)
            cases.take_step(optimizer, scaler)
    assert_same_bits(*optimizers)
    if scalers[0] is not None:
        assert scalers[0].get_scale() == scalers[1].get_scale()


# Bits.


@pytest.mark.parametrize("clip", rows({"free": {}, "clip": {"max_grad_norm": 2.0}}))
@pytest.mark.parametrize("scaled", rows({"alone": False, "scaler": True}))
@each_form
@cases.few_optimizers
def test_bits_are_those_of_training_without_offload(name, options, dtype, kept, scaled, clip):
    optimizers = beside_offloaded(name, dtype, **without_amsgrad(options, kept) | clip)
    scalers = scalers_of(amp_ext.GradScaler, scaled)
    for again in (False, True):
        with offloaded(optimizers[0]) if again else optimizers[0].offload:
            assert_trains_alike(optimizers, 8, scalers, overflows=scaled)
        # Both go on alike without the offload.
        assert optimizers[0].offload is None
        assert_trains_alike(optimizers, 2, scalers)


def test_torch_scaler_steps_alike() -> None:
    optimizers = beside_offloaded(max_grad_norm=1.0)
    assert_trains_alike(optimizers, 8, scalers_of(torch.amp.GradScaler), overflows=True)


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 30])
def test_size_of_chunks_changes_no_bit(chunk_bytes: int) -> None:
    optimizers = beside_offloaded(dtype=F16, chunk_bytes=chunk_bytes)
    transport, sent = transport_of(optimizers[0]), []
    before, record = len(transport.calls), transport.record_down
    transport.record_down = lambda: sent.append(transport.calls[before:].count("down")) or record()
    assert_trains_alike(optimizers, 1)
    assert sent == ([1, 2, 6] if chunk_bytes == 1 else [6])


@pytest.mark.parametrize(("threads", "expected"), [(None, 3), (1, 1), (2, 2)])
def test_threads_change_no_bit_and_no_other_number(threads: int | None, expected: int) -> None:
    with torch_threads(3):
        optimizers = cases.pair("AdamW", {"lr": 0.05}, F16, shapes=[(300, 300)])
        pool = offloaded(optimizers[0], threads=threads)._pool
        assert_trains_alike(optimizers, 2)
        assert pool.submit(torch.get_num_threads).result() == expected
        assert torch.get_num_threads() == 3


# What moves.


def test_steps_that_are_taken_move_gradients_down_and_parameters_up() -> None:
    optimizer, (scaler, _) = AdamW(cases.make_params(BF16)), scalers_of(amp_ext.GradScaler)
    offloaded(optimizer)
    calls = transport_of(optimizer).calls
    assert calls == ["down"] * len(params_of(optimizer))
    for bad, expected in ((1.0, ["down", "down", "up", "up"]), (float("nan"), [])):
        for param in params_of(optimizer)[1:3]:
            param.grad = torch.full_like(param, bad)
        scaled_up(optimizer, scaler)
        before = bits_of(params_of(optimizer))
        calls.clear()
        cases.take_step(optimizer, scaler)
        assert sorted(calls) == expected
    assert_same_bits(params_of(optimizer), before)
    assert scaler.get_scale() == 512.0


@each_form
def test_memory_of_the_host_is_counted_exactly(monkeypatch, dtype, kept):
    optimizer = AdamW(cases.make_params(dtype, shapes=[(256, 64), (64, 33)]), **kept)
    offloaded(optimizer, 1000)
    cases.trained(optimizer, 1)
    states = [state.items() for state in optimizer.state.values()]
    moments = sum(each.nbytes for items in states for key, each in items if key != "step")
    needed = moments + transport_of(optimizer).allocated
    monkeypatch.setattr(offload, "available_host_memory", lambda: needed)
    offloaded(AdamW(cases.twins(optimizer), **kept), 1000)
    monkeypatch.setattr(offload, "available_host_memory", lambda: needed - 1)
    other = AdamW(cases.twins(optimizer), **kept)
    with pytest.raises(RuntimeError, match=r"the host needs \d\.\d GiB"):
        offloaded(other, 1000)
    assert other.offload is None
    optimizer.add_param_group({"params": cases.make_params(F32, shapes=[(needed,)])})
    with pytest.raises(RuntimeError, match=r"the host needs \d\.\d GiB"):
        optimizer.state_dict()


def test_available_memory_is_below_that_of_the_machine() -> None:
    found = transport.available_host_memory() or 0
    assert 0 < found <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fake_cuda(patch: pytest.MonkeyPatch, error: int = 0) -> Any:
    """Returns a record of all calls of torch.cuda in the transport, which do nothing."""
    cuda = mock.MagicMock()
    cuda.Stream.side_effect = [cuda.down, cuda.up]
    cuda.current_stream.return_value = cuda.caller
    cuda.cudart().cudaHostRegister.return_value = error
    patch.setattr(transport, "torch", mock.Mock(cuda=cuda, empty=torch.empty, uint8=torch.uint8))
    return cuda


@pytest.mark.parametrize("pinned", [True, False])
def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    optimizers = cases.pair("AdamW", {"lr": 0.05}, F16, shapes=[(40,), (5, 7)])
    cuda = fake_cuda(monkeypatch)
    copies = transport.Transport(torch.device("cpu"), pinned)
    offload.OffloadedStates(optimizers[0], copies, chunk_bytes=1)
    assert_trains_alike(optimizers, 1)
    before = len(cuda.mock_calls)
    assert_trains_alike(optimizers, 1)
    log = [(name, *args) for name, args, _ in cuda.mock_calls[before:]]
    of_thread = [("down.record_event().synchronize",), ("stream", cuda.up)]
    assert [each for each in log if each in of_thread] == of_thread * 2
    waits = [("down.wait_stream", cuda.caller), ("up.wait_stream", cuda.caller)]
    copy = [*waits, ("stream", cuda.down), ("down.record_event",)]
    arrived = [("up.record_event",), ("caller.wait_event", cuda.up.record_event())]
    of_caller = [*copy, *copy, *arrived]
    assert [each for each in log if each in of_caller] == of_caller
    optimizers[0].offload.remove()
    cudart = cuda.cudart()
    sizes = [call.args[1] for call in cudart.cudaHostRegister.mock_calls]
    assert sum(sizes) == (4 * 128 if pinned else 0)
    assert len(cudart.cudaHostUnregister.mock_calls) == len(sizes)
    cuda.synchronize.assert_called_once()


def test_memory_that_can_not_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, error=2)
    optimizer = AdamW(cases.make_params(F32))
    with pytest.raises(RuntimeError, match=r"can't be pinned \(CUDA error 2\). Raise the limit"):
        offload.OffloadedStates(optimizer, transport.Transport(torch.device("cpu"), True))
    assert optimizer.offload is None
    cases.trained(optimizer)


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


def convert(optimizer: Any, swaps: bool) -> None:
    with cases.swapping(swaps):
        nn.ParameterList(params_of(optimizer)).bfloat16()


def change_layouts(optimizer: Any, step: int) -> None:
    params = params_of(optimizer)
    if step == 1:
        params[0].data = params[0].data.t().contiguous().t()
    params[1].grad = params[1].grad.t().contiguous().t()
    params[5].grad = params[5].grad.repeat_interleave(2)[::2]


def change_dtypes(optimizer: Any, step: int) -> None:
    is_coded = "8bit" in str(optimizer.defaults["state_dtype"])
    for param in params_of(optimizer):
        param.grad_dtype = None  # any
        param.grad = param.grad.to(param.dtype if is_coded else BF16 if step % 2 else F32)


def accumulate(optimizer: Any, step: int) -> None:
    params = params_of(optimizer)
    sums = vars(optimizer).setdefault("sums", [param.grad for param in params])
    for param, total in zip(params, sums, strict=True):
        param.grad = total.zero_().add_(param.grad).add_(1)  # where the last one was


def change_groups(optimizer: Any, step: int) -> None:
    group, params = optimizer.param_groups[0], params_of(optimizer)
    group["lr"] *= 0.5
    if step == 2:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(9))], "weight_decay": 0.5})
        params[0].requires_grad_(False)
    elif step == 4:
        group["state_dtype"] = "bfloat16"
        del optimizer.param_groups[1]


def freeze(optimizer: Any, step: int) -> None:
    param = params_of(optimizer)[1]
    param.requires_grad_(step in (2, 3, 5))
    if not param.requires_grad:
        param.grad = None


def at_3(change: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    return lambda optimizer, step: step == 3 and change(optimizer)


def with_options(**options: Any) -> Callable[[Any, int], Any]:
    return lambda optimizer, step: optimizer.param_groups[0].update(options)


def step_in(mode: Any) -> Callable[[Any, int], Any]:
    return lambda each, step: step == 0 and setattr(each, "step", mode()(each.step))


def triple_grads(optimizer: Any, *_: Any) -> None:
    for grad in grads_of(optimizer):
        grad.mul_(3)


CHANGES: dict[str, Callable[[Any, int], Any]] = {
    "clamp": at_3(lambda each: [param.clamp_(-0.3, 0.3) for param in params_of(each)]),
    "one": at_3(lambda each: params_of(each)[1].mul_(2)),
    "replace": at_3(lambda each: [setattr(p, "data", p.data * 0.5) for p in params_of(each)]),
    "load": at_3(load_a_model),
    "uncounted": at_3(write_uncounted),
    "states": at_3(edit_states),
    "order": at_3(lambda each: each.param_groups[0]["params"].reverse()),
    "converted": at_3(functools.partial(convert, swaps=False)),
    "swapped": at_3(functools.partial(convert, swaps=True)),
    "layouts": change_layouts,
    "dtypes": change_dtypes,
    "accumulated": accumulate,
    "groups": change_groups,
    "frozen": freeze,
    "hook": lambda each, step: step or each.register_step_pre_hook(triple_grads),
    "no_grad": step_in(torch.no_grad),
    "inference_mode": step_in(torch.inference_mode),
    "tensor-lr": with_options(lr=torch.tensor(0.1)),
    "tensor-lr-fp64": with_options(lr=torch.tensor([0.1], dtype=F64)),
    "clip-value": with_options(clip_value=0.1),
    "nonfinite": with_options(skip_nonfinite=True),
    "maximize": with_options(maximize=True),
    "capturable": with_options(capturable=True),
}


@pytest.mark.filterwarnings("ignore:.*a step pre-hook has changed gradients:UserWarning")
@pytest.mark.parametrize("is_released", rows({"scaled": False, "released": True}))
@each_form
@pytest.mark.parametrize("prepare", rows(CHANGES))
def test_changes_count_as_without_offload(dtype, kept, prepare, is_released):
    options = kept if is_released else {**kept, "max_grad_norm": 1.0}
    optimizers, seen = beside_offloaded(dtype=dtype, **options), []
    averages = [WeightAverage(optimizer, decay=0.5) for optimizer in optimizers]
    if is_released:
        release_gradients(optimizers[0])
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda each, *_: seen.append(bits_of(params_of(each))))
    scalers = scalers_of(amp_ext.GradScaler, not is_released)
    assert_trains_alike(optimizers, 6, scalers, overflows=True, prepare=prepare)
    for mine, plain in zip(seen[::2], seen[1::2], strict=True):
        assert_same_bits(mine, plain)
    assert all(map(same_bits, *(optimizer.master_params() for optimizer in optimizers)))
    assert all(map(same_bits, *(average.averages for average in averages)))
    assert len(optimizers[0].offload._hosts) == len(params_of(optimizers[0]))


@each_form
def test_files_load_on_both_sides(dtype: torch.dtype, kept: dict[str, Any]) -> None:
    optimizers = beside_offloaded(dtype=dtype, **kept)
    assert all(map(same_bits, *(optimizer.master_params() for optimizer in optimizers)))
    assert_trains_alike(optimizers, 3)
    files = [cases.through_a_file(optimizer.state_dict()) for optimizer in optimizers]
    assert files[0]["param_groups"] == files[1]["param_groups"]
    others = tuple(AdamW(cases.twins(optimizer), lr=0.05, **kept) for optimizer in optimizers)
    offloaded(others[0])
    for other, file in zip(others, reversed(files), strict=True):
        other.load_state_dict(file)
    assert_same_bits(*others)
    assert_trains_alike(others, 3)
    # The float32 form of a split master needs the parameter beside it.
    dicts = [amp_ext.optim.float32_state_dict(optimizer) for optimizer in others]
    for left, right in zip(*(each["state"].values() for each in dicts), strict=True):
        assert all(same_bits(left[key], right[key]) for key in right)


def test_frozen_parameters_take_no_memory_until_they_are_trained() -> None:
    params = [*cases.make_params(F16, shapes=[(40,)]), *cases.make_params(F64, shapes=[(4096,)])]
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
    optimizer = AdamW(cases.make_params(F32, shapes=[(3,)]))
    offloaded(optimizer)
    cases.trained(optimizer)
    optimizer.zero_grad()
    with cases.swapping(True):
        nn.ParameterList(params_of(optimizer)).to("meta")
    with pytest.raises(RuntimeError, match="param of group 0, param 0 must be on cpu, got meta"):
        optimizer.state_dict()


@pytest.mark.parametrize(("action", "max_grad_norm"), [("skip", 1.0), ("clip", None)])
def test_norms_guard_and_reports_are_those_without_offload(action, max_grad_norm):
    optimizers = mine, plain = beside_offloaded(max_grad_norm=max_grad_norm)
    scalers = scalers_of(amp_ext.GradScaler)
    for optimizer in optimizers:
        optimizer.track_grad_norms = True
        optimizer.norm_guard = NormGuard(warmup_steps=4, window=8, action=action)

    def prepare(optimizer: Any, step: int) -> None:
        params_of(optimizer)[2].grad.mul_(1000 if step == 15 else 1)
        params_of(optimizer)[1].grad = None

    for step in range(20):
        assert_trains_alike(optimizers, 1, scalers, prepare=lambda each, _: prepare(each, step))  # noqa: B023
        for name in ("grad_norm", "grad_norms", "step_applied"):
            assert same_bits(getattr(mine, name), getattr(plain, name))
        assert mine.named_grad_norms() == plain.named_grad_norms()
        assert bool(mine.step_applied) is (step != 15 or action == "clip")
    mine.offload.remove()
    assert mine.norm_guard.stats().outliers == 1
    for _ in range(2):
        assert mine.norm_guard.stats() == plain.norm_guard.stats()
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


def test_skipped_first_step_leaves_the_states_that_it_creates_without_offload() -> None:
    optimizers = beside_offloaded()
    give_grads(*optimizers)
    for optimizer in optimizers:
        optimizer.found_inf = torch.ones(())
        optimizer.step()
        del optimizer.found_inf
        assert len(optimizer.state) == len(cases.FORM_SHAPES)
    assert_same_bits(*optimizers)


def test_step_bumps_the_versions_of_parameters() -> None:
    optimizer = AdamW(cases.make_params(F32, shapes=[(3,)]))
    offloaded(optimizer)
    loss = params_of(optimizer)[0].square().sum()
    cases.trained(optimizer, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each_form
@pytest.mark.parametrize("first", ["average", "offload"])
def test_averages_begin_and_end_with_the_offload_and_are_swapped(dtype, kept, first):
    optimizers = cases.pair("AdamW", {"lr": 0.05} | kept, dtype, shapes=cases.FORM_SHAPES)
    if first == "offload":
        offloaded(optimizers[0])
    averages = [WeightAverage(optimizer, decay=0.5) for optimizer in optimizers]
    if first == "average":
        offloaded(optimizers[0])
    for is_removed in (False, True):
        assert_trains_alike(optimizers, 3, scalers_of(amp_ext.GradScaler), overflows=True)
        assert all(map(same_bits, *(average.averages for average in averages)))
        for average, optimizer in zip(averages, optimizers, strict=True):
            with average.swap():
                assert same_bits(params_of(optimizer)[0], averages[1].averages[0].to(dtype))
                with pytest.raises(RuntimeError, match="the parameters hold their averages"):
                    optimizer.step()
        if not is_removed:
            optimizers[0].offload.remove()


# Errors.


def step_scaled(optimizer: Any) -> None:
    scaler, _ = scalers_of(amp_ext.GradScaler)
    scaled_up(optimizer, scaler)
    cases.take_step(optimizer, scaler)


@pytest.mark.parametrize(("change", "words"), rows({
    "sparse": (
        lambda each: setattr(params_of(each)[1], "grad", torch.zeros(3, 5).to_sparse()),
        "sparse gradients: grad of group 0, param 1",
    ),
    "state": (lambda each: each.state[params_of(each)[-1]].pop("exp_avg"), "exp_avg"),
    "option": (lambda each: each.param_groups[0].update(clip_value=-1.0), "clip_value"),
    "write-back": (
        lambda each: each.param_groups[0].update(write_back_grads=True),
        "write_back_grads must be False while states are offloaded",
    ),
    "scaled": (step_scaled, "still carries the loss scale"),
}))  # fmt: skip
def test_refused_step_changes_nothing(change: Callable[[Any], Any], words: str) -> None:
    optimizer = AdamW(cases.make_params(F32, shapes=[(16385,), (3, 5), (7,)]))
    offloaded(optimizer)
    cases.trained(optimizer)
    give_grads(optimizer)
    change(optimizer)
    before, calls = bits_of(optimizer), transport_of(optimizer).calls
    calls.clear()
    with pytest.raises((RuntimeError, ValueError), match=words):
        optimizer.step()
    assert_same_bits(optimizer, before)
    assert "up" not in calls


def failing_copies(optimizer: Any, name: str, after: int) -> Any:
    """Makes a copy fail after the first ``after`` ones, if each is a call of its own."""
    effects = [*[mock.DEFAULT] * after, *[torch.OutOfMemoryError("the bus is gone")] * 20]
    copies = getattr(transport_of(optimizer), name)
    return mock.patch.object(transport_of(optimizer), name, wraps=copies, side_effect=effects)


@pytest.mark.parametrize(("added", "words"), rows({
    "fp64": (cases.make_params(F64), "param of group 1, param 0 must be Float, Half or BFloat16"),
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
        offload.offload_states(kind(cases.make_params(F32)), *others)


# Released gradients. test_gradient_release.py runs all its tests with offloaded states, too.


def backward(*optimizers: Any, scale: float = 1.0) -> None:
    """Gives the parameters of all optimizers the same gradients in a backward pass of each."""
    grads = [torch.randn_like(param) * scale for param in params_of(optimizers[0])]
    for optimizer in optimizers:
        torch.autograd.backward(params_of(optimizer), [grad.clone() for grad in grads])


def released(first_offloads: bool = True, **options: Any) -> tuple[Any, Any]:
    """Returns equal optimizers, of which the first is offloaded and releases its gradients."""
    optimizers = cases.pair("AdamW", {"lr": 0.05} | options, F16, shapes=[(40,)] * 6)
    for offloads in (first_offloads, not first_offloads):
        if offloads:
            offloaded(optimizers[0], chunk_bytes=1)
        else:
            release_gradients(optimizers[0])
    return optimizers


def iterate(*optimizers: Any) -> None:
    backward(*optimizers)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("first_offloads", [True, False])
@pytest.mark.parametrize("first_removed", ["offload", "gradient_release"])
def test_offload_and_release_begin_and_end_in_any_order(first_offloads, first_removed):
    optimizers = released(first_offloads)
    iterate(*optimizers)
    getattr(optimizers[0], first_removed).remove()
    iterate(*optimizers)
    (optimizers[0].offload or optimizers[0].gradient_release).remove()
    iterate(*optimizers)
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


def test_calls_between_backward_and_step_see_what_was_stepped() -> None:
    optimizers = beside_offloaded(dtype=F16, shapes=[(40,)] * 6, chunk_bytes=1)
    scalers = scalers_of(amp_ext.GradScaler)
    for optimizer, scaler in zip(optimizers, scalers, strict=True):
        release_gradients(optimizer, scaler)
    for _ in range(2):
        scale, _ = (float(scaler.scale(torch.ones(()))) for scaler in scalers)
        backward(*optimizers, scale=scale)
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            optimizer.state_dict()  # waits for the thread
            assert len(optimizer.state) == 6
            cases.take_step(optimizer, scaler)
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


@pytest.mark.parametrize("is_released", [False, True])
@pytest.mark.parametrize(("name", "after", "progress"), [
    ("copy_down", 0, ""),
    ("copy_down", 4, "4 of 6 parameters"),
    ("copy_up", 0, "1 of 6 parameters"),
    ("copy_up", 3, "4 of 6 parameters"),
])  # fmt: skip
def test_error_of_a_copy_is_raised_once_and_says_what_was_stepped(
    name: str, after: int, progress: str, is_released: bool
) -> None:
    optimizers = released()
    if not is_released:
        optimizers[0].gradient_release.remove()
    iterate(*optimizers)
    file, params = cases.through_a_file(optimizers[0].state_dict()), cases.twins(optimizers[0])
    before = bits_of(optimizers[0])
    with (
        failing_copies(optimizers[0], name, after),
        pytest.raises(torch.OutOfMemoryError, match="the bus is gone") as raised,
    ):
        iterate(optimizers[0])
    if not is_released:
        expected = (
            f"the step failed after updating {progress}" if progress else "no parameter was changed"
        )
        assert expected in "".join(raised.value.__notes__)
    warns = is_released and progress
    with pytest.warns(match="of 6 parameters had been") if warns else contextlib.nullcontext():
        optimizers[0].zero_grad()
    if progress:
        for param, before_it in zip(params_of(optimizers[0]), params, strict=True):
            param.data = before_it.data
        optimizers[0].load_state_dict(file)
    assert_same_bits(optimizers[0], before)
    iterate(*optimizers)
    assert_same_bits(*optimizers)


@pytest.mark.parametrize("is_stepped", [False, True])
def test_parameter_written_before_its_copy_is_refused(is_stepped: bool) -> None:
    optimizer, _ = released()
    iterate(optimizer)
    gate, copy_up = threading.Event(), transport_of(optimizer).copy_up
    transport_of(optimizer).copy_up = lambda *each: gate.wait(60) and copy_up(*each)
    param = params_of(optimizer)[2]
    param.sum().backward()
    if is_stepped:
        gate.set()
        optimizer.offload._work.result()
    with torch.no_grad():
        param.clamp_(-0.1, 0.1)
    gate.set()
    with pytest.raises(RuntimeError, match="group 0, param 2 was written after its gradient was"):
        optimizer.step()


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


@pytest.mark.parametrize("is_removed", [False, True])
def test_thread_and_memory_end_with_the_optimizer_or_the_offload(is_removed: bool) -> None:
    optimizer = AdamW(cases.make_params(F32))
    handle = offloaded(cases.trained(optimizer))
    cases.trained(optimizer)
    (thread,) = handle._pool._threads
    alive = [weakref.ref(optimizer), weakref.ref(handle._buffers[0])]
    if is_removed:
        handle.remove()
    else:
        del handle
    del optimizer
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert [each() for each in alive] == [None, None]


_PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import torch
from harness.transports import DelayedTransport
from amp_ext.optim import AdamW, offload_states, release_gradients
params = [torch.nn.Parameter(torch.ones(100)) for _ in range(5)]
optimizer = AdamW(params)
offload_states(optimizer, transport=DelayedTransport(delay=0.2))
release_gradients(optimizer)
torch.autograd.backward(params, [torch.ones(100)] * 5)
print("end")
"""


@pytest.mark.slow
def test_process_ends_within_an_iteration() -> None:
    program = _PROGRAM.format(tests=os.path.dirname(os.path.dirname(__file__)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
