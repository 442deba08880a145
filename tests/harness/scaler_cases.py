"""Scalers, the optimizers that they step, and one way to step them, for the tests of scalers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import amp_ext
from harness import optimizer_cases
from harness.edge_shapes import INF, NAN
from harness.optimizer_cases import params_of

TorchScaler = torch.amp.GradScaler


class Duck:
    """Has what a scaler needs of an optimizer, and no room for weak references."""

    __slots__ = ("param_groups",)

    def __init__(self, params: Any) -> None:
        self.param_groups = torch.optim.SGD(params, lr=0.5).param_groups

    @torch.no_grad()
    def step(self) -> None:
        for param in params_of(self):
            if param.grad is not None:
                param -= 0.5 * param.grad


MakeOptimizer = Callable[[Any], Any]


def torchs_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def torchs_adam(params: Any) -> torch.optim.Optimizer:
    """One that unscales and skips in its step, as ours do."""
    return torch.optim.Adam(params, lr=0.5, fused=True)


def our_sgd(params: Any) -> torch.optim.Optimizer:
    return amp_ext.optim.SGD(params, lr=0.5, momentum=0.9)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    """Ours without a state."""
    return amp_ext.optim.SGD(params, lr=0.5)


def fused_sgd(params: Any) -> torch.optim.Optimizer:
    """torch's, which takes attributes."""
    return torch.optim.SGD(params, lr=0.5, fused=True)


def looping_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def our_adam(params: Any) -> torch.optim.Optimizer:
    return amp_ext.optim.Adam(params, lr=0.5)


def our_adamw_with_norm(params: Any) -> torch.optim.Optimizer:
    """One that looks at gradients for itself as well, to clip them."""
    return amp_ext.optim.AdamW(params, lr=0.5, max_grad_norm=1.0)


# One for each way in which a step is looked at and skipped.
OPTIMIZERS = [torchs_sgd, torchs_adam, our_adam]
ALL_OPTIMIZERS = [*OPTIMIZERS, our_sgd, our_adamw_with_norm, Duck]


def over(makes: list[MakeOptimizer]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", makes, ids=lambda make: make.__name__)


every_optimizer, all_optimizers = over(OPTIMIZERS), over(ALL_OPTIMIZERS)
our_optimizers, torchs_and_ours = over([our_sgd, our_adam]), over([torchs_sgd, our_sgd])
unscaled_first = pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_-step"])
clean_or_overflow = pytest.mark.parametrize("value", [4.0, INF], ids=["clean", "overflow"])


def as_torch(run: Callable[..., Any]) -> Callable[..., None]:
    """Makes a test of a function: it must return with our scaler what it returns with torch's."""

    @functools.wraps(run)
    def test(**arguments: Any) -> None:
        actual, expected = (
            described(run(scaler_class=kind, **arguments))
            for kind in (amp_ext.GradScaler, TorchScaler)
        )
        assert expected is not None
        assert repr(actual) == repr(expected)

    signature = inspect.signature(run)
    others = [value for name, value in signature.parameters.items() if name != "scaler_class"]
    test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    return test


def described(value: Any) -> Any:
    """Returns something whose ``repr`` tells all: tensors by dtype, shape, device and values."""
    if isinstance(value, Tensor):
        if value.is_sparse:
            return "sparse", value.is_coalesced(), described(value._values())
        return value.dtype, tuple(value.shape), value.device.type, value.detach().tolist()
    if isinstance(value, dict):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [described(item) for item in value]
    return value


grads_of = optimizer_cases.grads_of
through_a_file = functools.partial(optimizer_cases.through_a_file, weights_only=False)


def error_of(kind: type[Exception], call: Callable[..., Any], *arguments: Any) -> str:
    """Returns the text of the error that a call raises, of just this kind."""
    with pytest.raises(kind) as caught:
        call(*arguments)
    assert caught.type is kind
    return str(caught.value)


def ready(device: Any = "cpu", scaler_class: Any = amp_ext.GradScaler, **options: Any) -> Any:
    """Builds a scaler whose tensors exist, with a scale of 4 unless told otherwise."""
    scaler = scaler_class(torch.device(device).type, **{"init_scale": 4.0} | options)
    scaler.scale(torch.ones((), device=device))
    return scaler


def new_params(device: Any = "cpu", count: int = 3) -> list[Parameter]:
    return [Parameter(torch.ones(5, device=device)) for _ in range(count)]


def named(device: Any, *names: str) -> list[tuple[str, Parameter]]:
    return list(zip(names, new_params(device, len(names)), strict=True))


def with_grads(*grads: Tensor, make: MakeOptimizer | None = None) -> Any:
    """Builds an optimizer, SGD by default, of parameters of ones that have copies of ``grads``."""
    params = [Parameter(torch.ones_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return make(params) if make is not None else torch.optim.SGD(params, lr=0.5)


def filled(value: float, device: Any = "cpu", make: MakeOptimizer | None = None) -> Any:
    """Builds an optimizer of one parameter of three ones whose gradient is ``value``."""
    return with_grads(torch.full((3,), value, device=device), make=make)


def takes(scaler_class: type | None, dtype: torch.dtype, device: torch.device) -> bool:
    """Tells whether gradients of a dtype can be there under a scaler, or without one."""
    return scaler_class is not TorchScaler or _torch_scans(dtype, device)


@functools.cache
def _torch_scans(dtype: torch.dtype, device: torch.device) -> bool:
    """On a GPU torch's scaler refuses bfloat16."""
    grad = torch.ones(1, dtype=dtype, device=device)
    found_inf, inverse = (torch.full((), value, device=device) for value in (0.0, 1.0))
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([grad], found_inf, inverse)
    except NotImplementedError:
        return False
    return True


def give_grads(optimizer: Any, *bad: int, missing: tuple[int, ...] = ()) -> None:
    """Gives every parameter a gradient of ones; those with the numbers in ``bad`` hold one NaN."""
    for number, param in enumerate(params_of(optimizer)):
        param.grad = None if number in missing else torch.ones_like(param)
        if number in bad:
            param.grad[3] = NAN


def scan_and_step(scaler: TorchScaler, optimizer: Any, unscale: bool = False) -> Any:
    if unscale:
        scaler.unscale_(optimizer)
    return scaler.step(optimizer)


def iterate(scaler: TorchScaler, *optimizers: Any, bad: Any = (), unscale: bool = False) -> None:
    """Takes one iteration; ``bad`` holds numbers of the last optimizer's parameters."""
    for optimizer in optimizers:
        give_grads(optimizer, *(bad if optimizer is optimizers[-1] else ()))
        scan_and_step(scaler, optimizer, unscale)
    scaler.update()


def scales(scaler: TorchScaler, sequence: str, device: Any = "cpu") -> list[float]:
    """Returns the scale after each iteration of a sequence: "x" overflows, "." does not."""
    optimizer, found = torch.optim.SGD(new_params(device, 1), lr=0.0), []
    for letter in sequence:
        scaler.scale(torch.ones((), device=device))
        iterate(scaler, optimizer, bad=[0] * (letter == "x"))
        found.append(scaler.get_scale())
    return found


def recorded(scaler: TorchScaler, optimizer: Any) -> list[float]:
    """Returns the values of found_inf that the scaler holds for an optimizer."""
    return [found.item() for found in scaler._found_inf_per_device(optimizer).values()]


def set_recorded(scaler: TorchScaler, optimizer: Any, value: float) -> None:
    for found_inf in scaler._found_inf_per_device(optimizer).values():
        found_inf.fill_(value)


def exact(scaler: amp_ext.GradScaler) -> amp_ext.ScalerStats:
    return scaler.stats(wait=True)


def name_of_last(scaler: amp_ext.GradScaler) -> str | None:
    return exact(scaler).last_nonfinite


class Delegating:
    """Has what the optimizer inside has, as in many tutorials."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def step(self) -> Any:
        return self.optimizer.step()


class Deriving(torch.optim.Optimizer):
    """As Accelerate's and torch's PostLocalSGDOptimizer: has the groups of the optimizer inside."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step()


class WithCopiedFlag(Deriving):
    """Promises to unscale in its step, as the optimizer inside does, and passes no scale on."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._step_supports_amp_scaling = getattr(optimizer, "_step_supports_amp_scaling", False)
