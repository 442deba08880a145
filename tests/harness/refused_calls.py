"""The table of calls that Python and C++ refuse alike: what is done, the exception, and its text.

A row adds a deed of ``deeds``, which a program in C++ does as well. Its text is that of Python.
That of C++ is the same up to what came, which each prints as its own language does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import amp_ext
from amp_ext.optim.options import defaults_of
from harness.deeds import ONE, Deed, Saved
from harness.optimizer_cases import CLASSES

Change = Callable[[Saved], Any]


def scaler(*calls: str | tuple[str, Any], **options: Any) -> Deed:
    """Makes a scaler on the CPU and calls its methods, by name or with one argument."""
    pairs = [(call,) if isinstance(call, str) else call for call in calls]
    return {"scaler": options, "calls": [(f"scaler.{name}", *rest) for name, *rest in pairs]}


def loads(**entries: Any) -> Deed:
    """Loads a state dict of a scaler with other entries."""
    state = amp_ext.GradScaler("cpu").state_dict()
    return scaler("scale", ("load_state_dict", {**state, **entries}), hysteresis=2)


def optimizer(kind: str, *calls: str | tuple[str, Any], **options: Any) -> Deed:
    """Makes an optimizer and calls its methods, or a function, by name or with one argument."""
    pairs = [(call,) if isinstance(call, str) else call for call in calls]
    return {"optimizer": kind, "options": options, "calls": pairs}


def groups(*each: dict[str, Any], **options: Any) -> Deed:
    """Makes an AdamW of these groups and lets it step."""
    return optimizer("AdamW", "optimizer.step", **options) | {"groups": each}


def loaded_file(change: Change) -> Deed:
    """Lets an AdamW of two groups step and load what a change returns or makes of its file."""
    saved = copy.deepcopy(FILE)
    made = change(saved)
    calls = "optimizer.step", ("optimizer.load_state_dict", made or saved)
    return optimizer("AdamW", *calls) | {"groups": TWO}


def in_state(**entries: Any) -> Change:
    return lambda saved: saved["state"][0].update(entries)


def in_group(**entries: Any) -> Change:
    return lambda saved: saved["param_groups"][1].update(entries)


def lacking(where: str, index: int, *keys: str) -> Change:
    def change(saved: Saved) -> None:
        for key in keys:
            del saved[where][index][key]

    return change


def coded(name: str, **entries: Any) -> Change:
    """Returns what writes entries in place of a moment."""

    def change(saved: Saved) -> None:
        del saved["state"][0][name]
        saved["state"][0].update({f"{name}_{key}": value for key, value in entries.items()})

    return change


def as_radam(saved: Saved) -> None:
    for group in saved["param_groups"]:
        for key in group.keys() - {"params", "lr", "betas", "eps", "weight_decay"}:
            del group[key]


def file_of(kind: str, *params: int, **options: Any) -> Saved:
    """Returns the state dict of an optimizer with a group for each number of parameters."""
    each = [{"params": [torch.ones(2, requires_grad=True) for _ in range(n)]} for n in params]
    made = getattr(amp_ext.optim, kind)(each, **options)
    each[0]["params"][0].grad = torch.ones(2)
    made.step()
    return made.state_dict()


OF_OTHER_CODES = (
    "an earlier amp_ext, which can write float32_state_dict(optimizer) to be loaded here"
)
NAN, INF = float("nan"), float("inf")
TWO = [*ONE, {"params": [1]}]
FILE = file_of("AdamW", 1, 1, lr=0.1)
OPTIONS = [key for key in FILE["param_groups"][1] if key != "params"]
IN_BYTES = torch.ones(2, dtype=torch.uint8)
IN_CHARS, IN_SHORTS, IN_PAIRS = IN_BYTES.char(), IN_BYTES.short(), torch.ones(2, 2).char()
A_NUMBER = "of param_groups[1] must be a number or a tensor of one element, got"
TWO_NUMBERS = "of param_groups[1] must be two numbers or two tensors of one element, got"
NO_STATE = "state_dict must have 'state', got"
INT8 = "be torch.int8 of shape (2,), got"
UINT8 = "be torch.uint8 of shape (2,), got"
PAIRS = "be torch.uint8 of shape (2, 2), got"
A_STATE_DTYPE = "must be torch.float32, torch.bfloat16, '8bit-bf16', '8bit' or None, got"
A_MASTER = "must be True, False, 'split' or 'split8', got"
A_LIMIT = "must be a number of at least 0 or None, got"
NO_CODE = (
    "must be torch.float32, torch.bfloat16 or None with amsgrad, whose maximum has no code, got"
)
# What each optimizer says of an option below 0.
BELOW_0 = {
    "lr": "Invalid learning rate: -1.0",
    "eps": "Invalid epsilon value: -1.0",
    "weight_decay": "Invalid weight_decay value: -1.0",
    "momentum": "Invalid momentum value: -1.0",
    "denominator_floor": "{}: denominator_floor must be a number of at least 0, got -1.0",
    "max_grad_norm": f"{{}}: max_grad_norm {A_LIMIT} -1.0",
    "clip_value": f"{{}}: clip_value {A_LIMIT} -1.0",
}

# What is written into files that an AdamW does not load, by the text of the refusal.
BAD_OPTIONS: dict[str, Change] = {
    f"lr {A_NUMBER} None": in_group(lr=None),
    f"lr {A_NUMBER} 'small'": in_group(lr="small"),
    f"betas {TWO_NUMBERS} (0.9,)": in_group(betas=(0.9,)),
    f"betas {TWO_NUMBERS} (0.9, 'large')": in_group(betas=(0.9, "large")),
    "maximize of param_groups[1] must be True or False, got 'yes'": in_group(maximize="yes"),
}
OTHER_DICTS: dict[str, Change] = {
    "state_dict must have 'param_groups', got ['state']": lambda _: {"state": {}},
    f"{NO_STATE} ['model', 'optimizer']; load its entry 'optimizer' instead": (
        lambda saved: {"model": {"weight": torch.ones(2)}, "optimizer": saved}
    ),
    f"{NO_STATE} ['first', 'second']; load its entry 'first' or 'second' instead": (
        lambda saved: {"first": saved, "second": saved}
    ),
    **{
        f"{NO_STATE} ['mine', '{masters}']; load its entry 'mine' instead; the masters in "
        f"'{masters}' are not read, but taken from the parameters: load the model first": (
            lambda saved, masters=masters: {"mine": saved, masters: [[torch.ones(2)]]}
        )
        # Of apex, its contributions, and Megatron.
        for masters in ("fp32_from_fp16", "fp32_groups", "fp32_from_fp16_params")
    },
    f"{NO_STATE} {[*'abcdefgh', '...']}": lambda _: dict.fromkeys("abcdefghi", torch.ones(2)),
}
BAD_FILES: dict[str, Change] = {
    "state must be a dict, got list": lambda saved: saved | {"state": [1, 2]},
    "param_groups must be a list, got dict": lambda saved: saved | {"param_groups": {}},
    "param_groups[0] must be a dict, got list": lambda saved: saved | {"param_groups": [[], []]},
    f"param_groups[1] must have ['params'], got {OPTIONS}": lacking("param_groups", 1, "params"),
    "param_groups[1]['params'] must be a list, got int": in_group(params=3),
    "state[0] must be a dict, got float": lambda saved: saved["state"].update({0: 0.5}),
    "state must have entries of the parameters that param_groups lists, got ['step', 'all']": (
        lambda saved: saved | {"state": {"step": 3, "all": [torch.ones(2)]}}
    ),
    f"param_groups[1] must have ['betas', 'eps'], got {[OPTIONS[0], *OPTIONS[3:], 'params']}": (
        lacking("param_groups", 1, "betas", "eps")
    ),
    "bias_correction of param_groups[1] must be True, got False": in_group(bias_correction=False),
    "correct_bias of param_groups[1] must be True, got False": in_group(correct_bias=False),
    "differentiable of param_groups[1] must be False, got True: a fused kernel is not "
    "differentiable; set it to False in the state dict to go on without gradients through the "
    "steps": in_group(differentiable=True),
    "eps of param_groups[1] must be a number, got nan": in_group(eps=NAN),
    f"lr {A_NUMBER} nan": in_group(lr=NAN),
    **{
        "state_dict must have the options and states of AdamW, but is a state dict of "
        f"{writer}: it has {key}": change
        for writer, change, key in (
            ("torch.optim.NAdam", in_group(momentum_decay=0.5), "'momentum_decay'"),
            ("torch.optim.Adafactor", in_group(beta2_decay=-0.8), "'beta2_decay'"),
            ("apex.optimizers.FusedLAMB", in_group(grad_averaging=True), "'grad_averaging'"),
            ("apex.optimizers.FusedNovoGrad", in_group(init_zero=True), "'init_zero'"),
            ("amp_ext.optim.SGD", in_state(momentum_buffer=torch.ones(2)), "'momentum_buffer'"),
            ("torch.optim.RAdam", as_radam, "'betas' without 'amsgrad' or 'bias_correction'"),
            (OF_OTHER_CODES, coded("exp_avg", q8r=IN_CHARS), "'exp_avg_q8r'"),
            (OF_OTHER_CODES, coded("exp_avg_sq", q8v=IN_BYTES, exp=IN_BYTES), "'exp_avg_sq_q8v'"),
        )
    },
}
# Likewise, of a state: the key, and what must be.
BAD_STATES: dict[str, Change] = {
    "exp_avg be there, got ['step', 'exp_avg_sq']": lacking("state", 0, "exp_avg"),
    "exp_avg be there, got ['step', 'exp_avg', 'exp_avg_sq']": in_state(exp_avg=None),
    "exp_avg be a tensor, got list": in_state(exp_avg=[0.5, 0.5]),
    "exp_avg have shape (2,), got (1, 2)": in_state(exp_avg=torch.ones(1, 2)),
    "exp_avg be dense and floating, got torch.strided, torch.int8": in_state(exp_avg=IN_CHARS),
    f"exp_avg_q8h {INT8} torch.uint8 of (2,)": coded("exp_avg", q8h=IN_BYTES),
    f"exp_avg_q8h {INT8} torch.int8 of (1, 2)": coded("exp_avg", q8h=IN_CHARS[None]),
    f"exp_avg_q8h {INT8} torch.bfloat16 of (2,)": coded("exp_avg", q8h=IN_BYTES.bfloat16()),
    "exp_avg_q8h be a tensor, got list": coded("exp_avg", q8h=[1, 2]),
    "exp_avg be there, got ['step', 'exp_avg_sq', 'exp_avg_q8h']": coded("exp_avg", q8h=None),
    "exp_avg_sq be there, got ['step', 'exp_avg', 'exp_avg_sq_q8s']": coded(
        "exp_avg_sq", q8s=IN_BYTES
    ),
    "exp_avg_sq be there, got ['step', 'exp_avg', 'exp_avg_sq_exp']": coded(
        "exp_avg_sq", exp=IN_BYTES
    ),
    f"exp_avg_sq_q8s {UINT8} torch.int8 of (2,)": coded("exp_avg_sq", q8s=IN_CHARS, exp=IN_BYTES),
    f"exp_avg_sq_q8s {UINT8} torch.float32 of (3,)": coded(
        "exp_avg_sq", q8s=torch.ones(3), exp=IN_BYTES
    ),
    "exp_avg_sq_exp be torch.uint8 of shape (2, 0), got torch.uint8 of (2,)": (
        coded("exp_avg_sq", q8s=IN_BYTES, exp=IN_BYTES)
    ),
    "master_param be floating, got the lower halves of masters, as TransformerEngine's FusedAdam "
    "writes with store_param_remainders=True; without 'master_param' in the states, masters are "
    "taken from the parameters": in_state(master_param=IN_SHORTS),
    f"master_low_bf16 {PAIRS} torch.uint8 of (2,)": in_state(master_low_bf16=IN_BYTES),
    f"master_low_fp16 {PAIRS} torch.int8 of (2, 2)": in_state(master_low_fp16=IN_PAIRS),
    f"master_low8_bf16 {INT8} torch.int16 of (2,)": in_state(master_low8_bf16=IN_SHORTS),
    f"master_low8_fp16 {INT8} torch.int8 of (2, 2)": in_state(master_low8_fp16=IN_PAIRS),
    "master_low_bf16 be a tensor, got int": in_state(master_low_bf16=3),
    "master_low8_bf16 be a tensor, got float": in_state(
        master_low8_bf16=0.5, exp_avg=torch.ones(3)
    ),
    "step be there, got ['exp_avg', 'exp_avg_sq']": lacking("state", 0, "step"),
    "step be one number, got shape (2,)": in_state(step=torch.ones(2)),
    "step be finite and at least 0, got nan": in_state(step=NAN),
    "step be finite and at least 0, got -2.0": in_state(step=torch.tensor(-2.0)),
    "step be finite and at least 0, got 1e+39": in_state(step=1e39),
    "step be one number, got 'three'": in_state(step="three"),
}

NOT_SCALED = (
    "Attempted {} but _scale is None.  This may indicate your script did not use "
    "scaler.scale(loss or outputs) earlier in the iteration."
)
# What numbers of scalers and guards must be; scales have one range wherever they come from.
A_SCALE, A_FLOOR = "a number from 0 to 3.4e+38", "a number of at least 0"
FROM_1, FROM_0 = "an int from 1 to 9.22e+18", "an int from 0 to 2.15e+09"
RANGES = {
    "init_scale": A_SCALE,
    "scale": A_SCALE,
    "min_scale": A_FLOOR,
    "max_scale": A_FLOOR,
    "growth_factor": "a finite number above 1",
    "backoff_factor": "a number above 0 and below 1",
    "growth_interval": FROM_1,
    "hysteresis": "an int from 1 to 2.15e+09",
    "warn_after": FROM_1,
    "_growth_tracker": FROM_0,
    "_hysteresis_tracker": FROM_0,
    "sigma_factor": "a finite number above 0",
    "window": FROM_1,
    "warmup_steps": FROM_1,
    "max_norm": "a number above 0",
    "patience": FROM_1,
    "action": "'skip' or 'clip'",
    "mean": "a finite number of at least 0",
    "variance": "a finite number of at least 0",
}
LARGE = torch.tensor(1e39, dtype=torch.float64)
LONG = 2**62  # of 8 bytes, as the reader of torch's files wants those beyond int32


def wrong_betas(kind: str) -> list[tuple[float, ...]]:
    """Returns the betas of a class with one after the other out of range."""
    count = len(defaults_of(getattr(amp_ext.optim, kind)).get("betas", ()))
    return [
        tuple((1.0, -0.5)[index % 2] if each == index else 0.5 for each in range(count))
        for index in range(count)
    ]


def guarded(*calls: Any, **options: Any) -> Deed:
    """Returns a deed of an optimizer that gets a guard of norms."""
    return {"calls": [("norm_guard", options), *calls]}


GUARD_STATE = amp_ext.optim.NormGuard().state_dict()
OF_GUARD = ("norm_guard.load_state_dict", GUARD_STATE | {"variance": -1.0})

REFUSED_CALLS: dict[str, tuple[Deed, type[Exception], str]] = {
    # Guards of norms.
    **{
        f"guard with {name} of {value!r}": (
            guarded(**{name: value}),
            ValueError,
            f"NormGuard: {name} must be {RANGES[name]}, got {value!r}",
        )
        for name, value in {
            "sigma_factor": 0.0,
            "window": 0,
            "max_norm": -1.0,
            "action": "warn",
        }.items()
    },
    "variance below 0": (
        guarded(OF_GUARD),
        ValueError,
        f"NormGuard.load_state_dict: variance must be {RANGES['variance']}, got -1.0",
    ),
    "no state of a guard": (
        guarded(("norm_guard.load_state_dict", {"mean": 1.0})),
        KeyError,
        "NormGuard.load_state_dict: state_dict must have 'norms', got ['mean']",
    ),
    # Numbers of a scaler, in the constructor, in setters and in a state dict.
    **{
        f"{name} of {value}": (
            scaler(**{name: value}),
            ValueError,
            f"GradScaler: {name} must be {RANGES[name]}, got {value}",
        )
        for name, values in {
            "init_scale": (1e300, -1.0, NAN),
            "min_scale": (-1.0,),
            "max_scale": (NAN,),
            "growth_factor": (NAN, INF),
            "backoff_factor": (-1.0, 0.0),
            "growth_interval": (0, -5),
            "hysteresis": (0, LONG),
            "warn_after": (0,),
        }.items()
        for value in values
    },
    "scale below its limit": (
        scaler(init_scale=1.0, min_scale=2.0, max_scale=4.0),
        ValueError,
        "GradScaler: init_scale must lie between min_scale and max_scale, got init_scale=1.0, "
        "min_scale=2.0, max_scale=4.0",
    ),
    **{
        f"{name} of 1": (scaler(**{name: 1.0}), AssertionError, f"The {words} 1.0.")
        for name, words in (
            ("growth_factor", "growth factor must be >"),
            ("backoff_factor", "backoff factor must be <"),
        )
    },
    **{
        f"set {name} to {value}": (
            scaler((f"set_{name}", value)),
            ValueError,
            f"GradScaler.set_{name}: {name} must be {RANGES[name]}, got {value}",
        )
        for name, values in {
            "growth_factor": (1.0, NAN),
            "backoff_factor": (2.0,),
            "growth_interval": (0,),
        }.items()
        for value in values
    },
    **{
        f"load {name} of {value!r}": (
            loads(**{name: value}),
            ValueError,
            f"GradScaler.load_state_dict: {name} must be {RANGES[name]}, got {value!r}",
        )
        for name, values in {
            "scale": (-1.0, 1e39, NAN, "65536"),
            "growth_factor": (0.5, None),
            "backoff_factor": (2.0,),
            "growth_interval": (0, 2.5),
            "_growth_tracker": (LONG,),
            "_hysteresis_tracker": (-1,),
        }.items()
        for value in values
    },
    "load an empty state": (
        scaler(("load_state_dict", {})),
        RuntimeError,
        "The source state dict is empty, possibly because it was saved from a disabled instance "
        "of GradScaler.",
    ),
    # New scales.
    **{
        f"update by {value!r}": (
            scaler("scale", "step", ("update", value), min_scale=64.0),
            RuntimeError if value == 1e39 else ValueError,
            f"GradScaler.update: new_scale must be {A_SCALE}, got {float(value)}",
        )
        for value in (-1.0, NAN, INF, 1e39, torch.tensor(-1.0), LARGE)
    },
    "update by two elements": (
        scaler("scale", ("update", torch.ones(2))),
        AssertionError,
        "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor "
        "with requires_grad=False.",
    ),
    # Methods of a scaler out of order.
    **{
        f"{call} before scale": (scaler(call), AssertionError, NOT_SCALED.format(call))
        for call in ("step", "unscale_", "update")
    },
    "update without a look": (
        scaler("scale", "update"),
        AssertionError,
        "No inf checks were recorded prior to update.",
    ),
    **{
        " and ".join(calls): (scaler("scale", *calls), RuntimeError, text)
        for text, *calls in (
            (
                "unscale_() has already been called on this optimizer since the last update().",
                "unscale_",
                "unscale_",
            ),
            ("unscale_() is being called after step().", "step", "unscale_"),
            ("step() has already been called since the last update().", "step", "step"),
        )
    },
    "unscale float16": (
        {**scaler("scale", "unscale_"), "dtype": "float16"},
        ValueError,
        "Attempting to unscale FP16 gradients. They would vanish in float16: call "
        "scaler.step(optimizer) alone, with an optimizer of amp_ext.optim, which unscales them in "
        "float32 inside its step; to clip them, construct it with max_grad_norm=.",
    ),
    **{
        f"complex gradients of {optimizer} in {call}": (
            {**scaler("scale", call), "optimizer": optimizer, "dtype": "complex64"},
            RuntimeError,
            "GradScaler: the gradient of group 0, param 0 must be real, got a complex one: keep "
            "its parameter out of the optimizers that the scaler steps",
        )
        for optimizer, call in (
            ("torch.optim.SGD", "step"),
            ("torch.optim.SGD", "unscale_"),
            ("SGD", "unscale_"),
        )
    },
    "complex gradients of SGD in step": (
        {**scaler("scale", "step"), "dtype": "complex64"},
        RuntimeError,
        "SGD: grad of group 0, param 0 must be Float, Double, Half or BFloat16, got ComplexFloat",
    ),
    # Options of an optimizer.
    **{
        f"{option} of {kind} below 0": (
            optimizer(kind, **{option: -1.0}),
            ValueError,
            text.format(kind),
        )
        for kind in CLASSES
        for option, text in BELOW_0.items()
        if option in defaults_of(getattr(amp_ext.optim, kind))
    },
    **{
        f"betas of {kind} at {index}": (
            optimizer(kind, betas=betas),
            ValueError,
            f"Invalid beta parameter at index {index}: {betas[index]}",
        )
        for kind in CLASSES
        for index, betas in enumerate(wrong_betas(kind))
    },
    "lr of nan": (optimizer("SGD", lr=NAN), ValueError, "Invalid learning rate: nan"),
    "nesterov without momentum": (
        optimizer("SGD", nesterov=True),
        ValueError,
        "Nesterov momentum requires a momentum and zero dampening",
    ),
    "dampening of nan": (
        optimizer("SGD", dampening=NAN),
        ValueError,
        "SGD: dampening must be a number, got nan",
    ),
    "rounding": (
        optimizer("SGD", rounding="up"),
        ValueError,
        "SGD: rounding must be 'dither', 'nearest' or None, got 'up'",
    ),
    **{
        f"state_dtype of {wrong!r}": (
            optimizer("Lion", state_dtype=wrong),
            ValueError,
            f"Lion: state_dtype {A_STATE_DTYPE} {wrong!r}{why}",
        )
        for wrong, why in (
            (torch.float16, ", in which second moments of small gradients are 0"),
            ("float16", ", in which second moments of small gradients are 0"),
            (torch.float64, ""),
            ("8-bit", ""),
            ("8BIT", ""),
            ("", ""),
        )
    },
    **{
        f"master_weights of {wrong!r}": (
            optimizer("AdamW", master_weights=wrong),
            TypeError,
            f"AdamW: master_weights {A_MASTER} {wrong!r}",
        )
        for wrong in ("splat", "Split", "split16", "")
    },
    **{
        f"{form} with amsgrad": (
            optimizer("Adam", amsgrad=True, state_dtype=form),
            ValueError,
            f"Adam: state_dtype of group 0 {NO_CODE} '{form}'",
        )
        for form in ("8bit", "8bit-bf16")
    },
    "float16 moments beside a split master": (
        {
            **optimizer("AdamW", "optimizer.step", master_weights="split", state_dtype=None),
            "dtype": "float16",
        },
        ValueError,
        "AdamW: state_dtype of group 0 must be torch.float32 or torch.bfloat16 for parameters in "
        "torch.float16 with master_weights='split', got None",
    ),
    # Groups, and what a loop writes into one.
    "no groups": (groups(), ValueError, "optimizer got an empty parameter list"),
    "parameter twice in a group": (
        groups({"params": [0, 1, 1]}),
        ValueError,
        "AdamW: param 2 of group 0 must be listed once, got it as param 1 already",
    ),
    "parameter in two groups": (
        groups({"params": [0]}, {"params": [0]}),
        ValueError,
        "some parameters appear in more than one parameter group",
    ),
    **{
        f"{option} that is {other} in a group": (
            groups({"params": [0]}, {"params": [1], option: other}, **{option: one}),
            ValueError,
            f"AdamW: {option} must be the same in all groups, whose norm is taken together, got "
            f"[{one}, {other}]",
        )
        for option, one, other in (
            ("max_grad_norm", 1.0, 2.0),
            ("max_grad_norm", 1.0, None),
            ("skip_nonfinite", True, False),
        )
    },
    **{
        f"{option} of a group": (
            groups({"params": [0]}, {"params": [1], option: wrong}),
            kind,
            f"AdamW: {option} of group 1 {text} {wrong!r}",
        )
        for option, wrong, kind, text in (
            ("clip_value", -1.0, ValueError, A_LIMIT),
            ("master_weights", "Split", TypeError, A_MASTER),
            ("state_dtype", "8Bit", ValueError, A_STATE_DTYPE),
        )
    },
    "amsgrad of a group with codes": (
        groups({"params": [0]}, {"params": [1], "amsgrad": True}, state_dtype="8bit-bf16"),
        ValueError,
        f"AdamW: state_dtype of group 1 {NO_CODE} '8bit-bf16'",
    ),
    **{
        f"{option} that a loop wrote, in {calls[-1]}": (
            optimizer("Lion", *calls[:-1], ("options", {option: wrong}), calls[-1]),
            kind,
            f"Lion: {option} of group 0 {text} {wrong!r}",
        )
        for option, wrong, kind, text, *calls in (
            ("clip_value", -1.0, ValueError, A_LIMIT, "optimizer.step"),
            ("clip_value", -1.0, ValueError, A_LIMIT, "optimizer.master_params"),
            ("master_weights", "low", TypeError, A_MASTER, "optimizer.step"),
            ("master_weights", "low", TypeError, A_MASTER, "optimizer.init_state"),
            ("state_dtype", "4bit", ValueError, A_STATE_DTYPE, "optimizer.init_state"),
            ("state_dtype", "4bit", ValueError, A_STATE_DTYPE, "optimizer.step", "optimizer.step"),
        )
    },
    **{
        f"amsgrad that a loop wrote, in {call}": (
            optimizer(
                "Adam", "optimizer.step", ("options", {"amsgrad": True}), call, state_dtype="8bit"
            ),
            ValueError,
            f"Adam: state_dtype of group 0 {NO_CODE} '8bit'",
        )
        for call in ("optimizer.step", "optimizer.init_state")
    },
    # Gradients.
    "sparse gradient": (
        optimizer("SGD", ("gradient", "sparse"), "optimizer.step"),
        RuntimeError,
        "SGD does not support sparse gradients: grad of group 0, param 0 must be Strided, got "
        "Sparse",
    ),
    "gradient over its parameter": (
        optimizer("SGD", ("gradient", "parameter"), "optimizer.step", write_back_grads=True),
        RuntimeError,
        "SGD: grad of group 0, param 0 is written and must not share memory with param of group "
        "0, param 0",
    ),
    "late gradient": (
        optimizer(
            "SGD",
            ("gradient", "none"),
            "scaler.scale",
            "scaler.unscale_",
            ("gradient", "ones"),
            "scaler.step",
        )
        | {"groups": TWO},
        RuntimeError,
        "GradScaler: the gradient of group 0, param 0 must be there when unscale_() is called, "
        "got it later: it may still be scaled",
    ),
    "norm of nan": (
        optimizer("SGD", ("gradient", "inf"), ("clip_grad_norm_", (1.0, True))),
        RuntimeError,
        "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot "
        "be clipped. To disable this error and scale the gradients by the non-finite norm anyway, "
        "set `error_if_nonfinite=False`",
    ),
    # Files.
    **{
        f"load: {text}": (loaded_file(change), kind, f"AdamW.load_state_dict: {text}")
        for kind, table in (
            (TypeError, BAD_OPTIONS),
            (KeyError, OTHER_DICTS),
            (ValueError, BAD_FILES),
        )
        for text, change in table.items()
    },
    **{
        f"load: {key} {text}": (
            loaded_file(change),
            ValueError,
            f"AdamW.load_state_dict: {key} of group 0, param 0 must {text}",
        )
        for (key, text), change in (
            (words.split(" ", 1), each) for words, each in BAD_STATES.items()
        )
    },
    "load: a ratio that is bad beside the step": (
        loaded_file(
            lambda saved: in_state(step=-1.0)(saved) or coded("exp_avg", q8h=IN_BYTES)(saved)
        ),
        ValueError,
        "AdamW.load_state_dict: exp_avg_q8h of group 0, param 0 must be torch.int8 of shape (2,), "
        "got torch.uint8 of (2,)",
    ),
    "load: roots of what has no rows": (
        loaded_file(coded("exp_avg_sq", q8s=IN_BYTES, exp=torch.ones(2, 0).byte())),
        RuntimeError,
        "decode_groups: codes must have rows of a multiple of 32 elements, dimension 0 outermost, "
        "got sizes [2] and strides [1]",
    ),
    "load: other groups": (
        optimizer("AdamW", ("optimizer.load_state_dict", FILE)),
        ValueError,
        "loaded state dict has a different number of parameter groups",
    ),
    "load: a longer group": (
        optimizer("AdamW", ("optimizer.load_state_dict", file_of("AdamW", 2))),
        ValueError,
        "loaded state dict contains a parameter group that doesn't match the size of optimizer's "
        "group",
    ),
    "load: SGD before its first momentum": (
        optimizer("AdamW", ("optimizer.load_state_dict", file_of("SGD", 1, momentum=0.5))),
        ValueError,
        "AdamW.load_state_dict: state_dict must have the options and states of AdamW, but is a "
        "state dict of amp_ext.optim.SGD: it has 'dampening'",
    ),
    "load: amsgrad into codes": (
        optimizer(
            "AdamW",
            "optimizer.step",
            ("optimizer.load_state_dict", file_of("AdamW", 1, amsgrad=True)),
            state_dtype="8bit",
        ),
        ValueError,
        f"AdamW.load_state_dict: state_dtype of param_groups[0] {NO_CODE} '8bit'",
    ),
}
