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
    Fault("one_minus_beta1 < T(0.5)", "true", "adam bit_equality"),
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
        "value > limit ? limit : value", "!(value <= limit) ? limit : value", "clipping_in_the_step"
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
    Fault("((bits >> 16) & 1u)", "1u", "masters adam bit_equality"),
    # The CPU engine.
    Fault("(skipped + kTileSize - 1) / kTileSize", "skipped / kTileSize", "adam bit_equality"),
    Fault(
        "in_float >= kSmallSum && is_finite(in_float)",
        "is_finite(in_float)",
        "sum_of_squares clip_grad_norm",
    ),
    Fault("if (!found) return;", "", "sum_of_squares check_finite"),
    Fault("record.group != group_ || step != step_", "record.group != group_", "adam sgd"),
    Fault("found |= any_nonfinite(grad, count);", "found = any_nonfinite(grad, count);", "unscale"),
    Fault(
        "if (found) first = std::min<int64_t>(first, tile.record.group);",
        "if (found) first = tile.record.group;",
        "unscale scaler_reports",
    ),
    # The choice of an engine.
    Fault(
        "GradientFactor::read({launch.grad_scale}).skip",
        "false",
        "check_finite grad_scaler",
    ),
    Fault("found_inf != nullptr", "false", "unscale", after="} else if ("),
    # The plan.
    Fault("param == at::kFloat && is_16_bit(grad)", "is_16_bit(grad)", "plan clipping_in_the_step"),
    Fault("if (memory_moved) memory_is_checked_ = false;", "", "plan"),
    Fault("if (list == kParam) row.param_version = -1;", "", "plan masters"),
    Fault(
        "seen.version == version_of(row.grad())",
        "true",
        "clipping_in_the_step plan loop_habits",
    ),
    Fault(
        "stale && (clips || options.found_inf.has_value())", "stale && clips", "plan loop_habits"
    ),
    Fault(
        "looks_again",
        "false",
        "clipping_in_the_step plan",
        after="at::Tensor found = scalar_on(device, *options.found_inf);\n    if (",
    ),
    Fault(
        "list != kGrad || row.writes_grad",
        "list != kGrad",
        "clipping_in_the_step plan",
        after="row.tensors[list].defined() && (",
    ),
    Fault(
        "fingerprint.contiguous || fingerprint.numel < 0",
        "fingerprint.contiguous || fingerprint.numel != 0",
        "plan optimizers",
    ),
    Fault("row.tensors[kGrad].reset();", "", "plan memory"),
    Fault(
        "if (grad_norm != nullptr) *grad_norm = GradientFactor::read(inputs).grad_norm;",
        "",
        "clipping_in_the_step",
    ),
    # The operations.
    Fault("if (sum != nullptr) sum_of_squares->zero_();", "", "sum_of_squares check_finite"),
    Fault("for (const at::Tensor& grad : grads) bump_version(grad);", "", "unscale clip_grad_norm"),
    # The memory of tensors.
    Fault("data + (last + 1) * item_size", "data + last * item_size", "plan adam"),
    Fault(
        "cluster_end = std::max(cluster_end, next.range.end);",
        "cluster_end = next.range.end;",
        "plan adam unscale",
    ),
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
]

PYTHON = [
    # The scaler.
    Fault("dynamic=self._dynamic and new_scale is None", "dynamic=self._dynamic"),
    Fault(
        "seen is None or seen.optimizer() is not optimizer",
        "seen is None",
        after='"""Returns what is known of an optimizer."""\n'
        "        seen = self._seen.get(id(optimizer))\n        if ",
    ),
    Fault(
        'min(state_dict.get("_hysteresis_tracker", self._hysteresis), self._hysteresis)',
        'state_dict.get("_hysteresis_tracker", self._hysteresis)',
    ),
    Fault('state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()', "pass"),
    Fault("seen.awaits_update = False", "pass"),
    Fault(
        "found_inf.to(device, non_blocking=True, copy=True)",
        "found_inf.to(device, non_blocking=True)",
    ),
    Fault("seen.forget()", "pass"),
    Fault("param.grad = grad = grad.coalesce()", "grad = grad.coalesce()"),
    Fault("dict.fromkeys(parameters)", "list(parameters)", after="for param in "),
    # The optimizers.
    Fault(
        " and self._planned_options == self._group_options()",
        "",
        after="len(self.state)\n           ",
    ),
    Fault("if sum_of_squares is None and plan.first_param", "if plan.first_param"),
    Fault('0.0 if state.get("momentum_buffer") is None else 1.0', "0.0"),
    # Checkpoints.
    Fault("self.rebuild()", "pass", after="self.state.update(states)\n            "),
    Fault(
        "to(param.device, copy=True)",
        "to(param.device)",
        after="_loaded_step(value, where % name).",
    ),
    Fault(
        'dtypes["master_param"] = torch.float32',
        'dtypes["master_param"] = self._buffer_dtype(group, param)',
    ),
    Fault("{**self.defaults, **saved, **_configured(group)}", "{**self.defaults, **saved}"),
    # Parameters that are sharded.
    Fault(
        "values[1 + index] = values[1 + index] + sum_of_squares.to(zero, non_blocking=True)",
        "values[1 + index] = sum_of_squares.to(zero, non_blocking=True)",
    ),
    Fault("values[0].clamp(max=1.0).float()", "values[0].float()"),
]
