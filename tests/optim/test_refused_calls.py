"""Calls that are refused: the exception, its text, and that nothing has changed.

A row is a scenario: the options of a "scaler", "options" of an "optimizer" and its "groups", which
have numbers of parameters, the "dtype" of the parameters, and "calls", by name or with one
argument.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from harness.optimizer_cases import CLASSES, assert_same_bits, bits_of
from torch import Tensor

import amp_ext
from amp_ext.optim.options import defaults_of

Scenario = dict[str, Any]
Saved = dict[str, Any]
Change = Callable[[Saved], Any]
Row = tuple[str, Scenario]  # by the text of its refusal

ONE = [{"params": [0]}]
USUAL: Scenario = {"optimizer": "SGD", "options": {}, "groups": ONE, "scaler": {}, "calls": []}
GRADIENTS: Mapping[str, Callable[[Tensor], Tensor | None]] = {
    "none": lambda param: None,
    "ones": lambda param: torch.ones_like(param),
    "sparse": lambda param: torch.ones_like(param).to_sparse(),
    "parameter": lambda param: param.detach(),
}


def do(scenario: Scenario) -> None:
    """Does a scenario. A call that raises must leave optimizer and scaler as they were."""
    row = {"dtype": "float32", **USUAL, **scenario}
    dtype = getattr(torch, row["dtype"])
    params = [torch.ones(2, dtype=dtype, requires_grad=True) for _ in range(2)]
    for param in params:
        param.grad = torch.ones_like(param)
    package, _, name = row["optimizer"].rpartition(".")
    kinds = torch.optim if package == "torch.optim" else amp_ext.optim
    each = [group | {"params": [params[i] for i in group["params"]]} for group in row["groups"]]
    optimizer = getattr(kinds, name)(each, **row["options"])
    scaler = amp_ext.GradScaler("cpu", **row["scaler"])
    implied = {"scale": [torch.ones(())], "step": [optimizer], "unscale_": [optimizer]}
    for call, *arguments in row["calls"]:
        owner, _, method = call.rpartition(".")
        before, bits = scaler.state_dict(), bits_of(optimizer)
        try:
            if call == "options":  # of the first group
                optimizer.param_groups[0].update(*arguments)
            elif call == "gradient":  # of the first parameter
                params[0].grad = GRADIENTS[arguments[0]](params[0])
            elif owner == "optimizer":
                getattr(optimizer, method)(*arguments)
            else:
                getattr(scaler, method)(*implied.get(method, arguments))
        except Exception:
            assert scaler.state_dict() == before
            assert_same_bits(optimizer, bits)
            raise


def scaler(*calls: str | tuple[str, Any], **options: Any) -> Scenario:
    """Makes a scaler on the CPU and calls its methods, by name or with one argument."""
    pairs = [(call,) if isinstance(call, str) else call for call in calls]
    return {"scaler": options, "calls": [(f"scaler.{name}", *rest) for name, *rest in pairs]}


def optimizer(kind: str, *calls: str | tuple[str, Any], **options: Any) -> Scenario:
    """Makes an optimizer and calls its methods, or a function, by name or with one argument."""
    pairs = [(call,) if isinstance(call, str) else call for call in calls]
    return {"optimizer": kind, "options": options, "calls": pairs}


def groups(*each: dict[str, Any], **options: Any) -> Scenario:
    """Makes an AdamW of these groups and lets it step."""
    return optimizer("AdamW", "optimizer.step", **options) | {"groups": each}


def loaded_file(change: Change) -> Scenario:
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


def of_another(lr: float = 0.1, **entries: Any) -> Saved:
    """Returns a file of another library, with one parameter; its state is under ``state``."""
    state = entries.pop("state", {})
    group = {"lr": lr, "weight_decay": 0.1, **entries, "params": [0]}
    return {"state": {0: state} if state else {}, "param_groups": [group]}


def file_of(kind: str, *params: int, **options: Any) -> Saved:
    """Returns the state dict of an optimizer with a group for each number of parameters."""
    each = [{"params": [torch.ones(2, requires_grad=True) for _ in range(n)]} for n in params]
    made = getattr(amp_ext.optim, kind)(each, **options)
    each[0]["params"][0].grad = torch.ones(2)
    made.step()
    return made.state_dict()


NAN, INF = float("nan"), float("inf")
TWO = [*ONE, {"params": [1]}]
FILE = file_of("AdamW", 1, 1, lr=0.1)
OPTIONS = [key for key in FILE["param_groups"][1] if key != "params"]
WITH_MAXIMUM = {"param_groups": [{**FILE["param_groups"][0], "amsgrad": True}]}
IN_BYTES = torch.ones(2, dtype=torch.uint8)
IN_CHARS, IN_SHORTS, IN_PAIRS = IN_BYTES.char(), IN_BYTES.short(), torch.ones(2, 2).char()
NO_STATE = "state_dict must have 'state', got"
INT8 = "be torch.int8 of shape (2,), got"
UINT8 = "be torch.uint8 of shape (2,), got"
PAIRS = "be torch.uint8 of shape (2, 2), got"
A_LIMIT = "must be a number of at least 0 or None, got"
IF_HARMLESS = "Delete them from the file if they don't change a step"
NO_CODE = "must be torch.float32, torch.bfloat16 or None with amsgrad, got"
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

OTHER_DICTS: dict[str, Change] = {
    "state_dict must have 'param_groups', got ['state']": lambda _: {"state": {}},
    f"{NO_STATE} {[*'abcdefgh', '...']}": lambda _: dict.fromkeys("abcdefghi", torch.ones(2)),
}
BAD_FILES: dict[str, Change] = {
    "state must be a dict, got list": lambda saved: saved | {"state": [1, 2]},
    "param_groups must be a list, got dict": lambda saved: saved | {"param_groups": {}},
    "param_groups[0] must be a dict, got list": lambda saved: saved | {"param_groups": [[], []]},
    f"param_groups[1] must have ['params'], got {OPTIONS}": lacking("param_groups", 1, "params"),
    "param_groups[1]['params'] must have keys of state, got list": in_group(params=[[0]]),
    "state[0] must be a dict, got float": lambda saved: saved["state"].update({0: 0.5}),
    "state must have the keys in params of param_groups, got ['step', 'all']": (
        lambda saved: saved | {"state": {"step": 3, "all": [torch.ones(2)]}}
    ),
    f"param_groups[1] must have ['betas', 'eps'], got {[OPTIONS[0], *OPTIONS[3:], 'params']}": (
        lacking("param_groups", 1, "betas", "eps")
    ),
    "bias_correction of param_groups[1] must be True, got False": in_group(bias_correction=False),
    "differentiable of param_groups[1] must be False, got True. Set it to False in "
    "the state dict, or use an optimizer of torch.optim for differentiable steps": in_group(
        differentiable=True
    ),
    f"state must have only entries of AdamW, got ['momentum_buffer']. {IF_HARMLESS}": in_state(
        momentum_buffer=torch.ones(2)
    ),
}
# Files of other libraries: which class refuses them, and the text. Keys and options are those that
# the packages write.
MOMENT = torch.full((2,), 0.25)
ONLY_OPTIONS = "param_groups[0] must have only options of"
OR_KEEP = f"{IF_HARMLESS}, or add the same keys to the optimizer's groups"
AN_SGD: dict[str, Any] = {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "foreach": None}
A_LION: dict[str, Any] = {"betas": (0.9, 0.99)}
FILES_OF_OTHERS: list[tuple[str, str, Saved]] = [
    (  # pytorch_optimizer 4.1.0 Lion
        "Lion",
        "weight_decouple of param_groups[0] must be True, got False. Set "
        "decoupled_weight_decay of the optimizer to the value in the file",
        of_another(**A_LION, weight_decouple=False, fixed_decay=False, foreach=None, step=2),
    ),
    (
        "Lion",
        "fixed_decay of param_groups[0] must be False, got True: the weight decay of a step is "
        "multiplied by lr",
        of_another(**A_LION, weight_decouple=True, fixed_decay=True, foreach=None, step=2),
    ),
    (  # pytorch_optimizer 4.1.0 PID
        "SGD",
        f"{ONLY_OPTIONS} SGD, got ['derivative', 'integral']. {OR_KEEP}",
        of_another(**AN_SGD, derivative=10.0, integral=5.0, state={"i_buffer": MOMENT}),
    ),
]
# Likewise, of a state: the key, and what must be.
BAD_STATES: dict[str, Change] = {
    "exp_avg be present, got ['step', 'exp_avg_sq']": lacking("state", 0, "exp_avg"),
    "exp_avg be a tensor, got list": in_state(exp_avg=[0.5, 0.5]),
    "exp_avg have shape (2,), got (1, 2)": in_state(exp_avg=torch.ones(1, 2)),
    "exp_avg be dense and floating-point, got torch.strided, torch.int8": in_state(
        exp_avg=IN_CHARS
    ),
    f"exp_avg_q8h {INT8} torch.uint8 of (2,)": coded("exp_avg", q8h=IN_BYTES),
    "exp_avg_sq be present, got ['step', 'exp_avg', 'exp_avg_sq_q8s']": coded(
        "exp_avg_sq", q8s=IN_BYTES
    ),
    f"exp_avg_sq_q8s {UINT8} torch.int8 of (2,)": coded("exp_avg_sq", q8s=IN_CHARS, exp=IN_BYTES),
    "exp_avg_sq_exp be torch.uint8 of shape (2, 0), got torch.uint8 of (2,)": (
        coded("exp_avg_sq", q8s=IN_BYTES, exp=IN_BYTES)
    ),
    "master_param be floating-point, got torch.int16, as TransformerEngine's FusedAdam writes with "
    "store_param_remainders=True. Delete 'master_param' from the states, so that masters are made "
    "from the parameters": in_state(master_param=IN_SHORTS),
    f"master_low_bf16 {PAIRS} torch.uint8 of (2,)": in_state(master_low_bf16=IN_BYTES),
    f"master_low8_bf16 {INT8} torch.int16 of (2,)": in_state(master_low8_bf16=IN_SHORTS),
    "step be present, got ['exp_avg', 'exp_avg_sq']": lacking("state", 0, "step"),
    "step be one number, got shape (2,)": in_state(step=torch.ones(2)),
    "step be finite and at least 0, got -2.0": in_state(step=torch.tensor(-2.0)),
    "step be finite and at least 0, got 1e+39": in_state(step=1e39),
    "step be one number, got 'three'": in_state(step="three"),
    "step be one number, got (1+2j)": in_state(step=torch.tensor(1 + 2j)),
    f"step be finite and at least 0, got 1{'0' * 400}": in_state(step=10**400),
    "exp_avg be dense and floating-point, got torch.sparse_coo, torch.float32": in_state(
        exp_avg=torch.ones(2).to_sparse()
    ),
    "master_param have shape (2,), got (3,)": in_state(master_param=torch.ones(3)),
}

FOR_DECOUPLED = (
    "must be False for a decay that is added to gradients, got True. Set "
    "decoupled_weight_decay=True"
)
COUPLED = file_of("SGD", 1)
del COUPLED["param_groups"][0]["cautious_weight_decay"]

NOT_SCALED = (
    "Attempted {} but _scale is None.  This may indicate your script did not use "
    "scaler.scale(loss or outputs) earlier in the iteration."
)


def wrong_betas(kind: str) -> list[tuple[float, ...]]:
    """Returns the betas of a class with one after the other out of range."""
    count = len(defaults_of(getattr(amp_ext.optim, kind)).get("betas", ()))
    return [
        tuple((1.0, -0.5)[index % 2] if each == index else 0.5 for each in range(count))
        for index in range(count)
    ]


STEP, INIT = "optimizer.step", "optimizer.init_state"
LOAD = "optimizer.load_state_dict"

ASSERTION_ERRORS: list[Row] = [
    ("The backoff factor must be < 1.0.", scaler(backoff_factor=1.0)),
    (
        "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor "
        "with requires_grad=False.",
        scaler("scale", ("update", torch.ones(2))),
    ),
    *((NOT_SCALED.format(call), scaler(call)) for call in ("step", "unscale_", "update")),
    ("No inf checks were recorded prior to update.", scaler("scale", "update")),
]
RUNTIME_ERRORS: list[Row] = [
    (
        "`fused` and `foreach` cannot be `True` together.",
        optimizer("Adam", fused=True, foreach=True),
    ),
    (
        "The source state dict is empty, possibly because it was saved from a disabled instance "
        "of GradScaler.",
        scaler(("load_state_dict", {})),
    ),
    (
        "unscale_() has already been called on this optimizer since the last update().",
        scaler("scale", "unscale_", "unscale_"),
    ),
    ("unscale_() is being called after step().", scaler("scale", "step", "unscale_")),
    ("step() has already been called since the last update().", scaler("scale", "step", "step")),
    *(
        (
            f"{operation}[0] must be Float, Double, Half or BFloat16, got ComplexFloat",
            scaler("scale", call) | {"optimizer": kind, "dtype": "complex64"},
        )
        for operation, kind, call in (
            ("unscale_: grads", "torch.optim.SGD", "unscale_"),
            ("unscale_: grads", "SGD", "unscale_"),
        )
    ),
    (
        "SGD: grad of group 0, param 0 must be Float, Double, Half or BFloat16, got ComplexFloat",
        scaler("scale", "step") | {"dtype": "complex64"},
    ),
    (
        "SGD does not support sparse gradients: grad of group 0, param 0 must be Strided, got "
        "Sparse",
        optimizer("SGD", ("gradient", "sparse"), STEP),
    ),
    (
        "dequantize_blockwise: codes must have rows of a multiple of 32 elements, dimension 0 "
        "outermost, got sizes [2] and strides [1]",
        loaded_file(coded("exp_avg_sq", q8s=IN_BYTES, exp=torch.ones(2, 0).byte())),
    ),
]
KEY_ERRORS: list[Row] = [
    *(
        (f"AdamW.load_state_dict: {text}", loaded_file(other))
        for text, other in OTHER_DICTS.items()
    ),
]
VALUE_ERRORS: list[Row] = [
    (
        "GradScaler: init_scale must lie between min_scale and max_scale, got init_scale=nan, "
        "min_scale=None, max_scale=None",
        scaler(init_scale=NAN),
    ),
    (
        "Attempting to unscale FP16 gradients. They would vanish in float16. Call "
        "scaler.step() without unscale_(), with an optimizer of amp_ext.optim, which unscales in "
        "float32 inside its step. To clip, construct it with max_grad_norm=.",
        scaler("scale", "unscale_") | {"dtype": "float16"},
    ),
    # Options of an optimizer.
    *(
        (text.format(kind), optimizer(kind, **{option: -1.0}))
        for kind in CLASSES
        for option, text in BELOW_0.items()
        if option in defaults_of(getattr(amp_ext.optim, kind))
    ),
    *(
        (f"Invalid beta parameter at index {index}: {betas[index]}", optimizer(kind, betas=betas))
        for kind in CLASSES
        for index, betas in enumerate(wrong_betas(kind))
    ),
    *(
        (f"{name}: cautious_weight_decay of group 0 {FOR_DECOUPLED}", scenario)
        for name, scenario in (
            ("Adam", optimizer("Adam", cautious_weight_decay=True)),
            ("Lion", optimizer("Lion", cautious_weight_decay=True, decoupled_weight_decay=False)),
            ("SGD", optimizer("SGD", STEP, ("options", {"cautious_weight_decay": True}), STEP)),
        )
    ),
    (
        f"SGD.load_state_dict: cautious_weight_decay of param_groups[0] {FOR_DECOUPLED}",
        optimizer("SGD", (LOAD, COUPLED), cautious_weight_decay=True, decoupled_weight_decay=True),
    ),
    ("Invalid learning rate: nan", optimizer("SGD", lr=NAN)),
    ("Tensor lr must be 1-element", optimizer("Adam", lr=torch.ones(2))),
    ("betas must be either both floats or both Tensors", optimizer("Lion", betas=(0, 0.9))),
    ("Tensor betas[0] must be 1-element", optimizer("Adam", betas=(torch.ones(2), torch.ones(1)))),
    *(
        (
            "Nesterov momentum requires a momentum and zero dampening",
            optimizer("SGD", nesterov=True, **others),
        )
        for others in ({}, {"momentum": 0.9, "dampening": 0.1})
    ),
    (
        "AdamW: state_dtype of group 0 must be torch.float32 or torch.bfloat16 for parameters in "
        "torch.float16 with master_weights='split', got None",
        optimizer("AdamW", STEP, master_weights="split", state_dtype=None) | {"dtype": "float16"},
    ),
    # Groups, and what a loop writes into one.
    (
        "AdamW: param 2 of group 0 is already listed as param 1. List each parameter once.",
        groups({"params": [0, 1, 1]}),
    ),
    *(
        (
            f"AdamW: {option} must be the same in all groups, got [{one}, {other}]",
            groups({"params": [0]}, {"params": [1], option: other}, **{option: one}),
        )
        for option, one, other in (
            ("max_grad_norm", 1.0, 2.0),
            ("skip_nonfinite", True, False),
        )
    ),
    *(
        (
            f"Adam: state_dtype of group 0 {NO_CODE} '8bit'",
            optimizer("Adam", STEP, ("options", {"amsgrad": True}), call, state_dtype="8bit"),
        )
        for call in (STEP, INIT)
    ),
    # Files.
    *((f"AdamW.load_state_dict: {text}", loaded_file(bad)) for text, bad in BAD_FILES.items()),
    *(
        (
            "AdamW.load_state_dict: {} of group 0, param 0 must {}".format(*words.split(" ", 1)),
            loaded_file(change),
        )
        for words, change in BAD_STATES.items()
    ),
    (
        "loaded state dict has a different number of parameter groups",
        optimizer("AdamW", (LOAD, FILE)),
    ),
    (
        "loaded state dict contains a parameter group that doesn't match the size of optimizer's "
        "group",
        optimizer("AdamW", (LOAD, file_of("AdamW", 2))),
    ),
    (
        "AdamW.load_state_dict: param_groups[0] must have ['betas', 'eps', 'amsgrad'], got "
        f"{[*file_of('SGD', 1)['param_groups'][0]]}",
        optimizer("AdamW", (LOAD, file_of("SGD", 1, momentum=0.5))),
    ),
    *(
        (f"{kind}.load_state_dict: {text}", optimizer(kind, (LOAD, saved)))
        for kind, text, saved in FILES_OF_OTHERS
    ),
    (
        "AdamW.load_state_dict: max_exp_avg_sq of group 0, param 0 must be present, got ['step', "
        "'exp_avg', 'exp_avg_sq']",
        optimizer("AdamW", (LOAD, file_of("AdamW", 1) | WITH_MAXIMUM), amsgrad=True),
    ),
    (
        f"AdamW.load_state_dict: state_dtype of param_groups[0] {NO_CODE} '8bit'",
        optimizer("AdamW", STEP, (LOAD, file_of("AdamW", 1, amsgrad=True)), state_dtype="8bit"),
    ),
]
TABLES: dict[type[Exception], list[Row]] = {
    AssertionError: ASSERTION_ERRORS,
    RuntimeError: RUNTIME_ERRORS,
    KeyError: KEY_ERRORS,
    ValueError: VALUE_ERRORS,
}
# By a name: the scenario, the exception and its text.
REFUSED_CALLS: dict[str, tuple[Scenario, type[Exception], str]] = {
    f"{kind.__name__} {number}: {text}": (scenario, kind, text)
    for kind, table in TABLES.items()
    for number, (text, scenario) in enumerate(table)
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_a_bad_call_is_refused(name: str) -> None:
    scenario, kind, text = REFUSED_CALLS[name]
    with pytest.raises(kind) as caught:
        do(scenario)
    assert caught.type is kind
    assert caught.value.args[0] == text
