"""Lists of a step whose moments have codes of 8 bits, and the same numbers in float32.

For the tests of several folders and for ``engine_results``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.awkward import BF16, F16, F32, SHAPES, Dtypes
from harness.list_operations import Lists, Options, build
from harness.number_codes import (
    GROUP,
    decode_q8h,
    decode_q8m,
    encode_q8h,
    encode_q8m,
    encode_q8s,
    root_of,
    root_of_q8s,
    round_bfloat16,
)
from harness.rows import rows

# The operation, its options, and the code of its moments: of Adam's second ones, if they have one.
CODED_STEPS = rows(
    {
        "adam-q8h": ("adam_", {}, "q8h"),
        "adamw-q8h-dither": ("adam_", {"decoupled_weight_decay": True, "dither": True}, "q8h"),
        "adam-q8s": ("adam_", {}, "q8s"),
        "adam-q8s-dither": ("adam_", {"dither": True, "beta2": 0.999}, "q8s"),
        "lion": ("lion_", {}, "q8m"),
        "lion-dither": ("lion_", {"beta2": 0.995, "dither": True}, "q8m"),
        "momentum": ("sgd_", {"momentum": 0.7, "nesterov": True}, "q8m"),
        "momentum-dither": ("sgd_", {"momentum": 0.995, "dither": True}, "q8m"),
    }
)
coded_steps = pytest.mark.parametrize(("operation", "options", "code"), CODED_STEPS)
params = pytest.mark.parametrize(
    "dtypes",
    rows(
        {
            "fp32": Dtypes(F32, F32, F32),
            "bf16": Dtypes(BF16, BF16, F32),
            "fp16": Dtypes(F16, F16, F32),
            "bf16-master": Dtypes(BF16, BF16, F32, master=True),
            "fp16-master": Dtypes(F16, F16, F32, master=True),
        }
    ),
)

# Whole groups, in tensors of less than a vector of them and more than a tile.
GROUPED_SHAPES = [(GROUP,), (3, GROUP), (2, 4 * GROUP), (1, 8192), (3, 4096 + GROUP), (0, GROUP)]
FIRST_STATES = {"adam_": "exp_avgs", "lion_": "exp_avgs", "sgd_": "momentum_buffers"}
# Of each tensor; those of groups are whole groups.
STARTS = [0, GROUP, 2**32 - GROUP, 2**40, GROUP * 77, 9 * GROUP] * 4


def shapes_of(code: str) -> list[tuple[int, ...]]:
    return SHAPES if code == "q8h" else GROUPED_SHAPES


def encode(
    lists: Lists,
    operation: str,
    code: str,
    words_of: Callable[[int, str], Tensor | None] = lambda index, stream: None,
) -> Lists:
    """The lists of a step in codes, of float32 ones; exponents are a list beside them.

    ``words_of`` gives those that dither a moment, by the tensor's number and the stream.
    """
    found, first = dict(lists), FIRST_STATES[operation]
    if code == "q8m":
        stream = "lion" if operation == "lion_" else "momentum"
        pairs = [encode_q8m(moment, words_of(i, stream)) for i, moment in enumerate(lists[first])]
        return found | {
            first: [codes for codes, _ in pairs],
            "exponents": [exponents for _, exponents in pairs],
        }
    seconds = lists["exp_avg_sqs"]
    if code == "q8s":
        pairs = [encode_q8s(v, words_of(i, "second_moment")) for i, v in enumerate(seconds)]
        found["exp_avg_sqs"] = [codes for codes, _ in pairs]
        found["exponents"] = [exponents for _, exponents in pairs]
        roots = [root_of_q8s(*pair) for pair in pairs]
    else:
        found["exp_avg_sqs"] = [
            round_bfloat16(v, words_of(i, "second_moment")) for i, v in enumerate(seconds)
        ]
        roots = [root_of(v) for v in found["exp_avg_sqs"]]
    found[first] = [
        encode_q8h(moment, root, words_of(i, "first_moment"))
        for i, (moment, root) in enumerate(zip(lists[first], roots, strict=True))
    ]
    return found


def decoded(lists: Lists, operation: str, code: str) -> Lists:
    """The same numbers with float32 states."""
    found, first = {name: list(tensors) for name, tensors in lists.items()}, FIRST_STATES[operation]
    exponents = found.pop("exponents", None)
    if code == "q8m":
        found[first] = [decode_q8m(*pair) for pair in zip(lists[first], exponents, strict=True)]
        return found
    if code == "q8s":
        roots = [root_of_q8s(*pair) for pair in zip(lists["exp_avg_sqs"], exponents, strict=True)]
        found["exp_avg_sqs"] = [root * root for root in roots]
    else:
        found["exp_avg_sqs"] = [v.float() for v in lists["exp_avg_sqs"]]
        roots = [root_of(v) for v in found["exp_avg_sqs"]]
    found[first] = [decode_q8h(*pair) for pair in zip(lists[first], roots, strict=True)]
    return found


def build_coded(
    operation: str,
    options: Options,
    code: str,
    dtypes: Dtypes,
    shapes: list[tuple[int, ...]] | None = None,
    **more: Any,
) -> Lists:
    """The lists of a step on the CPU, with its moments in codes."""
    shapes = shapes_of(code) if shapes is None else shapes
    return encode(build(operation, options, shapes, dtypes, "cpu", **more), operation, code)


def moved(lists: Lists, device: torch.device | str) -> Lists:
    """Copies that share nothing with ``lists``."""
    return {name: [t.clone().to(device) for t in tensors] for name, tensors in lists.items()}
