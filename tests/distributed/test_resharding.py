"""Tests of checkpoints that are written by so many ranks and read by another number of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import ranks
from harness.edge_shapes import BF16, F32
from harness.optimizer_cases import optimizers_named, ours
from harness.reference import same_bits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

pytestmark = [ranks.needs_gloo, pytest.mark.slow]

STEPS_OF_A_STAGE = 2
# What is kept, in which dtype of parameters; every second one by both optimizers.
FORMS: list[tuple[dict[str, Any], torch.dtype]] = [
    ({"max_grad_norm": 1.0}, F32),
    ({"state_dtype": BF16}, F32),
    ({"max_grad_norm": 1.0}, BF16),
    ({"state_dtype": BF16, "master_weights": False}, BF16),
    ({"master_weights": "split"}, BF16),
    ({"state_dtype": "8bit-bf16", "master_weights": "split8"}, BF16),
    ({"state_dtype": "8bit"}, F32),
    ({"state_dtype": "8bit", "master_weights": "split"}, BF16),
]


def make(name: str, options: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    has_groups = options.get("state_dtype") in ("8bit-bf16", "8bit")
    model = (ranks.WideModel if has_groups else ranks.Model)().to(dtype)
    if dist.get_world_size() > 1:
        ranks.fully_sharded(model)
    return model, ours(name)(model.parameters(), **options), ranks.small_scaler(growth_interval=3)


def train(model: Any, optimizer: Any, scaler: Any, steps: range, dtype: torch.dtype) -> None:
    for step in steps:
        optimizer.zero_grad()
        x, y = (values.to(dtype) for values in ranks.batch(step))  # all samples on every rank
        scaler.scale((model(x) - y).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def states(model: Any, optimizer: Any) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


@dataclass
class Stage:
    """Goes on with the training of every case from the checkpoint of the stage before."""

    folder: Path
    number: int

    @property
    def __name__(self) -> str:
        return f"stage {self.number}"

    def __call__(self, rank: int) -> None:
        """Loads, trains, saves; the last stage compares with a run that was never stopped."""
        for number, (kept, dtype) in enumerate(FORMS):
            for row in optimizers_named("adamw", "dampening")[: 1 + number % 2]:
                name, options = row.values
                self.run(f"{row.id}-{number}", name, options | kept, dtype)

    def run(self, case: str, name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
        model, optimizer, scaler = make(name, options, dtype)
        if self.number > 0:
            optimizer.init_state()
            loaded = states(model, optimizer)
            loaded["scaler"] = scaler.state_dict()
            dcp.load(loaded, checkpoint_id=self.folder / f"{case}-{self.number - 1}")
            set_state_dict(
                model,
                optimizer,
                model_state_dict=loaded["model"],
                optim_state_dict=loaded["optimizer"],
            )
            scaler.load_state_dict(loaded["scaler"])
        first = self.number * STEPS_OF_A_STAGE
        train(model, optimizer, scaler, range(first, first + STEPS_OF_A_STAGE), dtype)
        if self.number < 2:
            saved = {**states(model, optimizer), "scaler": scaler.state_dict()}
            dcp.save(saved, checkpoint_id=self.folder / f"{case}-{self.number}")
            return
        at_once = make(name, options, dtype)
        train(*at_once, range(first + STEPS_OF_A_STAGE), dtype)
        pairs = zip(model.parameters(), at_once[0].parameters(), strict=True)
        for param, wanted in pairs:
            assert same_bits(ranks.whole(param.detach()), ranks.whole(wanted.detach()))
            for key, value in at_once[1].state[wanted].items():
                got = ranks.whole(optimizer.state[param][key])
                assert same_bits(got, ranks.whole(value)), (case, key)
        assert scaler.state_dict() == at_once[2].state_dict()


def test_two_ranks_one_rank_two_ranks_train_as_if_never_stopped(tmp_path: Path) -> None:
    for number, world in enumerate((2, 1, 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        ranks.run_ranks([Stage(tmp_path, number)], folder, ranks=world)
