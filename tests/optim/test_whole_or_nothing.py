"""Loads come whole or not at all, and what is refused changes no state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F32
from harness.optimizer_cases import make_params, ours, params_of, trained
from torch.nn import Parameter

import amp_ext

SHAPES = [(5, 3), (7,)]


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
