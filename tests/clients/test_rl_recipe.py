"""The loops of docs/rl.md run with Accelerate and TRL, on the CPU and with a small random model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import client
from test_trl import WORDS, make_base_model, make_tokenizer

import amp_ext

accelerate = client("accelerate")
datasets = client("datasets")
trl = client("trl")

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

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
