"""Averages of weights in files and models, of parameters that join, and in a trainer."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from harness.edge_shapes import BF16, F32
from harness.optimizer_cases import through_a_file
from harness.reference import same_bits
from test_weight_average import model_of, params_of, step, trained
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel

import amp_ext
from amp_ext.optim import WeightAverage


def test_it_is_torchs_average_in_its_files_too():
    model = model_of()
    _, average, theirs = trained(model)
    written = average.averaged_state_dict()
    assert written.keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        # AveragedModel leaves the buffers of its copy as they were in the beginning.
        if "running" not in name and "batches" not in name:
            torch.testing.assert_close(written[name], value, rtol=1e-6, atol=1e-7, msg=name)
    AveragedModel(model).load_state_dict(written)
    copied = copy.deepcopy(model)
    for target in (copied, torch.compile(copied)):
        nn.init.zeros_(copied[2].weight)
        average.copy_to(target)
        for name, value in copied.state_dict().items():
            assert same_bits(value, written["module." + name]), name
    assert same_bits(copied[1].running_mean, model[1].running_mean)
    average.load_state_dict(through_a_file(theirs.state_dict()))
    assert average.n_averaged == 6
    reference = [param for param in theirs.module.parameters() if param.requires_grad]
    assert all(map(same_bits, average.averages, reference))


def test_an_average_of_some_steps_keeps_its_rhythm_after_a_file_of_torch():
    model = model_of()
    optimizer, average, theirs = trained(model, every=2)
    average.load_state_dict(theirs.state_dict() | {"n_averaged": 3})
    taken = []
    for _ in range(4):
        step(optimizer)
        taken.append(average.n_averaged.item())
    assert taken == [3, 4, 4, 5]


class WithExtraState(nn.Linear):
    """A layer with something else in its state dict, as TransformerEngine's layers have."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [torch.ones(1), {"amax": 1.0}, io.BytesIO(b"scales"), 3, None])
def test_extra_states_of_all_types_are_in_its_files(extra):
    model = WithExtraState(4, 2)
    model.extra = extra
    optimizer = amp_ext.optim.AdamW(model.parameters(), lr=0.1)
    average = WeightAverage(optimizer, 0.9, model=model)
    theirs = AveragedModel(model)
    theirs.module.extra = "another"
    written = average.averaged_state_dict()
    assert list(written) == list(theirs.state_dict())
    theirs.load_state_dict(written)
    assert theirs.module.extra == extra
    average.load_state_dict(theirs.state_dict())


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, Any] = {
    "nothing": lambda model: model,
    "torch.compile": compiled,
    "DataParallel": nn.DataParallel,
    "compiled DataParallel": lambda model: compiled(nn.DataParallel(model)),
    "checkpoint_wrapper": checkpoint_wrapper,
}


@pytest.mark.parametrize("after", WRAPPERS)
@pytest.mark.parametrize("before", WRAPPERS)
def test_names_in_files_are_compared_without_what_wrappers_add(before, after):
    def wrapped(name: str) -> tuple[nn.Module, WeightAverage]:
        torch.manual_seed(0)
        model = WRAPPERS[name](nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))
        optimizer = amp_ext.optim.AdamW(model.parameters(), lr=0.1)
        return model, WeightAverage(optimizer, 0.9, model=model)

    model, source = wrapped(before)
    step(source.optimizer)
    step(source.optimizer)
    theirs = AveragedModel(model)
    for file in (source.averaged_state_dict(), theirs.state_dict()):
        loaded = wrapped(after)[1]
        step(loaded.optimizer)
        loaded.load_state_dict(file | {"n_averaged": 1})
        params = [key for key in file if key.endswith(("weight", "bias"))]
        assert all(map(same_bits, loaded.averages, [file[key] for key in params]))


def assert_refused_by_each(
    average: WeightAverage, other: nn.Module, file: Any, error: type[Exception], text: str
) -> None:
    """Asserts that all calls that go by names refuse the model of the average."""
    for name, refused in {
        "copy_to": lambda: average.copy_to(other),
        "averaged_state_dict": average.averaged_state_dict,
        "load_state_dict": lambda: average.load_state_dict(file),
    }.items():
        with pytest.raises(error, match=f"^WeightAverage.{name}: {text}"):
            refused()


def test_models_that_do_not_fit_are_refused_before_anything_is_written():
    optimizer, average, theirs = trained(model_of())
    other = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    before, file = copy.deepcopy(other.state_dict()), theirs.state_dict()
    for model, text in (
        (other, r"2.weight of model must be a tensor of torch.Size\(\[2, 5\]\), None, got"),
        (other[:2], r"2.weight of model must be a tensor of .*, got None"),
    ):
        with pytest.raises(ValueError, match=text):
            average.copy_to(model)
    nameless = WeightAverage(optimizer)
    assert_refused_by_each(nameless, other, file, RuntimeError, "this average has no model")
    with pytest.raises(ValueError, match="WeightAverage: model must have all parameters of"):
        WeightAverage(optimizer, model=other)
    optimizer.add_param_group({"params": [Parameter(torch.ones(7))]})
    step(optimizer)
    text = "model must have all parameters of the optimizer"
    assert_refused_by_each(average, other, file, ValueError, text)
    assert all(map(same_bits, other.state_dict().values(), before.values()))


def test_a_load_takes_all_or_nothing(device):
    optimizer = amp_ext.optim.SGD(params_of(device, F32, F32), lr=0.1)
    average = WeightAverage(optimizer, dtype=BF16)
    step(optimizer)
    saved = copy.deepcopy(average.state_dict())
    step(optimizer)
    before = copy.deepcopy(average.state_dict())
    first, second = saved["averages"]
    for name, wrong, text in (
        ("averages", [first], "must have averages of 2 parameters .*, got 1 after"),
        ("averages", [second, first], r"averages\[0\] must be a tensor of torch.Size\(\[5\]\)"),
        ("averages", first, "must have averages of 2 parameters .*, got 5 after"),
        ("averages", [first, 2], r"averages\[1\] must be a tensor of .*, got None"),
        ("averages", [first.long(), second], r"averages\[0\] must be a tensor of .*, got None"),
        ("steps", 1.0, "'float' object cannot be interpreted as an integer"),
        ("n_averaged", torch.ones(2), "only integer tensors of a single element"),
        ("n_averaged", 2, "got 2 after 2 averages in 1 steps"),
        ("n_averaged", -1, "got 2 after -1 averages in 1 steps"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            average.load_state_dict({**saved, name: wrong})
    with pytest.raises(KeyError, match="state_dict must have 'steps', got"):
        average.load_state_dict({"averages": []})
    with pytest.raises(TypeError, match="state_dict must be a dict, got list"):
        average.load_state_dict([1])
    assert all(map(same_bits, average.averages, before["averages"]))
    assert average.n_averaged == 2
    addresses = [each.data_ptr() for each in average.averages]
    average.load_state_dict(saved)
    assert all(map(same_bits, average.averages, saved["averages"]))
    assert (average.n_averaged, average.state_dict()["steps"]) == (1, 1)
    assert [each.data_ptr() for each in average.averages] == addresses, "a graph goes on with them"


def unfrozen() -> tuple[nn.Sequential, Any, WeightAverage]:
    """A model of two layers, of which the second has joined after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    optimizer = amp_ext.optim.AdamW(model[0].parameters(), lr=0.1)
    average = WeightAverage(optimizer, 0.9, model=model)
    step(optimizer)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    return model, optimizer, average


def in_a_swap(model: nn.Module, average: WeightAverage) -> list[Tensor]:
    with average.swap():
        return average.averages


@pytest.mark.parametrize(
    "known",
    [
        lambda model, average: average.averages,
        lambda model, average: average.state_dict()["averages"],
        lambda model, average: [*average.averaged_state_dict().values()][1:],
        lambda model, average: copy.deepcopy((model, average))[1].averages,
        lambda model, average: average.copy_to(copy.deepcopy(model)) or average.averages,
        in_a_swap,
    ],
)
def test_parameters_that_have_joined_are_known_and_begin_at_their_weight_after_a_step(known):
    model, optimizer, average = unfrozen()
    assert [each.shape for each in known(model, average)] == [p.shape for p in model.parameters()]
    step(optimizer)
    for ours, param in zip(average.averages[2:], model[1].parameters(), strict=True):
        assert same_bits(ours, param)
    step(optimizer)
    assert not same_bits(average.averages[3], model[1].bias)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_goes_on_whose_parameters_have_joined(steps):
    _, optimizer, average = unfrozen()
    for _ in range(steps):
        step(optimizer)
    saved = copy.deepcopy((optimizer.state_dict(), average.state_dict()))
    _, resumed, other = unfrozen()
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    other.model.load_state_dict(average.model.state_dict())
    for each in (optimizer, resumed):
        torch.manual_seed(1)
        step(each)
    assert all(map(same_bits, other.averages, average.averages))
    assert ("joined" in saved[1]) == (steps == 0)


def test_averages_of_two_optimizers_of_one_model_come_together():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    optimizers = [amp_ext.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    averages = [WeightAverage(optimizer, 0.9, model=model) for optimizer in optimizers]
    for optimizer in 2 * optimizers:
        step(optimizer)
    copied = copy.deepcopy(model)
    for average in averages:
        average.copy_to(copied)
    expected = [each for average in averages for each in average.averages]
    assert all(map(same_bits, copied.parameters(), expected))
    with averages[0].swap():
        both = [*averages[1].averaged_state_dict().values()][1:]
        assert all(map(same_bits, both, expected))
    with averages[0].swap(), averages[1].swap():
        assert all(map(same_bits, model.parameters(), expected))
