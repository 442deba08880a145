"""Tests of gradients that a step writes back, and of the options that clip."""

from __future__ import annotations

import pytest
import torch
from harness import optimizer_cases as cases
from harness.awkward import F32, F64
from harness.clipping_cases import (
    CLIPPING,
    WAYS,
    fused_step,
    of_all_dtypes,
)
from harness.optimizer_cases import (
    assert_same_bits,
    give_grads,
    grads_of,
    pair,
    params_of,
)
from harness.reference import same_bits, snapshot

OPTIONS = {"max_grad_norm": 3.0, "clip_value": 0.5, "write_back_grads": True}

# What is written.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("clipping", [pytest.param({}, id="unclipped"), *CLIPPING[1:3]])
def test_a_write_back_leaves_what_was_stepped(clipping, way, device):
    writes, plain = of_all_dtypes(way, "AdamW", clipping, device, write_back_grads=True)
    scalers = [way.make_scaler(device, 2.0**4) for _ in range(2)]
    for _ in range(2):
        give_grads(writes, plain)
        before = snapshot(grads_of(writes))
        fused_step(writes, way, scalers[0])
        fused_step(plain, way, scalers[1])
        assert_same_bits(writes, plain)
        coefficient = 1.0
        if "max_grad_norm" in clipping:
            wanted = clipping["max_grad_norm"] / (writes.grad_norm.item() + 1e-6)
            coefficient = torch.tensor(wanted).clamp(max=1).item()
        limit = clipping.get("clip_value", torch.inf)
        for grad, old in zip(grads_of(writes), before, strict=True):
            wide = old.to(F64 if old.dtype == F64 else F32) * coefficient
            assert same_bits(grad, wide.clamp(-limit, limit).to(old.dtype))


def test_a_skipped_step_on_the_cpu_moves_no_version():
    """On a GPU the host does not know of the skip."""
    optimizer, _ = pair("AdamW", {}, **OPTIONS)
    cases.train([optimizer])
    optimizer.found_inf = torch.ones(())
    tensors = [*params_of(optimizer), *grads_of(optimizer)]
    versions = [tensor._version for tensor in tensors]
    optimizer.step()
    assert [tensor._version for tensor in tensors] == versions


@pytest.mark.parametrize("write_back", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_only_a_write_back_moves_the_version_of_gradients(transposed, write_back: bool, device):
    options = OPTIONS | {"write_back_grads": write_back}
    optimizer, _ = pair("AdamW", {}, device=device, shapes=[(6, 5), (3,)], **options)
    optimizer.grad_scale = torch.tensor(8.0, device=device)
    give_grads(optimizer)
    if transposed:
        params_of(optimizer)[0].grad = torch.randn(5, 6, device=device).t()
    before = snapshot(grads_of(optimizer))
    versions = [grad._version for grad in grads_of(optimizer)]
    optimizer.step()
    after = [grad._version for grad in grads_of(optimizer)]
    assert [new > old for new, old in zip(after, versions, strict=True)] == [write_back] * 2
    assert all(map(same_bits, grads_of(optimizer), before)) != write_back


def test_gradients_that_share_memory_cannot_be_written_back():
    optimizer, _ = pair("SGD", {}, shapes=[(5,), (5,)], write_back_grads=True)
    first, second = params_of(optimizer)
    bucket, where = torch.ones(9), "grad of group 0, param [01] .*"
    for shared, words in ((bucket[4:], f"{where}share memory"), (first.detach(), "share memory")):
        first.grad, second.grad = bucket[:5], shared
        with pytest.raises(RuntimeError, match=words):
            optimizer.step()
    bucket = torch.ones(10)
    first.grad, second.grad = bucket[:5], bucket[5:]
    optimizer.step()
    optimizer.param_groups[0]["write_back_grads"] = False
    first.grad = second.grad = bucket[5:]
    optimizer.step()
