"""The lines of docs/watching.md write curves that TensorBoard reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import small_training as small
import torch

import amp_ext

small.client("tensorboard")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "watching.md"


def test_the_curves_of_a_run_are_in_the_file(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils import tensorboard  # noqa: F401, which the page takes as an attribute

    text = PAGE.read_text()
    block = re.search(r"```python\n(writer = .*?)```", text, re.DOTALL)
    assert block is not None
    made, logged = block[1].split("\n", 1)
    monkeypatch.chdir(tmp_path)
    namespace = {"torch": torch}
    exec(made, namespace)
    model, scaler = small.make_model(), small.our_scaler()
    optimizer = amp_ext.optim.AdamW(model.parameters(), lr=small.LR, max_grad_norm=1.0)
    scales, norms = [], []
    for number, (x, y) in enumerate(small.make_batches()):
        small.train_by_hand(model, optimizer, scaler, batches=[(x, y)])
        exec(logged, namespace | {"scaler": scaler, "optimizer": optimizer, "step": 100 * number})
        scales.append(scaler.get_scale())
        norms.append(optimizer.grad_norm.item())
    namespace["writer"].close()
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    names = events.Tags()["scalars"]
    read = {name: [event.value for event in events.Scalars(name)] for name in names}
    assert read["loss scale"] == scales
    assert read["skipped steps"][-1] == scaler.stats().skips > 0
    assert read["gradient norm"] == pytest.approx(norms, nan_ok=True)
