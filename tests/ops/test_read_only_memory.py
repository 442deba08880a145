"""What only reads its gradients writes nothing, not even the same bits."""

from __future__ import annotations

READ_ONLY = """
import mmap, sys
import torch, amp_ext
from amp_ext import ops
with open(sys.argv[1], "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
    tensor = torch.frombuffer(pages, dtype=dtype)
    whole, found_inf = tensor[: tensor.numel() // 2], torch.zeros(())
    ops.check_finite_([whole, whole[1:]], found_inf)
    assert found_inf.item() == 0
    ops.check_finite_([tensor, tensor[1::2]], found_inf, grad_scale=torch.ones(()))
    assert found_inf.item() == 1
    grads = [whole[:5000], whole[5001:9001].view(40, 100).t(), whole[9001:10001:2]]
    params = [torch.nn.Parameter(torch.ones_like(grad)) for grad in grads]
    for param, grad in zip(params, grads):
        param.grad = grad
    assert amp_ext.clip_grad_norm_(params, 1.0).item() == 0
    ops.clip_grads_(grads, torch.tensor(0.5), max_norm=1.0)
    for each in (amp_ext.optim.AdamW, amp_ext.optim.SGD):
        each(params, max_grad_norm=1.0, clip_value=1.0).step()
    scaler = amp_ext.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for each in (torch.optim.SGD, amp_ext.optim.Adam, amp_ext.optim.SGD):
        optimizer = each(params)
        found_infs = scaler._check_inf_per_device(optimizer).values()
        assert [found_inf.item() for found_inf in found_infs] == [0]
        if each is not torch.optim.SGD:
            scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536
"""


def test_memory_that_cannot_be_written_can_be_checked_clipped_and_stepped(run_module, tmp_path):
    """A write of any kind would end the child with a signal."""
    file = tmp_path / "read_only"
    file.write_bytes(bytes(160_016) + b"\xff" * 8)  # zeros, and a NaN of every dtype
    (tmp_path / "steps.py").write_text(READ_ONLY)
    done = run_module("steps", str(file), folder=tmp_path, PYTHONWARNINGS="ignore")
    assert done.returncode == 0, (done.returncode, done.stderr)
