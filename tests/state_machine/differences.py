"""The differences from torch that the state machine expects, named as in docs/differences.md."""

MODELLED = {
    "fp16 gradients in `scaler.step`",
    "16-bit parameters",
    "`.grad` after a fused step under the scaler",
    "a step of an optimizer without gradients",
    "step hooks when a step is skipped",
    "inf and NaN that appear after the scaler's check",
    "a gradient that is added between `unscale_` and `step`",
    "`optimizer.step()` after `scaler.step(optimizer)`",
    "`scaler.step` raises, or is interrupted, in a fused optimizer",
    "an overflow while gradients are released",
    "a named parameter at another position in the file",
    "numpy numbers in groups, in `state_dict`",
    "`unscale_` of a wrapper and `step` of the optimizer inside, or the reverse",
    "`unscale_` of two optimizers, then `update` between their steps",
    "`load_state_dict` of an optimizer",
    "a wrapper that exposes `_step_supports_amp_scaling` of a fused optimizer, in `scaler.step`",
}
