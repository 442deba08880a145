// Allocates and writes the results of steps.
#include "optimizer/step_outputs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "optimizer/scalars.h"

namespace amp_ext {

void StepOutputs::take_over(const StepOutputs& before) {
  guard_ = before.guard_;
  retired_guards_ = before.retired_guards_;
  tracks_step_applied_ = before.tracks_step_applied_;
}

void StepOutputs::set_guard(std::shared_ptr<NormStatistics> guard) {
  if (guard_ != nullptr && guard_ != guard && !guard_->device().is_cpu()) {
    retired_guards_.push_back(guard_);
  }
  guard_ = std::move(guard);
}

OptionalTensor StepOutputs::allocate_norm(const ParamTable& params, bool reads_norm) {
  if (params.slots().empty()) return {};
  const at::Device device = params.slots().front().param().device();
  if (guard_ != nullptr) guard_->move_to(device);
  if (!reads_norm) return {};
  if (!grad_norm_.defined() || grad_norm_.device() != device) {
    const OutsideInferenceMode normal;
    has_grad_norm_ = false;
    grad_norm_ = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
  }
  return grad_norm_;
}

StepOutputs::Unfinished StepOutputs::prepare(const ParamTable& params, const StepInputs& inputs,
                                             std::vector<StepBatch>& batches) {
  Unfinished unfinished;
  if (tracks_step_applied_ && !params.slots().empty()) {
    unfinished.step_applied =
        prepare_step_applied(params.slots().front().param().device(), batches);
  }
  // The last launch on the guard's GPU lets the guard count the norm. Without such a launch, and on
  // the CPU, finish() does it, also for a step without gradients.
  if (guard_ != nullptr) {
    const at::Device device = guard_->device();
    const auto last = std::find_if(batches.rbegin(), batches.rend(), [&](const StepBatch& batch) {
      return batch.device == device && uses_cuda_engine(device) && !batch.is_skipped;
    });
    if (last != batches.rend()) {
      last->ends_guarded = true;
    } else {
      unfinished.guard_inputs.emplace(device, inputs);
    }
  }
  has_grad_norm_ = inputs.reads_norm && grad_norm_.defined();
  const bool is_written = std::any_of(batches.begin(), batches.end(), [](const StepBatch& batch) {
    return batch.inputs.grad_norm != nullptr;
  });
  if (has_grad_norm_ && !is_written) write_norm(inputs.gradients);
  return unfinished;
}

// Lets the launches set step_applied_, or a temporary tensor on the first batch's device if no
// batch is on `device`, the device of step_applied_. Returns the temporary tensor.
at::Tensor StepOutputs::prepare_step_applied(const at::Device& device,
                                             std::vector<StepBatch>& batches) {
  const OutsideInferenceMode normal;
  const auto options = at::TensorOptions(device).dtype(at::kFloat);
  if (!step_applied_.defined() || step_applied_.device() != device) {
    step_applied_ = at::zeros({}, options);
  }
  if (batches.empty()) step_applied_.zero_();
  const bool is_here = batches.empty() ||
                       std::any_of(batches.begin(), batches.end(),
                                   [&](const StepBatch& batch) { return batch.device == device; });
  const at::Tensor elsewhere =
      is_here ? at::Tensor() : at::zeros({}, options.device(batches.front().device));
  const at::Tensor& applied = is_here ? step_applied_ : elsewhere;
  for (StepBatch& batch : batches) {
    if (batch.device == applied.device()) batch.step_applied = applied.mutable_data_ptr<float>();
  }
  return elsewhere;
}

// Writes the norm of the unscaled gradients, rounded as in the kernels.
void StepOutputs::write_norm(const GradientOptions& options) {
  if (!options.sum_of_squares.has_value()) {
    grad_norm_.zero_();  // the norm of no gradients
    return;
  }
  const at::Device device = grad_norm_.device();
  at::Tensor norm = to_device(*options.sum_of_squares, device).to(at::kDouble).sqrt();
  if (options.grad_scale.has_value()) {
    norm = norm * to_device(inverse_of_scale(*options.grad_scale), device).to(at::kDouble);
  }
  grad_norm_.copy_(norm, /*non_blocking=*/true);
}

void StepOutputs::finish(const Unfinished& unfinished) {
  if (unfinished.step_applied.defined()) {
    step_applied_.copy_(unfinished.step_applied, /*non_blocking=*/true);
  }
  if (!unfinished.guard_inputs.has_value()) return;
  const at::Device device = guard_->device();
  engine_of(device).end_guarded_step(device, unfinished.guard_inputs->pointers);
}

}  // namespace amp_ext
