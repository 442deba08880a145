"""Parameters that are stepped during the backward pass, one by one, with their gradients freed."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import optimizer_cases as cases
from harness.edge_shapes import BF16, F16, F32, F64
from harness.reference import same_bits
from harness.rows import rows
from harness.transports import DelayedTransport
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_ext
from amp_ext.optim import AdamW, NormGuard, release_gradients
from amp_ext.optim.offload import OffloadedStates

FORMS = {
    **{name: cases.STORED_FORMS[name] for name in ("fp32", "bf16", "fp16", "fp16-split")},
    **{name: cases.STORED_FORMS[name] for name in ("bf16-split8-8bit", "fp32-8bit-bf16")},
    "fp64": (F64, {}),
    "bf16-alone-narrow": (BF16, {"master_weights": False, "state_dtype": BF16}),
}
# Tests of what offloaded states refuse, and of what does not depend on their place.
_NOT_OFFLOADED = {
    "test_an_option_that_changes_within_an_iteration_counts_from_the_next_gradient_on",
    "test_threads_that_run_backward_passes_take_turns",
    "test_bits_of_emulated_kernels_are_the_same",
    "test_lazy_parameters_get_their_hooks_with_their_shape",
}


@pytest.fixture(autouse=True, params=["device", "host"])
def place_of_states(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the tests twice: with states beside the parameters, and with offloaded states."""
    if request.param == "device":
        return
    if request.node.originalname in _NOT_OFFLOADED or (
        request.node.callspec.params.get("dtype") is F64
    ):
        pytest.skip("states can't be offloaded")

    def offload_and_release(optimizer: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(optimizer, "offload", True) is None:
            OffloadedStates(optimizer, DelayedTransport(), chunk_bytes=3000)
        return original(optimizer, *arguments, **options)

    original = release_gradients
    monkeypatch.setitem(globals(), "release_gradients", offload_and_release)


def backward_and_settle(optimizer: Any, *losses: Any) -> None:
    """Raises the errors of hooks, those of the thread that steps offloaded parameters included."""
    torch.autograd.backward(*losses)
    if optimizer.offload is not None:
        optimizer.gradient_release._end_backward()


def cpu_scaler(scale: float = 1024.0, **options: Any) -> amp_ext.GradScaler:
    return amp_ext.GradScaler("cpu", init_scale=scale, **options)


def released_params(
    *shapes: tuple[int, ...], scaler: Any = None
) -> tuple[list[nn.Parameter], AdamW, Any]:
    params = cases.make_params(F32, shapes=[*shapes])
    optimizer = AdamW(params)
    release_gradients(optimizer, scaler)
    return params, optimizer, scaler


def give(scaler: Any, params: list[Any], grads: list[Tensor]) -> None:
    """Runs a backward pass that gives parameters these gradients, scaled."""
    if scaler is not None:
        scaler.scale(torch.zeros(()))
        grads = [grad * scaler._scale.to(grad.dtype) for grad in grads]
    torch.autograd.backward(params, grads)


def train(
    optimizer: Any, scaler: Any, release: Any, micro_batches: int, steps: int, seed: int = 0
) -> None:
    params = cases.params_of(optimizer)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for index in range(micro_batches):
            grads = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]
            accumulates = release is not None and index < micro_batches - 1
            with release.paused() if accumulates else contextlib.nullcontext():
                give(scaler, params, grads)
        assert all((param.grad is None) == (release is not None) for param in params)
        cases.take_step(optimizer, scaler)
        optimizer.zero_grad()


def assert_trains_alike(
    name: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    scaled: bool,
    steps: int,
    micro_batches: int = 1,
) -> None:
    plain = cases.ours(name)(cases.make_params(dtype, shapes=cases.FORM_SHAPES), **options)
    released = cases.ours(name)(cases.twins(plain), **options)
    scalers = [cpu_scaler(growth_interval=7) if scaled else None for _ in range(2)]
    train(plain, scalers[0], None, micro_batches, steps)
    release = release_gradients(released, scalers[1])
    train(released, scalers[1], release, micro_batches, steps)
    cases.assert_same_bits(released, plain)
    if scaled:
        assert scalers[1].stats() == scalers[0].stats()
    # Both go on alike without the release, also where a master has more bits than its parameter.
    release.remove()
    for optimizer, scaler in zip((plain, released), scalers, strict=True):
        train(optimizer, scaler, None, 1, 2, seed=1)
    cases.assert_same_bits(released, plain)


@pytest.mark.parametrize("scaled", rows({"alone": False, "scaler": True}))
@pytest.mark.parametrize(("dtype", "kept"), rows(FORMS))
@cases.few_optimizers
def test_bits_are_those_of_training_without_release(name, options, dtype, kept, scaled):
    if options.get("amsgrad") and "8bit" in str(kept.get("state_dtype")):
        options = {key: value for key, value in options.items() if key != "amsgrad"}
    assert_trains_alike(name, options | kept, dtype, scaled, steps=20)


@cases.each_class
def test_bits_of_emulated_kernels_are_the_same(emulated, name, options):
    with emulated.selected():
        for dtype, kept in (FORMS["fp16"], FORMS["bf16-split8-8bit"]):
            assert_trains_alike(name, options | kept, dtype, scaled=True, steps=5)


@pytest.mark.parametrize("options", rows({
    "tensor-lr": {"lr": torch.tensor(0.1)},
    "clip": {"clip_value": 0.1},
    "nonfinite": {"skip_nonfinite": True},
    "norms": {"track_grad_norms": True},
    "maximize": {"maximize": True},
    "8bit": {"master_weights": "split8", "state_dtype": "8bit"},
}))  # fmt: skip
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_options_work_as_without_release(options: dict[str, Any], micro_batches: int) -> None:
    assert_trains_alike("AdamW", options, F16, True, 10, micro_batches)


@pytest.mark.parametrize("scaled", rows({"alone": False, "scaler": True}))
def test_norms_are_those_without_release(scaled: bool) -> None:
    params = cases.make_params(F32, shapes=[(5, 7), (3,), (4,)])
    optimizers = [AdamW(each, track_grad_norms=True) for each in (params, cases.twins(params))]
    scalers = [cpu_scaler(enabled=scaled) for _ in optimizers]
    release_gradients(optimizers[1], scalers[1])
    for optimizer, scaler in zip(optimizers, scalers, strict=True):
        two = cases.params_of(optimizer)[:2]
        torch.manual_seed(0)
        give(scaler if scaled else None, two, [torch.randn_like(param) for param in two])
        scaler.step(optimizer)
    assert same_bits(optimizers[0].grad_norm, optimizers[1].grad_norm)
    assert same_bits(optimizers[0].grad_norms, optimizers[1].grad_norms)
    assert optimizers[1].named_grad_norms().keys() == {"group 0, param 0", "group 0, param 1"}


# Overflows.


@pytest.mark.parametrize(("dtype", "kept"), rows(FORMS))
def test_an_overflow_skips_its_own_parameter_only(dtype: torch.dtype, kept: dict[str, Any]) -> None:
    optimizer = AdamW(cases.make_params(dtype, shapes=[(4, 32), (64, 64), (3,)]), lr=0.1, **kept)
    other = AdamW(cases.twins(optimizer), lr=0.1, **kept)
    scaler, other_scaler = cpu_scaler(), cpu_scaler()
    release_gradients(optimizer, scaler)
    for step in range(4):
        grads = [torch.randn_like(param) for param in cases.params_of(optimizer)]
        every = 1 if step < 3 else 2  # the twin has no gradient where ours is not finite
        give(other_scaler, cases.params_of(other)[::every], grads[::every])
        grads[1].view(-1)[77] *= 1.0 if step < 3 else float("nan")
        give(scaler, cases.params_of(optimizer), grads)
        for side, its_scaler in ((optimizer, scaler), (other, other_scaler)):
            its_scaler.step(side)
            its_scaler.update()
            side.zero_grad()
    cases.assert_same_bits(optimizer, other)
    stats = scaler.stats()
    assert (stats.skips, stats.skipped_tensors, stats.last_nonfinite) == (1, 1, "group 0, param 1")
    assert scaler.last_step_skipped(optimizer) is True
    assert scaler.get_scale() == 512.0


def test_a_scale_without_an_inverse_skips_all() -> None:
    params, optimizer, scaler = released_params((3,), (4,), scaler=cpu_scaler())
    before = [param.detach().clone() for param in params]
    scaler.scale(torch.zeros(()))
    scaler.update(0.0)
    give(scaler, params, [torch.ones_like(param) for param in params])
    scaler.step(optimizer)
    scaler.update(1024.0)
    assert all(same_bits(p.detach(), old) for p, old in zip(params, before, strict=True))
    assert scaler.stats().skipped_tensors == 2


def test_without_a_scaler_nonfinite_elements_can_be_left_out() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = AdamW([param], lr=0.1, skip_nonfinite=True)
    release_gradients(optimizer)
    give(None, [param], [torch.tensor([1.0, float("nan"), 1.0])])
    optimizer.step()
    assert (param != 1.0).tolist() == [True, False, True]


# Backward passes.


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def released_network() -> tuple[nn.Sequential, Any]:
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.1)
    release_gradients(optimizer)
    return model, optimizer


Passes = Callable[[nn.Sequential, Tensor, Any], None]


def one_pass(model: nn.Sequential, x: Tensor, release: Any) -> None:
    model(x).square().sum().backward()


def tied(model: nn.Sequential, x: Tensor, release: Any) -> None:
    (model(x) @ model[0].weight).square().sum().backward()


def checkpointed(model: nn.Sequential, x: Tensor, release: Any) -> None:
    first = checkpoint(model[:2], x, use_reentrant=False)
    model[2](first).square().sum().backward()


def checkpointed_reentrant(model: nn.Sequential, x: Tensor, release: Any) -> None:
    first = checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
    model[2](first).square().sum().backward()


def two_losses(model: nn.Sequential, x: Tensor, release: Any) -> None:
    model[0](x).square().sum().backward()
    model[2](x).square().sum().backward()


def retained(model: nn.Sequential, x: Tensor, release: Any) -> None:
    loss = model(x).square().sum()
    with contextlib.nullcontext() if release is None else release.paused():
        loss.backward(retain_graph=True)
    loss.backward()


def compiled(model: nn.Sequential, x: Tensor, release: Any) -> None:
    torch.compile(model, backend="aot_eager")(x).square().sum().backward()


def part_of_the_model(model: nn.Sequential, x: Tensor, release: Any) -> None:
    model[2](x).square().sum().backward()


def compiled_with_the_backward_pass(model: nn.Sequential, x: Tensor, release: Any) -> None:
    torch.compile(one_pass, backend="eager")(model, x, release)


PASSES: list[Passes] = [
    one_pass,
    compiled_with_the_backward_pass,
    tied,
    checkpointed,
    checkpointed_reentrant,
    two_losses,
    retained,
    compiled,
    part_of_the_model,
]


@pytest.mark.parametrize("passes", PASSES, ids=lambda each: each.__name__)
def test_backward_passes_of_all_sorts_train_alike(passes: Passes) -> None:
    results = []
    for is_released in (False, True):
        model = network()
        optimizer = AdamW(model.parameters(), lr=0.1)
        release = release_gradients(optimizer) if is_released else None
        for step in range(3):
            torch.manual_seed(step)
            passes(model, torch.randn(4, 8), release)
            optimizer.step()
            optimizer.zero_grad()
        results.append(cases.bits_of(optimizer))
    cases.assert_same_bits(*results)


def test_a_conversion_that_swaps_tensors_loses_no_hook_for_long() -> None:
    model, optimizer = released_network()
    for step in range(3):
        one_pass(model, torch.ones(4, 8, dtype=model[0].weight.dtype), None)
        is_free = [param.grad is None for param in model.parameters()]
        assert is_free == [step != 1] * 4
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            with cases.swapping(True):
                model.to(BF16)


def test_lazy_parameters_get_their_hooks_with_their_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    optimizer = AdamW(model.parameters())
    release_gradients(optimizer)
    for is_first in (True, False):
        model(torch.ones(2, 3)).sum().backward()
        assert all((param.grad is None) is not is_first for param in model.parameters())
        optimizer.step()
        assert all(param.grad is None for param in model.parameters())


def test_a_parameter_that_left_the_groups_keeps_its_gradient() -> None:
    model, optimizer = released_network()
    one_pass(model, torch.ones(4, 8), None)
    optimizer.step()
    del optimizer.param_groups[0]["params"][0]
    one_pass(model, torch.ones(4, 8), None)
    assert [param.grad is None for param in model.parameters()] == [False, True, True, True]


def test_a_weight_shared_under_reentrant_checkpoints_is_refused_by_name() -> None:
    model, optimizer = released_network()
    x = torch.ones(4, 8, requires_grad=True)
    first = checkpoint(model[0], x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"group 0, param \d got another gradient after \d of 4"):
        backward_and_settle(optimizer, checkpoint(model[0], first, use_reentrant=True).sum())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_graph_of_gradients_is_refused() -> None:
    model, optimizer = released_network()
    before = cases.bits_of(optimizer)
    loss = model(torch.ones(4, 8)).square().sum()
    with pytest.raises(RuntimeError, match="released gradients can't be part of a graph"):
        loss.backward(create_graph=True)
    cases.assert_same_bits(optimizer, before)


def test_compiled_autograd_is_refused() -> None:
    model, _optimizer = released_network()
    enabled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with enabled, pytest.raises(RuntimeError, match="released with compiled autograd"):
        one_pass(model, torch.ones(4, 8), None)


def test_sparse_gradients_are_refused_before_a_write() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = AdamW(table.parameters())
    release_gradients(optimizer)
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        table(torch.tensor([1, 2])).sum().backward()
    assert not optimizer.state


# Memory.


def test_gradients_never_pile_up() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12))).to(BF16)
    optimizer = AdamW(model.parameters(), master_weights="split8", state_dtype="8bit")
    optimizer.init_state()
    counts: list[int] = []

    def count(param: Tensor) -> None:
        counts.append(sum(p.grad is not None for p in model.parameters()))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)  # before ours frees the gradient
    release_gradients(optimizer)
    model(torch.randn(4, 64, dtype=BF16)).float().sum().backward()
    assert counts == [1] * 12


# The handle, and other code that holds the optimizer.


def test_a_handle_is_a_context_and_a_second_one_is_refused() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.1)
    with release_gradients(optimizer) as release:
        with pytest.raises(RuntimeError, match="releases its gradients already"):
            release_gradients(optimizer)
        one_pass(model, torch.ones(4, 8), None)
        optimizer.step()
    assert optimizer.gradient_release is None
    one_pass(model, torch.ones(4, 8), None)
    assert all(param.grad is not None for param in model.parameters())
    release.remove()  # does nothing any more
    with release_gradients(optimizer):
        optimizer.step()  # uses the gradients that are there
    assert all(param.grad is None for param in model.parameters())


def test_nothing_keeps_model_and_optimizer_alive() -> None:
    model, optimizer = released_network()
    one_pass(model, torch.ones(4, 8), None)
    optimizer.step()
    references = [weakref.ref(optimizer), weakref.ref(optimizer.gradient_release)]
    gc.disable()
    try:
        del optimizer
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
    one_pass(model, torch.ones(4, 8), None)
    assert all(param.grad is not None for param in model.parameters())


def load_of_before(optimizer: Any, file: Any) -> None:
    """Loads masters that do not fit the parameters any more."""
    optimizer.load_state_dict(file)


BETWEEN = {
    "clear": lambda optimizer, file: optimizer.state.clear(),
    "new": lambda optimizer, file: setattr(optimizer, "state", collections.defaultdict(dict)),
    "load": load_of_before,
}


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("change", rows(BETWEEN))
def test_changes_between_iterations_count_as_without_release(change, dtype):
    sides = []
    for is_released in (False, True):
        torch.manual_seed(0)
        params = cases.make_params(dtype, shapes=[(300,), (8,)])
        optimizer = AdamW(params, lr=0.01)
        release = release_gradients(optimizer) if is_released else None
        for step in range(8):
            if step == 1:
                file = copy.deepcopy(optimizer.state_dict())
            if step == 4:
                change(optimizer, file)
            give(None, params, [torch.full_like(param, 1.5 - step) for param in params])
            optimizer.step()
            optimizer.zero_grad()
        sides.append((cases.bits_of(optimizer), release))
    cases.assert_same_bits(sides[0][0], sides[1][0])


@pytest.mark.parametrize("runs_backward", [False, True])
def test_a_closure_is_called_before_the_step(runs_backward: bool) -> None:
    results = []
    for is_released in (False, True):
        model = network()
        optimizer = AdamW(model.parameters(), lr=0.1)
        release = release_gradients(optimizer) if is_released else None

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8)).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            if runs_backward:
                loss = optimizer.step(closure)
            else:
                loss = closure()
                assert optimizer.step(lambda loss=loss: loss) is loss
        results.append((cases.bits_of(optimizer), loss.detach(), release))
    cases.assert_same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])


def test_step_hooks_and_schedulers_see_one_step_an_iteration() -> None:
    model, optimizer = released_network()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen: list[bool] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(any(param.grad is not None for param in model.parameters()))
    )
    for _ in range(2):
        one_pass(model, torch.ones(4, 8), None)
        optimizer.step()
        scheduler.step()
    assert seen == [False, False]
    assert optimizer.param_groups[0]["lr"] == 0.025


def test_hooks_of_users_before_ours_see_the_gradient_and_later_ones_do_not() -> None:
    param = nn.Parameter(torch.ones(3))
    seen: list[bool] = []
    param.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad is not None))
    optimizer = AdamW([param])
    release_gradients(optimizer)
    param.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad is not None))
    give(None, [param], [torch.ones(3)])
    assert seen == [True, False]


# Refusals.

REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "max_grad_norm": (
        lambda optimizer: optimizer.param_groups[0].update(max_grad_norm=1.0),
        r"max_grad_norm \(clip_value works\), because",
    ),
    "write_back": (
        lambda optimizer: optimizer.param_groups[0].update(write_back_grads=True),
        "write_back_grads, because each is used",
    ),
    "guard": (lambda optimizer: setattr(optimizer, "norm_guard", NormGuard()), "a norm_guard"),
}


@pytest.mark.parametrize(("change", "words"), rows(REFUSED))
def test_what_needs_all_gradients_is_refused(change: Callable[[Any], Any], words: str) -> None:
    optimizer = AdamW(cases.make_params(F32, shapes=[(3,)]))
    change(optimizer)
    words = f"gradients can't be released with {words}"
    with pytest.raises(RuntimeError, match=words):
        release_gradients(optimizer)
    params, optimizer, _ = released_params((3,))
    change(optimizer)  # before the first hook of an iteration writes
    before = cases.bits_of(optimizer)
    with pytest.raises(RuntimeError, match=words):
        give(None, params, [torch.ones(3)])
    cases.assert_same_bits(optimizer, before)


def test_a_wrong_option_is_named_and_a_dtype_is_taken() -> None:
    params = cases.make_params(BF16, shapes=[(3,)])
    optimizer = AdamW(params)
    release_gradients(optimizer)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="AdamW: lr of group 0 must"):
        give(None, params, [torch.ones(3, dtype=BF16)])
    optimizer.zero_grad()
    optimizer.param_groups[0].update(lr=0.1, state_dtype=BF16)
    give(None, params, [torch.ones(3, dtype=BF16)])
    optimizer.step()
    assert optimizer.state[params[0]]["exp_avg"].dtype is BF16


class OwnStep(AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_that_reads_gradients_is_refused() -> None:
    params = cases.make_params(F32, shapes=[(3,)])
    for scaler in (None, cpu_scaler()):
        with pytest.raises(RuntimeError, match=r"released with the step\(\) of a subclass"):
            release_gradients(OwnStep(params), scaler)
    optimizer, scaler = AdamW(params), cpu_scaler()
    release_gradients(optimizer, scaler)
    optimizer._step_supports_amp_scaling = False
    with pytest.raises(RuntimeError, match="_step_supports_amp_scaling = False"):
        give(scaler, params, [torch.ones(3)])
    optimizer.gradient_release.remove()
    release_gradients(optimizer)  # without a scaler, the attribute has no meaning
    give(None, params, [torch.ones(3)])
    optimizer.step()


def test_a_process_of_several_is_refused_because_of_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    params = cases.make_params(F32, shapes=[(3,)])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"group 0, param 0 .* DistributedDataParallel would"):
        release_gradients(AdamW(params))
    release_gradients(AdamW(params), replicated=False)
    optimizer = AdamW(cases.make_params(F32, shapes=[(3,)]))
    monkeypatch.undo()
    release_gradients(optimizer)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="DistributedDataParallel would reduce it too late"):
        give(None, cases.params_of(optimizer), [torch.ones(3)])
    assert not optimizer.state


def test_two_optimizers_that_release_a_parameter_are_refused() -> None:
    params = cases.make_params(F32, shapes=[(3,), (4,)])
    first, second = AdamW(params[:1]), AdamW(params)
    release_gradients(first)
    with pytest.raises(RuntimeError, match="param 0 can't be released: another optimizer"):
        release_gradients(second)
    del first.param_groups[0]["params"][0]
    release_gradients(second)
    give(None, params, [torch.ones(3), torch.ones(4)])
    second.step()
    assert len(second.state) == 2


WRONG_ARGUMENTS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "optimizer": (
        lambda params: release_gradients(torch.optim.AdamW(params)),  # type: ignore[arg-type]
        TypeError,
        "optimizer must be one of amp_ext.optim, got AdamW",
    ),
    "scaler": (
        lambda params: release_gradients(AdamW(params), torch.amp.GradScaler("cpu")),
        TypeError,
        "scaler must be an amp_ext.GradScaler or None, got torch.amp.grad_scaler.GradScaler",
    ),
    "replicated": (
        lambda params: release_gradients(AdamW(params), replicated=True),
        ValueError,
        "replicated must be None or False, got True",
    ),
}


@pytest.mark.parametrize(("call", "error", "words"), rows(WRONG_ARGUMENTS))
def test_wrong_arguments_are_named(call, error, words):
    params = cases.make_params(F32, shapes=[(3,)])
    with pytest.raises(error, match=words):
        call(params)
    assert not params[0]._post_accumulate_grad_hooks


def test_a_scaler_that_is_disabled_counts_as_none() -> None:
    scaler = amp_ext.GradScaler("cpu", enabled=False)
    params, optimizer, _ = released_params((3,), scaler=scaler)
    before = params[0].detach().clone()
    give(None, params, [torch.ones(3)])
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(params[0], before)


@pytest.fixture
def scaled() -> tuple[AdamW, Any, list[Any]]:
    """An optimizer that releases its gradients with a scaler, in the middle of an iteration."""
    params, optimizer, scaler = released_params((3,), (4,), scaler=cpu_scaler())
    give(scaler, params[:1], [torch.ones(3)])
    return optimizer, scaler, params


def test_calls_that_do_not_fit_are_refused_and_the_right_one_goes_on(scaled):
    optimizer, scaler, params = scaled
    others = torch.amp.GradScaler("cpu"), cpu_scaler()
    for other in others:
        other.scale(torch.zeros(()))
        with pytest.raises(RuntimeError, match=r"released with (another|a) scaler"):
            other.step(optimizer)
    with pytest.raises(RuntimeError, match="unscale_ needs all gradients at once"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"did not call this step.*optimizer\.init_state\(\)"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="a scaler, which did not call this step"):
        optimizer.step(lambda: pytest.fail("a refused step called its closure"))
    give(scaler, params[1:], [torch.ones(4)])
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="before the scaler's update"):
        give(scaler, params[:1], [torch.ones(3)])
    scaler.update()
    assert scaler.last_step_skipped() is False
    optimizer.zero_grad()
    give(scaler, params, [torch.ones(3), torch.ones(4)])


def test_a_gradient_that_a_step_hook_gives_under_a_scaler_is_refused(scaled):
    optimizer, scaler, params = scaled
    handle = optimizer.register_step_pre_hook(
        lambda *_: setattr(params[1], "grad", torch.ones(4))  # after the scan of the scaler
    )
    with pytest.raises(RuntimeError, match="before the scaler's update"):
        scaler.step(optimizer)
    handle.remove()


def test_without_a_scaler_the_step_of_any_scaler_is_refused() -> None:
    for scaler in (torch.amp.GradScaler("cpu"), cpu_scaler()):
        params, optimizer, _ = released_params((3,))
        give(scaler, params, [torch.ones(3)])
        with pytest.raises(RuntimeError, match="released with another scaler, or without one"):
            scaler.step(optimizer)


def test_a_loss_that_no_scaler_has_scaled_is_refused() -> None:
    params, _optimizer, _ = released_params((3,), scaler=cpu_scaler())
    with pytest.raises(RuntimeError, match="the gradients are not scaled"):
        give(None, params, [torch.ones(3)])


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "lr": lambda group: group.update(lr=0.5),
    "betas": lambda group: group.update(betas=(0.5, 0.9)),
    "tensor": lambda group: group["lr"].mul_(0.5),
}


@pytest.mark.parametrize("change", rows(CHANGES))
def test_an_option_that_changes_within_an_iteration_counts_from_the_next_gradient_on(change):
    params = cases.make_params(F32, shapes=[(3,), (4,)])
    optimizer, others = AdamW(params, lr=torch.tensor(0.1)), cases.twins(params)
    before, after = (AdamW([other], lr=torch.tensor(0.1)) for other in others)
    release_gradients(optimizer)
    for _ in range(2):
        give(None, params[:1], [torch.ones(3)])
        others[0].grad = torch.ones(3)
        before.step()
        change(optimizer.param_groups[0])
        change(after.param_groups[0])
        give(None, params[1:], [torch.ones(4)])
        optimizer.step()
        others[1].grad = torch.ones(4)
        after.step()
        change(before.param_groups[0])
    cases.assert_same_bits(optimizer, [*cases.bits_of(before), *cases.bits_of(after)])


# Iterations that end in another way.


@pytest.mark.parametrize("scaled", rows({"alone": False, "scaler": True}))
def test_a_step_without_any_gradient_does_nothing(scaled: bool) -> None:
    params, optimizer, scaler = released_params((3,), scaler=cpu_scaler() if scaled else None)
    for side in (optimizer, AdamW(cases.twins(optimizer))):
        if scaler is None:
            side.step()
        else:
            scaler.scale(torch.zeros(()))
            scaler.step(side)
        assert not side.state
    if scaler is not None:
        with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
            scaler.update()
    give(scaler, params, [torch.ones(3)])
    assert params[0].grad is None


def test_an_overflow_of_a_batch_that_is_given_up_skips_no_later_step() -> None:
    params, optimizer, scaler = released_params((3,), (4,), scaler=cpu_scaler())
    give(scaler, params[:1], [torch.full((3,), float("inf"))])
    with pytest.warns(UserWarning, match="1 of 2 parameters had been stepped"):
        optimizer.zero_grad()
    give(scaler, params, [torch.ones(3), torch.ones(4)])
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step_skipped() is False
    assert scaler.get_scale() == 1024.0


def test_a_hook_that_raises_leaves_the_rest_unstepped() -> None:
    model = network()
    fails = [True]

    def hook(param: Tensor) -> None:
        if fails[0]:
            raise ZeroDivisionError

    model[0].weight.register_post_accumulate_grad_hook(hook)
    optimizer = AdamW(model.parameters(), lr=0.1)
    release_gradients(optimizer)
    before = cases.bits_of(optimizer)[0]
    with pytest.raises(ZeroDivisionError):
        one_pass(model, torch.ones(4, 8), None)
    assert same_bits(cases.bits_of(optimizer)[0]["param"], before["param"])
    fails[0] = False
    with pytest.warns(UserWarning, match="of 4 parameters had been stepped"):
        optimizer.zero_grad()
    one_pass(model, torch.ones(4, 8), None)
    optimizer.step()


def test_an_error_in_our_hook_leaves_its_parameter_and_the_step_can_go_on() -> None:
    params, optimizer, _ = released_params((3,), (4,), (5,))
    optimizer.init_state()
    optimizer.state[params[1]]["exp_avg"] = torch.ones(7)
    before = cases.bits_of(optimizer)
    give(None, params[:1], [torch.ones(3)])
    with pytest.raises(RuntimeError, match="exp_avg of group 0, param 1"):
        backward_and_settle(optimizer, params[1:2], [torch.ones(4)])
    cases.assert_same_bits(cases.bits_of(optimizer)[1:], before[1:])
    with pytest.warns(UserWarning, match=r"[12] of 3 parameters"):
        optimizer.zero_grad()
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(4)
    give(None, params, [torch.ones_like(param) for param in params])
    optimizer.step()
    assert [optimizer.state[param]["step"].item() for param in params] == [2.0, 1.0, 1.0]


# Threads.


def test_threads_that_run_backward_passes_take_turns() -> None:
    results = []
    for is_parallel in (False, True):
        torch.manual_seed(0)
        params = cases.make_params(F32, shapes=[(16,)] * 60)
        optimizer, scaler = AdamW(params, lr=0.1), cpu_scaler()
        release_gradients(optimizer, scaler)
        for _ in range(10):
            threads = [
                threading.Thread(target=give, args=(scaler, params[i::2], [torch.ones(16)] * 30))
                for i in range(2)
            ]
            scaler.scale(torch.zeros(()))
            for thread in threads:
                thread.start()
                if not is_parallel:
                    thread.join()
            for thread in threads:
                thread.join()
            scaler.step(optimizer)
            scaler.update()
        results.append(cases.bits_of(optimizer))
    cases.assert_same_bits(*results)
