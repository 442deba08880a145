"""Coqui's trainer gets our scaler after its constructor, which has loaded a checkpoint by then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_training as small
import torch
from torch import Tensor, nn

import amp_ext

small.client("trainer")

from trainer import Trainer, TrainerArgs, TrainerConfig, TrainerModel  # noqa: E402


class SmallModel(TrainerModel):
    """The model of ``small_training``; the trainer has no float16 on the CPU, so it is here."""

    def __init__(self, make_optimizer: small.MakeOptimizer, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = small.make_model().to(dtype)
        self.make_optimizer = make_optimizer

    def forward(self, x: Tensor) -> Any:
        dtype = self.net[0].weight.dtype
        with torch.autocast("cpu", torch.float16, enabled=dtype is torch.float32):
            return self.net(x.to(dtype))

    def train_step(self, batch: dict[str, Tensor], criterion: nn.Module) -> Any:
        output = self(batch["x"])
        return {"output": output}, {"loss": criterion(output, batch["y"])}

    def get_criterion(self) -> Any:
        return small.loss_of

    def get_optimizer(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.net.parameters())

    def get_scheduler(self, optimizer: torch.optim.Optimizer) -> None:
        return None

    def get_data_loader(self, *_: Any, **__: Any) -> Any:
        batches = [{"x": x, "y": y} for x, y in small.make_batches()]
        return torch.utils.data.DataLoader(batches, batch_size=None)


MakeTrainer = Callable[..., Any]


@pytest.fixture
def make_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeTrainer:
    # The trainer's own scaler is for CUDA and would be disabled here.
    monkeypatch.setattr("trainer.trainer.GradScaler", lambda: torch.amp.GradScaler("cpu"))

    def make(
        make_optimizer: small.MakeOptimizer,
        *,
        max_norm: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> Any:
        config = TrainerConfig(
            run_name="small",
            output_path=str(tmp_path),
            run_eval=False,
            epochs=1,
            use_grad_scaler=True,
            grad_clip=max_norm,
            lr=small.LR,
        )
        return Trainer(
            TrainerArgs(),
            config,
            output_path=str(tmp_path),
            model=SmallModel(make_optimizer, dtype),
            parse_command_line_args=False,
        )

    return make


@pytest.mark.parametrize("make_optimizer", [*small.FUSED, small.LOOPING])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_training_equals_the_loop_by_hand(make_trainer, make_optimizer, max_norm):
    scaler = small.our_scaler()
    trainer = make_trainer(make_optimizer, max_norm=max_norm or 0.0)
    trainer.scaler = scaler
    trainer.fit()
    small.assert_trained_as_by_hand(trainer.model.net, scaler, make_optimizer, max_norm=max_norm)


def test_fp16_parameters_train_without_the_trainers_clipping(make_trainer):
    def clipping_adamw(params: Any) -> amp_ext.optim.AdamW:
        return small.our_adamw(params, max_grad_norm=1.0)

    scaler = small.our_scaler()
    trainer = make_trainer(clipping_adamw, dtype=torch.float16)
    trainer.scaler = scaler
    trainer.fit()
    assert 0 < scaler.stats().skips < scaler.stats().updates
    assert trainer.model.net[0].weight.dtype is torch.float16
    assert not torch.equal(trainer.model.net[0].weight, small.make_model()[0].weight.half())
