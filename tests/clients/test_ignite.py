"""ignite's supervised trainer takes our scaler and our optimizers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from small_training import (
    LR,
    assert_same_weights,
    client,
    loss_of,
    make_batches,
    make_model,
    our_scaler,
    train_by_hand,
)

import amp_ext

client("ignite")

from ignite.engine import Events, create_supervised_trainer  # noqa: E402
from ignite.handlers import Checkpoint, DiskSaver  # noqa: E402

OPTIMIZERS = [
    pytest.param(functools.partial(amp_ext.optim.AdamW, lr=LR), id="our-adamw"),
    pytest.param(functools.partial(amp_ext.optim.SGD, lr=LR, momentum=0.9), id="our-sgd"),
    pytest.param(functools.partial(torch.optim.AdamW, lr=LR), id="torch"),
]


def in_half(model: torch.nn.Module, x: torch.Tensor) -> Any:
    """Runs the model in float16; ignite itself switches that on for CUDA only."""
    with torch.autocast("cpu", torch.float16):
        return model(x)


def make_trainer(model: Any, optimizer: Any, scaler: Any, **options: Any) -> Any:
    return create_supervised_trainer(
        model, optimizer, loss_of, amp_mode="amp", scaler=scaler, model_fn=in_half, **options
    )


@pytest.mark.filterwarnings("ignore:CUDA is not available")
class TestTrainer:
    @pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_training_equals_the_loop_by_hand(self, make_optimizer, accumulate):
        model, scaler = make_model(), our_scaler()
        trainer = make_trainer(
            model,
            make_optimizer(model.parameters()),
            scaler,
            gradient_accumulation_steps=accumulate,
        )
        trainer.run(make_batches())
        expected = make_model()
        skipped = train_by_hand(
            expected, make_optimizer(expected.parameters()), our_scaler(), accumulate=accumulate
        )
        assert any(skipped)
        assert scaler.history().skipped == skipped
        assert_same_weights(model, expected)

    def test_training_resumed_from_a_checkpoint_ends_with_the_same_bits(self, tmp_path):
        batches = make_batches()

        def make() -> tuple[Any, dict[str, Any]]:
            model, scaler = make_model(), our_scaler()
            optimizer = amp_ext.optim.AdamW(model.parameters(), lr=LR)
            trainer = make_trainer(model, optimizer, scaler)
            return trainer, {"model": model, "optimizer": optimizer, "scaler": scaler}

        trainer, parts = make()
        saver = Checkpoint(parts, DiskSaver(tmp_path, create_dir=False))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=7), saver)
        trainer.run(batches)

        resumed_trainer, resumed = make()
        file = torch.load(tmp_path / saver.last_checkpoint, weights_only=True)
        Checkpoint.load_objects(resumed, file)
        resumed_trainer.run(batches[7:])
        assert resumed["scaler"].state_dict() == parts["scaler"].state_dict()
        assert_same_weights(resumed["model"], parts["model"])
