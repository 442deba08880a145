"""``amp_ext.ops`` names what the compiled module has, which refuses what it does not know."""

from __future__ import annotations

import inspect

import pytest
from harness.list_operations import DESCRIBED

from amp_ext import ops

EACH_OPTIMIZER = pytest.mark.parametrize("described", DESCRIBED, ids=lambda each: each.operation)


@EACH_OPTIMIZER
def test_an_operation_names_every_field_and_buffer_of_its_optimizer(described):
    arguments = inspect.signature(getattr(ops, described.operation)).parameters
    lists = {f"{buffer.name}s" for buffer in described.buffers}
    of_gradients = {"grad_scale", "found_inf", "max_grad_norm", "skip_nonfinite"}
    of_gradients |= {"sum_of_squares", "grad_norm"}
    common = {"params", "grads", "steps", "master_params", "global_offsets", "exponents"}
    assert set(arguments) == lists | set(described.fields) | of_gradients | common


def test_an_unknown_argument_is_refused_by_the_binary():
    with pytest.raises(AttributeError, match="colour"):
        ops._C.adam_(params=[], grads=[], exp_avgs=[], exp_avg_sqs=[], steps=[], colour=1)


def test_what_is_no_list_of_tensors_is_refused_by_name():
    with pytest.raises(TypeError, match=r"adam_: exp_avgs must be a list of tensors, got int"):
        ops.adam_(*([], [], 3, [], []), lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
