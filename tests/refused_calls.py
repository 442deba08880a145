"""The table of calls that Python and C++ refuse alike: what is done, the exception, and its text.

A row adds what it does as plain values, which a program in C++ reads and does as well: options of a
scaler or an optimizer, and calls of their methods. Its text is that of Python.
"""

from __future__ import annotations

import re
from typing import Any

import torch

import amp_ext

# Options by "scaler", "options" (of the optimizer), and "optimizer", "dtype" and "calls".
Deed = dict[str, Any]


def scaler(*calls: str | tuple[str, Any], **options: Any) -> Deed:
    """Makes a scaler on the CPU and calls its methods, by name or with one argument."""
    pairs = [(call,) if isinstance(call, str) else call for call in calls]
    return {"scaler": options, "calls": [(f"scaler.{name}", *rest) for name, *rest in pairs]}


def loads(**entries: Any) -> Deed:
    """Loads a state dict of a scaler with other entries."""
    state = amp_ext.GradScaler("cpu").state_dict()
    return scaler("scale", ("load_state_dict", {**state, **entries}), hysteresis=2)


NOT_SCALED = (
    "Attempted {} but _scale is None.  This may indicate your script did not use "
    "scaler.scale(loss or outputs) earlier in the iteration."
)
OF_FACTOR = "growth_factor must be a finite number above 1, got"
OF_BACKOFF = "backoff_factor must be a number above 0 and below 1, got"
OF_INTERVAL = "growth_interval must be an int from 1 to 9.22e+18, got"
OF_SCALE = "must be a number from 0 to 3.4e+38, got"
LOAD = "GradScaler.load_state_dict:"
NAN, INF = float("nan"), float("inf")
LONG = 2**62  # of 8 bytes, as the reader of torch's files wants those beyond int32

REFUSED_CALLS: dict[str, tuple[Deed, type[Exception], str]] = {
    # Options of a scaler.
    "scale too large": (
        scaler(init_scale=1e300),
        ValueError,
        f"GradScaler: init_scale {OF_SCALE} 1e+300",
    ),
    "scale below 0": (
        scaler(init_scale=-1.0),
        ValueError,
        f"GradScaler: init_scale {OF_SCALE} -1.0",
    ),
    "scale of nan": (scaler(init_scale=NAN), ValueError, f"GradScaler: init_scale {OF_SCALE} nan"),
    "scale below its limit": (
        scaler(init_scale=1.0, min_scale=2.0, max_scale=4.0),
        ValueError,
        "GradScaler: init_scale must lie between min_scale and max_scale, got init_scale=1.0, "
        "min_scale=2.0, max_scale=4.0",
    ),
    "limit below 0": (
        scaler(min_scale=-1.0),
        ValueError,
        "GradScaler: min_scale must be a number of at least 0, got -1.0",
    ),
    "limit of nan": (
        scaler(max_scale=NAN),
        ValueError,
        "GradScaler: max_scale must be a number of at least 0, got nan",
    ),
    "growth of 1": (
        scaler(growth_factor=1.0),
        AssertionError,
        "The growth factor must be > 1.0.",
    ),
    "growth of nan": (scaler(growth_factor=NAN), ValueError, f"GradScaler: {OF_FACTOR} nan"),
    "growth of inf": (scaler(growth_factor=INF), ValueError, f"GradScaler: {OF_FACTOR} inf"),
    "backoff of 1": (
        scaler(backoff_factor=1.0),
        AssertionError,
        "The backoff factor must be < 1.0.",
    ),
    "backoff below 0": (scaler(backoff_factor=-1.0), ValueError, f"GradScaler: {OF_BACKOFF} -1.0"),
    "backoff of 0": (scaler(backoff_factor=0.0), ValueError, f"GradScaler: {OF_BACKOFF} 0.0"),
    "interval of 0": (scaler(growth_interval=0), ValueError, f"GradScaler: {OF_INTERVAL} 0"),
    "interval below 0": (scaler(growth_interval=-5), ValueError, f"GradScaler: {OF_INTERVAL} -5"),
    "hysteresis of 0": (
        scaler(hysteresis=0),
        ValueError,
        "GradScaler: hysteresis must be an int from 1 to 2.15e+09, got 0",
    ),
    "hysteresis beyond int32": (
        scaler(hysteresis=LONG),
        ValueError,
        f"GradScaler: hysteresis must be an int from 1 to 2.15e+09, got {LONG}",
    ),
    "warn after 0": (
        scaler(warn_after=0),
        ValueError,
        "GradScaler: warn_after must be an int from 1 to 9.22e+18, got 0",
    ),
    # Setters.
    "set growth of 1": (
        scaler(("set_growth_factor", 1.0)),
        ValueError,
        f"GradScaler.set_growth_factor: {OF_FACTOR} 1.0",
    ),
    "set growth of nan": (
        scaler(("set_growth_factor", NAN)),
        ValueError,
        f"GradScaler.set_growth_factor: {OF_FACTOR} nan",
    ),
    "set backoff of 2": (
        scaler(("set_backoff_factor", 2.0)),
        ValueError,
        f"GradScaler.set_backoff_factor: {OF_BACKOFF} 2.0",
    ),
    "set interval of 0": (
        scaler(("set_growth_interval", 0)),
        ValueError,
        f"GradScaler.set_growth_interval: {OF_INTERVAL} 0",
    ),
    # Entries of a state dict.
    "load an empty state": (
        scaler(("load_state_dict", {})),
        RuntimeError,
        "The source state dict is empty, possibly because it was saved from a disabled instance "
        "of GradScaler.",
    ),
    "load a scale below 0": (loads(scale=-1.0), ValueError, f"{LOAD} scale {OF_SCALE} -1.0"),
    "load a scale too large": (loads(scale=1e39), ValueError, f"{LOAD} scale {OF_SCALE} 1e+39"),
    "load a scale of nan": (loads(scale=NAN), ValueError, f"{LOAD} scale {OF_SCALE} nan"),
    "load a text": (loads(scale="65536"), ValueError, f"{LOAD} scale {OF_SCALE} '65536'"),
    "load growth of 0.5": (loads(growth_factor=0.5), ValueError, f"{LOAD} {OF_FACTOR} 0.5"),
    "load no growth": (loads(growth_factor=None), ValueError, f"{LOAD} {OF_FACTOR} None"),
    "load backoff of 2": (loads(backoff_factor=2.0), ValueError, f"{LOAD} {OF_BACKOFF} 2.0"),
    "load interval of 0": (loads(growth_interval=0), ValueError, f"{LOAD} {OF_INTERVAL} 0"),
    "load interval of 2.5": (loads(growth_interval=2.5), ValueError, f"{LOAD} {OF_INTERVAL} 2.5"),
    "load a count too large": (
        loads(_growth_tracker=LONG),
        ValueError,
        f"{LOAD} _growth_tracker must be an int from 0 to 2.15e+09, got {LONG}",
    ),
    "load a hysteresis below 0": (
        loads(_hysteresis_tracker=-1),
        ValueError,
        f"{LOAD} _hysteresis_tracker must be an int from 0 to 2.15e+09, got -1",
    ),
    # New scales.
    **{
        f"update by {value!r}": (
            scaler("scale", "step", ("update", value), min_scale=64.0),
            RuntimeError if value == 1e39 else ValueError,
            f"GradScaler.update: new_scale {OF_SCALE} {float(value)}",
        )
        for value in (
            -1.0,
            NAN,
            INF,
            1e39,
            torch.tensor(-1.0),
            torch.tensor(1e39, dtype=torch.float64),
        )
    },
    "update by two elements": (
        scaler("scale", ("update", torch.ones(2))),
        AssertionError,
        "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor "
        "with requires_grad=False.",
    ),
    # Methods of a scaler out of order.
    "step before scale": (scaler("step"), AssertionError, NOT_SCALED.format("step")),
    "unscale before scale": (scaler("unscale_"), AssertionError, NOT_SCALED.format("unscale_")),
    "update before scale": (scaler("update"), AssertionError, NOT_SCALED.format("update")),
    "update without a look": (
        scaler("scale", "update"),
        AssertionError,
        "No inf checks were recorded prior to update.",
    ),
    "unscale twice": (
        scaler("scale", "unscale_", "unscale_"),
        RuntimeError,
        "unscale_() has already been called on this optimizer since the last update().",
    ),
    "unscale after step": (
        scaler("scale", "step", "unscale_"),
        RuntimeError,
        "unscale_() is being called after step().",
    ),
    "step twice": (
        scaler("scale", "step", "step"),
        RuntimeError,
        "step() has already been called since the last update().",
    ),
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
}


def whole(deed: Deed) -> Deed:
    """Returns all that a program must know of a row."""
    usual = {"optimizer": "SGD", "options": {}, "dtype": "float32", "scaler": {}, "calls": []}
    return {**usual, **deed}


def do(deed: Deed) -> None:
    """Does what a row says; a call that raises must leave the state of the scaler as it was."""
    row = whole(deed)
    param = torch.ones(2, dtype=getattr(torch, row["dtype"]), requires_grad=True)
    param.grad = torch.ones_like(param)
    package, _, name = row["optimizer"].rpartition(".")
    kinds = torch.optim if package == "torch.optim" else amp_ext.optim
    optimizer = getattr(kinds, name)([param], **row["options"])
    scaler = amp_ext.GradScaler("cpu", **row["scaler"])
    implied = {"scale": [torch.ones(())], "step": [optimizer], "unscale_": [optimizer]}
    for call, *arguments in row["calls"]:
        owner, _, method = call.partition(".")
        before = scaler.state_dict()
        try:
            if call == "options":  # of the only group
                optimizer.param_groups[0].update(*arguments)
            elif owner == "optimizer":
                getattr(optimizer, method)(*arguments)
            else:
                getattr(scaler, method)(*implied.get(method, arguments))
        except Exception:
            assert scaler.state_dict() == before
            raise


def comparable(text: str) -> str:
    """Returns a message with numbers as numbers, without quotes that a KeyError adds."""
    text = text.strip('"').splitlines()[0] if text else text
    return re.sub(r"-?\d+(\.\d*)?(e[+-]?\d+)?", lambda match: f"{float(match[0]):.4g}", text)
