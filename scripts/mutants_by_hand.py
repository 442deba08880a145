"""Faults written by hand: what somebody could get wrong in one line, and the tests should notice.

A fault is found by its text, so it outlives a move to another file. Its number is its place in the
list; add new ones at the end of theirs.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """One wrong line.

    Attributes:
        old: The text that becomes wrong; with `after` before it, there once in all sources.
        new: What stands there instead. In C++ both are compiled, so both must fit; an expression
            replaces an expression, and a text that ends like a statement a statement.
        tests: Test files that should notice, without `test_` and `.py`: run first.
        after: Text right before `old` that tells its place.
    """

    old: str
    new: str
    tests: str = ""
    after: str = ""


CXX = [
    # The functors.
    Fault(
        "static_cast<T>(floor * bias_correction2)",
        "static_cast<T>(floor)",
        "denominator_floor optimizer_update",
    ),
    Fault(
        "update_param(param, exp_avg, max_exp_avg_sq)",
        "update_param(param, exp_avg, exp_avg_sq)",
        "adam optimizers",
    ),
    Fault(
        "max_norm / (static_cast<double>(total_norm) + 1e-6)",
        "max_norm / static_cast<double>(total_norm)",
        "clip_grad_norm clipping_in_the_step",
    ),
    Fault(
        "*state.hysteresis_tracker > 1",
        "*state.hysteresis_tracker > 0",
        "scaler_limits update_scale",
    ),
    Fault(
        "*state.growth_tracker = 0;",
        "",
        "update_scale grad_scaler",
        after="if (overflow) {\n    ",
    ),
    Fault("!is_finite(grown) || grown == scale", "!is_finite(grown)", "scaler_limits update_scale"),
    Fault(
        "wanted = larger<double>(hyperparameters.max_scale, scale);",
        "wanted = hyperparameters.max_scale;",
        "scaler_limits update_scale",
    ),
    Fault("hyperparameters.min_scale < static_cast<double>(scale)", "true", "scaler_limits"),
    Fault("optimizer.update != report.updates + 1", "true", "scaler_reports"),
    Fault("*flag.first_nonfinite = kNoTensor;", "", "scaler_reports"),
    Fault(
        "first ? 1.0 : 1.0 - hyperparameters.dampening", "1.0 - hyperparameters.dampening", "sgd"
    ),
    Fault(
        "decoupled ? 1.0 - lr * decay : 1.0",
        "decoupled ? 1.0 - hyperparameters.lr * decay : 1.0",
        "adam sgd optimizers",
    ),
    # What engines share.
    Fault(
        "!is_finite(factor.inv_scale)",
        "false",
        "adam sgd grad_scaler",
    ),
    Fault("magnitude >= 0x477ff000u", "magnitude > 0x477ff000u", "masters adam bit_equality"),
    # The CPU engine.
    Fault("(skipped + kTileSize - 1) / kTileSize", "skipped / kTileSize", "adam bit_equality"),
    Fault(
        "in_float >= kSmallSum && is_finite(in_float)",
        "is_finite(in_float)",
        "sum_of_squares clip_grad_norm",
    ),
    Fault("record.group != group_ || step != step_", "record.group != group_", "adam sgd"),
    # The choice of an engine.
    Fault(
        "GradientFactor::read({launch.grad_scale}).skip",
        "false",
        "check_finite grad_scaler",
    ),
    Fault("found_inf != nullptr", "false", "unscale", after="} else if ("),
    # The plan.
    Fault("param == at::kFloat && is_16_bit(grad)", "is_16_bit(grad)", "plan clipping_in_the_step"),
    Fault(
        "fingerprint.contiguous || fingerprint.numel < 0",
        "fingerprint.contiguous || fingerprint.numel != 0",
        "plan optimizers",
    ),
    # The operations.
    Fault("if (sum != nullptr) sum_of_squares->zero_();", "", "sum_of_squares check_finite"),
    # The memory of tensors.
    # The reports of a scaler.
    Fault("report.updates - kHistory", "report.updates - kHistory + 1", "scaler_reports"),
    # The CUDA engine.
    Fault(
        "arguments.number_of_groups == 0 || record.group != last_group",
        "new_group",
        "optimizers adam plan",
        after="return error;\n    }\n    if (",
    ),
    Fault("overflow |= *arguments.earlier_overflow != 0;", "", "update_scale scaler_reports"),
    # The scaler.
    Fault("here(found_inf.clone())", "here(found_inf)", "scaler_steps"),
    Fault(
        "params[i].mutable_grad() = grad = grad.coalesce()",
        "grad = grad.coalesce()",
        "scaler_steps",
    ),
]

PYTHON = [
    # The scaler.
    Fault('state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()', "pass"),
    Fault("dict.fromkeys(parameters)", "list(parameters)", after="for param in "),
    # The optimizers.
    Fault("return look.sum_of_squares, look.squares_of_params", "return None, None"),
    # Checkpoints.
    # Parameters that are sharded.
    Fault(
        "values[1 + index] = values[1 + index] + moved(sum_of_squares, zero.device)",
        "values[1 + index] = moved(sum_of_squares, zero.device)",
    ),
    Fault("values[0].clamp(max=1.0).float()", "values[0].float()"),
]
