"""Groups whose parameters a loop put into another container than a list."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import F32
from harness.optimizer_cases import give_grads, make_params, ours, params_of
from harness.reference import same_bits
from harness.rows import rows

import amp_ext

CONTAINERS = {
    "tuple": tuple,
    "deque": collections.deque,
    "module": torch.nn.ParameterList,
    "keys": lambda params: dict.fromkeys(params).keys(),
    "values": lambda params: dict(enumerate(params)).values(),
}


def used_up(params: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    iterator = iter(params)
    collections.deque(iterator, maxlen=0)
    return iterator


# What can be read only once, or in another order in another process.
REFUSED = {
    "list_iterator": iter,
    "generator": lambda params: (param for param in params),
    "used-up": used_up,
    "set": set,
    "frozenset": frozenset,
}
# What reads them, and what the error calls it.
READERS: dict[str, tuple[str, Callable[[Any, amp_ext.GradScaler], Any]]] = {
    "step": ("AdamW.step", lambda optimizer, scaler: optimizer.step()),
    "scaler.step": ("AdamW.scan_gradients", lambda optimizer, scaler: scaler.step(optimizer)),
    "unscale_": ("GradScaler", lambda optimizer, scaler: scaler.unscale_(optimizer)),
    "init_state": ("AdamW.init_state", lambda optimizer, scaler: optimizer.init_state()),
    "refresh": ("AdamW.refresh_masters", lambda optimizer, scaler: optimizer.refresh_masters()),
    "save": ("AdamW.state_dict", lambda optimizer, scaler: optimizer.state_dict()),
}


@pytest.mark.parametrize("container", rows(CONTAINERS))
@cases.each_name
def test_parameters_are_taken_from_any_sequence(name, container):
    optimizer, wanted = cases.pair(name, {})
    optimizer.param_groups[0]["params"] = container(optimizer.param_groups[0]["params"])
    cases.train([wanted, optimizer], 3)
    assert all(map(same_bits, params_of(optimizer), params_of(wanted)))
    optimizer.load_state_dict(wanted.state_dict())


# Every container in a step, and every reader of one.
READ = {
    f"{key}-{reader}": (container, reader)
    for key, container in REFUSED.items()
    for reader in READERS
    if reader == "step" or key == "generator"
}


@pytest.mark.parametrize(("container", "reader"), rows(READ))
def test_parameters_that_can_not_be_read_again_are_refused(container, reader):
    params = make_params(F32)
    optimizer = ours("AdamW")(params)
    cases.train([optimizer])
    saved = optimizer.state_dict()
    give_grads(params)
    before = cases.bits_of(optimizer)
    held = optimizer.param_groups[0]["params"] = container(params)
    scaler = amp_ext.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    what, read = READERS[reader]
    words = rf"^{what}: params of group 0 must be a list, got {type(held).__name__}$"
    for _ in range(2):  # it does not use an iterator up
        with pytest.raises(TypeError, match=words):
            read(optimizer, scaler)
    with pytest.raises(TypeError, match="load_state_dict: params of group 0 must be a list"):
        optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["params"] = params
    cases.assert_same_bits(optimizer, before)
    optimizer.step()
    assert not same_bits(params[0], before[0]["param"])


@pytest.mark.parametrize("container", [set, frozenset])
@cases.each_name
def test_a_constructor_refuses_a_set(name, container):
    """torch takes it; from 2.15 on it warns."""
    message = rf"^{name}: params must be ordered, such as a list, got {container.__name__}$"
    with pytest.raises(TypeError, match=message):
        ours(name)(container(make_params(F32)))
