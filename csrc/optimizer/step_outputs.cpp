// Allocates and writes the results of steps.
#include "optimizer/step_outputs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "optimizer/scalars.h"

namespace amp_ext {

OptionalTensor StepOutputs::allocate_norm(const ParamTable& params, bool reads_norm) {
  if (params.slots().empty() || !reads_norm) return {};
  const at::Device device = params.slots().front().param().device();
  if (!grad_norm_.defined() || grad_norm_.device() != device) {
    const OutsideInferenceMode normal;
    has_grad_norm_ = false;
    grad_norm_ = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
  }
  return grad_norm_;
}

at::Tensor StepOutputs::prepare(const ParamTable& params, const StepInputs& inputs,
                                std::vector<StepBatch>& batches) {
  has_grad_norm_ = inputs.reads_norm && grad_norm_.defined();
  const bool is_written = std::any_of(batches.begin(), batches.end(), [](const StepBatch& batch) {
    return batch.inputs.grad_norm != nullptr;
  });
  if (has_grad_norm_ && !is_written) write_norm(inputs.gradients);
  if (!tracks_step_applied_ || params.slots().empty()) return {};
  return prepare_step_applied(params.slots().front().param().device(), batches);
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

void StepOutputs::finish(const at::Tensor& step_applied) {
  if (step_applied.defined()) step_applied_.copy_(step_applied, /*non_blocking=*/true);
}

}  // namespace amp_ext
