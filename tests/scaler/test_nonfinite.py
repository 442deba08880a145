"""Tests of finding tensors with inf or NaN, and of dropping an iteration with a bad loss."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from reference import same_bits
from torch import Tensor, nn
from torch.nn import Parameter

import amp_ext

INF = math.inf
NAN = math.nan
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


class Model(nn.Module):
    """Two layers, a batch norm with its buffers and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.frozen = Parameter(torch.ones(5), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.body(inputs)))


def new_model(device: Any = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(3)
    return Model().to(device, dtype)


def with_clean_grads(model: nn.Module) -> nn.Module:
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.ones_like(param)
    return model


def spoil(tensor: Tensor, *values: float) -> None:
    """Writes values over the first elements of a tensor."""
    with torch.no_grad():
        for index, value in enumerate(values):
            tensor.view(-1)[index] = value


def holder(**tensors: Tensor) -> nn.Module:
    """Returns a module with these parameters, each with a gradient of ones, and buffers."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, Parameter):
            setattr(module, name, tensor)
        else:
            module.register_buffer(name, tensor)
    return module


# find_nonfinite


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bad_gradients_of_a_model_are_counted_by_name(dtype: torch.dtype, device) -> None:
    model = with_clean_grads(new_model(device, dtype))
    assert amp_ext.find_nonfinite(model) == {}
    spoil(model.head.weight.grad, NAN, 1.0, INF, -INF)
    spoil(model.body.bias.grad, -INF)
    found = amp_ext.find_nonfinite(model)
    assert list(found.items()) == [("body.bias", 1), ("head.weight", 3)], "in the model's order"
    assert {type(count) for count in found.values()} == {int}


def test_finding_changes_nothing(device) -> None:
    model = with_clean_grads(new_model(device))
    spoil(model.head.weight.grad, NAN)
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [param.grad for param in model.parameters() if param.grad is not None]
    before = [tensor.detach().clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    grads = [param.grad for param in model.parameters()]
    amp_ext.find_nonfinite(model)
    amp_ext.find_nonfinite(model, params=True)
    assert all(map(same_bits, tensors, before))
    assert [tensor._version for tensor in tensors] == versions
    assert all(now.grad is then for now, then in zip(model.parameters(), grads, strict=True))


def test_parameters_and_buffers_are_looked_at_on_request(device) -> None:
    model = with_clean_grads(new_model(device))
    spoil(model.body.weight.grad, NAN)
    spoil(model.head.bias, NAN, INF)
    spoil(model.norm.running_var, INF)
    spoil(model.frozen, NAN)
    assert amp_ext.find_nonfinite(model) == {"body.weight": 1}
    found = amp_ext.find_nonfinite(model, params=True)
    assert list(found.items()) == [("frozen", 1), ("head.bias", 2), ("norm.running_var", 1)]


def test_buffers_of_other_kinds_are_passed_over(device) -> None:
    model = holder(
        count=torch.tensor(7, device=device),
        mask=torch.ones(3, dtype=torch.bool, device=device),
        empty=torch.empty(0, device=device),
        bad=torch.full((2,), NAN, device=device),
    )
    assert amp_ext.find_nonfinite(model, params=True) == {"bad": 2}
    assert amp_ext.find_nonfinite(model) == {}


@pytest.mark.parametrize("params", [False, True], ids=["gradients", "parameters"])
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(None, ["group 0, param 1", "group 1, param 0"], id="without-names"),
        pytest.param("abc", ["b", "c"], id="with-names"),
        pytest.param("aba", ["b", "group 1, param 0 (a)"], id="a-name-twice"),
        pytest.param("bbb", ["group 0, param 1 (b)", "group 1, param 0 (b)"], id="thrice"),
    ],
)
@pytest.mark.parametrize(
    "optimizer_class", [torch.optim.SGD, amp_ext.optim.SGD, amp_ext.optim.Adam]
)
def test_an_optimizer_names_its_parameters(
    optimizer_class: type, names: str | None, expected: list[str], params: bool, device
) -> None:
    tensors = [Parameter(torch.ones(4, device=device)) for _ in range(3)]
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    for number in (1, 2):
        tensor = tensors[number]
        spoil(tensor if params else tensor.grad, *[NAN] * number)
    rows = list(zip(names, tensors, strict=True)) if names else tensors
    optimizer = optimizer_class([{"params": rows[:2]}, {"params": rows[2:]}], lr=0.1)
    found = amp_ext.find_nonfinite(optimizer, params=params)
    assert list(found.items()) == [(expected[0], 1), (expected[1], 2)]


def test_anything_with_groups_is_an_optimizer() -> None:
    class Duck:
        param_groups = ({"params": [Parameter(torch.full((2,), INF))]},)

    assert amp_ext.find_nonfinite(Duck(), params=True) == {"group 0, param 0": 2}
    assert amp_ext.find_nonfinite(Duck()) == {}


@pytest.mark.parametrize(
    "source",
    [
        pytest.param([torch.ones(2)], id="list"),
        pytest.param(torch.ones(2), id="tensor"),
        pytest.param(None, id="none"),
    ],
)
def test_other_sources_are_refused(source: Any) -> None:
    kind = type(source).__name__
    text = "find_nonfinite: source must be a torch.nn.Module or a torch.optim.Optimizer, got "
    with pytest.raises(TypeError, match=f"^{text}{kind}$"):
        amp_ext.find_nonfinite(source)


def test_nothing_to_look_at_finds_nothing(device) -> None:
    assert amp_ext.find_nonfinite(nn.Module()) == {}
    assert amp_ext.find_nonfinite(new_model(device)) == {}, "no gradient yet"
    model = holder(empty=Parameter(torch.empty(0, device=device)))
    assert amp_ext.find_nonfinite(with_clean_grads(model)) == {}
    assert amp_ext.find_nonfinite(model, params=True) == {}


def test_frozen_parameters_count_only_if_they_have_a_gradient(device) -> None:
    model = with_clean_grads(new_model(device))
    model.body.requires_grad_(False)
    spoil(model.body.weight.grad, NAN)
    assert amp_ext.find_nonfinite(model) == {"body.weight": 1}
    model.zero_grad()
    assert amp_ext.find_nonfinite(model) == {}


def test_tied_parameters_are_named_once(device) -> None:
    model = new_model(device)
    model.tied = nn.Linear(3, 4, device=device)
    model.tied.weight = model.body.weight
    with_clean_grads(model)
    spoil(model.body.weight.grad, NAN)
    assert amp_ext.find_nonfinite(model) == {"body.weight": 1}


@pytest.mark.parametrize(
    ("indices", "values", "expected"),
    [
        pytest.param([1, 3], [1.0, NAN], 1, id="coalesced"),
        pytest.param([1, 1, 2], [1.0, INF, INF], 2, id="duplicates"),
        pytest.param([0, 0], [3e38, 3e38], 1, id="a-sum-that-overflows"),
        pytest.param([0, 0], [INF, -INF], 1, id="a-sum-that-is-nan"),
        pytest.param([], [], 0, id="empty"),
    ],
)
def test_sparse_gradients_are_counted(
    indices: list[int], values: list[float], expected: int, device
) -> None:
    param = Parameter(torch.ones(5, device=device))
    param.grad = torch.sparse_coo_tensor(
        torch.tensor([indices], dtype=torch.int64),
        torch.tensor(values),
        (5,),
        device=device,
        check_invariants=True,
    )
    found = amp_ext.find_nonfinite(holder(table=param))
    assert found == ({"table": expected} if expected else {})


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc], ids=str)
def test_compressed_sparse_tensors_are_counted(layout: torch.layout, device) -> None:
    dense = torch.tensor([[1.0, 0.0, NAN], [0.0, INF, 0.0]], device=device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CS[RC]")
        model = holder(compressed=dense.to_sparse(layout=layout))
    assert amp_ext.find_nonfinite(model, params=True) == {"compressed": 2}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_both_parts_of_complex_numbers_are_counted(dtype: torch.dtype, device) -> None:
    param = Parameter(torch.ones(4, dtype=dtype, device=device))
    param.grad = torch.tensor(
        [complex(NAN, 0), complex(0, INF), complex(INF, NAN), 1], dtype=dtype, device=device
    )
    model = holder(wave=param)
    assert amp_ext.find_nonfinite(model) == {"wave": 4}
    param.grad = param.grad.conj()
    assert param.grad.is_conj()
    assert amp_ext.find_nonfinite(model) == {"wave": 4}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_8_bit_numbers_are_counted(dtype: torch.dtype, device) -> None:
    buffer = torch.tensor([1.0, NAN, 448.0, NAN], device=device).to(dtype)
    assert amp_ext.find_nonfinite(holder(small=buffer), params=True) == {"small": 2}


def test_all_dtypes_and_layouts_may_stand_side_by_side(device) -> None:
    bases = [torch.ones(6, 4, dtype=dtype, device=device) for dtype in DTYPES]
    for number, base in enumerate(bases):
        spoil(base, *[NAN] * number, *[1.0] * (6 - number), INF)  # the column beside is not ours
    views = [base.t()[:2] for base in bases]
    model = nn.ParameterList([Parameter(torch.ones_like(view)) for view in views])
    for param, view in zip(model, views, strict=True):
        param.grad = view
    expected = {str(i): int((~view.isfinite()).sum()) for i, view in enumerate(views)}
    assert amp_ext.find_nonfinite(model) == {k: v for k, v in expected.items() if v}
    assert len(set(expected.values())) > 2


def test_many_parameters_are_counted_each(device) -> None:
    model = nn.ParameterList([Parameter(torch.ones(3, device=device)) for _ in range(500)])
    with_clean_grads(model)
    bad = {0: 1, 255: 2, 256: 3, 499: 1}
    for index, count in bad.items():
        spoil(model[index].grad, *[NAN] * count)
    assert amp_ext.find_nonfinite(model) == {str(index): count for index, count in bad.items()}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_with_a_graph_are_looked_at(device) -> None:
    param = Parameter(torch.zeros(3, device=device))
    (1 / param).sum().backward(create_graph=True)
    assert param.grad.requires_grad
    assert amp_ext.find_nonfinite(holder(param=param)) == {"param": 3}


# check_for_overflow


def test_an_overflow_is_logged_with_the_names(device, caplog: pytest.LogCaptureFixture) -> None:
    model = with_clean_grads(new_model(device))
    spoil(model.head.weight.grad, NAN, INF)
    spoil(model.body.bias.grad, INF)
    with caplog.at_level(logging.DEBUG):
        assert amp_ext.check_for_overflow(model) is True
    assert caplog.record_tuples == [
        (
            "amp_ext",
            logging.WARNING,
            "check_for_overflow: inf or NaN in body.bias (1), head.weight (2)",
        )
    ]


def test_without_an_overflow_nothing_is_logged(device, caplog: pytest.LogCaptureFixture) -> None:
    model = with_clean_grads(new_model(device))
    spoil(model.head.weight, NAN)
    with caplog.at_level(logging.DEBUG):
        assert amp_ext.check_for_overflow(model) is False
        assert amp_ext.check_for_overflow(nn.Module()) is False
    assert not caplog.records


@pytest.mark.parametrize(
    ("count", "ending"),
    [
        pytest.param(5, "3 (2), 4 (2)", id="five-are-named"),
        pytest.param(6, "3 (2), 4 (2) and 1 more", id="six-are-not"),
        pytest.param(40, "3 (2), 4 (2) and 35 more", id="forty"),
    ],
)
def test_a_long_list_of_names_is_cut(
    count: int, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.ParameterList([Parameter(torch.ones(2)) for _ in range(count)])
    for param in with_clean_grads(model).parameters():
        spoil(param.grad, NAN, INF)
    assert amp_ext.check_for_overflow(model)
    (record,) = caplog.records
    assert record.getMessage().startswith("check_for_overflow: inf or NaN in 0 (2), 1 (2), 2 (2), ")
    assert record.getMessage().endswith(ending)


# handle_nan_loss


MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS = [
    pytest.param(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), id="torch-sgd"),
    pytest.param(lambda params: torch.optim.Adam(params, lr=0.1, fused=True), id="torch-adam"),
    pytest.param(lambda params: amp_ext.optim.SGD(params, lr=0.1, momentum=0.9), id="our-sgd"),
    pytest.param(lambda params: amp_ext.optim.Adam(params, lr=0.1), id="our-adam"),
    pytest.param(
        lambda params: amp_ext.optim.AdamW(params, lr=0.1, max_grad_norm=0.5), id="our-adamw-norm"
    ),
]
SCALERS = [
    pytest.param(amp_ext.GradScaler, True, id="our-scaler"),
    pytest.param(torch.amp.GradScaler, True, id="torch-scaler"),
    pytest.param(amp_ext.GradScaler, False, id="our-scaler-disabled"),
    pytest.param(torch.amp.GradScaler, False, id="torch-scaler-disabled"),
    pytest.param(None, False, id="no-scaler"),
]


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        pytest.param(lambda: torch.tensor(NAN), "NaN", id="nan"),
        pytest.param(lambda: torch.tensor(INF), "inf", id="inf"),
        pytest.param(lambda: torch.tensor(-INF), "inf", id="minus-inf"),
        pytest.param(lambda: torch.tensor(NAN, dtype=torch.float16), "NaN", id="half"),
        pytest.param(lambda: torch.tensor(INF, dtype=torch.bfloat16), "inf", id="bfloat16"),
        pytest.param(lambda: torch.tensor([1.0, INF, 2.0]), "inf", id="one-of-three"),
        pytest.param(lambda: torch.tensor([[INF], [NAN]]), "NaN", id="both"),
        pytest.param(lambda: torch.tensor(NAN, requires_grad=True) * 2, "NaN", id="with-a-graph"),
        pytest.param(lambda: NAN, "NaN", id="number-nan"),
        pytest.param(lambda: -INF, "inf", id="number-inf"),
        pytest.param(lambda: np.float64(NAN), "NaN", id="numpy"),
    ],
)
def test_a_bad_loss_is_told_and_logged_once(
    loss: Callable[[], Any], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert amp_ext.handle_nan_loss(loss()) is True
    text = f"handle_nan_loss: the loss is {what}; this iteration is dropped"
    assert caplog.record_tuples == [("amp_ext", logging.WARNING, text)]


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda: torch.tensor(0.0), id="zero"),
        pytest.param(lambda: torch.tensor(65504.0, dtype=torch.float16), id="largest-half"),
        pytest.param(lambda: torch.tensor([1.0, -3e38]), id="several"),
        pytest.param(lambda: torch.tensor(3), id="int-tensor"),
        pytest.param(lambda: torch.empty(0), id="none-at-all"),
        pytest.param(lambda: 1e308, id="number"),
        pytest.param(lambda: 7, id="int"),
    ],
)
@pytest.mark.parametrize(("scaler_class", "enabled"), SCALERS)
def test_a_good_loss_changes_nothing(
    loss: Callable[[], Any],
    scaler_class: type | None,
    enabled: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = with_clean_grads(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = None if scaler_class is None else scaler_class("cpu", enabled=enabled)
    if scaler is not None:
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
    grads = [param.grad for param in model.parameters()]
    before = [None if grad is None else grad.clone() for grad in grads]
    with caplog.at_level(logging.DEBUG):
        assert amp_ext.handle_nan_loss(loss(), optimizer, scaler=scaler) is False
    assert not caplog.records
    for param, grad, copy in zip(model.parameters(), grads, before, strict=True):
        assert param.grad is grad
        assert grad is None or torch.equal(grad, copy)
    if scaler is not None and enabled:
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("loss", [None, "nan", [NAN], 1j], ids=repr)
def test_a_loss_of_another_kind_is_refused_and_nothing_is_changed(loss: Any) -> None:
    model = with_clean_grads(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = f"^handle_nan_loss: loss must be a tensor or a number, got {type(loss).__name__}$"
    with pytest.raises(TypeError, match=text):
        amp_ext.handle_nan_loss(loss, optimizer)
    assert model.head.weight.grad is not None


def test_gradients_of_all_given_optimizers_are_dropped_and_of_no_other(device) -> None:
    models = [with_clean_grads(new_model(device)) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    assert amp_ext.handle_nan_loss(NAN, *optimizers[:2])
    with_grads = [any(p.grad is not None for p in model.parameters()) for model in models]
    assert with_grads == [False, False, True]


BAD_BATCH = 2


def train(
    make: MakeOptimizer,
    scaler_class: type | None,
    enabled: bool,
    moment: str,
    device: Any,
    passes: int,
    sees_bad_batch: bool,
) -> list[Any]:
    """Trains on five batches and returns all that a step reads later.

    Args:
        make: Makes the optimizer.
        scaler_class: Class of the scaler, or None.
        enabled: Whether it scales.
        moment: When a bad loss is handled.
        device: Where.
        passes: Backward passes of an iteration; the last one of the bad batch is bad.
        sees_bad_batch: Whether there is a bad batch.
    """
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    optimizer = make(model.parameters())
    scaler = None
    if scaler_class is not None:
        scaler = scaler_class(device.type, 8.0, growth_interval=2, enabled=enabled)
    draw = torch.Generator().manual_seed(11)
    for number in range(5):
        inputs = torch.randn(passes, 6, 3, generator=draw).to(device)
        if number == BAD_BATCH:
            if not sees_bad_batch:
                continue
            inputs[-1] = INF
        is_bad = False
        for batch in inputs:
            loss = model(batch).square().sum() * (NAN if batch.isinf().any() else 1.0)
            if moment == "before-backward" and amp_ext.handle_nan_loss(
                loss, optimizer, scaler=scaler
            ):
                is_bad = True
                break
            (loss if scaler is None else scaler.scale(loss)).backward()
        if moment == "after-unscale_" and scaler is not None:
            scaler.unscale_(optimizer)
        if is_bad or amp_ext.handle_nan_loss(loss, optimizer, scaler=scaler):
            assert number == BAD_BATCH
            assert all(param.grad is None for param in model.parameters())
            continue
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.parameters(), *states, {} if scaler is None else scaler.state_dict()]


@pytest.mark.parametrize("passes", [1, 3], ids=["one-pass", "three-passes"])
@pytest.mark.parametrize("moment", ["before-backward", "after-backward", "after-unscale_"])
@pytest.mark.parametrize(("scaler_class", "enabled"), SCALERS)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_run_goes_on_as_one_that_never_saw_the_bad_batch(
    make: MakeOptimizer,
    scaler_class: type | None,
    enabled: bool,
    moment: str,
    passes: int,
    device,
) -> None:
    actual, expected = (
        train(make, scaler_class, enabled, moment, device, passes, sees_bad_batch)
        for sees_bad_batch in (True, False)
    )
    for left, right in zip(actual, expected, strict=True):
        assert same_bits(left, right) if isinstance(left, Tensor) else left == right


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_scaler_amid_an_iteration_is_as_after_an_update(make: MakeOptimizer, device) -> None:
    """What it saw of every optimizer is forgotten, so that each may be unscaled again."""
    scaler = amp_ext.GradScaler(device.type, 4.0, growth_interval=5)
    scaler.scale(torch.ones((), device=device))
    models = [with_clean_grads(new_model(device)) for _ in range(2)]
    optimizers = [make(model.parameters()) for model in models]
    spoil(models[0].head.weight.grad, NAN)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    assert amp_ext.handle_nan_loss(NAN, *optimizers, scaler=scaler)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    for model, optimizer in zip(models, optimizers, strict=True):
        with_clean_grads(model)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict()["_growth_tracker"] == 1
    assert scaler.get_scale() == 4
    assert scaler.last_step_skipped(wait=True) is False
    assert scaler.stats(wait=True).updates == 1


def test_the_scale_stays_where_a_skip_would_halve_it(device) -> None:
    found = []
    for handled in (True, False):
        scaler = amp_ext.GradScaler(device.type, 4.0)
        model = new_model(device)
        optimizer = amp_ext.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(3, 3, device=device)).sum() * NAN
        scaler.scale(loss).backward()
        if not (handled and amp_ext.handle_nan_loss(loss, optimizer, scaler=scaler)):
            scaler.step(optimizer)
            scaler.update()
        found.append(scaler.get_scale())
    assert found == [4, 2]


def test_a_scaler_that_has_not_scaled_yet_is_fine() -> None:
    scaler = amp_ext.GradScaler("cpu", 4.0)
    assert amp_ext.handle_nan_loss(NAN, scaler=scaler)
    assert scaler.get_scale() == 4
