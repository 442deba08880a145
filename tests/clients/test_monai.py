"""MONAI's trainer makes its scaler when it runs; a handler of the start gives it ours."""

from __future__ import annotations

from typing import Any

import pytest
import small_training as small
import torch

small.client("monai")

from ignite.engine import Events  # noqa: E402
from monai.engines import SupervisedTrainer  # noqa: E402
from monai.inferers import SimpleInferer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*GradScaler.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*CUDA is not available"),
]


class InHalf(SimpleInferer):
    """Runs the model in float16; MONAI itself switches that on for CUDA only."""

    def __call__(self, inputs: Any, network: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.float16):
            return super().__call__(inputs, network, *args, **kwargs)


@pytest.mark.parametrize("make_optimizer", [*small.FUSED, small.LOOPING])
def test_training_equals_the_loop_by_hand(make_optimizer):
    model, scaler = small.make_model(), small.our_scaler()
    batches = [{"image": x, "label": y} for x, y in small.make_batches()]
    trainer = SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=1,
        train_data_loader=batches,
        network=model,
        optimizer=make_optimizer(model.parameters()),
        loss_function=small.loss_of,
        inferer=InHalf(),
        amp=True,
    )
    trainer.add_event_handler(Events.STARTED, lambda engine: setattr(engine, "scaler", scaler))
    trainer.run()
    small.assert_trained_as_by_hand(model, scaler, make_optimizer)
