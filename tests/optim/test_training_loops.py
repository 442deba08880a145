"""What training loops do around an optimizer works as it does around those of torch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness import scaler_cases
from harness.edge_shapes import BF16, F32
from harness.reference import assert_close, same_bits
from harness.rows import rows
from test_forms import FORMS
from test_offload import offloaded
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim import optimizer as of_torch
from torch.utils._pytree import tree_leaves

import amp_ext
from amp_ext import GradScaler


def small_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


# Schedules of the learning rate.

# Of the ways in which those of torch write into groups: a new rate, one that is kept in its tensor,
# momentum and betas beside it, and whenever they are told to.
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda opt: schedulers.LambdaLR(opt, [lambda n: 0.9**n, lambda n: 1 / (n + 1)]),
    "SequentialLR": lambda opt: schedulers.SequentialLR(
        opt, [schedulers.LinearLR(opt, 0.25, total_iters=3), schedulers.StepLR(opt, 2)], [3]
    ),
    "OneCycleLR": lambda opt: schedulers.OneCycleLR(opt, 0.1, total_steps=9),
    "ReduceLROnPlateau": lambda opt: schedulers.ReduceLROnPlateau(opt, factor=0.5, patience=1),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize(("name", "options"), cases.in_torch(cases.FEW_OPTIMIZERS))
def test_a_schedule_leads_ours_where_it_leads_torchs(name, options, as_tensor, schedule):
    sides = []
    start = cases.make_params(F32, shapes=[(5,), (7,), (3,)])
    for package, own in ((cases.ours, cases.AS_TORCH), (cases.theirs, {"foreach": False})):
        params = cases.twins(start)
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.02}]
        optimizer = package(name)(groups, **(options | {"lr": 0.1}), **own)
        if as_tensor:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(group["lr"])
        sides.append((optimizer, SCHEDULES[schedule](optimizer)))
    (mine, _), (other, _) = sides
    for _ in range(8):
        cases.train([mine, other])
        for _, each in sides:
            each.step(*[1.0] if schedule == "ReduceLROnPlateau" else [])
        for group, expected in zip(mine.param_groups, other.param_groups, strict=True):
            assert isinstance(group["lr"], Tensor) == isinstance(expected["lr"], Tensor)
            for key in ("lr", "momentum", "betas"):
                assert group.get(key) == expected.get(key), key
    cases.assert_all_close(mine, other, steps=8)


# Masters, for averages of weights.


@cases.each_class
@cases.HALVES
def test_masters_are_given_in_the_order_of_the_parameters(dtype, name, options):
    model = small_model(dtype).append(nn.Linear(2, 2))  # float32: has no masters
    params = list(model.parameters())
    params[0].requires_grad_(False)
    optimizer = cases.ours(name)([{"params": params[3:]}, {"params": params[:3]}], **options)
    elsewhere = nn.Parameter(torch.ones(5, dtype=dtype))  # stands for itself
    for _ in ("before a step", "after it"):
        masters = optimizer.master_params()
        for param, master in zip(cases.params_of(optimizer), masters, strict=True):
            kept = optimizer.state[param].get("master_param", param)
            assert (kept is param) == (param.dtype == F32 or param is params[0])
            assert master.data_ptr() == kept.data_ptr()
            assert same_bits(master.to(param.dtype), param)
            assert not master.requires_grad
        *in_order, itself = optimizer.master_params([*params, elsewhere])
        assert all(map(same_bits, in_order, [*masters[-3:], *masters[:-3]]))
        assert itself.data_ptr() == elsewhere.data_ptr()
        assert elsewhere not in optimizer.state
        cases.give_grads([param for param in params if param.requires_grad])
        optimizer.step()


# Hooks and profiles.


@cases.each_class
def test_all_hooks_of_a_step_run_in_torchs_order(name, options):
    logs = []
    for package in (cases.ours, cases.theirs):
        optimizer = package(name)(cases.make_params(F32, shapes=[(5,)]), **options)
        log: list[str] = []

        def note(word: str, log: list[str] = log) -> Callable[..., None]:
            return lambda optimizer, args, kwargs: log.append(f"{word} {len(args)} {len(kwargs)}")

        handles = [
            of_torch.register_optimizer_step_pre_hook(note("all-pre")),
            of_torch.register_optimizer_step_post_hook(note("all-post")),
            optimizer.register_step_pre_hook(note("pre")),
            optimizer.register_step_post_hook(note("post")),
            optimizer.register_step_post_hook(note("post-2")),
        ]
        cases.train([optimizer])
        optimizer.step(lambda log=log: log.append("closure"))
        optimizer.step(closure=None)
        if package is cases.ours:  # an overflow is a step with all its hooks
            optimizer.found_inf = torch.ones(())
        optimizer.step()
        for handle in handles:
            handle.remove()
        optimizer.step()
        logs.append(log)
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((opt, lambda: 5.0), {}))
        assert optimizer.step() == 5.0
    assert logs[0] == logs[1]
    assert len(logs[0]) == 21


@cases.each_in_torch
def test_the_profiler_sees_the_ranges_that_it_sees_of_torch(name):
    seen = []
    for package in (cases.ours, cases.theirs):
        optimizer = package(name)(cases.make_params(F32, shapes=[(5,)]), lr=0.1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            cases.give_grads(cases.params_of(optimizer))
            optimizer.step()
            optimizer.zero_grad()
        seen.append(sorted(e.key for e in profile.key_averages() if e.key.startswith("Optimizer")))
    assert seen == [[f"Optimizer.{do}#{name}.{do}" for do in ("step", "zero_grad")]] * 2


# Closures, and gradients that stay.


@pytest.mark.parametrize("grad_enabled", [True, False])
@cases.few_optimizers
def test_a_closure_is_run_as_torch_runs_it(name, options, grad_enabled):
    losses, optimizers = [], []
    for package, own in ((cases.ours, cases.AS_TORCH), (cases.theirs, {"foreach": False})):
        model = small_model(F32)
        optimizer = package(name)(model.parameters(), **(options | {"lr": 0.01}), **own)
        optimizers.append(optimizer)
        calls = itertools.count()

        def closure(model=model, optimizer=optimizer, calls=calls):
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            torch.manual_seed(next(calls))
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            return loss

        with torch.set_grad_enabled(grad_enabled):
            losses.append([optimizer.step(closure).item() for _ in range(3)])
            losses[-1].append(optimizer.step(closure=closure).item())
            assert optimizer.step(closure=None) is None
            assert optimizer.step() is None
        assert next(calls) == 4
    assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), steps=4)
    cases.assert_all_close(*optimizers, steps=6)


# Autocast keeps weights that it has cast until its outermost scope ends.


@pytest.mark.parametrize("prepare", [lambda _: None, offloaded])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_inside_an_autocast_scope_leaves_no_stale_weight(scaled: bool, prepare: Any) -> None:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.ones_(linear.weight)
    optimizer = cases.ours("SGD")(linear.parameters(), lr=1.0)
    prepare(optimizer)
    scaler = GradScaler("cpu", init_scale=2.0, enabled=scaled)
    with torch.autocast("cpu", BF16):
        output = linear(torch.ones(1, 1))
        assert output.item() == 1.0
        scaler.scale(-output.float().sum()).backward()
        scaler.step(optimizer)
        assert linear(torch.ones(1, 1)).item() == 2.0


# Groups and states that a loop edits by hand.


@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"], ids=str)
@pytest.mark.parametrize("name", ["step", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("erases", [True, False], ids=["erased", "none"])
def test_what_is_left_of_a_state_is_refused(erases, name, state_dtype) -> None:
    params = [nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    optimizer = cases.ours("AdamW")(params, lr=0.5, state_dtype=state_dtype)
    cases.train([optimizer])
    state = optimizer.state[params[1]]
    for key in {name, f"{name}_q8h", f"{name}_q8s"} & state.keys():
        state[key] = None
        if erases:
            del state[key]
    before = cases.bits_of(optimizer)
    words = rf"AdamW: {name} of group 0, param 1 must be present, got"
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    cases.assert_same_bits(optimizer, before)


@cases.each_class
def test_others_may_write_into_a_state_before_the_first_step(name, options) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = cases.ours(name)([param], **options)
    held = optimizer.state[param]
    held["slow"] = torch.ones(3)
    if not optimizer.state_spec_of(optimizer.param_groups[0]).keeps_step:
        held["step"] = 0  # theirs: neither read nor written
    cases.train([optimizer])
    assert held.get("step") in (0, torch.tensor(1.0))
    param.data = param.data.half()  # asks for other states
    cases.train([optimizer])
    assert "master_param" in held
    optimizer.param_groups[0].update(master_weights=False, rounding="nearest")
    optimizer.step()
    assert "master_param" not in held
    assert optimizer.state[param] is held
    assert same_bits(held["slow"], torch.ones(3))


# What is made inside torch.inference_mode(), and training after it.


SHAPES = [(64, 64), (7,), ()]


def load(optimizer: Any) -> None:
    optimizer.load_state_dict(cases.trained(copy.deepcopy(optimizer)).state_dict())


def step(optimizer: Any) -> None:
    cases.trained(optimizer, 1)


CALLS = {
    "init_state": lambda optimizer: optimizer.init_state(),
    "float32_state_dict": lambda optimizer: amp_ext.optim.float32_state_dict(
        cases.trained(optimizer)
    ),
    "load": load,
    "step": step,
}


def inference_tensors(*values: Any) -> list[Tensor]:
    found = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    assert found
    return [tensor for tensor in found if tensor.is_inference()]


# Every call with masters of a kind and with codes, and two with all forms.
MADE = {
    f"{form}-{call}": (*FORMS[form], call)
    for form in FORMS
    for call in CALLS
    if call in ("load", "step") or form in ("bf16-masters", "fp16-split", "bf16-8bit")
}


@pytest.mark.parametrize(("dtype", "kept", "call"), rows(MADE))
def test_training_goes_on_from_what_was_made_in_inference_mode(dtype, kept, call, device):
    sides = []
    for is_on in (True, False):
        torch.manual_seed(0)
        params = cases.make_params(dtype, device, SHAPES)
        optimizer = cases.ours("AdamW")(params, lr=0.05, max_grad_norm=1.0, **kept)
        with torch.inference_mode(is_on):
            optimizer.norm_guard = amp_ext.optim.NormGuard()
            made = CALLS[call](optimizer)
        assert inference_tensors(made, dict(optimizer.state), optimizer.grad_norm) == []
        cases.train([optimizer], 2)
        optimizer.refresh_masters()
        cases.train([optimizer])
        sides.append(optimizer)
    cases.assert_same_bits(*sides)


# Scalers.

# What an iteration calls inside the mode; the rest of it comes after.
ITERATION = {
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "update": lambda scaler, optimizer: scaler.update(),
    "load": lambda scaler, optimizer: scaler.load_state_dict(scaler.state_dict()),
}


def give_scaled_grads(scaler: Any, optimizer: Any, value: float) -> None:
    for param in cases.params_of(optimizer):
        param.grad = None
    with torch.enable_grad():
        scaler.scale(sum(param.sum() for param in cases.params_of(optimizer)) * value).backward()


@scaler_cases.over([scaler_cases.our_adamw_with_norm, scaler_cases.our_sgd, scaler_cases.Duck])
@pytest.mark.parametrize("inside", range(len(ITERATION) + 1))
def test_scalers_go_on_after_inference_mode(make, inside, device):
    sides = []
    for is_on in (True, False):
        optimizer = make(scaler_cases.new_params(device))
        scaler = amp_ext.GradScaler(device.type, init_scale=4.0, hysteresis=2)
        with torch.inference_mode(is_on):
            scaler.scale(torch.ones((), device=device))
        give_scaled_grads(scaler, optimizer, 2.0)
        for number, call in enumerate(ITERATION.values()):
            with torch.inference_mode(is_on and number < inside):
                call(scaler, optimizer)
        assert inference_tensors(list(vars(scaler).values())) == []
        for value in (2.0, torch.inf, torch.inf, 3.0):
            give_scaled_grads(scaler, optimizer, value)
            scaler.step(optimizer)
            scaler.update()
        sides.append((cases.params_of(optimizer), scaler.state_dict(), scaler.stats()))
    cases.assert_same_bits(sides[0][0], sides[1][0])
    assert sides[0][1:] == sides[1][1:]


def test_a_parameter_of_inference_mode_stays_what_it_is(device):
    """Whoever makes a model there steps and loads it there."""
    with torch.inference_mode():
        optimizer = cases.trained(cases.ours("AdamW")(cases.make_params(BF16, device, SHAPES)))
        load(optimizer)
        cases.trained(optimizer)
    assert all(param.is_inference() for param in cases.params_of(optimizer))
