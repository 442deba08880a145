"""``FullyShardedDataParallel`` saves the optimizers in each of its ways, and goes on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import ranks
from harness.edge_shapes import BF16, F16, F32
from harness.optimizer_cases import Optimizer, assert_same_bits, optimizers_named, ours
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

pytestmark = [ranks.needs_gloo, pytest.mark.slow]

# FSDP with use_orig_params=True saves all tensors of a state in one dtype: float32 masters, and
# moments in bfloat16 or the parameter's dtype.
CASES = [
    (*row.values, dtype, own)
    for row in optimizers_named("adam-amsgrad", "adamw", "lion", "dampening")
    for dtype, own in ((BF16, {"state_dtype": BF16}), (F16, {"state_dtype": None}))
] + [
    ("AdamW", {}, F32, {"state_dtype": BF16}),
    ("AdamW", {}, BF16, {"state_dtype": BF16, "master_weights": False}),
]
CANNOT_BE_SAVED: list[dict[str, Any]] = [
    *({"state_dtype": state_dtype} for state_dtype in ("8bit", "8bit-bf16")),
    *({"master_weights": form} for form in ("split", "split8")),
]
# On the CPU offloaded states would all be the last one: torch takes no copies of its buffer there.
in_full = partial(fsdp.FullOptimStateDictConfig, offload_to_cpu=False)
WAYS: dict[str, Any] = {
    "full": (StateDictType.FULL_STATE_DICT, in_full()),
    "full-on-rank-0": (StateDictType.FULL_STATE_DICT, in_full(rank0_only=True)),
    "sharded": (StateDictType.SHARDED_STATE_DICT, fsdp.ShardedOptimStateDictConfig()),
    "local": (StateDictType.LOCAL_STATE_DICT, fsdp.LocalOptimStateDictConfig()),
    "folder": None,
}


def make(
    name: str, options: dict[str, Any], dtype: torch.dtype, use_orig_params: bool, way: str
) -> tuple[Any, Any]:
    """Returns a model whose ranks lack some parameters, and its optimizer, of two groups if any."""
    torch.manual_seed(0)
    model = ranks.Model().to(dtype)
    if use_orig_params:
        model.first.bias.requires_grad_(False)
    # Without a mesh dcp.load finds no keys of tensors of which a rank has no part.
    mesh = init_device_mesh("cpu", (2,)) if way == "folder" else None
    on_cpu = {"device_id": torch.device("cpu"), "device_mesh": mesh}
    wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params, **on_cpu)
    params = list(wrapped.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.25}]
    return wrapped, ours(name)(groups if use_orig_params else params, **options)


def train(model: Any, optimizer: Optimizer, steps: range, dtype: torch.dtype) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(ranks.batch(step)[0].to(dtype)).float().square().mean().backward()
        optimizer.step()


def carry(saver: tuple[Any, Any], loader: tuple[Any, Any], way: str, folder: Path) -> None:
    """Saves a model and its optimizer and loads them into others."""
    if WAYS[way] is None:
        loader[1].init_state()
        dcp.save(dict(zip("mo", get_state_dict(*saver), strict=True)), checkpoint_id=folder)
        content = dict(zip("mo", get_state_dict(*loader), strict=True))
        dcp.load(content, checkpoint_id=folder)
        loaded = {"model_state_dict": content["m"], "optim_state_dict": content["o"]}
        set_state_dict(*loader, **loaded)
        return
    with torch.no_grad():
        for to, param in zip(loader[0].parameters(), saver[0].parameters(), strict=True):
            to.copy_(param)
    kind, config = WAYS[way]
    for model in (saver[0], loader[0]):
        FullyShardedDataParallel.set_state_dict_type(model, kind, None, config)
    saved = FullyShardedDataParallel.optim_state_dict(*saver)
    loader[1].load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(*loader, saved))


@dataclass
class Resuming:
    """Saves and resumes the cases, each way and each case with several of the others."""

    folder: Path
    use_orig_params: bool

    __name__ = "resuming"

    def __call__(self, rank: int) -> None:
        """Compares with a run that went on."""
        for own in CANNOT_BE_SAVED:
            with pytest.raises(ValueError, match="FullyShardedDataParallel flattens"):
                make("AdamW", own, BF16, self.use_orig_params, "full")
        in_each = [*itertools.product(CASES, WAYS)][::3]
        rows = in_each if self.use_orig_params else zip(CASES, itertools.cycle(WAYS), strict=False)
        for number, (case, way) in enumerate(rows):
            name, options, dtype, own = case
            both = [make(name, options | own, dtype, self.use_orig_params, way) for _ in range(2)]
            train(*both[0], range(2), dtype)
            try:
                carry(*both, way, self.folder / str(number))
                for steps in (range(0), range(2, 4)):
                    for each in both:
                        train(*each, steps, dtype)
                    assert_same_bits(both[1][1], both[0][1])
            except Exception as error:
                raise AssertionError(f"{case}, {way}") from error


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(tmp_path, use_orig_params):
    ranks.run_ranks([Resuming(tmp_path, use_orig_params)], tmp_path)
