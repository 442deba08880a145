"""Files of other packages that load as they are, as the packages wrote them.

The files were written after two steps from [1, -2, 3] with the first two of ``GRADS``, with lr and
weight_decay of 0.1. The parameter is theirs, then and after a third step.
"""

from __future__ import annotations

from typing import Any

import torch


def file_of(options: dict[str, Any], **state: Any) -> dict[str, Any]:
    """Returns a file of one parameter; lists of its state become tensors."""
    tensors = {
        key: torch.tensor(value) if isinstance(value, list) else value
        for key, value in state.items()
    }
    group = {"lr": 0.1, "weight_decay": 0.1, "params": [0], **options}
    return {"state": {0: tensors}, "param_groups": [group]}


GRADS = [[0.5, -1.0, 2.0], [1.0, 0.25, -0.5], [-0.75, 1.5, 1.0]]
# By package: our class, its options, the file, the parameter before and after the third step.
OF_OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[float], list[float]]] = {
    "pytorch_optimizer 4.1.0, Lion": (
        "Lion",
        {},
        file_of(
            {"betas": (0.9, 0.99), "weight_decouple": True, "fixed_decay": False, "step": 2},
            exp_avg=[0.01495, -0.0074, 0.0148],
        ),
        [0.7810999751, -1.9611999989, 2.9413001537],
        [0.8732889891, -2.041588068, 2.8118872643],
    ),
    "pytorch_optimizer 4.1.0, Lion(weight_decouple=False)": (
        "Lion",
        {"decoupled_weight_decay": False},
        file_of(
            {"betas": (0.9, 0.99), "weight_decouple": False, "fixed_decay": False, "step": 2},
            exp_avg=[0.01684, -0.01128, 0.020669999],
        ),
        [0.7999999523, -1.7999999523, 3.0],
        [0.8999999762, -1.8999999762, 2.9000000954],
    ),
    "pytorch_optimizer 4.1.0, SGDW(momentum=0.9)": (
        "SGD",
        {"decoupled_weight_decay": True},
        file_of(
            {
                "momentum": 0.9,
                "dampening": 0.0,
                "nesterov": False,
                "weight_decouple": True,
                "step": 2,
            },
            momentum_buffer=[1.450000048, -0.649999976, 1.299999952],
        ),
        [0.7856000066, -1.7961999178, 2.6122999191],
        [0.7222439647, -1.8697379827, 2.3691768646],
    ),
    "lion-pytorch 0.2.5": (
        "Lion",
        {},
        file_of({"betas": (0.9, 0.99)}, exp_avg=[0.01495, -0.0074, 0.0148]),
        [0.7810999751, -1.9611999989, 2.9413001537],
        [0.8732889891, -2.041588068, 2.8118872643],
    ),
    "deepspeed 0.19.8, DeepSpeedCPULion": (
        "Lion",
        {},
        file_of(
            {"betas": (0.9, 0.999)},
            step=2,
            exp_avg=[0.001499481, -0.00074899, 0.001497981],
            exp_avg_sq=[0.0, 0.0, 0.0],
        ),
        [0.7810999751, -1.9611999989, 2.9413001537],
        [0.8732889891, -2.041588068, 2.8118872643],
    ),
    "deepspeed 0.19.8, DeepSpeedCPUAdam": (
        "AdamW",
        {},
        file_of(
            {"betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True, "amsgrad": False},
            step=2,
            exp_avg=[0.145000041, -0.065000013, 0.130000025],
            exp_avg_sq=[0.001249734, 0.001061486, 0.004245945],
        ),
        [0.7845821381, -1.8142533302, 2.7943532467],
        [0.7503908873, -1.8282362222, 2.7058627605],
    ),
}
