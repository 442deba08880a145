"""What the state machine takes for different on purpose, by the names of docs/differences.md."""

MODELLED = {
    "fp16 gradients in `scaler.step`",
    "16-bit parameters",
    "`.grad` after a fused step under the scaler",
    "a step of an optimizer without gradients",
    "step hooks when a step is skipped",
    "inf and NaN that come after the look of a scaler",
    "a gradient that comes between `unscale_` and `step`",
    "`optimizer.step()` with gradients that `scaler.step` took",
    "`scaler.step` raises, or is interrupted, in a fused optimizer",
    "a gradient that overlaps its parameter",
    "`differentiable=True`, sparse or complex gradients",
    "states, and tensors of a scaler, made in `torch.inference_mode()`",
    "an option of torch's that a group has lost",
    "an iterator or a set in `params` of a group",
    "a parameter whose name is at another place in the file",
    "numbers of numpy in groups, in `state_dict`",
    "`unscale_` of a wrapper, `step` of the optimizer inside, or the other way round",
    "`load_state_dict` of an optimizer",
    "an object around a fused optimizer that shows `_step_supports_amp_scaling`, in `scaler.step`",
    "a closure, `scaler.step(optimizer, closure)`, with a fused optimizer",
}
