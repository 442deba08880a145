"""``amp_ext.ops.sgd_``: first steps, and every 16-bit gradient exactly."""

from __future__ import annotations

import pytest
import torch
from harness import list_operations as cases
from harness.edge_shapes import BF16, F16, F32
from harness.gradient_lists import equal


@pytest.mark.parametrize("buffer", [0.0, 12345.0])
def test_first_and_later_steps_share_a_launch_and_the_first_ignores_the_buffer(device, buffer):
    lists = cases.build("sgd_", cases.DAMPENING, [(5,)] * 3, cases.IN_FLOAT, device)
    lists["steps"][1].zero_()
    lists["momentum_buffers"][1].fill_(buffer)
    cases.assert_steps_by_the_formula("sgd_", lists, **cases.DAMPENING)


@pytest.mark.parametrize("in_float", [True, False], ids=["float-param", "same-dtype"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_16_bit_gradient_is_read_exactly_and_judged_right(device, dtype, in_float):
    grad = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)
    for start, skip in ((0.0, False), (3.0, True)):
        param = torch.full((2**16,), start, dtype=F32 if in_float else dtype, device=device)
        expected = (start - grad.float()).to(param.dtype)
        if skip:
            expected = torch.where(grad.isfinite(), expected, param)
        cases.run("sgd_", {"params": [param], "grads": [grad]}, lr=1.0, skip_nonfinite=skip)
        assert equal(param, expected)
