"""Tests of operations over lists some of whose launches are refused: each launch in turn."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness.edge_shapes import BF16, F16, F32, F64, placed, strided
from harness.launch_failures import WORDS, refusing_launch
from harness.list_operations import IN_FLOAT, build, copied, few_steps_and_updates, run
from harness.reference import same_bits
from torch import Tensor

from amp_ext import ops

COUNT = 1100  # more than a launch holds


def refused(call: Callable[[], Any]) -> Iterator[str]:
    """Yields the message after each launch of a call was refused in turn."""
    for number in itertools.count():
        try:
            with refusing_launch(number):
                call()
        except torch.AcceleratorError as error:
            yield str(error)
        else:
            return


@few_steps_and_updates
def test_a_step_that_is_refused_in_the_middle_says_how_many_it_stepped(
    operation, options, emulated
):
    """The parameters of the last launch are in 16 bits."""
    before = build(operation, options, [(5,), (3, 2), (7,)], IN_FLOAT, "cpu")
    before["params"][1] = before["params"][1].to(BF16)
    whole, lists = copied(before), copied(before)
    run(operation, whole, **options)

    def call() -> None:
        for name, tensors in copied(before).items():
            lists[name][:] = tensors
        run(operation, lists, **options)

    found = []
    for message in refused(call):
        stepped = [same_bits(*pair) for pair in zip(lists["params"], whole["params"], strict=True)]
        for name in before:
            for index, is_new in enumerate(stepped):
                expected = (whole if is_new else before)[name][index]
                assert same_bits(lists[name][index], expected), f"{name}[{index}]"
        found.append(sum(stepped))
        words = (
            f"{WORDS} ({operation}: the step failed after updating {sum(stepped)} of 3 parameters. "
            "Restore the parameters and their states before the next step.)"
        )
        assert message == (words if any(stepped) else WORDS)
    assert found == [0, 2]


def gradients() -> list[Tensor]:
    """Returns gradients for four launches."""
    torch.manual_seed(0)
    grads = [torch.randn(5, dtype=dtype) for dtype in (F16, F32, BF16, F64, F32)]
    return [placed(grads[0], strided), *grads[1:]]


NUMBERS = {
    "unscale_": {"inv_scale": torch.tensor(0.5), "found_inf": torch.zeros(())},
    "clip_grads_": {"total_norm": torch.tensor(4.0), "max_norm": 1.0},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_gradients_of_a_refused_launch_are_as_before_and_the_message_counts_the_others(
    name, emulated
):
    arguments = NUMBERS[name]
    before, whole, grads = gradients(), gradients(), gradients()
    getattr(ops, name)(whole, **arguments)

    def call() -> None:
        grads[:] = gradients()
        getattr(ops, name)(grads, **arguments)

    found = []
    for message in refused(call):
        written = [same_bits(*pair) for pair in zip(grads, whole, strict=True)]
        versions = [grad._version > 0 for grad in grads[1:]]  # the first was placed
        assert versions == written[1:]
        for grad, old, is_written in zip(grads, before, written, strict=True):
            assert is_written or same_bits(grad, old)
        found.append(sum(written))
        words = (
            f"{WORDS} ({name}: the call failed after changing {sum(written)} of 5 gradients. Call"
        )
        assert message == WORDS if not any(written) else message.startswith(words)
    assert found == [0, 2, 3, 4]


def test_lists_of_several_launches_are_written_up_to_the_refused_one(emulated):
    grads: list[Tensor] = []

    def call() -> None:
        grads[:] = [torch.ones(3) for _ in range(COUNT)]
        ops.unscale_(grads, torch.tensor(0.5), torch.zeros(()))

    messages = list(refused(call))
    assert len(messages) >= 2  # an older driver takes fewer at once
    written = int(re.search(rf"changing (\d+) of {COUNT} gradients", messages[1])[1])
    assert 0 < written < COUNT

    with pytest.raises(torch.AcceleratorError), refusing_launch(1):
        call()
    assert [grad.tolist() for grad in grads[:written]] == [[0.5] * 3] * written
    assert [grad.tolist() for grad in grads[written:]] == [[1.0] * 3] * (COUNT - written)


def refused_by_an_old_driver() -> list[str]:
    """What the emulator's operations say."""
    from conftest import emulated_cuda

    messages = []
    param, flag = torch.ones(3), torch.zeros(())
    calls = (
        lambda: ops.sgd_([param], [param.clone()], lr=1.0),
        lambda: ops.check_finite_([param], flag),
        lambda: ops.count_nonfinite([param]),
        lambda: ops.unscale_([param], torch.ones(()), flag),
    )
    with emulated_cuda():
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                messages.append(str(error).splitlines()[0])
    assert torch.equal(param, torch.ones(3))
    return messages


def test_an_old_driver_is_named(under_isa, monkeypatch, emulated):
    monkeypatch.setenv("CUDA_EMULATOR_DRIVER_VERSION", "12000")
    _, messages = under_isa(refused_by_an_old_driver, None)
    words = (
        "the GPU's driver is that of CUDA 12.0, which is too old. Update it to that of CUDA 12.1 "
        "or later."
    )
    operations = ("sgd_", "check_finite_", "count_nonfinite", "unscale_")
    assert messages == [f"{operation}: {words}" for operation in operations]
