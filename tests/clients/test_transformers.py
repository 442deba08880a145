"""A tiny GPT-2 trains through Transformers' Trainer with our scaler and optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import INIT_SCALE, client, our_scaler

import amp_ext

transformers = client("transformers")
accelerate = client("accelerate")

from amp_ext.integrations.accelerate import use_scaler  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

STEPS = 10
LR = 0.01
SAME = {"rtol": 0.0, "atol": 0.0}
CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # float32 rounds otherwise, float16 activations amplify it


def make_model() -> Any:
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=32,
            n_positions=8,
            n_embd=16,
            n_layer=1,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def make_data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(32, (4 * STEPS, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_trainer(
    folder: Path,
    trainer_class: Any = transformers.Trainer,
    max_grad_norm: float = 0.5,
    **options: Any,
) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="linear",
        max_grad_norm=max_grad_norm,
        fp16=True,
        use_cpu=True,
        seed=3,
        save_strategy="steps",
        save_steps=5,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return trainer_class(args=arguments, train_dataset=make_data(), **options)


def with_class(our_class: Any, **options: Any) -> dict[str, Any]:
    """Returns how a trainer is told to make an optimizer; eps keeps gradients of 0 at rest."""
    return {
        "model": make_model(),
        "optimizer_cls_and_kwargs": (our_class, {"lr": LR, "eps": 1e-3, **options}),
    }


def train_with_torch(folder: Path) -> tuple[Any, int]:
    """Trains with torch's scaler and optimizer; returns the trainer and the number of skips."""
    trainer = make_trainer(folder, **with_class(torch.optim.AdamW, foreach=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=4)
    trainer.accelerator.scaler = scaler
    trainer.accelerator.native_amp = True  # Accelerate says so on a GPU
    trainer.train()
    return trainer, rates_of(trainer).count(LR) - 1


def rates_of(trainer: Any) -> list[float]:
    """Returns the learning rate of every step."""
    return [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]


def assert_close(actual: Any, expected: Any, **tolerances: float) -> None:
    untrained = make_model()
    for (name, left), right, before in zip(
        actual.named_parameters(), expected.parameters(), untrained.parameters(), strict=True
    ):
        torch.testing.assert_close(left, right, **tolerances)
        assert not torch.equal(left, before), f"{name} was not trained"


@pytest.mark.parametrize(
    ("our_class", "options", "tolerances"),
    [
        pytest.param(amp_ext.optim.AdamW, {}, CLOSE, id="our-adamw"),
        pytest.param(torch.optim.AdamW, {"fused": True}, CLOSE, id="torch-fused"),
        pytest.param(torch.optim.AdamW, {"foreach": True}, SAME, id="torch"),
    ],
)
def test_training_equals_the_trainer_s_own_with_torch(our_class, options, tolerances, tmp_path):
    trainer = make_trainer(tmp_path / "ours", **with_class(our_class, **options))
    scaler = use_scaler(trainer.accelerator, our_scaler())
    trainer.train()
    expected, skips = train_with_torch(tmp_path / "torch")
    assert 0 < skips < STEPS
    assert scaler.stats().skips == skips
    assert rates_of(trainer) == rates_of(expected)
    assert_close(trainer.model, expected.model, **tolerances)


def test_an_optimizer_that_was_made_before_trains_the_same(tmp_path):
    model = make_model()
    optimizer = amp_ext.optim.AdamW(model.parameters(), lr=LR, eps=1e-3, weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    trainer = make_trainer(tmp_path / "ours", model=model, optimizers=(optimizer, schedule))
    use_scaler(trainer.accelerator, our_scaler())
    trainer.train()
    expected, _ = train_with_torch(tmp_path / "torch")
    assert rates_of(trainer) == pytest.approx(rates_of(expected))
    assert_close(trainer.model, expected.model, **CLOSE)


class TrainerWithOurScaler(transformers.Trainer):
    """Gives every accelerator that it makes our scaler."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        use_scaler(self.accelerator, our_scaler())


def test_every_accelerator_of_a_trainer_can_get_our_scaler(tmp_path):
    trainer = make_trainer(tmp_path, **with_class(amp_ext.optim.AdamW))
    use_scaler(trainer.accelerator, our_scaler())
    trainer.train()
    other = make_trainer(tmp_path, TrainerWithOurScaler, **with_class(amp_ext.optim.AdamW))
    other.create_accelerator_and_postprocess()  # as a search does between its trials
    other.train()
    assert other.accelerator.scaler.stats() == trainer.accelerator.scaler.stats()
    assert_close(other.model, trainer.model, **SAME)


def test_clipping_in_the_step_equals_the_trainer_s(tmp_path):
    models = []
    for max_grad_norm, options in ((0.5, {}), (0.0, {"max_grad_norm": 0.5})):
        trainer = make_trainer(
            tmp_path,
            max_grad_norm=max_grad_norm,
            **with_class(amp_ext.optim.AdamW, **options),
        )
        use_scaler(trainer.accelerator, our_scaler())
        trainer.train()
        models.append(trainer.model)
    assert_close(*models, **CLOSE)


def test_training_resumed_from_a_checkpoint_ends_with_the_same_bits(tmp_path):
    trainers = []
    for checkpoint in (None, str(tmp_path / "checkpoint-5")):
        trainer = make_trainer(tmp_path, **with_class(amp_ext.optim.AdamW))
        scaler = our_scaler() if checkpoint is None else amp_ext.GradScaler("cpu")
        scaler.set_growth_interval(4)
        use_scaler(trainer.accelerator, scaler)
        trainer.train(resume_from_checkpoint=checkpoint)
        trainers.append(trainer)
    whole, resumed = trainers
    assert resumed.accelerator.scaler.stats().updates == STEPS - 5
    assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    assert rates_of(resumed) == rates_of(whole)
    assert_close(resumed.model, whole.model, **SAME)
