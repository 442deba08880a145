"""The C++ interface: its checks, and runs with the bits of Python's."""

from __future__ import annotations

import copy
import math
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_corpus as corpus
import pytest
import torch
from optimizer_cases import CLASSES
from refused_calls import comparable
from torch import Tensor
from torch.utils import cpp_extension

import amp_ext
from amp_ext import cmake, ops
from amp_ext.training.checkpoint_file import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "cpp" / "program"

Run = Callable[..., str]

CHECKS = [
    name
    for file in ("checks.h", "misuse_checks.h")
    for name in re.findall(r"^inline void (\w+)\(\) \{", (SOURCE / file).read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_of_the_program_passes(run: Run, name: str) -> None:
    run("check", name)


def test_every_check_is_run(run: Run) -> None:
    assert sorted(run("checks").split()) == sorted(CHECKS) != []


OWN_STEP = """
#include <amp_ext/optim.h>
struct Own : amp_ext::optim::AdamW {
  using AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override { return AdamW::step(closure); }
};
"""


@pytest.mark.slow
def test_a_step_that_a_scaler_would_not_call_does_not_compile() -> None:
    folders = [cmake.folder().parents[2] / "include", *cpp_extension.include_paths()]
    command = ["c++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(
        command + [f"-I{each}" for each in folders],
        input=OWN_STEP,
        capture_output=True,
        text=True,
    )
    (error,) = (line for line in done.stderr.splitlines() if " error: " in line)
    assert "final" in error


Saved = dict[str, Any]


# Runs.

STEPS = 200

ADAM = {"lr": 0.01, "weight_decay": 0.1}
BFLOAT16_STATES = {"state_dtype": "bfloat16"}  # by its name, which C++ reads
WIDE = (64, 64)  # of which the first weight has groups, the second has none
ROWS: dict[str, dict[str, Any]] = {
    "adamw float16 autocast": {"optimizer": "AdamW", "options": ADAM, "autocast": "float16"},
    "adamw bfloat16 autocast": {
        "optimizer": "AdamW",
        "options": {**ADAM, "amsgrad": True},
        "autocast": "bfloat16",
        "unscale_steps": list(range(0, STEPS, 10)),
    },
    "adam float16 masters": {
        "optimizer": "Adam",
        "options": {**ADAM, "max_grad_norm": 0.5, "eps": 1e-5},
        "param_dtype": "float16",
    },
    "sgd bfloat16 masters": {
        "optimizer": "SGD",
        "options": {"lr": 0.05, "momentum": 0.9, "dampening": 0.25, "clip_value": 0.125},
        "param_dtype": "bfloat16",
        "unscale_steps": [7, 8, 50],
    },
    "lion float32 unscale": {
        "optimizer": "Lion",
        "options": {"lr": 0.001, "betas": (0.8, 0.95), "maximize": True},
        "autocast": "float16",
        "unscale_steps": [3, 77],
    },
    "sgd bfloat16 without masters": {
        "optimizer": "SGD",
        "options": {"lr": 0.05, "nesterov": True, "momentum": 0.9, "master_weights": False},
        "param_dtype": "bfloat16",
    },
    "adamw bfloat16 states": {"optimizer": "AdamW", "options": {**ADAM, **BFLOAT16_STATES}},
    "lion float16 masters bfloat16 states": {
        "optimizer": "Lion",
        "options": {"lr": 0.001, **BFLOAT16_STATES},
        "param_dtype": "float16",
    },
    "sgd float16 without masters to nearest": {
        "optimizer": "SGD",
        "options": {
            "lr": 0.05,
            "momentum": 0.99,
            "master_weights": False,
            **BFLOAT16_STATES,
            "rounding": "nearest",
        },
        "param_dtype": "float16",
    },
    "sgd bfloat16 as torch dithered": {
        "optimizer": "SGD",
        "options": {
            "lr": 0.05,
            "momentum": 0.99,
            "master_weights": False,
            "state_dtype": None,
            "rounding": "dither",
        },
        "param_dtype": "bfloat16",
    },
    "adamw bfloat16 split masters": {
        "optimizer": "AdamW",
        "options": {**ADAM, "max_grad_norm": 0.5, "master_weights": "split"},
        "param_dtype": "bfloat16",
        "unscale_steps": [7, 8, 50],
    },
    "sgd float16 split masters bfloat16 states": {
        "optimizer": "SGD",
        "options": {"lr": 0.05, "momentum": 0.99, "master_weights": "split", **BFLOAT16_STATES},
        "param_dtype": "float16",
    },
    "lion float16 split8 masters": {
        "optimizer": "Lion",
        "options": {"lr": 0.001, "master_weights": "split8"},
        "param_dtype": "float16",
    },
    "adam bfloat16 split8 masters to nearest": {
        "optimizer": "Adam",
        "options": {**ADAM, "master_weights": "split8", "rounding": "nearest"},
        "param_dtype": "bfloat16",
    },
    "adamw moments in 8 bits": {
        "optimizer": "AdamW",
        "options": {**ADAM, "max_grad_norm": 0.5, "state_dtype": "8bit"},
        "autocast": "bfloat16",
        "unscale_steps": [7, 8, 50],
        "widths": WIDE,
    },
    "lion float16 split masters momentum in 8 bits": {
        "optimizer": "Lion",
        "options": {"lr": 0.001, "master_weights": "split", "state_dtype": "8bit-bf16"},
        "param_dtype": "float16",
        "widths": WIDE,
    },
    "sgd bfloat16 momentum in 8 bits to nearest": {
        "optimizer": "SGD",
        "options": {"lr": 0.01, "momentum": 0.9, "state_dtype": "8bit", "rounding": "nearest"},
        "param_dtype": "bfloat16",
        "widths": WIDE,
    },
}


def plan_of(row: dict[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)

    def draws(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    plan = {
        "param_dtype": "float32",
        "autocast": None,
        "unscale_steps": [],
        "bad_steps": [7, 23, 24, 60],
        "scaler": {"init_scale": 1024.0, "growth_interval": 20, "hysteresis": 2},
        "steps": STEPS,
        "resume": None,
        "dtypes_from": {},  # by step, to which the model is converted
        "options_from": {},  # by step, which the groups get
        "widths": (16, 33),  # of the input and the hidden layer
        **row,
    }
    dtype = getattr(torch, plan["param_dtype"])
    width, hidden = plan["widths"]
    shapes = ((hidden, width), (hidden,), (5, hidden), (5,))
    plan["weights"] = [(draws(*shape) / 4).to(dtype) for shape in shapes]
    plan["inputs"] = draws(STEPS, 8, width)
    plan["targets"] = draws(STEPS, 8, 5)
    return plan


def snapshot(optimizer: torch.optim.Optimizer) -> Tensor:
    """Returns all parameters and states in one tensor, by parameter and by key."""
    parts = []
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        state = optimizer.state.get(param, {})
        parts += [param.detach(), *(state[key] for key in sorted(state))]
    return torch.cat([part.reshape(-1).double() for part in parts])


def train(plan: dict[str, Any], checkpoint: dict[str, Any] | None = None) -> dict[str, Any]:
    """Does in Python what the program does."""
    dtype = getattr(torch, plan["param_dtype"])
    sizes = [weight.shape for weight in plan["weights"][::2]]
    model = torch.nn.Sequential(
        torch.nn.Linear(sizes[0][1], sizes[0][0]),
        torch.nn.ReLU(),
        torch.nn.Linear(sizes[1][1], sizes[1][0]),
    ).to(dtype)
    params = list(model.parameters())
    weights = plan["weights"] if checkpoint is None else checkpoint["model"]
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    kind = getattr(amp_ext.optim, plan["optimizer"])
    optimizer = kind(params, **plan["options"])
    scaler = amp_ext.GradScaler("cpu", **plan["scaler"])
    first = 0
    if checkpoint is not None:
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
        first = checkpoint["step"]
    autocast = plan["autocast"]
    cast_to = torch.bfloat16 if autocast is None else getattr(torch, autocast)
    written: dict[str, Any] = {"losses": [], "states": [], "scales": [], "skips": []}
    for step in range(first, plan["steps"]):
        optimizer.zero_grad()
        if step in plan["dtypes_from"]:
            dtype = getattr(torch, plan["dtypes_from"][step])
            model.to(dtype)
        for group in optimizer.param_groups:
            group.update(plan["options_from"].get(step, {}))
        with torch.autocast("cpu", cast_to, enabled=autocast is not None):
            inputs = plan["inputs"][step]
            output = model(inputs if autocast else inputs.to(dtype))
            loss = torch.nn.functional.mse_loss(output.float(), plan["targets"][step])
        scaler.scale(loss).backward()
        if step in plan["bad_steps"]:
            params[0].grad.view(-1)[0] = math.inf
        if step in plan["unscale_steps"]:
            scaler.unscale_(optimizer)
            amp_ext.clip_grad_norm_(params, 0.5)
        scaler.step(optimizer)
        scaler.update()
        written["losses"].append(loss.detach())
        written["states"].append(snapshot(optimizer))
        written["scales"].append(scaler.get_scale())
        written["skips"].append(float(scaler.last_step_skipped()))
    written["checkpoint"] = {
        "model": [param.detach() for param in params],
        "optimizer": optimizer.state_dict(),
        "masters": optimizer.master_params(),
        "scaler": scaler.state_dict(),
        "step": plan["steps"],
    }
    return written


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train_in_cpp(run: Run, plan: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    """Returns what the program wrote of its steps, and its checkpoint."""
    folder.mkdir(exist_ok=True)
    torch.save(plan, folder / "plan.pt")
    run("train", str(folder))
    files = [torch.load(folder / name, weights_only=True) for name in ("cpp.pt", "checkpoint.pt")]
    return files[0], files[1]


def assert_same_steps(cpp: dict[str, Any], python: dict[str, Any]) -> None:
    assert cpp["scales"].tolist() == python["scales"]
    assert cpp["skips"].tolist() == python["skips"]
    for step, (mine, theirs) in enumerate(zip(cpp["states"], python["states"], strict=True)):
        assert torch.equal(cpp["losses"][step], python["losses"][step]), f"loss of step {step}"
        assert torch.equal(mine, theirs), f"parameters and states after step {step}"


@pytest.mark.parametrize("row", ROWS)
def test_every_step_has_the_bits_of_python(
    run: Run, row: str, tmp_path: Path, one_thread: None
) -> None:
    plan = plan_of(ROWS[row])
    cpp, _ = train_in_cpp(run, plan, tmp_path)
    python = train(plan)
    assert_same_steps(cpp, python)
    assert sum(python["skips"]) >= 4
    assert max(python["scales"]) > 1024 > min(python["scales"])


@pytest.mark.parametrize("row", ROWS)
def test_a_run_moves_from_python_to_cpp_and_back(
    run: Run, row: str, tmp_path: Path, one_thread: None
) -> None:
    plan = plan_of(ROWS[row])
    whole = train(plan)
    begin = train({**plan, "steps": 40})["checkpoint"]
    torch.save(begin, tmp_path / "begin.pt")
    middle = {**plan, "steps": 90, "resume": str(tmp_path / "begin.pt")}
    cpp, checkpoint = train_in_cpp(run, middle, tmp_path)
    assert_same_steps(cpp, {name: whole[name][40:90] for name in cpp})
    end = train(plan, checkpoint)
    for step, state in enumerate(end["states"], 90):
        assert torch.equal(state, whole["states"][step]), f"after step {step}"


# Masters in all their forms.

FORMS: tuple[Any, ...] = (True, "split", "split8", False)
SHORT = {"bfloat16": "bf16", "float16": "fp16"}
KINDS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "Adam", "options": ADAM},
    "amsgrad": {"optimizer": "Adam", "options": {**ADAM, "amsgrad": True}},
    "sgd momentum": {"optimizer": "SGD", "options": {"lr": 0.05, "momentum": 0.9}},
    "lion": {"optimizer": "Lion", "options": {"lr": 0.001}},
}
dtypes = pytest.mark.parametrize("dtype", SHORT)
splits = pytest.mark.parametrize("form", ["split", "split8"])


def plan_with(form: Any, dtype: str, kind: str = "adam", **changes: Any) -> dict[str, Any]:
    row = KINDS[kind]
    options = {**row["options"], "master_weights": form}
    return plan_of({**row, "param_dtype": dtype, "options": options, "bad_steps": [3], **changes})


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns what is equal where NaN is as well."""
    return tensor.reshape(-1).view(torch.uint8)


def assert_same_checkpoint(cpp: dict[str, Any], python: dict[str, Any]) -> None:
    """Compares options, keys in their order, dtypes, shapes and bits."""
    assert cpp["optimizer"]["param_groups"] == python["optimizer"]["param_groups"]
    states = cpp["optimizer"]["state"], python["optimizer"]["state"]
    assert states[0].keys() == states[1].keys()
    for number, theirs in states[1].items():
        mine = states[0][number]
        assert [*mine] == [*theirs]
        for key, wanted in theirs.items():
            assert mine[key].dtype == wanted.dtype, key
            assert mine[key].shape == wanted.shape, key
            assert torch.equal(bytes_of(mine[key]), bytes_of(wanted)), f"{key} of param {number}"
    for mine, theirs in zip(cpp["masters"], python["masters"], strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
@dtypes
@splits
def test_split_masters_have_the_bits_of_python(
    run: Run, kind: str, dtype: str, form: str, tmp_path: Path, one_thread: None
) -> None:
    plan = plan_with(form, dtype, kind, steps=20)
    cpp, checkpoint = train_in_cpp(run, plan, tmp_path)
    python = train(plan)
    assert_same_steps(cpp, python)
    assert_same_checkpoint(checkpoint, python["checkpoint"])
    state = checkpoint["optimizer"]["state"][0]
    name = "master_low" if form == "split" else "master_low8"
    assert [key for key in state if "master" in key] == [f"{name}_{SHORT[dtype]}"]
    assert state[f"{name}_{SHORT[dtype]}"].any()
    assert "step" in state or (form == "split" and kind in ("sgd momentum", "lion"))


def make_awkward(checkpoint: dict[str, Any], dtype: str) -> None:
    """Gives masters what conversions may get wrong.

    Ties of their parameters, what does not round to them, the least and the largest lower part.
    """
    half_unit = 2**15 if dtype == "bfloat16" else 2**12  # of a parameter, as of float32 bits
    generator = torch.Generator().manual_seed(3)
    for number, state in checkpoint["optimizer"]["state"].items():
        for key in [key for key in state if "master" in key]:
            low = state[key]
            if key == "master_param":
                bits = checkpoint["model"][number].float().view(torch.int32)
                bits.view(-1)[::3] += half_unit
                bits.view(-1)[1::3] -= half_unit
                state[key] = bits.view(torch.float32)
                state[key].view(-1)[-1] = 7.0
            elif low.dtype == torch.uint8:
                low.random_(0, 256, generator=generator)
                low.view(torch.int16).view(-1)[:4] = torch.tensor([-(2**15), 2**15 - 1, 0, -1])
            else:
                low.random_(-128, 128, generator=generator)
                low.view(-1)[:4] = torch.tensor([-128, 127, 0, -1])


def assert_loads_as_python(
    run: Run, plan: dict[str, Any], checkpoint: dict[str, Any], folder: Path
) -> None:
    """Compares what C++ and Python have right after a load."""
    torch.save(checkpoint, folder / "begin.pt")
    plan = {**plan, "steps": checkpoint["step"], "resume": str(folder / "begin.pt")}
    loaded = train_in_cpp(run, plan, folder)[1]
    assert_same_checkpoint(loaded, train(plan, copy.deepcopy(checkpoint))["checkpoint"])


@dtypes
@pytest.mark.parametrize("saved", FORMS)
def test_every_form_loads_every_other_as_in_python(
    run: Run, dtype: str, saved: Any, tmp_path: Path, one_thread: None
) -> None:
    checkpoint = train(plan_with(saved, dtype, steps=3))["checkpoint"]
    awkward = copy.deepcopy(checkpoint)
    make_awkward(awkward, dtype)
    for form in FORMS:
        plan = plan_with(form, dtype)
        assert_loads_as_python(run, plan, checkpoint, tmp_path)
        assert_loads_as_python(run, plan, awkward, tmp_path)


def in_32_bits(checkpoint: dict[str, Any]) -> list[Tensor]:
    """Returns other float32 masters for a checkpoint, one for each parameter."""
    return [param.float() * 1.0001 for param in checkpoint["model"]]


ODD_MASTERS: dict[str, Callable[[Saved, Tensor, str], None]] = {
    "newer in float32": lambda state, other, _: state.update(master_param=other),
    "cast by torch": lambda state, _, key: state.update({key: state[key].to(torch.bfloat16)}),
    "none": lambda state, _, key: state.update({key: None}),
    "of the other dtype": lambda state, _, key: state.update(
        {key.replace("bf16", "?").replace("fp16", "bf16").replace("?", "fp16"): state.pop(key)}
    ),
    "two lower parts": lambda state, other, _: state.update(
        master_low8_bf16=torch.full(other.shape, 33, dtype=torch.int8)
    ),
}


@dtypes
@splits
@pytest.mark.parametrize("name", ODD_MASTERS)
def test_odd_masters_are_read_as_in_python(
    run: Run, dtype: str, form: str, name: str, tmp_path: Path, one_thread: None
) -> None:
    checkpoint = train(plan_with(form, dtype, steps=3))["checkpoint"]
    for state, other in zip(
        checkpoint["optimizer"]["state"].values(), in_32_bits(checkpoint), strict=True
    ):
        key = next(key for key in state if key.startswith("master_low"))
        ODD_MASTERS[name](state, other, key)
    for loaded in FORMS:
        assert_loads_as_python(run, plan_with(loaded, dtype), checkpoint, tmp_path)


def assert_trains_as_python(
    run: Run, plan: dict[str, Any], ends: tuple[int, ...], tmp_path: Path
) -> None:
    """Compares runs of so many steps, and the checkpoints after them, which tell the keys."""
    for steps in ends:
        part = {**plan, "steps": steps}
        cpp, checkpoint = train_in_cpp(run, part, tmp_path)
        python = train(part)
        assert_same_steps(cpp, python)
        assert_same_checkpoint(checkpoint, python["checkpoint"])


@splits
def test_a_model_is_converted_as_in_python(
    run: Run, form: str, tmp_path: Path, one_thread: None
) -> None:
    to = {4: "float16", 7: "float32", 9: "float16", 12: "bfloat16", 15: "float64"}
    plan = plan_with(form, "bfloat16", steps=18, dtypes_from=to)
    assert_trains_as_python(run, plan, (6, 14, 18), tmp_path)


@dtypes
@pytest.mark.parametrize("kind", ["amsgrad", "lion"])
def test_a_loop_changes_the_form_as_in_python(
    run: Run, dtype: str, kind: str, tmp_path: Path, one_thread: None
) -> None:
    forms = ("split", True, "split8", "split", False, "split8", True, False)
    changes = {step: {"master_weights": form} for step, form in enumerate(forms, 2)}
    plan = plan_with(True, dtype, kind, steps=12, options_from=changes)
    cpp, checkpoint = train_in_cpp(run, plan, tmp_path)
    python = train(plan)
    assert_same_steps(cpp, python)
    assert_same_checkpoint(checkpoint, python["checkpoint"])


# Moments in all their forms.

MOMENTS = ("float32", "bfloat16", None, "8bit-bf16", "8bit")
CODED_KINDS = [kind for kind in KINDS if kind != "amsgrad"]
coded_kinds = pytest.mark.parametrize("kind", CODED_KINDS)
codes = pytest.mark.parametrize("form", ["8bit-bf16", "8bit"])
# By optimizer and form: of a weight that has groups, and of another.
CODED_KEYS = {
    ("adam", "8bit-bf16"): (["exp_avg_q8h", "exp_avg_sq"], ["exp_avg_q8h", "exp_avg_sq"]),
    ("adam", "8bit"): (
        ["exp_avg_q8h", "exp_avg_sq_q8s", "exp_avg_sq_exp"],
        ["exp_avg_q8h", "exp_avg_sq"],
    ),
    "sgd momentum": (["momentum_buffer_q8m", "momentum_buffer_exp"], ["momentum_buffer"]),
    "lion": (["exp_avg_q8m", "exp_avg_exp"], ["exp_avg"]),
}


def plan_of_moments(form: Any, dtype: str, kind: str = "adam", **changes: Any) -> dict[str, Any]:
    row = KINDS[kind]
    row = {"options": {**row["options"], "state_dtype": form}, "optimizer": row["optimizer"]}
    return plan_of({**row, "param_dtype": dtype, "widths": WIDE, "bad_steps": [3], **changes})


@coded_kinds
@pytest.mark.parametrize("dtype", ["float32", *SHORT])
@codes
def test_moments_in_8_bits_have_the_bits_of_python(
    run: Run, kind: str, dtype: str, form: str, tmp_path: Path, one_thread: None
) -> None:
    plan = plan_of_moments(form, dtype, kind, steps=20)
    cpp, checkpoint = train_in_cpp(run, plan, tmp_path)
    python = train(plan)
    assert_same_steps(cpp, python)
    assert_same_checkpoint(checkpoint, python["checkpoint"])
    state = checkpoint["optimizer"]["state"]
    keys = CODED_KEYS.get((kind, form)) or CODED_KEYS[kind]
    for number, wanted in zip((0, 2), keys, strict=True):
        assert [key for key in state[number] if key not in ("step", "master_param")] == wanted
        assert all(state[number][key].any() for key in wanted)
        assert state[number]["step"] == 19


def with_awkward_moments(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy whose moments have every code, inf, NaN and the least numbers."""
    awkward = copy.deepcopy(checkpoint)
    generator = torch.Generator().manual_seed(3)
    for state in awkward["optimizer"]["state"].values():
        for key in state.keys() - {"step", "master_param"}:
            moment = state[key]
            if not moment.is_floating_point():
                moment.view(torch.uint8).random_(0, 256, generator=generator)
            else:
                moment.view(-1)[:4] = torch.tensor([math.inf, math.nan, 1e-30, 0.0])
    return awkward


@coded_kinds
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("saved", MOMENTS)
def test_every_form_of_moments_loads_every_other_as_in_python(
    run: Run, kind: str, dtype: str, saved: Any, tmp_path: Path, one_thread: None
) -> None:
    checkpoint = train(plan_of_moments(saved, dtype, kind, steps=3))["checkpoint"]
    awkward = with_awkward_moments(checkpoint)
    for form in MOMENTS:
        plan = plan_of_moments(form, dtype, kind)
        assert_loads_as_python(run, plan, checkpoint, tmp_path)
        if dtype == "float32":
            assert_loads_as_python(run, plan, awkward, tmp_path)


def lacking(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for key in [key for key in state if key.endswith(names)]:
            del state[key]

    return change


ODD_MOMENTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "newer in float32": lambda state: state.update(
        {key.rpartition("_")[0]: state[key] / 32.0 for key in state if "q8" in key}
    ),
    "keys of none beside codes": lambda state: state.update(
        {key.rpartition("_")[0]: None for key in state if "q8" in key}
    ),
    "no exponents": lacking("_exp"),
    "no elements": lacking("_q8h", "_q8s", "_q8m"),
    "none at all": lacking("_q8h", "_q8s", "_q8m", "_exp", "_sq", "_avg", "_buffer"),
    "another code": lambda state: state.update(
        {
            f"{key[:-4]}_q8m": state.pop(f"{key[:-4]}_q8s", state.get(f"{key[:-4]}_q8m"))
            for key in [*state]
            if key.endswith("_exp")
        }
    ),
}


@coded_kinds
@pytest.mark.parametrize("name", ODD_MOMENTS)
def test_odd_moments_are_read_or_refused_as_in_python(
    run: Run, kind: str, name: str, tmp_path: Path, one_thread: None
) -> None:
    checkpoint = train(plan_of_moments("8bit", "float32", kind, steps=3))["checkpoint"]
    for state in checkpoint["optimizer"]["state"].values():
        ODD_MOMENTS[name](state)
    for form in MOMENTS:
        plan = plan_of_moments(form, "float32", kind)
        plan |= {"steps": 3, "resume": str(tmp_path / "begin.pt")}
        words = ""
        try:
            train(plan, copy.deepcopy(checkpoint))
        except ValueError as error:
            words = comparable(str(error))
        if words:
            torch.save(checkpoint, tmp_path / "begin.pt")
            with pytest.raises(AssertionError) as refused:
                train_in_cpp(run, plan, tmp_path)
            assert comparable(str(refused.value)) == words
        else:
            assert_loads_as_python(run, plan, checkpoint, tmp_path)


@coded_kinds
@codes
def test_a_model_with_codes_is_converted_as_in_python(
    run: Run, kind: str, form: str, tmp_path: Path, one_thread: None
) -> None:
    to = {4: "float16", 7: "float32", 9: "float64", 12: "bfloat16"}
    plan = plan_of_moments(form, "bfloat16", kind, dtypes_from=to)
    assert_trains_as_python(run, plan, (6, 11, 15), tmp_path)


@coded_kinds
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loop_changes_the_form_of_moments_as_in_python(
    run: Run, kind: str, dtype: str, tmp_path: Path, one_thread: None
) -> None:
    forms = ("8bit", "8bit-bf16", "bfloat16", "8bit", "float32", "8bit-bf16", None, "8bit", None)
    changes = {step: {"state_dtype": form} for step, form in enumerate(forms, 4)}
    plan = plan_of_moments("float32", dtype, kind, steps=13, options_from=changes)
    assert_trains_as_python(run, plan, (9, 12, 13), tmp_path)


@codes
def test_steps_behind_codes_are_counted_as_in_python(
    run: Run, form: str, tmp_path: Path, one_thread: None
) -> None:
    changes = {6: {"rounding": "dither"}}
    plan = plan_of_moments(form, "float32", "sgd momentum", steps=9, options_from=changes)
    plan["options"]["rounding"] = "nearest"
    cpp, checkpoint = train_in_cpp(run, plan, tmp_path)
    python = train(plan)
    assert_same_steps(cpp, python)
    assert_same_checkpoint(checkpoint, python["checkpoint"])
    assert [state["step"] for state in checkpoint["optimizer"]["state"].values()] == [4.0] * 4


# Files of earlier versions.


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    corpus.unpack(folder)
    return folder


def cpp_result(run: Run, folder: Path) -> str:
    """Runs the plan in a folder; returns the hash of what was written, or the error."""
    try:
        run("resume", str(folder))
    except AssertionError as error:
        return str(error).partition("\n")[0]
    return corpus.hash_of(torch.load(folder / "cpp.pt", weights_only=True))


@pytest.mark.parametrize("group", corpus.GROUPS)
def test_files_load_with_the_bits_of_before(
    run: Run, group: str, files: Path, tmp_path: Path
) -> None:
    loaded = 0
    for row, target, wanted in corpus.loads(group):
        for path in corpus.files_of(files, row, "python", "cpp", "archive", "torch"):
            plan = corpus.plan_of(row, target, path)
            if path.is_relative_to(files / "archive"):  # which has no parameters
                plan |= {"archive": str(path), "file": str(files / "cpp" / f"{row}.pt")}
            torch.save(plan, tmp_path / "plan.pt")
            loaded += 1
            assert cpp_result(run, tmp_path) == wanted, f"{path} into {target}"
    assert loaded > 0


# What a class of Python says and one of C++ says again.

each_class = pytest.mark.parametrize("name", CLASSES)


def group_or_error(step: Callable[[], dict[str, Any]]) -> Any:
    """Returns the only group of a checkpoint, or the first line of an error up to what came."""
    try:
        (group,) = step()["optimizer"]["param_groups"]
        return group
    except (AssertionError, RuntimeError, ValueError) as error:
        return comparable(str(error))


@each_class
def test_options_have_the_defaults_of_python(
    run: Run, name: str, tmp_path: Path, one_thread: None
) -> None:
    plan = plan_of({"optimizer": name, "options": {}, "steps": 1})
    cpp = group_or_error(lambda: train_in_cpp(run, plan, tmp_path)[1])
    assert cpp == group_or_error(lambda: train(plan)["checkpoint"])


@each_class
def test_a_group_that_lacks_an_option_loads_as_in_python(
    run: Run, name: str, tmp_path: Path, one_thread: None
) -> None:
    plan = plan_of({"optimizer": name, "options": {}, "steps": 1})
    saved = train(plan)["checkpoint"]
    plan |= {"options": {"maximize": True}, "steps": 2, "resume": str(tmp_path / "begin.pt")}
    described = getattr(ops, getattr(amp_ext.optim, name)._hyperparameters_class).options
    required = [option.name for option in described if option.on_load == "required"]
    others = saved["optimizer"]["param_groups"][0].keys() - {"params", *required}
    for lacking in (others, *({option} for option in required)):
        file = copy.deepcopy(saved)
        for option in lacking:
            del file["optimizer"]["param_groups"][0][option]
        torch.save(file, tmp_path / "begin.pt")
        cpp = group_or_error(lambda: train_in_cpp(run, plan, tmp_path)[1])
        assert cpp == group_or_error(lambda file=file: train(plan, file)["checkpoint"]), lacking


def test_a_file_whose_group_counts_for_its_states_loads_as_in_python(
    run: Run, tmp_path: Path, one_thread: None
) -> None:
    """As FusedAdam of apex and of TransformerEngine writes it."""
    plan = plan_of({"optimizer": "Adam", "options": ADAM, "steps": 3})
    file = train(plan)["checkpoint"]
    for group in file["optimizer"]["param_groups"]:
        group |= {"bias_correction": True, "step": 3, "kept": "by somebody"}
    for state in file["optimizer"]["state"].values():
        assert state.pop("step").item() == 3
    torch.save(file, tmp_path / "begin.pt")
    plan |= {"steps": 6, "resume": str(tmp_path / "begin.pt")}
    cpp, checkpoint = train_in_cpp(run, plan, tmp_path)
    python = train(plan, file)
    assert_same_steps(cpp, python)
    saved = checkpoint["optimizer"]
    assert saved["param_groups"] == python["checkpoint"]["optimizer"]["param_groups"]
    assert "step" not in saved["param_groups"][0]
    assert [state["step"].item() for state in saved["state"].values()] == [6] * len(saved["state"])


@pytest.mark.parametrize("row", ["adamw float16 autocast", "sgd bfloat16 masters"])
def test_torch_loads_what_cpp_wrote(run: Run, row: str, tmp_path: Path) -> None:
    plan = plan_of({**ROWS[row], "steps": 5})
    _, checkpoint = train_in_cpp(run, plan, tmp_path)
    params = [param.requires_grad_() for param in checkpoint["model"]]
    theirs = getattr(torch.optim, plan["optimizer"])(params)
    theirs.load_state_dict(checkpoint["optimizer"])
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(checkpoint["scaler"])
    assert scaler.get_scale() == checkpoint["scaler"]["scale"]
    assert theirs.param_groups[0]["lr"] == plan["options"]["lr"]
    ours = getattr(amp_ext.optim, plan["optimizer"])(params)
    ours.load_state_dict(checkpoint["optimizer"])
    keys = set(ours.state_dict()["param_groups"][0])
    assert keys == set(checkpoint["optimizer"]["param_groups"][0])
    for number, param in enumerate(params):
        for name, value in theirs.state[param].items():
            assert_same = torch.testing.assert_close
            assert_same(value, checkpoint["optimizer"]["state"][number][name].to(value.dtype))


def test_tensors_of_a_gpu_are_read_without_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of({**ROWS["adamw float16 autocast"], "steps": 5})
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save(plan, tmp_path / "plan.pt")
    run("train", str(tmp_path))


# Where a file is written, by the program and by the trainer of Python.

Save = Callable[[Path], None]


@pytest.fixture(params=["cpp", "python"])
def save(run: Run, request: pytest.FixtureRequest) -> Save:
    """Returns what writes "text" to a path, or raises an error with the words of any language."""

    def save_in_python(path: Path) -> None:
        try:
            write_checkpoint("save_state", "text", path)
        except OSError as error:
            raise AssertionError(f"{error.filename}: {error.strerror}") from None
        except ValueError as error:
            raise AssertionError(str(error)) from None

    return save_in_python if request.param == "python" else lambda path: run("save", str(path))


def test_links_stay_and_what_they_name_is_replaced(save: Save, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    for name, target in (("run.pt", "disk/last.pt"), ("disk/last.pt", "7.pt")):
        (tmp_path / name).symlink_to(target)
    for _ in range(2):  # the first where no file is yet
        save(tmp_path / "run.pt")
        assert sorted(os.listdir(tmp_path / "disk")) == ["7.pt", "last.pt"]
        assert [path for path in tmp_path.rglob("*.pt") if not path.is_symlink()] == [
            tmp_path / "disk" / "7.pt"
        ]
        assert torch.load(tmp_path / "run.pt") == "text"


@pytest.mark.parametrize("mode", [0o640, 0o600, 0o666, 0o444])
def test_a_file_keeps_its_mode(save: Save, mode: int, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    path.touch()
    path.chmod(mode)
    save(path)
    assert path.stat().st_mode & 0o777 == mode
    assert torch.load(path) == "text"


def test_a_file_is_written_under_a_name_of_its_own(save: Save, tmp_path: Path) -> None:
    (tmp_path / "run.pt.tmp").write_text("mine")
    save(tmp_path / "run.pt")
    assert sorted(os.listdir(tmp_path)) == ["run.pt", "run.pt.tmp"]
    assert (tmp_path / "run.pt.tmp").read_text() == "mine"
    modes = {(tmp_path / name).stat().st_mode for name in ("run.pt", "run.pt.tmp")}
    assert len(modes) == 1  # the mode that new files get


@pytest.mark.parametrize("letter", ["a", "ä"])
def test_a_name_may_be_as_long_as_the_disk_allows(save: Save, letter: str, tmp_path: Path) -> None:
    longest = (letter * 255).encode()[:252].decode(errors="ignore") + ".pt"
    for length in (len(longest), 100):
        save(tmp_path / longest[-length:])
    assert {torch.load(path) for path in tmp_path.iterdir()} == {"text"}
    with pytest.raises(AssertionError, match=rf"{letter}\.pt: File name too long"):
        save(tmp_path / (letter + longest))
    assert len(os.listdir(tmp_path)) == 2


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    ("make", "kind"), [(Path.mkdir, "a folder"), (os.mkfifo, "a pipe"), (make_socket, "a socket")]
)
def test_what_is_no_file_is_refused(save: Save, make: Callable[[Path], None], kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a short path, as those of sockets must be
        path = Path(folder) / "run.pt"
        make(path)
        before = path.stat()
        words = f"save_state: path must be of a file, or of nothing yet, got {kind}: {path}"
        with pytest.raises(AssertionError, match=re.escape(words)):
            save(path)
        assert path.stat() == before
        assert os.listdir(folder) == ["run.pt"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing/run.pt", "missing/run.pt: No such file or directory"),
        ("file/run.pt", "file/run.pt: Not a directory"),
        ("loop", "loop: Too many levels of symbolic links"),
        ("gone/", "No such file or directory"),
    ],
)
def test_an_error_names_the_file_and_leaves_none(
    save: Save, name: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(AssertionError, match=words):
        save(f"{tmp_path}/{name}")
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]


def test_a_file_without_crcs_is_read(run: Run, tmp_path: Path) -> None:
    plan = plan_of({**ROWS["adamw float16 autocast"], "steps": 5})
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({**plan, "nothing": torch.ones(0)}, tmp_path / "plan.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    run("train", str(tmp_path))


def test_files_that_cpp_can_not_read_are_explained(run: Run, tmp_path: Path) -> None:
    plan = plan_of({**ROWS["adamw float16 autocast"], "steps": 5})
    model = torch.nn.Linear(2, 2)
    for name, value, text in (
        ("ordered.pt", model.state_dict(), "torch.save(dict(model.state_dict()), path)"),
        ("absent.pt", None, "path must be of a file that can be read, got"),
    ):
        if value is not None:
            torch.save({"model": value}, tmp_path / name)
        torch.save({**plan, "resume": str(tmp_path / name)}, tmp_path / "plan.pt")
        with pytest.raises(AssertionError, match=re.escape(text)):
            run("train", str(tmp_path))
    (tmp_path / "text.pt").write_text("not a checkpoint")
    torch.save([torch.full((64,), b"w"[0], dtype=torch.uint8)], tmp_path / "whole.pt")
    damaged = (tmp_path / "whole.pt").read_bytes().replace(b"wwww", b"vwww", 1)
    (tmp_path / "damaged.pt").write_bytes(damaged)
    for name, text in (("text", ""), ("damaged", ".* record data/0 was damaged: its CRC differs")):
        path = tmp_path / f"{name}.pt"
        torch.save({**plan, "resume": str(path)}, tmp_path / "plan.pt")
        text = f"load_state of {path}: the file must be one that torch.save wrote,{text}"
        with pytest.raises(AssertionError, match=text):
            run("train", str(tmp_path))
