"""Loads come whole or not at all, and what is refused changes no state."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F32
from harness.optimizer_cases import make_params, ours, params_of, trained, twins
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map

import amp_ext

SHAPES = [(5, 3), (7,)]
of_two = pytest.mark.parametrize("name", ["AdamW", "SGD"])  # they run the same lines
MOMENTUM = {"SGD": {"momentum": 0.9, "dampening": 0.5}}


def all_of(optimizer: torch.optim.Optimizer) -> Any:
    """Returns all options, states and hooks of an optimizer, for comparison."""
    values = tree_map(
        lambda leaf: (leaf.dtype, leaf.tolist()) if isinstance(leaf, Tensor) else leaf,
        (optimizer.state_dict(), params_of(optimizer)),
    )
    hooks = {name: len(value) for name, value in vars(optimizer).items() if name.endswith("hooks")}
    return repr((values, hooks))


def after_a_step(optimizer: torch.optim.Optimizer) -> str:
    for param in params_of(optimizer):
        param.grad = torch.ones_like(param)
    optimizer.step()
    return all_of(optimizer)


def source_and_target(name: str) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Returns an optimizer to load, and another one of the same parameters."""
    torch.manual_seed(0)
    options = MOMENTUM.get(name, {})
    source = trained(ours(name)(make_params(BF16, shapes=SHAPES), **options, lr=0.5))
    return source, trained(ours(name)(twins(source), **options, lr=0.25), 1)


@of_two
def test_a_load_that_ctrl_c_interrupts_has_loaded_all_or_nothing(name):
    source, target = source_and_target(name)
    file = copy.deepcopy(source.state_dict())
    before = all_of(target)
    target.load_state_dict(file)
    allowed = {before, all_of(target)}
    assert len(allowed) == 2
    went_on = {all_of(one): after_a_step(one) for one in (target, source_and_target(name)[1])}
    lines: set[tuple[str, int]] = set()
    found = set()

    def interrupt(frame: Any, event: str, argument: Any) -> Any:
        line = frame.f_code.co_filename, frame.f_lineno
        if not line[0].startswith(str(Path(amp_ext.__file__).parent)):
            return None
        if event == "line" and line not in lines:
            lines.add(line)
            raise KeyboardInterrupt
        return interrupt

    before, is_done = sys.gettrace(), False
    while not is_done:  # at each line in turn, the first time that it is run
        target = source_and_target(name)[1]
        sys.settrace(interrupt)
        try:
            target.load_state_dict(file)
            is_done = True
        except KeyboardInterrupt:
            state = all_of(target)
        finally:
            sys.settrace(before)
        if not is_done:
            assert state in allowed
            assert after_a_step(target) == went_on[state]
            found.add(state)
    assert found == allowed


def test_groups_of_a_checkpoint_that_share_a_learning_rate_go_on_sharing_it():
    def make(package: Any) -> torch.optim.Optimizer:
        lr = torch.tensor(0.5)
        groups = [{"params": [param], "lr": lr} for param in make_params(F32, shapes=SHAPES)]
        return package("AdamW")(groups, foreach=False)

    for package in (ours, cases.theirs):
        source, target = make(package), make(package)
        target.load_state_dict(source.state_dict())
        rates = [group["lr"] for group in target.param_groups]
        assert rates[0] is rates[1]
        assert rates[0] is not source.param_groups[0]["lr"]


# States made ahead, and those of a file.


@pytest.mark.parametrize("method", ["init_state", "master_params", "load_state_dict"])
def test_a_lazy_parameter_is_refused_by_name_before_any_state_is_made(method):
    lazy = torch.nn.LazyLinear(3)
    optimizer = ours("AdamW")([Parameter(torch.ones(2)), lazy.weight])
    loads = method == "load_state_dict"
    arguments = [trained(ours("AdamW")(make_params(F32, shapes=[(2,), (3, 2)]))).state_dict()]
    words = "param of group 0, param 1 is a lazy parameter, which has no shape yet"
    words = rf"^AdamW.{method if loads else 'init_state'}: {words}"
    with pytest.raises(ValueError if loads else RuntimeError, match=words):
        getattr(optimizer, method)(*arguments[: int(loads)])
    assert optimizer.state_dict()["state"] == {}
    lazy(torch.ones(1, 2))
    getattr(optimizer, method)(*arguments[: int(loads)])
    assert len(optimizer.state) == 2


SWITCHED = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {"state_dtype": "8bit"},
    "Lion": {"master_weights": "split"},
}


@pytest.mark.parametrize("refused_for", ["scale", "gradient"])
@cases.each_name
def test_a_step_that_is_refused_leaves_states_as_they_were(name, refused_for):
    """Also where it would have made what options ask for that were switched on since."""
    torch.manual_seed(0)
    optimizer = trained(ours(name)(make_params(BF16, shapes=SHAPES), lr=0.5, rounding="dither"))
    if refused_for == "scale":
        scaler = amp_ext.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        words = "still carries the loss scale, because"
    else:
        last = params_of(optimizer)[-1]
        last.grad = last.grad.to_sparse()
        words = "sparse"
    for group in optimizer.param_groups:
        group.update(SWITCHED.get(name, SWITCHED["AdamW"]))
    before = {param: dict(state) for param, state in optimizer.state.items()}
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()
    assert optimizer.state == before
