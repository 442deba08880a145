"""A tiny GPT-2 trains through Transformers' Trainer with our scaler and optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.rows import rows
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
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    others = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id")
    config = transformers.GPT2Config(**sizes, **dict.fromkeys(others, 0))
    return transformers.GPT2LMHeadModel(config)


def make_data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(32, (4 * STEPS, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


TRAINING: dict[str, Any] = {
    **{"per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": LR, "seed": 3},
    **{"lr_scheduler_type": "linear", "fp16": True, "use_cpu": True, "report_to": "none"},
    **{"save_strategy": "steps", "save_steps": 5, "logging_steps": 1, "disable_tqdm": True},
    "dataloader_pin_memory": False,
}


def make_trainer(
    folder: Path, make: Any = transformers.Trainer, clip: Any = 0.5, **more: Any
) -> Any:
    options = {**TRAINING, "max_grad_norm": clip}
    arguments = transformers.TrainingArguments(output_dir=str(folder), **options)
    return make(args=arguments, train_dataset=make_data(), **more)


def with_class(our_class: Any, **options: Any) -> dict[str, Any]:
    """Returns how a trainer is told to make an optimizer; eps keeps gradients of 0 at rest."""
    options |= {"lr": LR, "eps": 1e-3}
    return {"model": make_model(), "optimizer_cls_and_kwargs": (our_class, options)}


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, int]:
    """A trainer that has trained with torch's scaler and optimizer, and its number of skips."""
    folder = tmp_path_factory.mktemp("torch")
    trainer = make_trainer(folder, **with_class(torch.optim.AdamW, foreach=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=4)
    trainer.accelerator.scaler = scaler
    trainer.accelerator.native_amp = True  # Accelerate says so on a GPU
    trainer.train()
    return trainer, rates_of(trainer).count(LR) - 1


@pytest.fixture(scope="module")
def with_ours(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer that has trained with our scaler and optimizer."""
    return train(make_trainer(tmp_path_factory.mktemp("ours"), **with_class(amp_ext.optim.AdamW)))


def train(trainer: Any, scaler: Any = None, **options: Any) -> Any:
    use_scaler(trainer.accelerator, scaler or our_scaler())
    trainer.train(**options)
    return trainer


def rates_of(trainer: Any) -> list[float]:
    """Returns the learning rate of every step."""
    return [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]


def assert_close(actual: Any, expected: Any, **tolerances: float) -> None:
    models = (actual, expected, make_model())
    for left, right, before in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(left, right, **tolerances)
        assert not torch.equal(left, before), "a weight was not trained"


OPTIMIZERS = {
    "our-adamw": (None, CLOSE),
    "torch-fused": ({"fused": True}, CLOSE),
    "torch": ({"foreach": True}, SAME),
}


@pytest.mark.parametrize(("of_torch", "tolerances"), rows(OPTIMIZERS))
def test_training_equals_the_trainer_s_own_with_torch(
    of_torch, tolerances, with_ours, with_torch, tmp_path
):
    trainer = with_ours
    if of_torch:
        trainer = train(make_trainer(tmp_path, **with_class(torch.optim.AdamW, **of_torch)))
    expected, skips = with_torch
    assert 0 < skips < STEPS
    assert trainer.accelerator.scaler.stats().skips == skips
    assert rates_of(trainer) == rates_of(expected)
    assert_close(trainer.model, expected.model, **tolerances)


class TrainerWithOurScaler(transformers.Trainer):
    """Gives every accelerator that it makes our scaler."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        use_scaler(self.accelerator, our_scaler())


def test_every_accelerator_of_a_trainer_can_get_our_scaler(with_ours, tmp_path):
    other = make_trainer(tmp_path, TrainerWithOurScaler, **with_class(amp_ext.optim.AdamW))
    other.create_accelerator_and_postprocess()  # as a search does between its trials
    other.train()
    assert other.accelerator.scaler.stats() == with_ours.accelerator.scaler.stats()
    assert_close(other.model, with_ours.model, **SAME)


def test_clipping_in_the_step_equals_the_trainer_s(with_ours, tmp_path):
    options = with_class(amp_ext.optim.AdamW, max_grad_norm=0.5)
    trainer = train(make_trainer(tmp_path, clip=0.0, **options))
    assert_close(trainer.model, with_ours.model, **CLOSE)


def test_training_resumed_from_a_checkpoint_ends_with_the_same_bits(with_ours, tmp_path):
    checkpoint = str(Path(with_ours.args.output_dir) / "checkpoint-5")
    resumed = train(
        make_trainer(tmp_path, **with_class(amp_ext.optim.AdamW)),
        amp_ext.GradScaler("cpu", growth_interval=4),
        resume_from_checkpoint=checkpoint,
    )
    assert resumed.accelerator.scaler.stats().updates == STEPS - 5
    assert resumed.accelerator.scaler.state_dict() == with_ours.accelerator.scaler.state_dict()
    assert rates_of(resumed) == rates_of(with_ours)
    assert_close(resumed.model, with_ours.model, **SAME)


def test_muon_gets_its_groups_as_params(tmp_path):
    model = make_model()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    groups = amp_ext.optim.param_groups_for_muon(model, lr=LR, adamw={"lr": LR})
    muon = {"optimizer_cls_and_kwargs": (amp_ext.optim.Muon, {"params": groups})}
    trainer = make_trainer(tmp_path, model=model, **muon)
    use_scaler(trainer.accelerator, our_scaler())
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, amp_ext.optim.Muon)
    stepped = {
        name
        for name, param in model.named_parameters()
        if "momentum_buffer" in optimizer.state[param]
    }
    layer = "transformer.h.0."
    assert stepped == {
        f"{layer}{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert not any(torch.equal(before[name], model.get_parameter(name)) for name in stepped)


class Release(transformers.TrainerCallback):
    """Releases the gradients of the optimizer that the trainer has made."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler

    def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        amp_ext.optim.release_gradients(getattr(optimizer, "optimizer", optimizer), self.scaler)


def test_released_gradients_train_in_fp16_as_others_do(tmp_path):
    scaler = amp_ext.GradScaler("cpu", init_scale=64.0)
    plain = make_trainer(tmp_path / "plain", clip=0.0, **with_class(amp_ext.optim.AdamW))
    train(plain, amp_ext.GradScaler("cpu", init_scale=64.0))
    options = {**with_class(amp_ext.optim.AdamW), "callbacks": [Release(scaler)]}
    released = train(make_trainer(tmp_path / "released", clip=0.0, **options), scaler)
    assert_close(released.model, plain.model, **SAME)
