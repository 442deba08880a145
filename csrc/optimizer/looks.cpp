// What a look at all gradients does, and which looks belong to a step.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "optimizer/plan.h"
#include "optimizer/scalars.h"

namespace amp_ext {

std::vector<LookResult> Plan::look(const at::Tensor& found_inf, const OptionalTensor& grad_scale,
                                   const optim::SharedOptions& options) {
  const at::NoGradGuard no_grad;
  looks_.clear();  // if this look fails, no step may use the one before
  looks_ = look_at_grads(found_inf, grad_scale, options);
  std::vector<LookResult> results;
  for (Look& look : looks_) {
    look.result.first_nonfinite = first_nonfinite_on(look.result.found_inf.device());
    look.records.clear();
    results.push_back(look.result);
  }
  if (is_partitioned()) looks_.clear();
  return results;
}

at::Tensor Plan::first_nonfinite_on(const at::Device& device) {
  for (const at::Tensor& first : first_nonfinites_) {
    if (first.device() == device) return first;
  }
  const OutsideInferenceMode normal;
  const auto options = at::TensorOptions(device).dtype(at::kLong);
  first_nonfinites_.push_back(at::full({}, kNoTensor, options));
  return first_nonfinites_.back();
}

std::vector<Plan::Look> Plan::look_at_grads(const OptionalTensor& found_inf,
                                            const OptionalTensor& grad_scale,
                                            const optim::SharedOptions& options) {
  check_scalar(checks_.operation, "found_inf", found_inf);
  check_scalar(checks_.operation, "grad_scale", grad_scale);
  std::vector<Look> looks;
  for (size_t index = 0; index < rows_.size(); ++index) {
    if (index + kTensorsAhead < rows_.size()) rows_[index + kTensorsAhead].prefetch_grad();
    if (index + kStoragesAhead < rows_.size())
      rows_[index + kStoragesAhead].prefetch_grad_storage();
    Row& row = rows_[index];
    if (!row.has_grad()) {
      row.seen_grad.reset();
      continue;
    }
    checks_.check_grad(row);
    Look& look = look_of(looks, row, found_inf, options);
    row.see_grad();
    const bool is_dense = row.grad().is_non_overlapping_and_dense();
    // The copy is kept alive.
    if (!is_dense) row.staged.push_back({row.grad(), row.grad().contiguous(), false});
    const at::Tensor& dense = is_dense ? row.grad() : row.staged.back().dense;
    look.records.push_back(gradient_record(dense, const_cast<void*>(dense.const_data_ptr()),
                                           static_cast<int64_t>(index)));
  }
  for (Look& look : looks) {
    const LookResult& result = look.result;
    const at::Device device = result.found_inf.device();
    const at::Tensor scale = grad_scale.has_value() ? scalar_on(device, *grad_scale) : at::Tensor();
    // Only a scaler's look is followed by the update that reports and resets it.
    int64_t* const first_nonfinite =
        found_inf.has_value() ? first_nonfinite_on(device).mutable_data_ptr<int64_t>() : nullptr;
    const LookLaunch launch{look.records.data(),    static_cast<int64_t>(look.records.size()),
                            float_data(scale),      result.found_inf.mutable_data_ptr<float>(),
                            first_nonfinite,        double_data(result.sum_of_squares),
                            options.skip_nonfinite, double_data(result.squares_of_params)};
    engine_of(device).look(device, launch, scratch_);
  }
  for (Row& row : rows_) row.staged.clear();
  return looks;
}

Plan::Look& Plan::look_of(std::vector<Look>& looks, const Row& row, const OptionalTensor& found_inf,
                          const optim::SharedOptions& options) const {
  const at::Device device = row.grad().device();
  for (Look& look : looks) {
    const LookResult& result = look.result;
    if (result.found_inf.device() == device && result.partition == row.partition) return look;
  }
  Look look;
  const auto float32 = at::TensorOptions(device).dtype(at::kFloat);
  const auto float64 = float32.dtype(at::kDouble);
  look.result.partition = row.partition;
  look.result.found_inf = found_inf.has_value()
                              ? found_inf->to(device, at::kFloat,
                                              /*non_blocking=*/!device.is_cpu(), /*copy=*/true)
                              : at::zeros({}, float32);
  if (wants_norm(options.max_grad_norm)) look.result.sum_of_squares = at::zeros({}, float64);
  if (tracks_grad_norms_) {
    look.result.squares_of_params = at::full({number_of_params()}, std::nan(""), float64);
  }
  look.records.reserve(rows_.size());
  return looks.emplace_back(std::move(look));
}

bool Plan::is_partitioned() const {
  return std::any_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.partition != 0; });
}

bool Plan::gradients_are_as_seen() const {
  return std::all_of(rows_.begin(), rows_.end(), [](const Row& row) {
    return row.has_grad() ? row.grad_is_as_seen() : !row.seen_grad.has_value();
  });
}

bool Plan::gradients_were_written() const {
  return std::any_of(rows_.begin(), rows_.end(), [](const Row& row) {
    return row.has_grad() && row.seen_grad.has_value() && !row.grad_is_as_seen();
  });
}

// The looks that a step goes by: those of `look` if the gradients are unchanged, else new ones.
std::vector<Plan::Look> Plan::looks_for_step(const GradientOptions& options,
                                             bool has_squares_of_params, bool& is_new) {
  const bool is_stale = !looks_.empty() && !gradients_are_as_seen();
  is_new = needs_look(options, has_squares_of_params, is_stale);
  std::vector<Look> looks;
  std::swap(looks, looks_);
  if (is_stale) looks.clear();
  if (!is_new) return looks;
  return look_at_grads({}, {}, {options.max_grad_norm, options.skip_nonfinite});
}

// Whether a step takes a look of its own, by what it asks for and what is known from the last look
// ("stale": a gradient changed since):
//
//                   nothing   found_inf   a norm whose sum is given   a norm, or one of each
//   no look         no        no          no                          yes
//   without a sum   no        no          no                          yes
//   with a sum      no        no          no                          no
//   stale           no        yes         yes                         yes
bool Plan::needs_look(const GradientOptions& options, bool has_squares_of_params,
                      bool is_stale) const {
  const bool asks_norm = wants_norm(options.max_grad_norm);
  if (is_stale) return asks_norm || options.found_inf.has_value();
  const LookResult last = looks_.empty() ? LookResult() : looks_.front().result;
  const bool has_sum = options.sum_of_squares.has_value() || last.sum_of_squares.defined();
  const bool has_each = has_squares_of_params || last.squares_of_params.defined();
  return (asks_norm && !has_sum) || (tracks_grad_norms_ && !has_each);
}

}  // namespace amp_ext
