"""Parameters in float16 train through TRL, and with Accelerate in the loops of docs/rl.md.

Torch's scaler refuses them. All runs on the CPU and with a small random model.
"""

from __future__ import annotations

import re
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


# The loops of docs/rl.md.

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rl.md"
BLOCK = re.compile(r"(?:^<!-- not run: needs (\w+)[^\n]*-->\n)?^```python\n(.*?)^```", re.M | re.S)


def run_blocks(needed: str, namespace: dict[str, Any]) -> None:
    """Runs the blocks of the page that need nothing, and those that need one library."""
    for library, code in BLOCK.findall(PAGE.read_text()):
        if library in ("", needed):
            code = code.replace('GradScaler("cuda"', 'GradScaler("cpu"')
            exec(code.replace("Accelerator(", "Accelerator(cpu=True, "), namespace)


def test_the_loop_with_accelerate_learns():
    page: dict[str, Any] = {}
    run_blocks("Accelerate", page)
    assert {param.dtype for param in page["policy"].parameters()} == {torch.float16}
    assert page["mean_reward"] > 0.5
    assert page["mismatch"] < 0.01
    assert page["guard"].stats(wait=True).norms > 90
    assert page["accelerator"].scaler is page["scaler"]


def test_the_loop_with_trl_trains_float16_parameters(tmp_path):
    torch.manual_seed(3)
    model = make_base_model()
    before = [param.clone() for param in model.parameters()]
    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "max_steps": 4}
    options |= {"per_device_train_batch_size": 8, "num_generations": 4, "learning_rate": 0.01}
    options |= {"max_completion_length": 6, "save_strategy": "no", "disable_tqdm": True}
    options |= {"logging_steps": 1, "dataloader_pin_memory": False}

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    prompts = datasets.Dataset.from_dict({"prompt": WORDS[2:10] * 4})
    page: dict[str, Any] = {
        "model": model,
        "dataset": prompts,
        "tokenizer": make_tokenizer(),
        "reward": reward,
    }
    page["options"] = options
    run_blocks("TRL", page)
    trainer, guard = page["trainer"], page["guard"]
    assert {param.dtype for param in model.parameters()} == {torch.float16}
    stats = trainer.accelerator.scaler.stats(wait=True)
    assert stats.updates == 4
    assert guard.stats(wait=True).norms == stats.steps > 0
    assert isinstance(trainer.accelerator.scaler, amp_ext.GradScaler)
    masters = [state["master_param"] for state in page["optimizer"].state.values()]
    moved = [not torch.equal(m, b.float()) for m, b in zip(masters, before, strict=True)]
    assert all(moved)
