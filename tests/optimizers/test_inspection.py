"""What the coming step would do, told before it, and after a step that was asked to tell it."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from harness.clipping_cases import WAYS, Way, scale_grads
from harness.edge_shapes import (
    BF16,
    F32,
    INF,
    NAN,
    channels_last,
    placed,
    sliced,
    strided,
    transposed,
)
from harness.optimizer_cases import (
    assert_same_bits,
    give_grads,
    grads_of,
    make_params,
    ours,
    params_of,
    trained,
)
from harness.reference import same_bits
from harness.rows import rows
from test_forms import each_form_and_setting, make
from torch import Tensor
from torch.nn import Parameter

import amp_ext
from amp_ext.optim import float32_state_dict


def with_grads(optimizer: Any) -> Any:
    """Gives all parameters but the last a gradient."""
    give_grads(optimizer)
    params_of(optimizer)[-1].grad = None
    return optimizer


def copied(optimizer: Any) -> Any:
    other = copy.deepcopy(optimizer)
    for param, twin in zip(params_of(optimizer), params_of(other), strict=True):
        twin.grad = None if param.grad is None else param.grad.clone()
    return other


def everything(optimizer: Any, scaler: Any) -> list[Any]:
    """All that an inspection must leave as it is."""
    params = params_of(optimizer)
    tensors = [*params, *grads_of(optimizer)]
    tensors += [tensor for state in optimizer.state.values() for tensor in state.values()]
    return [
        [(id(tensor), tensor._version, tensor.detach().clone()) for tensor in tensors],
        [list(state) for state in optimizer.state.values()],
        None if optimizer.grad_norm is None else optimizer.grad_norm.clone(),
        {} if scaler is None else scaler.state_dict(),
        torch.get_rng_state(),
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return same_bits(one, other) if isinstance(one, Tensor) else one == other


def state_spec_of(optimizer: Any) -> list[dict[str, Tensor]]:
    """Copies of what each parameter stores, and of what that stands for, in float64."""
    whole = copy.deepcopy(optimizer)
    whole.refresh_masters()
    masters = whole.master_params()
    states = float32_state_dict(whole)["state"]
    kept = []
    for index, (param, master) in enumerate(zip(params_of(whole), masters, strict=True)):
        moments = {
            key: each.double() for key, each in states.get(index, {}).items() if key != "step"
        }
        has_master = moments.pop("master_param", None) is not None
        kept.append({"param": param.detach().clone(), "weight": master.double().clone()} | moments)
        if has_master:
            kept[-1]["master"] = master.clone()
    return kept


def norm_of(tensor: Tensor) -> float:
    return tensor.double().norm().item()


def expected(optimizer: Any, before: list[Any], after: list[Any]) -> dict[str, Any]:
    """What differs between two copies around a step."""
    names = [
        f"group {number}, param {index}"
        for number, group in enumerate(optimizer.param_groups)
        for index in range(len(group["params"]))
    ]
    found = {}
    for name, param, was, now in zip(names, params_of(optimizer), before, after, strict=True):
        if param.grad is None:
            continue
        update, norm = now["weight"] - was["weight"], norm_of(was["weight"])
        share = {
            key: now[key].eq(was[key]).double().mean().item() if param.numel() else 0.0
            for key in ("param", "master")
            if key in was
        }
        found[name] = {
            "norm": norm,
            "update_norm": norm_of(update),
            "ratio": norm_of(update) / norm if norm_of(update) else 0.0,
            "largest_update": update.abs().max().item() if param.numel() else 0.0,
            "moment_norms": {
                key: norm_of(each)
                for key, each in now.items()
                if key not in ("param", "weight", "master")
            },
            "unmoved": share["param"],
            "unmoved_master": share.get("master"),
        }
    return found


def assert_close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, numbers in wanted.items():
        got = dict(found[name])
        for key, value in numbers.items():
            is_empty = value is None or value == {}
            close = value if is_empty else pytest.approx(value, rel=1e-9, abs=0, nan_ok=True)
            assert got.pop(key) == close, (name, key)
        assert not got


def inspect_and_step(optimizer: Any, way: Way, scaler: Any = None, twin: Any = None) -> Any:
    """Asserts that an inspection tells what the next step does, and changes nothing."""
    other_scaler = None if scaler is None else copy.deepcopy(scaler)
    twin = copied(optimizer) if twin is None else twin
    if way.unscale_first:
        scaler.unscale_(optimizer)
    grads = [grad.clone() for grad in grads_of(optimizer)]
    left, before = everything(optimizer, scaler), state_spec_of(optimizer)
    inspection = optimizer.inspect(scaler)
    assert same(everything(optimizer, scaler), left)
    assert all(map(same_bits, grads_of(optimizer), grads))
    optimizer.inspect_next()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    assert_close(
        inspection.to_dict()["params"], expected(optimizer, before, state_spec_of(optimizer))
    )
    assert optimizer.inspection.skipped == inspection.skipped
    assert_close(optimizer.inspection.to_dict()["params"], inspection.to_dict()["params"])
    if other_scaler is not None:
        other_scaler.scale(torch.ones((), device=params_of(twin)[0].device))
    way.step(twin, other_scaler)
    assert_same_bits(optimizer, twin)
    if scaler is not None:
        assert scaler.state_dict() == other_scaler.state_dict()
    return inspection


# As those of the forms, but small.
SHAPES = [(33, 32), (8, 32, 3, 3), (7, 33), (4099,), (3, 5), (), (0, 32)]


@each_form_and_setting
def test_it_tells_what_the_step_does_in_every_form(device, name, options, dtype, kept):
    optimizer = ours(name)(make_params(dtype, device, SHAPES), **options, **kept)
    for _ in range(2):  # the first makes the states
        inspection = inspect_and_step(with_grads(optimizer), Way(None))
    assert not inspection.skipped
    assert any(param.update_norm > 0 for param in inspection.params.values())


# Small ones, where nothing depends on the form.
FEW_SHAPES = [(40, 32), (3, 5), (), (200,), (0, 4), (7,)]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"max_grad_norm": 3.0},
    "norm-and-value": {"max_grad_norm": 30.0, "clip_value": 0.25},
    "write-back": {"write_back_grads": True, "clip_value": 0.25},
    "finite-elements": {"skip_nonfinite": True, "max_grad_norm": 30.0},
    "dither": {"master_weights": False, "rounding": "dither"},
    "tensor-lr": {"lr": torch.tensor(0.01)},
    "norms": {"track_grad_norms": True},
    "three-moments": {"amsgrad": True},
}


# Under torch's scaler, and of NaN, what the others don't show.
EACH_WAY = {
    f"{way.id}-{key}-{bad}": (*way.values, options, bad)
    for way, (key, options), bad in itertools.product(WAYS, OPTIONS.items(), [None, INF, NAN])
    if key == "norm" or (bad is not NAN and (way in WAYS[:3] or key == "finite-elements"))
}


@pytest.mark.parametrize(("way", "options", "bad"), rows(EACH_WAY))
def test_it_tells_what_the_step_does_in_every_way(way: Way, options, bad, device):
    """Also of a gradient that is not finite: some skip the step, some an element, some nothing."""
    dtype = BF16 if way.takes(BF16, device) else F32
    optimizer = trained(ours("AdamW")(make_params(dtype, device, FEW_SHAPES), **options), 1)
    scaler = way.make_scaler(device)
    scale_grads(with_grads(optimizer), scaler)
    if bad is not None:
        params_of(optimizer)[3].grad[77] = bad
    inspection = inspect_and_step(optimizer, way, scaler)
    assert inspection.skipped == (bad is not None and scaler is not None)
    if inspection.skipped:
        assert "skipped" in str(inspection)
        assert all(param.update_norm == 0 for param in inspection.params.values())


@pytest.mark.parametrize("kept", [{}, {"master_weights": False}, {"master_weights": "split8"}])
def test_layouts_are_walked_as_the_step_walks_them(kept, device):
    """The order of elements in memory decides where a number is dithered."""
    layouts = (channels_last, transposed, strided, sliced)
    dense = make_params(BF16, device, [(8, 32, 3, 4)] * len(layouts))
    params = [Parameter(placed(each.detach(), at)) for each, at in zip(dense, layouts, strict=True)]
    optimizer = ours("AdamW")(params, lr=0.01, state_dtype=BF16, **kept)
    for _ in range(2):
        inspect_and_step(with_grads(optimizer), Way(None))


def test_a_parameter_that_was_written_counts_as_it_is_now(device):
    """Its master follows before it is stepped; one that was written itself is stepped from."""
    optimizer = trained(make("AdamW", BF16, device))
    with torch.no_grad():
        params_of(optimizer)[0].mul_(3)
    inspect_and_step(with_grads(optimizer), Way(None))
    master = optimizer.state[params_of(optimizer)[0]]["master_param"]
    master.fill_(2.0)
    with_grads(optimizer)
    inspection = optimizer.inspect()
    optimizer.step()
    found = inspection.params["group 0, param 0"]
    assert found.norm == pytest.approx(2 * math.sqrt(master.numel()))
    assert found.update_norm == pytest.approx(norm_of(master.double() - 2.0), rel=1e-9)


def double_grads(optimizer: Any, args: Any, kwargs: Any) -> None:
    for grad in grads_of(optimizer):
        grad.mul_(2)


def test_a_hook_counts_for_the_next_step_and_a_second_look_for_the_inspection(device):
    """A gradient that is written after the scaler's look is looked at anew, in both."""
    scaler = amp_ext.GradScaler(device.type, 8.0)
    optimizer = make("AdamW", F32, device, max_grad_norm=1.0)
    optimizer.register_step_pre_hook(double_grads)
    optimizer._has_warned_of_hooks = True
    scale_grads(with_grads(optimizer), scaler)
    before = state_spec_of(optimizer)
    optimizer.inspect_next()
    scaler.step(optimizer)
    wanted = expected(optimizer, before, state_spec_of(optimizer))
    assert_close(optimizer.inspection.to_dict()["params"], wanted)


def test_an_inspection_keeps_the_look_of_a_scaler(device):
    """One between a look by hand and its step leaves both as they are, and the scale's update."""
    optimizer = make("SGD", F32, device, lr=0.1, max_grad_norm=1.0)
    twin = copied(with_grads(optimizer))
    for each in (optimizer, twin):
        params_of(each)[0].grad[0, 0] = INF
        each.scan_gradients(torch.zeros((), device=device))
        params_of(each)[0].grad[0, 0] = 0.0
    scan = optimizer.inspect()
    for each in (optimizer, twin):
        each.step()
    assert_same_bits(optimizer, twin)
    assert not scan.skipped


def test_there_is_nothing_to_inspect_but_before_a_step(device):
    optimizer = make("AdamW", F32, device)
    got_none = (
        "^AdamW.inspect: there are no gradients to inspect. Call inspect.. after backward.. and"
    )
    with pytest.raises(RuntimeError, match=got_none):
        optimizer.inspect()
    scaler = amp_ext.GradScaler(device.type, 4.0)
    with pytest.raises(RuntimeError, match="inspect: this scaler has not scaled a loss yet"):
        optimizer.inspect(scaler)
    with pytest.raises(TypeError, match="scaler must be a torch"):
        optimizer.inspect(optimizer)
    for step in (lambda: optimizer.step(), lambda: scaler.step(optimizer)):
        scale_grads(with_grads(optimizer), scaler)
        optimizer.inspect()
        step()
        with pytest.raises(
            RuntimeError, match="inspect: the last step has already used these gradients"
        ):
            optimizer.inspect()
    with pytest.raises(RuntimeError, match=r"inspect: scaler\.step\(\) has already used these"):
        optimizer.inspect(scaler)
    scaler.update()
    with pytest.raises(
        RuntimeError, match="inspect: the last step has already used these gradients"
    ):
        optimizer.inspect(scaler)
    optimizer.zero_grad(set_to_none=False)  # they are written, if with zeros
    assert optimizer.inspect(scaler).params


def test_a_refused_step_refuses_the_inspection_in_the_same_words(device):
    optimizer = trained(make("AdamW", F32, device))
    with_grads(optimizer)
    params_of(optimizer)[1].grad = params_of(optimizer)[1].grad.to_sparse()
    with pytest.raises(RuntimeError, match=r"^AdamW does not support sparse gradients: grad "):
        optimizer.inspect()
    params_of(optimizer)[1].grad = None
    state = optimizer.state[params_of(optimizer)[0]]
    before = state["exp_avg"]
    state["exp_avg"] = before[1:]
    with pytest.raises(RuntimeError, match=r"^AdamW: exp_avg of group 0, param 0 must be of "):
        optimizer.inspect()
    state["exp_avg"] = before
    inspect_and_step(with_grads(optimizer), Way(None))


def test_a_table_a_dict_a_pickle_and_a_picture_show_it(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).to(BF16)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
            param.grad = torch.ones_like(param)
    optimizer = amp_ext.optim.SGD(model.named_parameters(), lr=2.0**-10)
    inspection = optimizer.inspect()
    assert not optimizer.state
    assert list(inspection.params) == [name for name, _ in model.named_parameters()]
    weight = inspection.params["0.weight"]
    assert (weight.norm, weight.update_norm, weight.ratio) == (2.0, 2.0**-9, 2.0**-10)
    assert (weight.unmoved, weight.unmoved_master, weight.moment_norms) == (1.0, 0.0, {})
    lines = str(inspection).splitlines()
    assert lines[0].split() == ["norm", "update", "ratio", "largest", "unmoved", "of", "master"]
    numbers = ["2", "0.00195", "0.000977", "0.000977", "100.0%", "0.0%"]
    assert lines[1].split() == ["0.weight", *numbers]
    assert repr(inspection) == str(inspection)  # in a notebook
    other = pickle.loads(pickle.dumps(inspection))
    assert (other.to_dict(), str(other)) == (inspection.to_dict(), str(inspection))
    pytest.importorskip("matplotlib")
    inspection.plot(tmp_path / "updates.png")
    assert (tmp_path / "updates.png").stat().st_size > 10_000


def test_a_copy_forgets_it_and_a_load_ends_it():
    optimizer = with_grads(make("AdamW", F32))
    optimizer.inspect_next()
    other = copied(optimizer)
    for each in (optimizer, other):
        each.step()
    assert optimizer.inspection is not None
    assert other.inspection is None
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.inspection is None


def test_a_step_that_is_refused_or_has_no_gradients_leaves_it_to_the_next(device):
    param = Parameter(torch.ones(4, device=device))
    optimizer = amp_ext.optim.SGD([param], lr=0.5)
    optimizer.inspect_next()
    optimizer.step()
    assert optimizer.inspection is None
    param.grad = torch.ones(4, device=device).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    param.grad = torch.ones_like(param)
    optimizer.step()
    (inspected,) = optimizer.inspection.params.values()
    assert inspected.update_norm == 1.0
    optimizer.step()
    assert next(iter(optimizer.inspection.params.values())).norm == 2.0, "that of the step before"
