"""The optimizers' operations over lists of tensors, each with its options and its formula.

A new optimizer needs its formula in ``reference.py``, an entry in ``OPERATIONS`` and its rows in
``STEPS``: every property of the engines is then tested for it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.ops import OptimizerType
from harness import reference
from harness.edge_shapes import BF16, F32, F64, INF, NAN, Dtypes
from harness.number_codes import counter_of
from harness.reference import assert_close, clipped, same_bits, tolerance
from harness.rows import rows

Options = dict[str, Any]
Lists = dict[str, list[Tensor]]
One = dict[str, Tensor]  # of each list the tensor of one parameter

# What the compiled module says of its optimizers, but for Muon's: tests/optim/test_muon.py.
DESCRIBED = [
    each
    for each in vars(ops._C).values()
    if isinstance(each, ops._C.FormulaNames) and each.operation != "muon_"
]
# The buffers of an operation by the names of their lists.
BUFFERS = {one.operation: {f"{each.name}s": each for each in one.buffers} for one in DESCRIBED}
# The operation, the list and the hyperparameter of each buffer that only a hyperparameter gives.
OF_OPTIONS = [
    (one.operation, f"{each.name}s", each.option)
    for one in DESCRIBED
    for each in one.buffers
    if each.option in one.fields
]
# The hyperparameters that give an operation all its buffers.
ALL_BUFFERS: dict[str, Options] = {
    name: {option: 0.9 for operation, _, option in OF_OPTIONS if operation == name}
    for name in BUFFERS
}
# Lists of buffers that are never negative.
SQUARES = {
    name
    for buffers in BUFFERS.values()
    for name, buffer in buffers.items()
    if buffer.role in ("second moment", "maximum")
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """What tests must know of one operation.

    Attributes:
        formula: Its step in float64, from the parameter, the unscaled and clipped gradient, all
            tensors before and the hyperparameters; returns new tensors by the names of their lists.
        buffers: Names of the lists of buffers, with these options.
        hyperparameters: Those that every call needs. Large ones, so that a wrong place of eps or a
            lost update shows in 8 bits as well.
        decays: The hyperparameters by which moments decay, by the names of their lists.
        keeps_steps: Whether it counts steps, with these options.
        is_finite_after_inf: Whether a parameter is finite after a gradient of inf, as a sign is.
        has_scaler: Whether it takes ``grad_scale``, ``found_inf`` and the options beside them.
    """

    formula: Callable[..., One]
    buffers: Callable[[Options], tuple[str, ...]]
    hyperparameters: Options
    decays: dict[str, str] = dataclasses.field(default_factory=dict)
    keeps_steps: Callable[[Options], bool] = lambda options: False
    is_finite_after_inf: bool = False
    has_scaler: bool = True


def formula_of(operation: str) -> Callable[..., One]:
    """Returns the step of an operation in ``reference.py``, with tensors by the names of lists."""
    step = getattr(reference, operation.strip("_"))
    states = inspect.signature(step).parameters.keys() - {"param", "grad"}

    def formula(param: Tensor, grad: Tensor, old: One, **options: Any) -> One:
        given = {name[:-1]: tensor for name, tensor in old.items() if name[:-1] in states}
        return {f"{name}s": new for name, new in step(param, grad, **given, **options).items()}

    return formula


def update_formula(
    param: Tensor, grad: Tensor, old: One, *, optimizer_type: OptimizerType, **options: Any
) -> One:
    """``adam_`` with a floor or ``sgd_``, both with decoupled decay."""
    beta1, beta2, eps, timestep = (options.pop(n) for n in ("beta1", "beta2", "eps", "timestep"))
    options["decoupled_weight_decay"] = True
    if optimizer_type is OptimizerType.ADAM:
        options |= {"beta1": beta1, "beta2": beta2, "eps": eps, "denominator_floor": 1e-12}
        old = old | {"steps": torch.tensor(timestep - 1.0)}
        new = formula_of("adam_")(param, grad, old, **options)
        del new["steps"]
        return new
    momentum = beta1 if optimizer_type is OptimizerType.MOMENTUM else 0.0
    new = reference.sgd(param, grad, old.get("velocities"), momentum=momentum, **options)
    return {{"param": "params"}.get(name, "velocities"): tensor for name, tensor in new.items()}


UPDATE_BUFFERS = {
    OptimizerType.SGD: (),
    OptimizerType.MOMENTUM: ("velocities",),
    OptimizerType.ADAM: ("exp_avgs", "exp_avg_sqs"),
}


def described(operation: str, *settings: Any, **more: Any) -> Operation:
    """Returns an operation with the buffers of its description and its formula."""

    def buffers(options: Options) -> tuple[str, ...]:
        every = BUFFERS[operation].items()
        return tuple(name for name, each in every if each.option in (None, *options))

    return Operation(formula_of(operation), buffers, *settings, **more)


OPERATIONS = {
    "adam_": described(
        "adam_",
        {"lr": 0.3, "beta1": 0.8, "beta2": 0.99, "eps": 0.05, "weight_decay": 0.0},
        {"exp_avgs": "beta1", "exp_avg_sqs": "beta2"},
        lambda options: True,
    ),
    "lion_": described(
        "lion_",
        {"lr": 0.3, "beta1": 0.8, "beta2": 0.95},
        {"exp_avgs": "beta2"},
        lambda options: "dither" in options,
        is_finite_after_inf=True,
    ),
    "sgd_": described(
        "sgd_",
        {"lr": 0.3},
        {"momentum_buffers": "momentum"},
        lambda options: "dampening" in options or "dither" in options,
    ),
    "optimizer_update_": Operation(
        update_formula,
        lambda options: UPDATE_BUFFERS[options["optimizer_type"]],
        {"lr": 0.3, "beta1": 0.8, "beta2": 0.99, "eps": 0.05, "weight_decay": 0.3, "timestep": 4},
        has_scaler=False,
    ),
}

DECAY = {"weight_decay": 0.3}
DECOUPLED = DECAY | {"decoupled_weight_decay": True}
CAUTIOUS = DECOUPLED | {"cautious_weight_decay": True}
MAXIMIZE = {"maximize": True}
MOMENTUM = {"momentum": 0.7}
DAMPENING = MOMENTUM | {"dampening": 0.4}
NESTEROV = MOMENTUM | {"nesterov": True}
AMSGRAD = {"amsgrad": True}  # as lists are built; the operation sees it by its list

STEPS = rows(
    {
        "adam-decay": ("adam_", DECAY),
        "adam": ("adam_", {}),
        "adamw-maximize": ("adam_", DECOUPLED | MAXIMIZE),
        "amsgrad-decay-maximize": ("adam_", AMSGRAD | DECAY | MAXIMIZE),
        "amsgradw": ("adam_", AMSGRAD | DECOUPLED),
        # A floor that is the corrected moment of some elements of a test and not of others.
        "adam-floor": ("adam_", {"denominator_floor": 0.7}),
        "amsgrad-floor": ("adam_", AMSGRAD | {"denominator_floor": 0.7}),
        "lion": ("lion_", DECAY),
        "lion-coupled-max": ("lion_", DECAY | MAXIMIZE | {"decoupled_weight_decay": False}),
        "sgdw": ("sgd_", DECOUPLED),
        "sgd": ("sgd_", {}),
        "sgd-decay-maximize": ("sgd_", DECAY | MAXIMIZE),
        "dampening-decay-maximize": ("sgd_", DAMPENING | DECAY | MAXIMIZE),
        "momentum-decoupled": ("sgd_", MOMENTUM | DECOUPLED),
        "nesterov-decay": ("sgd_", NESTEROV | DECAY),
        "dampening-decoupled": ("sgd_", DAMPENING | DECOUPLED),
        "adamw-cautious-max": ("adam_", CAUTIOUS | MAXIMIZE),
        "amsgradw-cautious": ("adam_", AMSGRAD | CAUTIOUS),
        "lion-cautious": ("lion_", CAUTIOUS),
        "sgd-cautious": ("sgd_", CAUTIOUS),
        "nesterov-cautious-max": ("sgd_", NESTEROV | CAUTIOUS | MAXIMIZE),
    }
)


def kernel_of(row: Any) -> tuple[str, int]:
    operation, options = row.values
    return operation, len(OPERATIONS[operation].buffers(options))


# The first row for each kernel, which each number of buffers of each optimizer has.
FEW_STEPS = list({kernel_of(row): row for row in reversed(STEPS)}.values())[::-1]
UPDATES = rows(
    {
        f"update-{kind.value}": ("optimizer_update_", {"optimizer_type": kind})
        for kind in OptimizerType
    }
)
# Likewise, with all that is dithered.
DITHERED_STEPS = rows(
    {
        "adam-dithered": ("adam_", DECAY | {"dither": True}),
        "amsgrad-dithered": ("adam_", AMSGRAD | DECOUPLED | {"dither": True}),
        "lion-dithered": ("lion_", {"beta2": 0.99, "dither": True}),
        "sgd-dithered": ("sgd_", DECAY | {"dither": True}),
        "momentum-dithered": ("sgd_", {"momentum": 0.99, "dither": True}),
    }
)
STEP = ("operation", "options")
COUNTED = [row for row in STEPS if OPERATIONS[row.values[0]].keeps_steps(row.values[1])]
every_step = pytest.mark.parametrize(STEP, [*STEPS, *UPDATES])
few_steps = pytest.mark.parametrize(STEP, FEW_STEPS)
few_steps_and_updates = pytest.mark.parametrize(STEP, [*FEW_STEPS, *UPDATES])

SMALL = [(0,), (), (1,), (3,), (5,), (7, 5), (1025,)]
WITH_MASTERS = Dtypes(BF16, BF16, F32, master=True)
IN_FLOAT = Dtypes(F32, F32, F32)


def build(
    operation: str,
    options: Options,
    shapes: list[tuple[int, ...]],
    dtypes: Dtypes,
    device: torch.device | str,
    *,
    step: int = 3,
    bad: bool = False,
) -> Lists:
    """Makes the lists of a step that ``step`` others went before, by their names.

    Args:
        operation: A name of ``OPERATIONS``.
        options: What it is called with.
        shapes: One for each parameter.
        dtypes: Of each parameter and what belongs to it.
        device: Of all tensors.
        step: What the step counters count, where the operation has them.
        bad: Makes a fifth of the gradients' elements inf or NaN.
    """

    def normal(dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(shape, device=device).to(dtype) for shape in shapes]

    def squares(dtype: torch.dtype) -> list[Tensor]:
        return [(torch.rand(shape, device=device) * 0.05 + 1e-3).to(dtype) for shape in shapes]

    masters = normal(F32 if dtypes.master else dtypes.param)
    lists = {
        "params": [master.to(dtypes.param, copy=True) for master in masters],
        "grads": normal(dtypes.grad),
    }
    for name in OPERATIONS[operation].buffers(options):
        lists[name] = (squares if name in SQUARES else normal)(dtypes.state)
    if OPERATIONS[operation].keeps_steps(options):
        lists["steps"] = [counter_of(step).to(device) for _ in shapes]
    if dtypes.master:
        lists["master_params"] = masters
    if bad:
        spoil(lists["grads"])
    return lists


def spoil(grads: list[Tensor]) -> None:
    """Makes a fifth of the elements inf, -inf or NaN, and all of every fourth tensor."""
    for index, grad in enumerate(grads):
        bad = torch.rand(grad.shape) < (1.0 if index % 4 == 1 else 0.2)
        kinds = torch.tensor([INF, -INF, NAN])[torch.randint(3, grad.shape)]
        grad.copy_(torch.where(bad.to(grad.device), kinds.to(grad), grad))


def copied(lists: Lists) -> Lists:
    return {name: [tensor.clone() for tensor in tensors] for name, tensors in lists.items()}


ON_DEVICE = {"grad_scale": F32, "found_inf": F32, "sum_of_squares": F64, "grad_norm": F32}


def on_device(options: Options, device: torch.device | str) -> Options:
    """Returns those options that lie on the device, of numbers."""
    return {
        name: torch.tensor(options[name], device=device, dtype=dtype)
        for name, dtype in ON_DEVICE.items()
        if name in options
    }


def run(operation: str, lists: dict[str, Any], **options: Any) -> None:
    """Calls the operation; ``amsgrad`` among the options speaks of the lists only."""
    options.pop("amsgrad", None)
    getattr(ops, operation)(**lists, **(OPERATIONS[operation].hyperparameters | options))


def assert_same(actual: Lists, expected: Lists) -> None:
    for name, tensors in expected.items():
        for index, tensor in enumerate(tensors):
            assert same_bits(actual[name][index], tensor), f"{name}[{index}] {tuple(tensor.shape)}"


# What becomes of the gradients before the formula sees them, and what it does not see at all.
CLIPPING = ("grad_scale", "max_grad_norm", "clip_value")
UNSEEN = ("amsgrad", "found_inf", "grad_norm", "skip_nonfinite", "workspace", "write_back_grads")


def assert_is_the_formula(operation: str, after: Lists, before: Lists, **options: Any) -> None:
    """Compares every tensor with one step of the reference from ``before``.

    It knows all options of the operation: unscaling, clipping, skipping and writing back too.
    """
    limits = {name: options.pop(name, None) for name in CLIPPING}
    unseen = {name: options.pop(name, None) for name in UNSEEN}
    options = OPERATIONS[operation].hyperparameters | options
    grads, norm = clipped(before["grads"], **limits)
    if unseen["grad_norm"] is not None:
        assert unseen["grad_norm"].item() == pytest.approx(norm, rel=1e-6)
    for index, grad in enumerate(grads):
        old, new = ({name: side[name][index] for name in side} for side in (before, after))
        old_values = old | {"params": old.get("master_params", old["params"])}
        expected = OPERATIONS[operation].formula(old_values["params"], grad, old, **options)
        skipped = torch.zeros(grad.shape, dtype=torch.bool, device=grad.device)
        if unseen["skip_nonfinite"] or not OPERATIONS[operation].has_scaler:
            skipped = ~grad.isfinite()
        if "doubts" in expected:  # where rounding decides which way a step goes
            doubts = expected.pop("doubts") & ~skipped
            computed = new.get("master_params", new["params"]).double()
            off = (computed - expected["params"])[doubts].abs()
            assert (off <= 2.01 * options["lr"] + 0.01 * computed[doubts].abs()).all()
            expected["params"] = torch.where(doubts, computed, expected["params"])
        assert expected.keys() == old.keys() - {"grads", "master_params"}
        for name, wanted in expected.items():
            what = f"{name}[{index}] {tuple(grad.shape)}"
            if name == "steps":
                assert new[name].item() == wanted.item(), what
                continue
            wanted = torch.where(skipped, old_values[name].double(), wanted)
            computed = new.get("master_params", new[name]) if name == "params" else new[name]
            assert_close(computed, wanted, what=what)
            assert same_bits(new[name][skipped], old[name][skipped]), what
        if "master_params" in new:
            assert same_bits(new["params"], new["master_params"].to(new["params"].dtype))
        if not unseen["write_back_grads"]:
            assert same_bits(new["grads"], old["grads"]), "a gradient was written"
            continue
        assert same_bits(new["grads"][skipped], old["grads"][skipped]), "a skipped one was written"
        # Gradients of float64 for parameters of float32 are read in float32.
        in_float = new["grads"].dtype == F64 and new["params"].dtype == F32
        torch.testing.assert_close(
            new["grads"][~skipped].double(),
            grad[~skipped],
            **tolerance(F32 if in_float else new["grads"].dtype),
            msg=f"grads[{index}]",
        )


def assert_steps_by_the_formula(operation: str, lists: Lists, **options: Any) -> None:
    """Takes a step and compares every tensor with one of the reference."""
    before = copied(lists)
    run(operation, lists, **options)
    assert_is_the_formula(operation, lists, before, **options)
