"""The one table of what the state machine takes for different on purpose.

Names are those of the tables in docs/differences.md.
"""

from __future__ import annotations

#: What the machine comes across, and what it expects of our side then.
MODELLED = {
    "fp16 gradients in `scaler.step`": "stepped; `unscale_` refuses them as torch does",
    "16-bit parameters": "float32 masters and moments, or one rounding of a float32 step, "
    "of which dither may make the other neighbour",
    "`.grad` after a fused step under the scaler": "every bit as before, or as it was stepped with",
    "a step of an optimizer without gradients": "steps nothing, and only `update` may refuse",
    "step hooks when a step is skipped": "called",
    "inf and NaN that come after the look of a scaler": "skipped where a step looks for itself",
    "a gradient that comes between `unscale_` and `step`": "refused by our scaler",
    "`optimizer.step()` with gradients that `scaler.step` took": "refused, and nothing is written",
    "`scaler.step` raises, or is interrupted, in a fused optimizer": "the next one looks anew, "
    "or is refused until the update",
    "a gradient that overlaps its parameter": "refused, and nothing is written",
    "`differentiable=True`, sparse or complex gradients": "refused, and nothing is written",
    "states, and tensors of a scaler, made in `torch.inference_mode()`": "stepped as any others",
    "an option of torch's that a group has lost": "refused, and nothing is written",
    "an iterator or a set in `params` of a group": "refused, and nothing is written",
    "a parameter whose name is at another place in the file": "takes the state of its name",
    "numbers of numpy in groups, in `state_dict`": "saved as numbers of Python",
    "`unscale_` of a wrapper, `step` of the optimizer inside, or the other way round": "the two "
    "are one",
    "`load_state_dict` of an optimizer": "copies in the configured dtypes",
}

#: What it does not do, and where that is tested instead.
ELSEWHERE = {
    "an object that delegates to a fused optimizer, in `scaler.step`": "torch's loop is not fused",
    "the search for inf and NaN in `step`": "its writes show in no result",
    "a first step that overflows, SGD with momentum, fused": "torch's loop has no such fault",
    "`found_inf` of 2 or more (several devices, ranks)": "it has one device",
    "a scale without a finite inverse (0)": "its scales stay between 2**-8 and 2**20",
    "a number of the scaler out of its range, in setters, `update` and loads too": "its numbers "
    "are in their ranges",
    "what is no type of a device in `GradScaler(device)`": "its device is the CPU",
    "ranks with different scales, under `ShardedGradScaler`": "it has one rank",
    "a step inside an open `torch.autocast` scope": "its losses are not cast",
    "`unscale_` of two optimizers that share a parameter": "its optimizers share none",
    "a set of parameters, in the constructor": "its optimizers are made of lists",
    "a parameter listed twice": "no rule adds one",
    "a parameter listed twice in `clip_grad_norm_`": "no rule adds one",
    "a step counter at 2^24": "it takes fewer steps",
    "a 16-bit parameter written through `.data` (`clamp_`, `lerp_`, `copy_`), which torch does not "
    "count": "it calls `refresh_masters` then",
    "gradients whose squares overflow float32": "its gradients are smaller",
    "a numpy array of no dimensions as `lr`, written in place": "its learning rates are numbers",
    "a group without parameters in `set_optimizer_state_dict`": "its groups have parameters",
    "an option of a wrong type or NaN, in a group too": "its options are right",
    "a state whose parameter has left the groups, in `state_dict`": "no rule takes one out",
    "`foreach=`, `fused=`, `capturable=`": "its optimizers are made without",
}
