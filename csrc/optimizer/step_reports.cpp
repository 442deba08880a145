// Reports of a step: gradient norms, whether it was applied, and writes that version counters miss.
#include <ATen/TensorOperators.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "optimizer/plan.h"
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

// Allocates grad_norm_ and grad_norms_ if this step sets them. Existing tensors are reused, because
// a captured CUDA graph may write to them for as long as the plan lives.
void Plan::take_norms(GradientOptions& options) {
  const auto allocate = [&](at::Tensor& norms, bool& are_of_last_step, at::IntArrayRef sizes) {
    if (params_.slots().empty()) return;
    const at::Device device = params_.slots().front().param().device();
    if (norms.defined() && norms.sizes() == sizes && norms.device() == device) return;
    const OutsideInferenceMode normal;
    are_of_last_step = false;
    norms = at::zeros(sizes, at::TensorOptions(device).dtype(at::kFloat));
  };
  const StepNorms norms = this->norms(options.max_grad_norm);
  if (norms.wants_total()) allocate(grad_norm_, has_grad_norm_, {});
  if (norms.wants_each()) allocate(grad_norms_, has_grad_norms_, {params_.number_of_params()});
  if (norms.wants_total() && grad_norm_.defined()) options.grad_norm = grad_norm_;
  if (is_guarded() && counts_norms_ && !params_.slots().empty())
    guard_->move_to(params_.slots().front().param().device());
}

// Returns the flag that the step sets to 1 if it is applied: step_applied_, or a temporary tensor
// on the first batch's device if no batch is on the device of step_applied_. Undefined if the flag
// is not tracked. step_applied_ is reused, because a captured CUDA graph may write to it.
at::Tensor Plan::take_step_applied(const std::vector<Batch>& batches) {
  if (!tracks_step_applied_ || params_.checks().naming != Naming::kGroups ||
      params_.slots().empty())
    return {};
  const at::Device device = params_.slots().front().param().device();
  const OutsideInferenceMode normal;
  const auto options = at::TensorOptions(device).dtype(at::kFloat);
  if (!step_applied_.defined() || step_applied_.device() != device) {
    step_applied_ = at::zeros({}, options);
  }
  if (batches.empty()) step_applied_.zero_();
  const bool is_here =
      batches.empty() || std::any_of(batches.begin(), batches.end(),
                                     [&](const Batch& batch) { return batch.device == device; });
  return is_here ? step_applied_ : at::zeros({}, options.device(batches.front().device));
}

// Writes the norms that no launch writes: the norm of each gradient, and the norm of all gradients
// unless a batch on its device computes it (`is_written`).
void Plan::write_norms(const GradientOptions& options, const std::vector<GradScan>& scans,
                       const at::Tensor& squares_of_params, bool is_written) {
  const bool wants_norm = norms(options.max_grad_norm).wants_total();
  if (wants_norm && options.grad_norm.has_value() && !is_written) {
    const at::Tensor sum = sum_of_squares_on(options.grad_norm->device(), options, scans);
    if (sum.defined()) {
      options.grad_norm->copy_(norm_of(sum, options.grad_scale), /*non_blocking=*/true);
    } else {
      options.grad_norm->zero_();  // the norm of no gradients
    }
  }
  if (!has_grad_norms_) return;
  const at::Device device = grad_norms_.device();
  at::Tensor squares = squares_of_params;
  for (const GradScan& scan : scans) {
    const at::Tensor here = to_device(scan.result.squares_of_params, device);
    squares = squares.defined() ? at::where(squares.isnan(), here, squares) : here;
  }
  if (squares.defined()) {
    grad_norms_.copy_(norm_of(squares, options.grad_scale), /*non_blocking=*/true);
  } else {
    grad_norms_.fill_(std::nan(""));  // no parameter has a gradient
  }
}

// Chooses the next parameter to compare with its master: one per step, so that steps stay cheap.
void Plan::choose_sample() {
  sample_.reset();
  if (!finds_writes_ || params_.slots().empty()) return;
  const size_t index = static_cast<size_t>(steps_) % params_.slots().size();
  const ParamSlot& slot = params_.slots()[index];
  const bool is_comparable = slot.args_are_current && slot.args.master == Master::kFloat32 &&
                             slot.args.numel > 0 && slot.param().is_cpu();
  if (is_comparable) sample_ = {index, version_of(slot.master_param())};
}

std::optional<int64_t> Plan::find_uncounted_write() {
  if (!sample_.has_value() || !finds_writes_) return {};
  const ParamSlot& slot = params_.slots()[sample_->slot];
  const bool is_as_the_step_left_it =
      slot.args_are_current && slot.has_current_master() &&
      version_of(slot.master_param()) == sample_->master_version &&
      slot.param().const_data_ptr() == slot.args.param &&
      slot.master_param().const_data_ptr() == slot.args.master_param;
  if (!is_as_the_step_left_it || !slot.differs_from_master(steps_)) return {};
  finds_writes_ = false;
  return static_cast<int64_t>(sample_->slot);
}

std::string Plan::warning_of_write(const std::string& param) const {
  return c10::str(
      params_.operation(), ".step: parameter ", param,
      " was written in a way that torch does not count, such as through .data. The step "
      "goes on from its float32 master and undoes the write. Write it in place without "
      ".data, or call refresh_masters() after the write.");
}

}  // namespace amp_ext
