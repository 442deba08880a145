"""The Trainer of sentence-transformers trains with our scaler and AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_training as small
import torch

import amp_ext

sentence_transformers = small.client("sentence_transformers")
datasets = small.client("datasets")

from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Dense, StaticEmbedding  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PrinterCallback  # noqa: E402

from amp_ext.integrations.accelerate import use_scaler  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

BATCHES, BATCH = 24, 8
WORDS = ["red", "green", "blue", "cat", "dog", "fish", "runs", "sleeps"]
# eps keeps elements with a gradient near 0 at rest, which would amplify rounding.
ADAMW: dict[str, Any] = {"lr": 0.05, "eps": 1e-3}
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


def make_model() -> Any:
    torch.manual_seed(1)
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    modules = [StaticEmbedding(tokenizer, embedding_dim=16), Dense(16, 8)]
    return sentence_transformers.SentenceTransformer(modules=modules, device="cpu")


def make_data() -> dict[str, list[Any]]:
    """Returns pairs of sentences of three words, and the similarities that they should have."""
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(len(WORDS), (2, BATCHES * BATCH, 3), generator=generator).tolist()
    first, second = ([" ".join(WORDS[word] for word in row) for row in rows] for rows in words)
    labels = torch.rand(BATCHES * BATCH, generator=generator).tolist()
    return {"first": first, "second": second, "label": labels}


def assert_close(actual: Any, expected: Any) -> None:
    parameters = (model.parameters() for model in (actual, expected, make_model()))
    for left, right, before in zip(*parameters, strict=True):
        torch.testing.assert_close(left, right, **CLOSE)
        assert not torch.equal(left, before), "a weight was not trained"


TRAINING: dict[str, Any] = {
    **{"per_device_train_batch_size": BATCH, "max_steps": BATCHES, "learning_rate": ADAMW["lr"]},
    **{"fp16": True, "use_cpu": True, "dataloader_pin_memory": False, "seed": 3},
    **{"save_strategy": "steps", "save_steps": BATCHES // 2, "report_to": "none"},
    "disable_tqdm": True,
}


def make_trainer(folder: Path, model: Any, optimizer_class: Any) -> Any:
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model=model,
        args=sentence_transformers.SentenceTransformerTrainingArguments(
            output_dir=str(folder), **TRAINING
        ),
        train_dataset=datasets.Dataset.from_dict(make_data()),
        loss=CosineSimilarityLoss(model),
        optimizer_cls_and_kwargs=(optimizer_class, ADAMW),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(trainer: Any, **options: Any) -> Any:
    use_scaler(trainer.accelerator, small.our_scaler())
    trainer.train(**options)
    return trainer


def test_the_trainer_trains_as_with_torch_and_goes_on_from_its_checkpoint(tmp_path):
    expected = make_trainer(tmp_path / "torch", make_model(), torch.optim.AdamW)
    expected.accelerator.scaler = torch.amp.GradScaler(
        "cpu", init_scale=small.INIT_SCALE, growth_interval=4
    )
    expected.accelerator.native_amp = True  # Accelerate says so on a GPU
    expected.train()

    folder = tmp_path / "ours"
    trainer = train(make_trainer(folder, make_model(), amp_ext.optim.AdamW))
    scaler = trainer.accelerator.scaler
    assert 0 < scaler.stats().skips < BATCHES
    assert scaler.get_scale() == expected.accelerator.scaler.get_scale()
    assert_close(trainer.model, expected.model)

    checkpoint = folder / f"checkpoint-{BATCHES // 2}"
    resumed = make_trainer(folder, make_model(), amp_ext.optim.AdamW)
    train(resumed, resume_from_checkpoint=str(checkpoint))
    assert resumed.accelerator.scaler.get_scale() == scaler.get_scale()
    for left, right in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(left, right)
