"""Tests of the choice of a precision, and of its benchmark."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import pytest
import torch
from harness.edge_shapes import BF16, F16, F32, F64
from harness.rows import rows
from harness.trainer_cases import WithLoss, new_trainer, plain
from torch import Tensor, nn

import amp_ext
from amp_ext.training import benchmark_precision, choose_precision

# The choice.


def of_dtypes(*dtypes: torch.dtype) -> nn.Module:
    return nn.ParameterList(torch.zeros(2, dtype=dtype) for dtype in dtypes or [F32])


# The capability of a GPU or another device, the dtypes of the parameters, the choice, the reason.
CHOICES = {
    "ampere": ((8, 0), [], "bf16", "compute capability 8.0|Tensor Cores|range of float32"),
    "hopper": ((9, 0), [], "bf16", "9.0"),
    "blackwell": ((12, 0), [], "bf16", "12.0"),
    "turing": ((7, 5), [], "fp16", "compute capability 7.5|emulate bfloat16|65504"),
    "volta": ((7, 0), [], "fp32", "7.0|older than 7.5"),
    "pascal": ((6, 1), [], "fp32", "6.1"),
    "another-device": ("mps", [], "fp32", "Nothing is known|'mps'"),
    "fp64": ((9, 0), [F64, F32], "fp32", "float64|Autocast"),
    "complex": ((9, 0), [torch.complex64, F32], "fp32", "complex"),
    "fp16-parameters": ((9, 0), [F16], "fp16", "float16 already|65504"),
    "some-fp16": ((9, 0), [F16, F32], "fp16", "already"),
    "fp16-and-fp64": ((9, 0), [F16, F64], "fp16", "already"),
    "fp16-and-bf16": ((9, 0), [BF16, F16], "fp16", "float16 already"),
    "bf16-parameters": ((9, 0), [BF16], "bf16", "bfloat16 already|range of float32"),
    "bf16-on-cpu": ("cpu", [BF16], "bf16", "bfloat16 already"),
}


@pytest.mark.parametrize(("device", "dtypes", "chosen", "parts"), rows(CHOICES))
def test_each_kind_of_device_and_model_has_its_precision(
    device, dtypes, chosen, parts, monkeypatch
):
    if isinstance(device, tuple):
        of_device = {torch.device("cuda:1"): device}  # and of no other
        monkeypatch.setattr(torch.cuda, "get_device_capability", of_device.__getitem__)
        device = "cuda:1"
    choice = choose_precision(of_dtypes(*dtypes), device)
    assert choice.precision == chosen
    assert [part for part in parts.split("|") if part not in choice.reason] == []


def test_only_parameters_to_train_count():
    model = nn.Sequential(nn.Linear(2, 2, dtype=F16), nn.Linear(2, 2))
    assert "already" in choose_precision(model).reason
    model[0].requires_grad_(False)
    assert "already" not in choose_precision(model).reason
    model[1].requires_grad_(False)
    assert "already" in choose_precision(model).reason


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("avx512", [True, False])
@pytest.mark.parametrize("amx", [True, False])
def test_a_cpu_needs_instructions_and_a_library_for_bf16(library, avx512, amx, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: library)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    able = library and (avx512 or amx)
    choice = choose_precision(nn.Linear(2, 2), "cpu")
    assert choice.precision == ("bf16" if able else "fp32")
    assert ("10 to 100 times slower" in choice.reason) != able


def test_the_choice_for_this_machine_trains(device):
    model = nn.Linear(4, 2).to(device)
    choice = choose_precision(model)
    assert isinstance(choice, amp_ext.training.PrecisionChoice)
    assert choice == choose_precision(model, device)
    trainer = new_trainer(choice.precision, model)
    trainer.train_step(torch.randn(3, 4, device=device), torch.randn(3, 2, device=device))
    assert (trainer.scaler is not None) == (choice.precision == "fp16")


# The benchmark.


class Stateful(nn.Module):
    """Has buffers that training changes, draws random numbers and writes to an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.rest = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, x: Tensor, calls: Tensor) -> Tensor:
        calls.add_(1)
        return self.rest(self.first(x))


@pytest.mark.parametrize(("train", "has_grads"), [(True, False), (False, True)])
def test_the_callers_model_inputs_and_random_numbers_stay(device, train, has_grads):
    model = Stateful().to(device).train(train)
    model.rest[0].train(not train)
    x = torch.randn(4, 6, device=device, requires_grad=has_grads)
    calls = torch.zeros((), device=device)
    if has_grads:
        model(x, calls).sum().backward()
    model.first.bias.requires_grad_(False)

    def everything() -> str:
        params = list(model.parameters())
        switches = [[p.requires_grad for p in params], [m.training for m in model.modules()]]
        random = [torch.get_rng_state(), torch.cuda.get_rng_state() if x.is_cuda else None]
        return plain(
            (model.state_dict(), [p.grad for p in params], x, x.grad, calls, switches, random)
        )

    before, threads = everything(), torch.get_num_threads()
    result = benchmark_precision(model, (x, calls), steps=1)
    assert [row.error for row in result.rows] == [None] * 3
    assert everything() == before
    assert torch.get_num_threads() == threads


def noting(model: nn.Module, seen: list[Any]) -> nn.Module:
    """Lets a linear layer and its copies note how they run."""

    def note(module: Any, _: Any, output: Tensor) -> None:
        weight = module.weight.detach().sum().item()
        seen.append((output.dtype, weight, module.training, torch.get_num_threads()))

    model.register_forward_hook(note)
    return model


def test_each_precision_trains_a_copy_in_that_precision(device):
    seen: list[Any] = []
    model = noting(nn.Linear(6, 2), seen).to(device).eval()
    torch.set_num_threads(2)
    result = benchmark_precision(model, torch.randn(4, 6, device=device), steps=2)
    assert list(dict.fromkeys(dtype for dtype, *_ in seen)) == [F32, F16, BF16]
    assert {tuple(how) for _, _, *how in seen} == {(True, 2)}, "in training, by all threads"
    for dtype in (F32, F16, BF16):
        weights = [weight for seen_dtype, weight, *_ in seen if seen_dtype == dtype]
        assert weights[0] == model.weight.sum().item()
        assert len(set(weights)) > len(weights) // 2, "every copy must be trained"
    assert [row.precision for row in result.rows] == ["fp32", "fp16", "bf16"]
    for row in result.rows:
        assert row.seconds_per_step > 0
        # Parameters, gradients and two states; caching allocators count in pieces of 512 bytes.
        known = row.peak_memory_bytes is not None
        assert known == (device.type == "cuda")
        assert not known or row.peak_memory_bytes >= 4 * (512 + 512)


def test_the_loss_function_and_the_optimizer_may_be_chosen():
    loss_function = mock.Mock(side_effect=nn.functional.cross_entropy)
    optimizer = mock.Mock(side_effect=lambda params: torch.optim.SGD(params, 0.1))
    options = {"loss_function": loss_function, "optimizer": optimizer, "steps": 1}
    inputs, targets = {"input": torch.randn(3, 6)}, torch.tensor([0, 1, 1])
    (row,) = benchmark_precision(
        nn.Linear(6, 2), inputs, targets=targets, precisions=("bf16",), **options
    ).rows
    assert (row.precision, row.error) == ("bf16", None)
    optimizer.assert_called_once()
    given = [call.args[1].tolist() for call in loss_function.call_args_list]
    assert given == [[0, 1, 1]] * len(given)
    assert len(given) > 3


OUTPUTS = {
    "tensor": lambda _, y: y,
    "dict": lambda _, y: {"loss": y.mean(), "logits": y},
    "nested": lambda _, y: ([y, y.argmax(1)], {"y": y}),
    "object": lambda _, y: types.SimpleNamespace(logits=y),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_loss_is_made_of_most_outputs(name):
    model, x = WithLoss(OUTPUTS[name]), torch.randn(3, 6)
    (row,) = benchmark_precision(model, x, targets=x, precisions=["fp32"], steps=1).rows
    assert row.error is None or (name == "object" and "must return a loss" in row.error)


def fails_in_half(_: Any, y: Tensor) -> Tensor:
    """Stands for an operation that a precision lacks."""
    if y.dtype == F16:
        raise NotImplementedError("no kernel for Half\nand a second line")
    return y


def test_16_bit_parameters_are_measured_in_their_own_precision_alone():
    result = benchmark_precision(nn.Linear(6, 2, dtype=BF16), torch.randn(3, 6), steps=1)
    *errors, last = [row.error for row in result.rows]
    assert last is None
    text = "config.precision must be that of 16-bit parameters"
    assert all(text in error for error in errors)


def test_results_are_a_table_with_a_row_for_what_failed():
    result = benchmark_precision(WithLoss(fails_in_half), torch.randn(3, 6), steps=1)
    error = "NotImplementedError: no kernel for Half"
    assert [row.error for row in result.rows] == [None, error, None]
    assert result.rows[1].seconds_per_step is result.rows[1].peak_memory_bytes is None
    title, _, *lines = str(result).splitlines()
    assert title == "cpu"
    shown = [line.split() for line in lines[:3]]
    fp32, bf16 = (row.seconds_per_step for row in (result.rows[0], result.rows[2]))
    assert shown[0] == ["fp32", f"{1e3 * fp32:.3g}", "1.00", "-"]
    assert shown[1] == ["fp16", "failed", "-", "-"]
    assert shown[2][2] == f"{fp32 / bf16:.2f}"
    assert lines[3:] == [f"fp16: {error}"]
    row = amp_ext.training.PrecisionTiming("fp32", 0.5, 3 * 2**20)
    table = str(amp_ext.training.PrecisionBenchmark("some GPU", (row,)))
    assert all(part in table for part in ("some GPU", "500", "3.0"))


def test_an_unknown_precision_is_refused_before_anything_runs():
    seen: list[Any] = []
    text = "precision must be 'fp32', 'bf16' or 'fp16', got 'int8'"
    with pytest.raises(ValueError, match=text):
        benchmark_precision(
            noting(nn.Linear(6, 2), seen), torch.randn(3, 6), precisions=["fp32", "int8"]
        )
    assert seen == []
