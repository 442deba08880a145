"""The memory calculator: every configuration against the bytes of a model and its optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from harness.optimizer_cases import CLASSES, KINDS, ours, theirs
from harness.transports import DelayedTransport
from torch import Tensor, nn

import amp_ext
from amp_ext import memory
from amp_ext.memory import __main__ as command_line
from amp_ext.optim.offload import OffloadedStates

OF_OPTIONS = {"amsgrad": ("Adam", {"amsgrad": True}), "momentum": ("SGD", {"momentum": 0.9})}
# The class of each and its options. Muon, which splits a model, has its test in test_muon.py.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name.lower(): (name, {}) for name in CLASSES},
    **OF_OPTIONS,
}
BY_NAME = {configuration.name: configuration for configuration in memory.CONFIGURATIONS}


class Model(nn.Module):
    """Tied weights, a frozen layer, a scalar, an empty parameter, and buffers of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.factor = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(7, dtype=torch.bool))


def allocated(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes behind some tensors, shared ones once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def bytes_after_a_step(
    model: nn.Module, make: type[torch.optim.Optimizer], **options: Any
) -> dict[str, int]:
    """Returns the bytes that are there, step counters aside."""
    optimizer = make(model.parameters(), **options)
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    optimizer.step()
    states = [(name, s) for state in optimizer.state.values() for name, s in state.items()]
    sizes = {
        "parameters": allocated(model.parameters()),
        "masters": allocated(s for name, s in states if name.startswith("master_")),
        "gradients": allocated(p.grad for p in model.parameters() if p.grad is not None),
        "states": allocated(s for name, s in states if not re.match("master_|step", name)),
        "buffers": allocated(model.buffers()),
    }
    return {**sizes, "total": sum(sizes.values())}


SIXTEEN_BIT = [(torch.float16, "adamw"), *((torch.bfloat16, name) for name in OPTIMIZERS)]
SIDES = [(ours, name) for name in BY_NAME]
SIDES += [(theirs, name) for name in BY_NAME if not re.search("masters|(fp32|bf16|8bit) st", name)]


RUNS = [
    (*kind, *run)
    for kind in SIDES
    for run in SIXTEEN_BIT
    if not (run[1] == "amsgrad" and "8bit" in kind[1])  # which no optimizer has
]


def stored_as(configuration: memory.Configuration) -> dict[str, Any]:
    """Returns the options of ours that keep states so."""
    names = ("master_weights", "state_dtype")
    return {name: getattr(configuration, name) for name in names}


def calculated(
    name: str, dtype: torch.dtype, optimizer: str, make: Any = Model, **how: bool
) -> tuple[Any, ...]:
    """Returns what is calculated, the model, and the class of the optimizer with its options."""
    configuration, (class_name, options) = BY_NAME[name], OPTIMIZERS[optimizer]
    rows = memory.training_memory(make(), optimizer, **how)
    (usage,) = [row for row in rows if row.configuration == configuration]
    model = make().to(dtype if configuration.dtype == torch.bfloat16 else torch.float32)
    return usage, model, class_name, options | stored_as(configuration)


@pytest.mark.parametrize(("classes", "name", "dtype", "optimizer"), RUNS)
def test_optimizers_allocate_what_was_calculated(classes, name, dtype, optimizer, device):
    usage, model, class_name, options = calculated(name, dtype, optimizer)
    if classes is theirs:
        is_16_bit = BY_NAME[name].dtype == torch.bfloat16
        options = OPTIMIZERS[optimizer][1] | (KINDS[class_name].in_16_bits if is_16_bit else {})
    assert bytes_after_a_step(model.to(device), classes(class_name), **options) == usage.bytes


def peak_of_a_released_backward(
    model: nn.Module, make: type[torch.optim.Optimizer], **options: Any
) -> int:
    """Returns the most bytes that are there in a hook of the second iteration."""
    params = [param for param in model.parameters() if param.requires_grad]
    peak = 0

    def watch(_: Tensor) -> None:  # called before the hook that frees the gradient
        nonlocal peak
        states = [(name, s) for state in optimizer.state.values() for name, s in state.items()]
        gradients = [param.grad for param in params if param.grad is not None]
        kept = [s for name, s in states if name != "step"]
        peak = max(peak, allocated([*model.parameters(), *model.buffers(), *gradients, *kept]))

    for param in params:
        param.register_post_accumulate_grad_hook(watch)
    optimizer = make(params, **options)
    amp_ext.optim.release_gradients(optimizer)
    for _ in range(2):
        torch.autograd.backward(params, [torch.ones_like(param) for param in params])
        optimizer.step()
    return peak


RELEASED = [run[1:] for run in RUNS if run[0] is ours]


@pytest.mark.parametrize(("name", "dtype", "optimizer"), RELEASED)
def test_released_gradients_take_what_was_calculated(name, dtype, optimizer, device):
    usage, model, class_name, options = calculated(name, dtype, optimizer, released=True)
    model.to(device)
    peak = peak_of_a_released_backward(model, ours(class_name), **options)
    # The largest gradient may not be the last, and the others are freed before it.
    assert usage.bytes["gradients"] == 66 * model.factor.element_size()
    assert peak == usage.total


def test_the_largest_gradient_of_a_number_of_parameters_is_not_known():
    for row, all_of_it in zip(
        memory.training_memory(64, released=True), memory.training_memory(64), strict=True
    ):
        assert row.bytes["gradients"] == 0
        assert row.total == all_of_it.total - all_of_it.bytes["gradients"]
    assert any("largest gradient" in each for each in memory.NOT_COUNTED)


@pytest.mark.parametrize(("name", "dtype", "optimizer"), RELEASED)
def test_offloaded_states_take_what_was_calculated(name, dtype, optimizer):
    usage, model, class_name, options = calculated(name, dtype, optimizer, offloaded=True)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = ours(class_name)(params, **options)
    OffloadedStates(optimizer, DelayedTransport())
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    kept = [item for state in optimizer.state.values() for item in state.items()]
    states = [value for name, value in kept if name != "step"]
    copies = [optimizer.offload.host_of(param) for param in params]
    assert usage.host == allocated(states) + sum(copy.nbytes for copy in copies)
    gradients = [param.grad for param in params]
    assert usage.gpu == allocated([*model.parameters(), *model.buffers(), *gradients])
    assert usage.total == usage.gpu + usage.host


def parameters_with_groups_and_without() -> nn.ParameterList:
    layouts = [
        torch.zeros(128, 32),
        torch.zeros(64, 32, 3, 3),
        torch.zeros(1, 4096),
        torch.zeros(3, 5, 1024),
        # Without: small, of one dimension, with other rows, or in another layout.
        torch.zeros(127, 32),
        torch.zeros(4096),
        torch.zeros(128, 33),
        torch.zeros(64, 96).t(),
        torch.zeros(64, 32, 3, 3).to(memory_format=torch.channels_last),
    ]
    return nn.ParameterList(layouts)


NAMES_OF_8_BITS = [name for name in BY_NAME if "8bit" in name]


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "amsgrad"])
@pytest.mark.parametrize("name", NAMES_OF_8_BITS)
def test_shapes_decide_what_states_in_8_bits_take(name, optimizer, device):
    make = parameters_with_groups_and_without
    usage, model, class_name, options = calculated(name, torch.bfloat16, optimizer, make)
    assert bytes_after_a_step(model.to(device), ours(class_name), **options) == usage.bytes


def test_a_number_of_parameters_is_taken_for_whole_groups():
    (row,) = [
        row for row in memory.training_memory(33) if row.configuration.name == "fp32, 8bit states"
    ]
    assert row.bytes["states"] == 33 + 33 + 2
    assert any("for a number" in each for each in memory.NOT_COUNTED)


def test_amsgrad_has_no_states_in_8_bits():
    names = [row.configuration.name for row in memory.training_memory("7B", "amsgrad")]
    assert names == [name for name in BY_NAME if "8bit" not in name]
    assert len(names) == len(BY_NAME) - len(NAMES_OF_8_BITS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_model_of_mixed_dtypes_is_calculated_as_it_is(optimizer):
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    model = nn.ParameterList(torch.zeros(3 + i, dtype=dtype) for i, dtype in enumerate(dtypes))
    frozen = nn.Parameter(torch.zeros(9, dtype=torch.int8), requires_grad=False)
    model.append(frozen)
    class_name, options = OPTIMIZERS[optimizer]
    usage = memory.training_memory(model, optimizer)[0]
    assert usage.configuration.name == "the model as it is"
    assert bytes_after_a_step(model, ours(class_name), **options) == usage.bytes


COUNTS = [
    *[("7B", 7_000_000_000), ("124M", 124_000_000), ("1.3e9", 1_300_000_000)],
    *[("7_000_000_000", 7_000_000_000), ("6,738,415,616", 6_738_415_616), (" 350 k ", 350_000)],
    *[("0.5t", 500_000_000_000), ("1.000000001B", 1_000_000_001), ("1e+18", 10**18)],
    *[(7e9, 7_000_000_000), (1, 1)],
]


@pytest.mark.parametrize(("text", "count"), COUNTS)
def test_counts_are_read_exactly(text, count):
    assert memory.parse_count(text) == count
    assert type(memory.parse_count(text)) is int


NO_COUNTS = ["", "7X", "B", "-7B", "0", "1.5", "1.0000000001B", "1,3B", "7_0", "inf", "nan"]


@pytest.mark.parametrize("text", [*NO_COUNTS, "1e99", "2e18"])
def test_what_is_no_count_is_refused(text):
    message = f"parse_count: a number of parameters must be a whole number .* got {text!r}"
    with pytest.raises(ValueError, match=message):
        memory.parse_count(text)


def test_an_unknown_optimizer_is_refused():
    message = f"training_memory: optimizer must be one of {list(memory.OPTIMIZERS)}, got 'tiger'"
    with pytest.raises(ValueError, match=re.escape(message)):
        memory.training_memory("7B", "tiger")


def test_the_command_line_prints_a_table(capsys):
    command_line.main(["7B"])
    shown = capsys.readouterr().out
    assert shown.startswith("7,000,000,000 parameters, adamw. GiB;")
    (row,) = re.findall("16-bit [+] masters, fp32 states .*", shown)
    sizes = [f"{7e9 * size / 2**30:.2f}" for size in (2, 4, 2, 8, 16)]
    assert row.split()[5:] == [*sizes, "16", "defaults"]
    (row,) = re.findall("16-bit, 16-bit states .*", shown)
    assert row.endswith(" 8  master_weights=False, state_dtype=None")
    (row,) = re.findall("fp32, bf16 states .*", shown)
    assert row.endswith(" 12  state_dtype=torch.bfloat16")
    assert "Not counted: activations;" in shown
    assert "autocast" in shown
    command_line.main(["7B", "--released"])
    shown = capsys.readouterr().out
    assert "adamw, released gradients. GiB;" in shown
    (row,) = re.findall("16-bit [+] split8 masters, 8bit states .*", shown)
    assert " 5.031 " in row
    command_line.main(["7B", "--offloaded"])
    shown = capsys.readouterr().out
    assert "adamw, states in host memory. GiB;" in shown
    (row,) = re.findall("16-bit [+] split8 masters, 8bit states .*", shown)
    gib = 7e9 / 2**30
    assert row.split()[11:13] == [f"{4 * gib:.2f}", f"{(3 + 1 / 32 + 2) * gib:.2f}"]
