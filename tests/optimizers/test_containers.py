"""Groups whose parameters a loop put into another container than a list."""

from __future__ import annotations

import collections

import optimizer_cases as cases
import pytest
import torch
from awkward import F32
from optimizer_cases import give_grads, make_params, ours, params_of
from reference import same_bits
from rows import rows

import amp_ext

CONTAINERS = {"tuple": tuple, "deque": collections.deque, "module": torch.nn.ParameterList}


@pytest.mark.parametrize("scaled", [False, True], ids=["alone", "under-a-scaler"])
@pytest.mark.parametrize("container", rows(CONTAINERS))
@cases.each_name
def test_parameters_are_taken_from_any_sequence(name, container, scaled):
    params = make_params(F32)
    wanted = ours(name)(params)
    optimizer = ours(name)([torch.nn.Parameter(param.detach().clone()) for param in params])
    optimizer.param_groups[0]["params"] = container(optimizer.param_groups[0]["params"])
    scaler = amp_ext.GradScaler("cpu", init_scale=1.0, enabled=scaled)
    for _ in range(3):
        give_grads(wanted, optimizer)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        if scaled:
            scaler.update()
        wanted.step()
    assert all(map(same_bits, params_of(optimizer), params))
    optimizer.load_state_dict(wanted.state_dict())
