"""Float32 masters of 16-bit parameters: what they keep, and what happens when weights change."""

from __future__ import annotations

import pytest
import torch
from optimizer_cases import (
    FEW_OPTIMIZERS,
    SHAPES,
    assert_same_bits,
    bits_of,
    give_grads,
    in_16_bits,
    make_params,
    ours,
    params_of,
    theirs,
    train,
    twins,
)
from reference import refreshed_master, same_bits

from amp_ext import ops

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
HALVES = pytest.mark.parametrize("dtype", [F16, BF16], ids=str)


def still_step(optimizer: torch.optim.Optimizer) -> None:
    """Takes a step that moves nothing: with a learning rate of 0."""
    lrs = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train([optimizer], 1)
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr


def masters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        optimizer.state[param]["master_param"].detach().clone() for param in params_of(optimizer)
    ]


def copy_values(params, values) -> None:
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def load_into_the_model(params, values):
    model = torch.nn.ParameterList(params)
    assert all(param is twin for param, twin in zip(model, params, strict=True))
    model.load_state_dict({str(index): value for index, value in enumerate(values)})


def clamp(params, values):
    with torch.no_grad():
        for param in params:
            param.clamp_(-0.3, 0.3)


def swap_with_average(params, values):
    with torch.no_grad():
        torch._foreach_lerp_(list(params), values, 0.5)


def add_in_place(params, values):
    with torch.no_grad():
        for param in params:
            param += 0.125


def step_of_another_optimizer(params, values):
    give_grads(params)
    theirs("SGD")(params, lr=0.1, foreach=False).step()


CHANGES = [
    pytest.param(load_into_the_model, id="load-state-dict"),
    pytest.param(clamp, id="clamp"),
    pytest.param(swap_with_average, id="average"),
    pytest.param(add_in_place, id="add"),
    pytest.param(step_of_another_optimizer, id="other-optimizer"),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
@HALVES
def test_changed_weights_reach_the_master_at_the_next_step(device, dtype, name, options, change):
    optimizer = ours(name)(make_params(dtype, device), **options)
    train([optimizer], 3)
    values = [torch.randn_like(param) for param in params_of(optimizer)]
    before = masters_of(optimizer)
    change(params_of(optimizer), values)
    changed = [param.detach().clone() for param in params_of(optimizer)]
    assert not same_bits(changed[0], before[0].to(dtype))
    still_step(optimizer)
    for param, old, new in zip(params_of(optimizer), before, changed, strict=True):
        assert same_bits(param, new)
        assert same_bits(optimizer.state[param]["master_param"], refreshed_master(old, new))


@HALVES
def test_elements_that_did_not_change_keep_their_extra_bits(device, dtype):
    optimizer = ours("AdamW")(make_params(dtype, device, [(1000,)]), lr=0.01)
    train([optimizer], 3)
    (before,) = masters_of(optimizer)
    (param,) = params_of(optimizer)
    with torch.no_grad():
        param[500:] = 0.7
    still_step(optimizer)
    (after,) = masters_of(optimizer)
    assert same_bits(after[:500], before[:500])
    assert (after[:500] != param.detach()[:500].float()).any()
    assert same_bits(after[500:], param.detach()[500:].float())


@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
@HALVES
def test_masters_are_left_alone_while_nobody_else_writes(dtype, name, options):
    optimizer = ours(name)(make_params(dtype), **options)
    train([optimizer], 3)
    before = masters_of(optimizer)
    assert not same_bits(before[0], params_of(optimizer)[0].detach().float())
    still_step(optimizer)
    optimizer.refresh_masters()
    still_step(optimizer)
    assert all(map(same_bits, masters_of(optimizer), before))


@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
@HALVES
def test_refresh_masters_sees_writes_through_data(device, dtype, name, options):
    optimizer = ours(name)(make_params(dtype, device), **options)
    train([optimizer], 3)
    before = masters_of(optimizer)
    for param in params_of(optimizer):
        param.data.mul_(0.5)
    changed = [param.detach().clone() for param in params_of(optimizer)]
    optimizer.refresh_masters()
    still_step(optimizer)
    for param, old, new in zip(params_of(optimizer), before, changed, strict=True):
        assert same_bits(param, new)
        assert same_bits(optimizer.state[param]["master_param"], refreshed_master(old, new))


@HALVES
def test_refresh_masters_works_at_once(device, dtype):
    optimizer = ours("AdamW")(make_params(dtype, device))
    train([optimizer], 3)
    before = masters_of(optimizer)
    for param in params_of(optimizer):
        param.data.mul_(0.5)
    optimizer.refresh_masters()
    for param, old in zip(params_of(optimizer), before, strict=True):
        expected = refreshed_master(old, param.detach())
        assert same_bits(optimizer.state[param]["master_param"], expected)


@HALVES
def test_the_operation_refreshes_only_what_differs(device, dtype):
    exact = [torch.randn(shape, device=device) for shape in SHAPES]
    params = [master.to(dtype) for master in exact]
    for param in params:
        param.view(-1)[::3] = 0.7
    before = [param.clone() for param in params]
    masters = [master.clone() for master in exact]
    ops.refresh_masters_(params, masters)
    assert all(map(same_bits, params, before))
    for master, old, param in zip(masters, exact, params, strict=True):
        assert same_bits(master, refreshed_master(old, param))
    assert not same_bits(masters[0], exact[0])
    assert not same_bits(masters[0], params[0].float())


@pytest.mark.parametrize(
    ("params", "masters"),
    [
        pytest.param([F16, F16], [F32], id="too-few"),
        pytest.param([F16, F16], [F32, F16], id="master-dtype"),
    ],
)
def test_the_operation_names_bad_input(params, masters):
    params = [torch.ones(5).to(dtype) for dtype in params]
    masters = [torch.zeros(5).to(dtype) for dtype in masters]
    with pytest.raises(RuntimeError, match=r"^refresh_masters_: (master_params|params)"):
        ops.refresh_masters_(params, masters)
    assert all(torch.count_nonzero(master) == 0 for master in masters)


@HALVES
def test_refresh_masters_may_be_called_at_any_time(dtype):
    fresh = ours("AdamW")(make_params(dtype))
    plain = ours("AdamW")(twins(params_of(fresh)))
    fresh.refresh_masters()
    train([fresh, plain], 1)
    fresh.refresh_masters()
    fresh.refresh_masters()
    train([fresh, plain], 1)
    assert_same_bits(fresh, plain)
    ours("SGD")(make_params(F32)).refresh_masters()


@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
@HALVES
def test_a_change_before_an_overflow_is_not_forgotten(device, dtype, name, options):
    optimizer = ours(name)(make_params(dtype, device), **options)
    train([optimizer], 3)
    before = masters_of(optimizer)
    add_in_place(params_of(optimizer), None)
    changed = [param.detach().clone() for param in params_of(optimizer)]
    optimizer.found_inf = torch.ones((), device=device)
    train([optimizer], 2)
    assert all(map(same_bits, params_of(optimizer), changed))
    del optimizer.found_inf
    still_step(optimizer)
    for param, old, new in zip(params_of(optimizer), before, changed, strict=True):
        assert same_bits(param, new)
        assert same_bits(optimizer.state[param]["master_param"], refreshed_master(old, new))


@pytest.mark.parametrize("change", CHANGES)
@HALVES
def test_a_change_before_the_first_step_starts_the_master(dtype, change):
    optimizer = ours("AdamW")(make_params(dtype))
    change(params_of(optimizer), [torch.randn_like(param) for param in params_of(optimizer)])
    plain = ours("AdamW")(twins(params_of(optimizer)))
    train([optimizer, plain], 2)
    assert_same_bits(optimizer, plain)


@pytest.mark.parametrize("overflow", [False, True], ids=["clean", "overflow"])
@HALVES
def test_a_parameter_without_a_gradient_is_refreshed_when_it_gets_one(dtype, overflow):
    optimizer = ours("AdamW")(make_params(dtype, shapes=[(70,), (5,)]))
    train([optimizer], 3)
    first, second = params_of(optimizer)
    add_in_place([second], None)
    changed = second.detach().clone()
    give_grads([first])
    second.grad = None
    if overflow:
        optimizer.found_inf = torch.ones(())
    optimizer.step()
    if overflow:
        del optimizer.found_inf
    still_step(optimizer)
    assert same_bits(second, changed)


@pytest.mark.parametrize("weights_first", [True, False], ids=["weights-first", "optimizer-first"])
@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
@HALVES
def test_weights_and_optimizer_may_be_loaded_in_either_order(dtype, name, options, weights_first):
    straight = ours(name)(make_params(dtype), **options)
    train([straight], 3)
    resumed = ours(name)(make_params(dtype), **options)
    train([resumed], 2)
    weights = [param.detach().clone() for param in params_of(straight)]
    if weights_first:
        copy_values(params_of(resumed), weights)
    resumed.load_state_dict(straight.state_dict())
    if not weights_first:
        copy_values(params_of(resumed), weights)
    train([straight, resumed], 2)
    assert_same_bits(resumed, straight)


@pytest.mark.parametrize(("name", "options"), FEW_OPTIMIZERS)
@HALVES
def test_a_trip_through_torch_leaves_no_stale_masters(dtype, name, options):
    first = ours(name)(make_params(dtype), **options)
    train([first], 3)
    other = theirs(name)(twins(params_of(first)), **in_16_bits(name), **options)
    other.load_state_dict(first.state_dict())
    train([other], 3)
    second = ours(name)(twins(params_of(other)), **options)
    second.load_state_dict(other.state_dict())
    still_step(second)
    for param, twin in zip(params_of(second), params_of(other), strict=True):
        assert same_bits(param, twin)
        assert same_bits(second.state[param]["master_param"], twin.detach().float())


@HALVES
def test_a_wrong_master_in_a_file_does_not_win_over_the_weights(dtype):
    source = ours("AdamW")(make_params(dtype))
    train([source], 3)
    file = source.state_dict()
    for state in file["state"].values():
        state["master_param"] = state["master_param"] + 1
    loaded = ours("AdamW")(twins(params_of(source)))
    loaded.load_state_dict(file)
    still_step(loaded)
    assert all(map(same_bits, params_of(loaded), params_of(source)))


@pytest.mark.parametrize(("name", "lr"), [("SGD", 1e-3), ("Adam", 1e-4), ("AdamW", 1e-4)])
def test_small_updates_survive_in_the_master_alone(device, name, lr):
    def trained(master_weights: bool) -> torch.optim.Optimizer:
        param = torch.nn.Parameter(torch.ones(16, dtype=BF16, device=device))
        optimizer = ours(name)([param], lr=lr, master_weights=master_weights, weight_decay=0)
        for _ in range(100):
            param.grad = torch.ones_like(param)
            optimizer.step()
        return optimizer

    (lost,) = params_of(trained(False))
    assert torch.equal(lost, torch.ones_like(lost))
    optimizer = trained(True)
    (kept,) = params_of(optimizer)
    master = optimizer.state[kept]["master_param"]
    torch.testing.assert_close(master, torch.full_like(master, 1 - 100 * lr), rtol=1e-5, atol=0)
    assert same_bits(kept, master.to(BF16))
    assert (kept < 1).all()


def test_masters_follow_the_layout_of_the_parameter():
    param = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(BF16, memory_format=torch.channels_last))
    optimizer = ours("AdamW")([param])
    train([optimizer], 1)
    assert optimizer.state[param]["master_param"].stride() == param.stride()


def test_one_changed_parameter_does_not_touch_the_others():
    optimizer = ours("AdamW")(make_params(BF16, shapes=[(70,), (70,)]))
    train([optimizer], 3)
    other = params_of(optimizer)[1]
    add_in_place(params_of(optimizer)[:1], None)
    before = bits_of(optimizer)[1]
    still_step(optimizer)
    assert same_bits(optimizer.state[other]["master_param"], before["master_param"])
