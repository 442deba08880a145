"""ignite's supervised trainer takes our scaler and our optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import small_training as small
import torch

small.client("ignite")

from ignite.engine import Events, create_supervised_trainer  # noqa: E402
from ignite.handlers import Checkpoint, DiskSaver  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")


def in_half(model: torch.nn.Module, x: torch.Tensor) -> Any:
    """Runs the model in float16; ignite itself switches that on for CUDA only."""
    with torch.autocast("cpu", torch.float16):
        return model(x)


def make(make_optimizer: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a trainer and what it trains."""
    model, scaler = small.make_model(), small.our_scaler()
    parts = {"model": model, "optimizer": make_optimizer(model.parameters()), "scaler": scaler}
    if guard := getattr(parts["optimizer"], "norm_guard", None):
        parts["guard"] = guard
    options |= {"amp_mode": "amp", "scaler": scaler, "model_fn": in_half}
    return create_supervised_trainer(model, parts["optimizer"], small.loss_of, **options), parts


@pytest.mark.parametrize("make_optimizer", [*small.FUSED, small.LOOPING])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_equals_the_loop_by_hand(make_optimizer, accumulate):
    trainer, parts = make(make_optimizer, gradient_accumulation_steps=accumulate)
    trainer.run(small.make_batches())
    small.assert_trained_as_by_hand(
        parts["model"], parts["scaler"], make_optimizer, accumulate=accumulate
    )


def test_training_resumed_from_a_checkpoint_ends_with_the_same_bits(tmp_path):
    trainer, parts = make(small.guarded_adamw)
    saver = Checkpoint(parts, DiskSaver(tmp_path, create_dir=False))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=7), saver)
    trainer.run(small.make_batches())

    resumed_trainer, resumed = make(small.guarded_adamw)
    file = torch.load(tmp_path / saver.last_checkpoint, weights_only=True)
    Checkpoint.load_objects(resumed, file)
    resumed_trainer.run(small.make_batches()[7:])
    for name in ("scaler", "guard"):
        assert resumed[name].state_dict() == parts[name].state_dict()
    small.assert_same_weights(resumed["model"], parts["model"])
