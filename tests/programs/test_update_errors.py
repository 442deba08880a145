"""How far the updates of optimizers with narrow states may be from float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gradient_streams import gradients
from harness.rows import rows
from update_errors import OptimizerScheme, exact_adamw, exact_lion, exact_sgd, shadow_run
from update_errors_figure import MASTERS, STATES, draw, errors_of_updates, errors_of_weights

from amp_ext.optim import SGD, AdamW, Lion

BF16 = torch.bfloat16
# Of the streams that need not be seen at each setting.
few_streams = pytest.mark.parametrize("name", ["rare", "model"])


def errors_of(
    optimizer: Any, name: str, exact: Callable[[tuple[int, ...]], Any], **options: Any
) -> Any:
    """Returns the errors of an optimizer's updates beside those in float64."""
    stream = gradients(name)
    scheme = OptimizerScheme(optimizer, stream.shape[1:], **options)
    (errors,) = shadow_run(stream, exact(stream.shape[1:]), {"": scheme}).values()
    return errors


# By betas and stream, for states in bfloat16, in "8bit-bf16" and in "8bit": the root mean square of
# the error of an update, the largest single one, and the error of the way where that is not the
# first. What was measured, times 1.3, or times 1.6 for a single error, which varies with the seed.
BOUNDS: dict[tuple[float, float], dict[str, tuple[tuple[float, ...], ...]]] = {
    (0.9, 0.999): {
        "two decades": ((0.013, 0.06), (0.034, 0.20), (0.12, 1.8)),
        "leaning": ((0.015, 0.11, 0.01), (0.035, 0.50, 0.011), (0.06, 0.50, 0.03)),
        "sparse": ((0.008, 0.05), (0.034, 0.20), (0.038, 0.8)),
        # The ratio of a row that is seen for the first time is 3.2, where codes are up to 0.39
        # roots apart, of which a step keeps 0.9.
        "rare": ((0.0065, 0.08), (0.035, 0.35), (0.044, 2.5)),
        "model": ((0.013, 0.08), (0.035, 0.60, 0.02), (0.06, 1.0, 0.035)),
    },
    # Ratios above 8 are too small.
    (0.9, 0.9999): {
        "leaning": ((0.017, 0.12, 0.011), (0.105, 1.0, 0.017), (0.113, 1.0, 0.034)),
        "rare": ((0.005, 0.05), (0.16, 1.2), (0.16, 2.9)),
        "model": ((0.0135, 0.08, 0.0075), (0.19, 1.3, 0.11), (0.195, 1.3, 0.11)),
    },
}
# Of ln sqrt(v) at beta2 = 0.999. A number that only decays is not independent of the words that
# rounded it, so its decay may be some per cent too fast.
LARGEST_BIAS = {BF16: 0.01, "8bit-bf16": 0.01, "8bit": 0.03}
SETTINGS = [
    pytest.param(betas, name, state_dtype, bound, id=f"{name}-{betas[1]}-{state_dtype}")
    for betas, streams in BOUNDS.items()
    for name, bounds in streams.items()
    for state_dtype, bound in zip(LARGEST_BIAS, bounds, strict=True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("betas", "name", "state_dtype", "bound"), SETTINGS)
def test_adamw_keeps_its_bounds(betas, name, state_dtype, bound):
    options = {"state_dtype": state_dtype, "betas": betas, "weight_decay": 0.0}
    errors = errors_of(AdamW, name, partial(exact_adamw, betas=betas), **options)
    update, largest, way = (*bound, bound[0])[:3]
    assert errors.update < update, errors
    assert errors.largest < largest, errors
    assert errors.way < way, errors
    assert abs(errors.bias) < LARGEST_BIAS[state_dtype]


@pytest.mark.slow
@few_streams
def test_the_maximum_of_amsgrad_is_not_biased(name):
    options = {"state_dtype": BF16, "amsgrad": True, "weight_decay": 0.0}
    errors = errors_of(AdamW, name, partial(exact_adamw, amsgrad=True), **options)
    assert abs(errors.bias) < 0.004
    assert errors.update < 0.015


# To nearest a buffer freezes in rows without gradients unless it decays by more than half a code in
# a step.
MOMENTUM_BOUNDS = {BF16: {0.9: 0.0045, 0.99: 0.0185}, "8bit": {0.9: 0.032, 0.99: 0.096}}


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.9, 0.99])
@pytest.mark.parametrize("state_dtype", MOMENTUM_BOUNDS, ids=str)
@few_streams
def test_momentum_keeps_its_bounds(name, state_dtype, momentum):
    options = {"state_dtype": state_dtype, "momentum": momentum}
    errors = errors_of(SGD, name, partial(exact_sgd, momentum=momentum), **options)
    assert errors.update < MOMENTUM_BOUNDS[state_dtype][momentum], errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state_dtype", "share"), rows({"bf16": (BF16, 0.0031), "8bit": ("8bit", 0.015)})
)
@few_streams
def test_lion_turns_few_signs(name, state_dtype, share):
    errors = errors_of(Lion, name, exact_lion, state_dtype=state_dtype)
    # A turned sign differs by two.
    assert (errors.update / 2) ** 2 < share, errors


@pytest.mark.slow
@few_streams
def test_masters_end_where_float64_ends(name):
    errors = errors_of_weights(gradients(name))
    assert errors["split"] == errors["float32"] < 1e-5
    assert errors["split8"] < 0.003
    assert errors["none"] < 0.2
    assert errors["none, to nearest"] > 2 * errors["none"]


def test_the_figure_has_a_mark_for_each_way_to_store(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    stream = gradients("half a decade")[:50]
    updates, weights = errors_of_updates(stream), errors_of_weights(stream)
    assert updates.keys() == STATES.keys()
    assert weights.keys() == MASTERS.keys()
    draw({"half a decade": updates}, {"half a decade": weights}, tmp_path / "errors.png")
    assert (tmp_path / "errors.png").stat().st_size > 10_000
