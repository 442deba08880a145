"""Scenarios: lists of calls as plain values, which Python and a program in C++ do alike.

A scenario has the options of a "scaler", "options" of an "optimizer" and its "groups", which have
numbers of parameters, the "params" or their "dtype", and "calls", by name or with one argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import amp_ext
from harness.optimizer_cases import assert_same_bits, bits_of

Scenario = dict[str, Any]
Saved = dict[str, Any]

ONE = [{"params": [0]}]
USUAL: Scenario = {"optimizer": "SGD", "options": {}, "groups": ONE, "scaler": {}, "calls": []}
GRADIENTS: Mapping[str, Callable[[Tensor], Tensor | None]] = {
    "none": lambda param: None,
    "ones": lambda param: torch.ones_like(param),
    "inf": lambda param: torch.full_like(param, torch.inf),
    "sparse": lambda param: torch.ones_like(param).to_sparse(),
    "parameter": lambda param: param.detach(),
}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def whole(scenario: Scenario) -> Scenario:
    """Returns all that a program must know of a scenario, with dtypes by their names."""
    scenario = {**USUAL, **scenario}
    options = {
        key: str(value) if isinstance(value, torch.dtype) else value
        for key, value in scenario["options"].items()
    }
    ones = torch.ones(2, dtype=getattr(torch, scenario.pop("dtype", "float32")))
    return {"params": [ones, ones], **scenario, "options": options, "groups": [*scenario["groups"]]}


def snapshot(optimizer: torch.optim.Optimizer) -> Tensor:
    """Returns all parameters and states in one tensor, by parameter and by key."""
    states = [
        [bits.pop("param"), *(bits[key] for key in sorted(bits))] for bits in bits_of(optimizer)
    ]
    return torch.cat([part.reshape(-1).double() for state in states for part in state])


def do(scenario: Scenario) -> Saved:
    """Does a scenario; returns what came of it and of its notes.

    A call that raises must leave optimizer and scaler as they were.
    """
    row = whole(scenario)
    params = [param.clone().requires_grad_() for param in row["params"]]
    for param in params:
        param.grad = torch.ones_like(param)
    package, _, name = row["optimizer"].rpartition(".")
    kinds = torch.optim if package == "torch.optim" else amp_ext.optim
    each = [group | {"params": [params[i] for i in group["params"]]} for group in row["groups"]]
    optimizer = getattr(kinds, name)(each, **scenario.get("options", {}))
    scaler = amp_ext.GradScaler("cpu", **row["scaler"])
    implied = {"scale": [torch.ones(())], "step": [optimizer], "unscale_": [optimizer]}
    notes = []
    for call, *arguments in row["calls"]:
        owner, _, method = call.rpartition(".")
        before, bits = scaler.state_dict(), bits_of(optimizer)
        try:
            if call == "note":
                norm = getattr(optimizer, "grad_norm", None)
                notes.append(
                    {
                        "bits": snapshot(optimizer),
                        "scale": scaler.get_scale(),
                        "norm": None if norm is None else norm.item(),
                    }
                )
            elif call == "norm_guard":
                optimizer.norm_guard = amp_ext.optim.NormGuard(**arguments[0])
            elif owner == "norm_guard":
                getattr(optimizer.norm_guard, method)(*arguments)
            elif call == "options":  # of the first group
                optimizer.param_groups[0].update(*arguments)
            elif call == "gradient":  # of the first parameter
                params[0].grad = GRADIENTS[arguments[0]](params[0])
            elif call in ("grads", "scaled_grads"):
                for param, grad in zip(params, *arguments, strict=True):
                    param.grad = scaler.scale(grad) if call == "scaled_grads" else grad.clone()
            elif call == "convert":  # as a module does
                (to,) = arguments
                for param in params:
                    param.grad = None
                    param.data = (
                        param.data.contiguous(memory_format=FORMATS[to])
                        if to in FORMATS
                        else param.data.to(getattr(torch, to))
                    )
            elif method == "load":  # out of a file
                saved = torch.load(*arguments)[owner]
                if owner == "params":
                    for param, value in zip(params, saved, strict=True):
                        param.data.copy_(value)
                else:
                    {"optimizer": optimizer, "scaler": scaler}[owner].load_state_dict(saved)
            elif owner == "optimizer":
                getattr(optimizer, method)(*arguments)
            else:
                getattr(scaler, method)(*implied.get(method, arguments))
        except Exception:
            assert scaler.state_dict() == before
            assert_same_bits(optimizer, bits)
            raise
    if kinds is torch.optim:
        return {}
    return {
        "params": [param.detach() for param in params],
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "notes": notes,
        "masters": optimizer.master_params(),
    }


def comparable(text: str) -> str:
    """Returns what Python and C++ say alike: a message without what came, numbers as numbers."""
    text = text.partition("\n")[0].partition(", got ")[0]
    text = re.sub(" or (a tensor|two tensors) of one element", "", text)
    text = re.sub(r"\(([\d, ]+?),?\)", r"[\1]", text)
    return re.sub(r"-?\d+(\.\d*)?(e[+-]?\d+)?", lambda match: f"{float(match[0]):.4g}", text)
