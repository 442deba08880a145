"""What the state machine takes for different on purpose, by the names of docs/differences.md."""

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
