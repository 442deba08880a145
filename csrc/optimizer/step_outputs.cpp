// Allocates and writes the results of steps.
#include "optimizer/step_outputs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "optimizer/scalars.h"

namespace amp_ext {

namespace {

// Returns the norm of the unscaled gradients, rounded as in the kernels.
at::Tensor norm_of(const at::Tensor& sum_of_squares, const OptionalTensor& grad_scale) {
  const at::Tensor norm = sum_of_squares.sqrt();
  if (!grad_scale.has_value()) return norm;
  return norm * to_device(inverse_of_scale(*grad_scale), norm.device()).to(norm.scalar_type());
}

}  // namespace

void StepOutputs::take_over(const StepOutputs& before) {
  guard_ = before.guard_;
  retired_guards_ = before.retired_guards_;
  tracks_grad_norms_ = before.tracks_grad_norms_;
  tracks_step_applied_ = before.tracks_step_applied_;
}

void StepOutputs::set_guard(std::shared_ptr<NormStatistics> guard) {
  if (guard_ != nullptr && guard_ != guard && !guard_->device().is_cpu()) {
    retired_guards_.push_back(guard_);
  }
  guard_ = std::move(guard);
}

OptionalTensor StepOutputs::allocate_norms(const ParamTable& params, const StepNorms& norms) {
  if (params.slots().empty()) return {};
  const at::Device device = params.slots().front().param().device();
  const auto allocate = [&](at::Tensor& norms, bool& are_of_last_step, at::IntArrayRef sizes) {
    if (norms.defined() && norms.sizes() == sizes && norms.device() == device) return;
    const OutsideInferenceMode normal;
    are_of_last_step = false;
    norms = at::zeros(sizes, at::TensorOptions(device).dtype(at::kFloat));
  };
  if (norms.wants_total()) allocate(grad_norm_, has_grad_norm_, {});
  if (norms.wants_each()) {
    allocate(grad_norms_, has_grad_norms_, {static_cast<int64_t>(params.slots().size())});
  }
  if (guard_ != nullptr) guard_->move_to(device);
  return norms.wants_total() ? OptionalTensor(grad_norm_) : std::nullopt;
}

StepOutputs::Unfinished StepOutputs::prepare(const ParamTable& params, const StepNorms& norms,
                                             const StepInputs& inputs,
                                             const std::vector<GradScan>& scans,
                                             const at::Tensor& squares_of_params,
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
  has_grad_norm_ = norms.wants_total() && grad_norm_.defined();
  has_grad_norms_ = norms.wants_each() && !params.slots().empty();
  const bool is_written = std::any_of(batches.begin(), batches.end(), [](const StepBatch& batch) {
    return batch.inputs.grad_norm != nullptr;
  });
  write_norms(inputs, scans, squares_of_params, is_written);
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

// Writes the norms that no launch writes: the norm of each gradient, and the norm of all gradients
// unless a batch on its device computes it (`is_written`).
void StepOutputs::write_norms(const StepInputs& inputs, const std::vector<GradScan>& scans,
                              const at::Tensor& squares_of_params, bool is_written) {
  const GradientOptions& options = inputs.gradients;
  if (has_grad_norm_ && !is_written) {
    if (options.sum_of_squares.has_value()) {
      const at::Tensor sum = to_device(*options.sum_of_squares, grad_norm_.device());
      grad_norm_.copy_(norm_of(sum.to(at::kDouble), options.grad_scale), /*non_blocking=*/true);
    } else {
      grad_norm_.zero_();  // the norm of no gradients
    }
  }
  if (!has_grad_norms_) return;
  const at::Tensor squares = squares_of_all(scans, squares_of_params);
  if (squares.defined()) {
    grad_norms_.copy_(norm_of(squares, options.grad_scale), /*non_blocking=*/true);
  } else {
    grad_norms_.fill_(std::nan(""));  // no parameter has a gradient
  }
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
