"""An average of weights that follows the steps of an optimizer."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from harness.awkward import BF16, F16, F32, INF
from harness.optimizer_cases import through_a_file, train
from harness.reference import same_bits
from harness.refusals import launches_of
from harness.trainer_cases import batches, new_trainer, train_on, two_trainers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import amp_ext
from amp_ext.optim import WeightAverage


def params_of(device: torch.device, *dtypes: torch.dtype) -> list[Parameter]:
    return [
        Parameter(torch.randn(37 * i + 5).to(dtype).to(device)) for i, dtype in enumerate(dtypes)
    ]


def step(optimizer: Any) -> None:
    train([optimizer])


def model_of() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model[2].weight.requires_grad_(False)
    return model


def trained(model: nn.Module, **options: Any) -> tuple[Any, WeightAverage, AveragedModel]:
    """Six steps of a model, with averages by us and by torch."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = amp_ext.optim.AdamW(params, lr=0.01)
    average = WeightAverage(optimizer, 0.9, model=model, **options)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        theirs.update_parameters(model)
    return optimizer, average, theirs


@pytest.mark.parametrize("scaler_class", [amp_ext.GradScaler, torch.amp.GradScaler])
def test_it_follows_the_steps_that_landed_and_takes_parameters_without_a_gradient(
    scaler_class, device
):
    params = params_of(device, F32, BF16, F32)
    optimizer = amp_ext.optim.SGD(params, lr=0.1)
    average = WeightAverage(optimizer, 0.0, every=2)
    scaler = scaler_class(device.type, init_scale=4.0)
    scaler.scale(torch.zeros((), device=device))
    params[0].grad = torch.ones_like(params[0])
    taken = []
    for bad in (1.0, INF, 1.0, 1.0, INF, INF, 1.0, 1.0):
        params[0].grad.fill_(bad)
        with torch.no_grad():
            params[1] += 0.25  # nothing but the average sees it
        scaler.step(optimizer)
        scaler.update()
        taken.append(average.n_averaged.item())
        if taken[-1:] != taken[-2:-1] and taken[-1]:  # one was taken
            assert same_bits(average.averages[0], params[0])
            assert same_bits(average.averages[1], params[1].float())
    assert taken == [0, 0, 1, 1, 1, 1, 2, 2]
    optimizer.zero_grad()
    optimizer.step()
    assert average.state_dict()["steps"] == 5, "a step without a gradient lands nowhere"


def test_a_flag_that_is_a_number_skips_the_average_too(device):
    optimizer = amp_ext.optim.SGD(params_of(device, F32), lr=0.1)
    average = WeightAverage(optimizer)
    step(optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.ones((), device=device), 1
    step(optimizer)
    assert average.n_averaged == 1


def test_a_master_that_its_parameter_has_left_behind_is_what_the_next_step_would_make_of_it(device):
    params = params_of(device, BF16, F32)
    optimizer = amp_ext.optim.SGD(params, lr=0.1)
    average = WeightAverage(optimizer, 0.0)
    step(optimizer)
    with torch.no_grad():
        params[0].copy_(torch.arange(5.0))
    params[0].grad, params[1].grad = None, torch.ones_like(params[1])
    optimizer.step()
    assert same_bits(average.averages[0], params[0].float())


@pytest.mark.parametrize("masters", [True, "split", "split8"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_swap_restores_every_bit_and_leaves_masters_alone(fails, masters, device):
    params = params_of(device, BF16, F32, F16)
    optimizer = amp_ext.optim.AdamW(params, lr=0.1, master_weights=masters)
    average = WeightAverage(optimizer, 0.5, dtype=BF16)
    step(optimizer)
    step(optimizer)
    if masters is True:  # no rounding of this one: the parameter must not come to count as written
        optimizer.state[params[0]]["master_param"].add_(1.0)
    tensors = [*params, *(t for state in optimizer.state.values() for t in state.values())]
    before = [tensor.detach().clone() for tensor in tensors]
    twin = copy.deepcopy(optimizer)
    try:
        with average.swap():
            for param, ours in zip(params, average.averages, strict=True):
                assert same_bits(param, ours.to(param.dtype))
            if masters is not True:
                for param, master in zip(params, optimizer.master_params(), strict=True):
                    assert same_bits(master, param.float())
            if fails:
                raise KeyboardInterrupt
            optimizer.rebuild()
    except KeyboardInterrupt:
        assert fails
    assert all(map(same_bits, tensors, before))
    if masters is not True:
        torch.manual_seed(1)
        step(optimizer)
        torch.manual_seed(1)
        step(twin)
        for ours, other in zip(optimizer.master_params(), twin.master_params(), strict=True):
            assert same_bits(ours, other)
    else:
        written = optimizer.state[params[0]]["master_param"].clone()
        optimizer.param_groups[0]["lr"] = 0.0
        step(optimizer)
        assert same_bits(optimizer.state[params[0]]["master_param"], written)


def test_a_step_a_save_and_a_load_inside_a_swap_are_refused_by_name():
    optimizer, average, _ = trained(model_of())
    other = WeightAverage(optimizer)
    state, own = optimizer.state_dict(), average.state_dict()
    text = "parameters must hold the weights in training, got their averages"
    with average.swap():
        for name, refused in {
            "AdamW.step": optimizer.step,
            "AdamW.look_at_gradients": lambda: optimizer.look_at_gradients(torch.zeros(())),
            "AdamW.take_average": lambda: WeightAverage(optimizer),
            "AdamW.state_dict": optimizer.state_dict,
            "AdamW.load_state_dict": lambda: optimizer.load_state_dict(state),
            "AdamW.__getstate__": lambda: copy.deepcopy(optimizer),
            "WeightAverage.swap": average.swap().__enter__,
            "WeightAverage.swap of another": other.swap().__enter__,
            "WeightAverage.state_dict": average.state_dict,
            "WeightAverage.averaged_state_dict": average.averaged_state_dict,
            "WeightAverage.load_state_dict": lambda: average.load_state_dict(own),
            "AdamW.refresh_masters": optimizer.refresh_masters,
            "AdamW.restart_average": other.restart,
        }.items():
            with pytest.raises(RuntimeError, match=f"^{name.removesuffix(' of another')}: {text}"):
                refused()
    step(optimizer)
    assert average.n_averaged == 7


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
        (None, "model must be a torch.nn.Module, got NoneType"),
        (other, r"2.weight of model must be of shape \[2, 5\], got of shape"),
        (other[:2], r"2.weight of model must be of shape \[2, 5\], got absent"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            average.copy_to(model)
    nameless = WeightAverage(optimizer)
    assert_refused_by_each(nameless, other, file, RuntimeError, "model must be given to WeightAv")
    with pytest.raises(ValueError, match=r"model must have all parameters .* without param 0"):
        WeightAverage(optimizer, model=other)
    optimizer.add_param_group({"params": [Parameter(torch.ones(7))]})
    step(optimizer)
    text = r"model must have all parameters of the optimizer, got one without param 5, of shape .7."
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
        ("averages", [first], "must be of 2 parameters, got 1"),
        ("averages", [second, first], r"\[0\] must be of sizes \[5\]"),
        ("averages", first, "must be a list, got Tensor"),
        ("averages", [first, 2], r"\[1\] must be a tensor, got 2"),
        ("averages", [first.long(), second], r"\[0\] must be floating-point numbers, got Long"),
        ("steps", 1.0, "must be a whole number, got 1.0"),
        ("n_averaged", torch.ones(2), "must be a whole number, got tensor"),
        ("n_averaged", 2, "must be at most 1, the steps that have landed, got 2"),
        ("n_averaged", -1, "must be at least 0, got -1"),
    ):
        words = f"WeightAverage.load_state_dict: {name} ?{text}"
        with pytest.raises((ValueError, TypeError), match=words):
            average.load_state_dict({**saved, name: wrong})
    with pytest.raises(KeyError, match=r"state_dict must have \['steps', 'n_averaged'\]"):
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


def test_parameters_may_join_and_leave(device):
    params = params_of(device, F32, F32)
    optimizer = amp_ext.optim.SGD(params, lr=0.0)
    average = WeightAverage(optimizer)
    step(optimizer)
    kept = average.averages[1].clone()
    new = Parameter(torch.full((3,), 2.0, device=device))
    optimizer.add_param_group({"params": [new]})
    with average.swap():  # before a step has seen it
        assert [each.numel() for each in average.averages] == [5, 42, 3]
    step(optimizer)
    assert (average.averages[2] == 2).all()
    del optimizer.param_groups[0]["params"][0]
    step(optimizer)
    assert [each.numel() for each in average.averages] == [42, 3]
    assert same_bits(average.averages[0], kept)
    average.remove()
    step(optimizer)
    optimizer.add_param_group({"params": [Parameter(torch.ones(4, device=device))]})
    assert [each.numel() for each in average.averages] == [42, 3, 4]
    assert average.n_averaged == 3, "to list parameters takes no step"


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


def test_names_are_those_of_the_state_dict_whatever_it_has_under_them():
    def cloning(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        state.update({name: each.clone() for name, each in state.items()})

    def renaming(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        state.update({"its." + name: state.pop(name).clone() for name in [*state]})

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(6, 5)), nn.BatchNorm1d(5), nn.Linear(5, 2))
    _, average, theirs = trained(model)
    for file in (average.averaged_state_dict(), theirs.state_dict()):
        average.load_state_dict(file)
    model = model_of()
    model.register_state_dict_post_hook(cloning)
    _, average, theirs = trained(model)
    assert same_bits(average.averaged_state_dict()["module.0.weight"], average.averages[0])
    copied = copy.deepcopy(model)
    nn.init.zeros_(copied[2].weight)
    average.copy_to(copied)
    assert same_bits(copied[0].weight, average.averages[0])
    assert same_bits(copied[2].weight, model[2].weight)
    copied.register_state_dict_post_hook(renaming)
    before = copied[0].weight.detach().clone()
    nn.init.zeros_(model[1].running_mean)
    with pytest.raises(ValueError, match=r"^WeightAverage.copy_to: 0.weight of model must be"):
        average.copy_to(copied)
    model.register_state_dict_post_hook(renaming)
    text = "state_dict.. of model must have param 0 under its name '0.w"
    assert_refused_by_each(average, copied, theirs.state_dict(), ValueError, text)
    assert same_bits(copied[0].weight, before)


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
    del average, averages[1]  # what nobody averages comes as it is
    averages[0].copy_to(copied)
    assert all(map(same_bits, copied[1].parameters(), model[1].parameters()))


def test_an_average_goes_when_nobody_holds_it_and_holds_its_optimizer():
    gc.disable()
    try:
        optimizer = amp_ext.optim.SGD([Parameter(torch.ones(3))], lr=0.1)
        average = WeightAverage(optimizer)
        step(optimizer)
        gone, held = weakref.ref(average), weakref.ref(optimizer)
        del optimizer
        step(average.optimizer)
        optimizer = average.optimizer
        del average
        assert gone() is None
        step(optimizer)
        del optimizer
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda param: param.data.bfloat16(), r"BFloat16 of sizes \[5\]"),
        (lambda param: param.data[:2].clone(), r"Float of sizes \[2\]"),
    ],
)
def test_a_parameter_of_another_shape_or_dtype_is_refused_by_name(change, got):
    params = params_of(torch.device("cpu"), F32, F32)
    optimizer = amp_ext.optim.SGD(params, lr=0.1)
    average = WeightAverage(optimizer)
    step(optimizer)
    params[0].grad = None
    params[0].data = change(params[0])
    text = f"WeightAverage: param of group 0, param 0 must be Float of sizes .5. .*, got {got}"
    with pytest.raises(RuntimeError, match=text + r".*: call restart\(\)"):
        step(optimizer)
    average.restart()
    assert same_bits(average.averages[0], optimizer.master_params()[0])
    assert average.n_averaged == 0
    step(optimizer)
    assert average.n_averaged == 1
    assert same_bits(average.averages[0], optimizer.master_params()[0])


def test_an_optimizer_may_get_its_first_parameter_later():
    optimizer = amp_ext.optim.SGD([{"params": []}], lr=0.1)
    average = WeightAverage(optimizer)
    for _ in range(2):  # the second finds parameters that were given back
        with average.swap():
            assert average.averages == []
            assert average.n_averaged == 0
    optimizer.add_param_group({"params": [Parameter(torch.ones(3))]})
    average.restart()
    assert same_bits(average.averages[0], torch.ones(3))


def with_another_state(optimizer: Any) -> None:
    def replace(optimizer: Any, args: Any, kwargs: Any) -> None:
        states = optimizer.state
        for param in states:
            states[param] = {key: value.clone() for key, value in states[param].items()}

    optimizer.register_step_post_hook(replace)


@pytest.mark.parametrize("masters", [True, "split", "split8"])
@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: None,
        lambda optimizer: optimizer.rebuild(),
        lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        lambda optimizer: optimizer.add_param_group({"params": [Parameter(torch.ones(2))]}),
        with_another_state,
    ],
)
def test_an_average_always_takes_the_master_that_the_state_has(change, masters, device):
    params = params_of(device, BF16, F16)
    optimizer = amp_ext.optim.AdamW(params, lr=1e-3, master_weights=masters)
    for _ in range(3):
        step(optimizer)
    change(optimizer)
    begun = WeightAverage(optimizer, 0.0)
    average = copy.deepcopy(begun.averages)
    begun.restart()
    restarted = copy.deepcopy(begun.averages)
    params[0].grad = None  # no step tells the plan of this one's state
    params[1].grad = torch.ones_like(params[1])
    weights = [weight.clone() for weight in copy.deepcopy(optimizer).master_params()]
    assert not same_bits(weights[0], params[0].float()), "the parameter is not the master"
    assert all(map(same_bits, average, weights))
    assert all(map(same_bits, restarted, weights))
    optimizer.step()
    assert begun.n_averaged == 1
    assert same_bits(begun.averages[0], weights[0])
    with begun.swap():
        if masters is not True:
            held = copy.copy(optimizer.state)
            assert not any(held[params[0]][key].any() for key in held[params[0]] if "low" in key)
    assert same_bits(optimizer.master_params()[0], weights[0])


def test_the_options_are_read_only_and_may_be_numbers_of_numpy():
    optimizer = amp_ext.optim.SGD([Parameter(torch.ones(2))], lr=0.1)
    average = WeightAverage(optimizer, numpy.float32(0.5), numpy.int64(2))
    assert (average.decay, average.every, average.warmup) == (0.5, 2, False)
    for name in ("optimizer", "decay", "every", "dtype", "model", "warmup"):
        with pytest.raises(AttributeError):
            setattr(average, name, getattr(average, name))


def test_autograd_sees_a_swap():
    model = nn.Linear(3, 3)
    average = WeightAverage(amp_ext.optim.SGD(model.parameters(), lr=0.0), 0.5)
    x = torch.ones(2, 3, requires_grad=True)
    with average.swap():
        inside = model(x).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        inside.backward()


def test_autocast_casts_the_averages_and_then_the_parameters_again(device):
    model = nn.Linear(3, 3).to(device)
    optimizer = amp_ext.optim.SGD(model.parameters(), lr=0.5)
    average = WeightAverage(optimizer, 0.9)
    for _ in range(3):
        step(optimizer)
    x = torch.randn(2, 3, device=device)
    with torch.autocast(device.type, BF16):
        before = model(x)
        with average.swap():
            assert not same_bits(model(x), before)
        assert same_bits(model(x), before)


@pytest.mark.parametrize("change", [lambda it: it.half(), lambda it: it[:2].clone()])
def test_a_parameter_with_other_data_after_a_swap_is_refused_and_the_others_are_back(change):
    params = params_of(torch.device("cpu"), F32, F32, F32)
    optimizer = amp_ext.optim.SGD(params, lr=0.1)
    average = WeightAverage(optimizer, 0.5)
    step(optimizer)
    step(optimizer)
    before = [param.detach().clone() for param in params]
    text = r"WeightAverage.swap: param of group 0, param 1 must be Float of sizes .42. on cpu, as "
    with pytest.raises(RuntimeError, match=text), average.swap():
        other = params[1].data = change(params[1].detach())
    assert same_bits(params[1], other)
    assert same_bits(params[0], before[0])
    assert same_bits(params[2], before[2])
    params[1].data = before[1]
    step(optimizer)
    assert average.n_averaged == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_follow_their_own_optimizer(copied):
    """Also of an average that the model holds; and of one that was removed, none."""
    model = model_of()
    optimizer, average, _ = trained(model, warmup=True)
    model.average = average
    other_model, other_optimizer = copied((model, optimizer))
    other = other_model.average
    assert other.optimizer is other_optimizer
    assert other.model is other_model
    before = [each.clone() for each in average.averages]
    for side in (other_optimizer, optimizer):
        torch.manual_seed(3)
        step(side)
        if side is other_optimizer:
            assert all(map(same_bits, average.averages, before))
    assert all(map(same_bits, average.averages, other.averages))
    assert other.n_averaged == average.n_averaged == 7
    average.remove()
    optimizer, removed = copied((optimizer, average))
    step(optimizer)
    assert removed.n_averaged == 7


def test_an_average_may_go_amid_the_hooks_of_a_step():
    optimizer = amp_ext.optim.SGD([Parameter(torch.ones(3))], lr=0.1)
    cycle: list[Any] = [WeightAverage(optimizer)]
    cycle.append(cycle)
    gone = weakref.ref(cycle[0])
    optimizer.register_step_post_hook(lambda *arguments: gc.collect())
    last = WeightAverage(optimizer)
    del cycle
    step(optimizer)
    assert gone() is None
    assert last.n_averaged == 1


@pytest.mark.parametrize(("averages", "launches"), [(0, 1), (1, 2), (2, 3)])
def test_an_average_is_one_launch_and_none_where_nobody_asks(averages, launches, emulated):
    def call(steps: int) -> None:
        optimizer = amp_ext.optim.SGD(params_of(torch.device("cpu"), F32, F32, F32), lr=0.1)
        held = [WeightAverage(optimizer, dtype=BF16) for _ in range(averages)]
        for _ in range(steps):
            step(optimizer)
        if not held:
            assert optimizer.has_landed is None

    begins = launches_of(lambda: call(0))
    assert begins == averages
    assert launches_of(lambda: call(1)) - begins == launches


WRONG = [
    (
        {"optimizer": torch.optim.SGD([torch.ones(1)])},
        TypeError,
        "optimizer must be one of amp_ext.optim, such as AdamW, got torch.optim.sgd.SGD$",
    ),
    (
        {"optimizer": SimpleNamespace(optimizer=amp_ext.optim.SGD([Parameter(torch.ones(1))]))},
        TypeError,
        "optimizer must be .*, got types.SimpleNamespace: give its .optimizer$",
    ),
    ({"decay": 1.1}, ValueError, "decay must be from 0 to 1, got 1.1"),
    ({"decay": "even"}, TypeError, "decay must be a number or \"equal\", got 'even'"),
    ({"decay": True}, TypeError, "decay must be a number"),
    ({"every": 0}, ValueError, "every must be at least 1, got 0"),
    ({"every": numpy.float64(2.0)}, TypeError, r"every must be an int, got 2\.0"),
    ({"dtype": F16}, ValueError, "dtype must be Float or BFloat16, got Half"),
    ({"dtype": "bf16"}, TypeError, "dtype must be torch.float32 or torch.bfloat16, got 'bf16'"),
    ({"warmup": 10}, TypeError, "warmup must be a bool, got 10"),
    ({"decay": "equal", "warmup": True}, ValueError, "warmup must be False where every weight"),
    ({"model": 3}, TypeError, "model must be a torch.nn.Module or None, got 3"),
]


@pytest.mark.parametrize(("change", "error", "text"), WRONG)
def test_wrong_arguments_are_refused_by_name(change, error, text):
    optimizer = amp_ext.optim.SGD([Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(error, match=f"^WeightAverage: {text}"):
        WeightAverage(**{"optimizer": optimizer} | change)


def test_a_lazy_parameter_is_refused_by_name():
    average = WeightAverage(amp_ext.optim.SGD([Parameter(torch.ones(2))], lr=0.1))
    average.optimizer.add_param_group({"params": list(nn.LazyLinear(2).parameters())})
    for refused in (lambda: WeightAverage(average.optimizer), average.state_dict):
        with pytest.raises(RuntimeError, match=r"^WeightAverage: param 1 must have a shape, got a"):
            refused()


def averages_in(trainer: Any) -> list[Tensor]:
    return [each.clone() for each in trainer.average.averages]


def test_the_trainer_carries_it(tmp_path):
    trainer, resumed = two_trainers(average_decay=0.9)
    *data, batch = batches(count=4)
    metrics = train_on(trainer, data)[-1]
    assert metrics.to_dict()["n_averaged"] == 3
    trainer.save(tmp_path / "file")
    saved = averages_in(trainer)
    train_on(trainer, [batch])
    resumed.load(tmp_path / "file")
    assert all(map(same_bits, averages_in(resumed), saved))
    train_on(resumed, [batch])
    assert all(map(same_bits, averages_in(resumed), averages_in(trainer)))
    broken = resumed.state_dict()
    broken["average"] = {**broken["average"], "averages": []}
    before = averages_in(resumed)
    with pytest.raises(ValueError, match="averages must be of 4 parameters, got 0"):
        resumed.load_state_dict(broken)
    assert all(map(same_bits, averages_in(resumed), before))
    plain = new_trainer()
    plain.load(tmp_path / "file")
    plain.save(tmp_path / "plain")
    resumed.load(tmp_path / "plain")
    assert resumed.average.n_averaged == 0
    with pytest.raises(ValueError, match="average_decay must be from 0 to 1"):
        new_trainer(average_decay=2.0)
