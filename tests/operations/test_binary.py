"""``amp_ext/_C.pyi``, ``ops.py`` and the calls of the package say what the compiled module has."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
from harness.list_operations import DESCRIBED

from amp_ext import ops

STUB = Path(ops.__file__).with_name("_C.pyi")
EACH_OPTIMIZER = pytest.mark.parametrize("described", DESCRIBED, ids=lambda each: each.operation)


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def name_of_member(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef):
        return node.name
    return ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def classes_of_stub() -> dict[str, dict[str, ast.AST]]:
    """Returns for every class its members, inherited ones too."""
    members: dict[str, dict[str, ast.AST]] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef):
            defined = [n for n in node.body if not isinstance(n, ast.Expr)]  # "..." of none
            own = {name_of_member(n): n for n in defined}
            for base in node.bases:
                own = {**members.get(ast.unparse(base), {}), **own}
            members[node.name] = own
    return members


def test_the_stub_names_the_classes_of_the_binary():
    stub = classes_of_stub()
    assert stub.keys() == {name for name, each in vars(ops._C).items() if isinstance(each, type)}
    for name, members in stub.items():
        assert public(members) == public(dir(getattr(ops._C, name))), name


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
