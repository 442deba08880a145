"""A net of skorch trains through Accelerate with our scaler, and is pickled as before."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import small_training as small
import torch

import amp_ext

small.client("skorch")
accelerate = small.client("accelerate")

from skorch import NeuralNetRegressor  # noqa: E402
from skorch.hf import AccelerateMixin  # noqa: E402

from amp_ext.integrations.accelerate import use_scaler  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings("ignore:Setting self.device = cpu"),
]


class Net(AccelerateMixin, NeuralNetRegressor):
    pass


def test_a_net_is_trained_as_by_hand_and_pickled():
    accelerator = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
    scaler = use_scaler(accelerator, small.our_scaler())
    net = Net(
        small.make_model(),
        criterion=torch.nn.MSELoss,
        optimizer=amp_ext.optim.AdamW,
        lr=small.LR,
        accelerator=accelerator,
        max_epochs=1,
        batch_size=8,
        train_split=None,
        device=None,
        verbose=0,
    )
    xs, ys = zip(*small.make_batches(), strict=True)
    net.fit(torch.cat(xs).numpy(), torch.cat(ys).numpy())
    small.assert_trained_as_by_hand(net.module_, scaler, small.our_adamw)
    again = pickle.loads(pickle.dumps(net))
    x = np.ones((3, 6), dtype=np.float32)
    assert np.array_equal(again.predict(x), net.predict(x))
    assert again.accelerator.scaler.state_dict() == scaler.state_dict()
