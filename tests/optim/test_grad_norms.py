"""The norm of each gradient, which a step keeps when it is asked to."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from harness.clipping_cases import WAYS, Way, fused_step
from harness.edge_shapes import BF16, F16, F32, F64, INF, NAN
from harness.optimizer_cases import ours
from harness.reference import same_bits
from torch import Tensor
from torch.nn import Parameter

import amp_ext

# Less and more than a tile of any kernel, of many tiles, and of no element.
SIZES = [1, 7, 0, 8193, 16384, 16385, 200_003, 33]


def params_with_grads(way: Way, device: torch.device) -> list[Parameter]:
    """Parameters of all dtypes of a way, in turns; the last has no gradient."""
    torch.manual_seed(0)
    dtypes = [dtype for dtype in (F32, F16, BF16, F64) if way.takes(dtype, device)]
    params = []
    for index, size in enumerate(SIZES):
        dtype = dtypes[index % len(dtypes)]
        params.append(Parameter(torch.randn(size).to(dtype).to(device)))
        params[-1].grad = torch.randn(size).to(dtype).to(device)
    params[-1].grad = None
    return params


def norms_of(params: list[Parameter]) -> list[float]:
    return [
        math.nan if param.grad is None else param.grad.double().norm().item() for param in params
    ]


def optimizer_of(params: list[Parameter], name: str = "AdamW", **options: Any) -> Any:
    half = len(params) // 2
    groups = [{"params": params[:half]}, {"params": params[half:]}]
    return ours(name)(groups, **options, track_grad_norms=True)


def assert_norms(actual: Tensor, expected: list[float]) -> None:
    assert actual.dtype == F32
    wanted = torch.tensor(expected, dtype=F64)
    torch.testing.assert_close(actual.double().cpu(), wanted, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("clipping", [{}, {"max_grad_norm": 3.0}], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("way", WAYS)
def test_they_are_those_of_the_unscaled_gradients(way: Way, clipping, device):
    params = params_with_grads(way, device)
    expected = norms_of(params)
    twins = copy.deepcopy(params)
    for param, twin in zip(params, twins, strict=True):
        twin.grad = None if param.grad is None else param.grad.clone()
    optimizer, other = optimizer_of(params, **clipping), optimizer_of(twins, **clipping)
    other.track_grad_norms = False
    for side in (optimizer, other):
        fused_step(side, way, way.make_scaler(device))
    assert_norms(optimizer.grad_norms, expected)
    total = math.sqrt(math.fsum(norm**2 for norm in expected if not math.isnan(norm)))
    assert_norms(optimizer.grad_norm, total)
    assert other.grad_norms is None
    for param, twin in zip(params, twins, strict=True):
        assert same_bits(param, twin), "the step is the same"


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("skips", [False, True], ids=["", "finite-elements"])
def test_a_gradient_that_is_not_finite_has_an_infinite_norm(bad, skips, device):
    params = params_with_grads(Way(None), device)
    expected = norms_of(params)
    params[3].grad[8192], params[6].grad[-1] = bad, bad
    expected[3] = expected[6] = INF
    optimizer = optimizer_of(params, skip_nonfinite=skips)
    optimizer.step()
    assert_norms(optimizer.grad_norms, expected)
    assert optimizer.grad_norm.item() == INF


def test_a_skipped_step_has_norms_and_they_stay_until_the_next_step(device):
    params = params_with_grads(Way(amp_ext.GradScaler), device)
    optimizer, scaler = optimizer_of(params, "SGD", lr=0.1), amp_ext.GradScaler(device.type, 8.0)
    scaler.scale(torch.zeros((), device=device))
    before = params[0].detach().clone()
    params[0].grad.fill_(INF)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    first = optimizer.grad_norms
    assert first[0].item() == INF
    assert same_bits(params[0], before)
    for param in params:
        param.grad = torch.full_like(param, 4.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert first[0].item() == INF
    assert_norms(optimizer.grad_norms, [math.sqrt(size) for size in SIZES])


def test_they_are_those_before_a_step_that_writes_back_what_it_clipped(device):
    params = params_with_grads(Way(None), device)
    expected = norms_of(params)
    optimizer = optimizer_of(params, max_grad_norm=1.0, write_back_grads=True)
    optimizer.step()
    assert_norms(optimizer.grad_norms, expected)
    assert max(norms_of(params[:-1])) < 1.0


def test_they_follow_groups_and_end_with_the_attribute(device):
    params = params_with_grads(Way(None), device)
    optimizer = optimizer_of(params, "Lion")
    assert optimizer.grad_norms is None
    optimizer.step()
    assert len(optimizer.grad_norms) == len(params)
    new = Parameter(torch.ones(4, device=device))
    new.grad = torch.ones_like(new)
    optimizer.add_param_group({"params": [new]})
    optimizer.step()
    assert_norms(optimizer.grad_norms, [*norms_of(params), 2.0])
    for group in optimizer.param_groups[:2]:
        group["params"].clear()
    optimizer.step()
    assert_norms(optimizer.grad_norms, [2.0])
    optimizer.param_groups[2]["params"].clear()
    optimizer.step()
    assert optimizer.grad_norms is None
    optimizer.param_groups[2]["params"].append(new)
    optimizer.track_grad_norms = False
    optimizer.step()
    assert optimizer.grad_norms is None
    assert optimizer.grad_norm is None


def test_tensors_without_elements_have_a_norm_of_zero(device):
    """Also where a launch of a GPU has no others."""
    sizes = {F16: [0, 0], F32: [50_000, 70_000, 0]}
    params = [
        Parameter(torch.ones(size, dtype=dtype, device=device))
        for dtype, each in sizes.items()
        for size in each
    ]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = optimizer_of(params)
    for _ in range(2):
        optimizer.step()
        assert_norms(optimizer.grad_norms, norms_of(params))


def test_names_stand_beside_them_for_people():
    model = torch.nn.Linear(3, 2)
    optimizer = amp_ext.optim.SGD(model.named_parameters(), lr=0.1)
    message = r"^SGD\.named_grad_norms: no step has recorded gradient norms yet\. Set optimizer"
    with pytest.raises(RuntimeError, match=message):
        optimizer.named_grad_norms()
    wrong = pytest.raises(TypeError, match=r"^SGD: track_grad_norms must be a bool, got 1$")
    with wrong:
        amp_ext.optim.SGD(model.parameters(), track_grad_norms=1)
    with wrong:
        optimizer.track_grad_norms = 1
    optimizer.track_grad_norms = True
    model.weight.grad = torch.full_like(model.weight, 0.5)
    optimizer.step()
    expected = {"weight": pytest.approx(math.sqrt(1.5))}
    assert optimizer.named_grad_norms() == expected
    optimizer.add_param_group({"params": [("more", Parameter(torch.ones(2)))]})
    optimizer.param_groups[0]["params"].reverse()
    optimizer.param_groups[0]["param_names"].reverse()
    assert optimizer.named_grad_norms() == expected
    # A step that is refused leaves no norms of the parameters that there are now.
    optimizer.param_groups[1]["momentum"] = 0.9
    (joined,) = optimizer.param_groups[1]["params"]
    optimizer.state[joined] = {"momentum_buffer": torch.zeros(7)}
    joined.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="momentum_buffer of group 1, param 0"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=message):
        optimizer.named_grad_norms()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_track_them_and_files_know_nothing_of_it(copied):
    params = params_with_grads(Way(None), torch.device("cpu"))
    optimizer = optimizer_of(params)
    optimizer.step()
    state_dict = optimizer.state_dict()
    assert not [name for group in state_dict["param_groups"] for name in group if "track" in name]
    other = copied(optimizer)
    assert other.track_grad_norms
    assert other.grad_norms is None
    optimizer.load_state_dict(state_dict)
    assert optimizer.track_grad_norms
    assert optimizer.grad_norms is None
