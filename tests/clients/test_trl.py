"""LoRA adapters in float16 train through TRL's SFTTrainer, where torch's scaler refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import client

import amp_ext

transformers = client("transformers")
accelerate = client("accelerate")
datasets = client("datasets")
peft = client("peft")
tokenizers = client("tokenizers")
trl = client("trl")

from amp_ext.integrations.accelerate import use_scaler  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

STEPS = 24
LR = 0.02
WORDS = ["<pad>", "<eos>", *(f"word{number}" for number in range(30))]


def make_tokenizer() -> Any:
    """Returns a tokenizer of whole words."""
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )


def make_data() -> Any:
    """Returns lines of four words in turns."""
    lines = [" ".join(WORDS[2 + (start + i) % 4] for i in range(8)) for start in range(4 * STEPS)]
    return datasets.Dataset.from_dict({"text": lines})


def make_base_model() -> Any:
    """Returns a Llama with random weights in float16."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    config = transformers.LlamaConfig(**sizes, **heads, **tokens, initializer_range=0.2)
    return transformers.LlamaForCausalLM(config).half()


def make_model() -> Any:
    """Returns the Llama with LoRA adapters that are float16, too."""
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(make_base_model(), lora, autocast_adapter_dtype=False)


def adapters(model: Any) -> dict[str, torch.Tensor]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def make_trainer(folder: Path, optimizer_class: Any, clip: float = 0.0, **options: Any) -> Any:
    arguments = trl.SFTConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=LR,
        max_length=16,
        max_grad_norm=clip,
        fp16=True,
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )
    trainer = trl.SFTTrainer(
        model=make_model(),
        args=arguments,
        train_dataset=make_data(),
        processing_class=make_tokenizer(),
        optimizer_cls_and_kwargs=(optimizer_class, {"lr": LR, **options}),
    )
    assert {param.dtype for param in adapters(trainer.model).values()} == {torch.float16}
    return trainer


def test_float16_adapters_train_with_our_scaler_and_optimizer(tmp_path):
    trainer = make_trainer(tmp_path, amp_ext.optim.AdamW, max_grad_norm=1.0)
    before = {name: param.clone() for name, param in adapters(trainer.model).items()}
    scaler = use_scaler(trainer.accelerator, amp_ext.GradScaler("cpu", init_scale=2.0**20))
    trainer.train()
    after = adapters(trainer.model)
    assert {param.dtype for param in after.values()} == {torch.float16}
    assert {name for name in after if torch.equal(after[name], before[name])} == set()
    masters = [state["master_param"] for state in trainer.optimizer.state.values()]
    assert {master.dtype for master in masters} == {torch.float32}
    assert len(masters) == len(after)
    stats = scaler.stats(wait=True)
    assert stats.updates == STEPS
    assert 0 < stats.skips < STEPS / 2
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    # What the trainer measures before a step is what the step clips by: of unscaled gradients.
    assert lines[-1]["grad_norm"] == pytest.approx(trainer.optimizer.optimizer.grad_norm.item())
