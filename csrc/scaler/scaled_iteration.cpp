// Checks which gradients are scaled or unscaled, and tracks iterations that were interrupted.
#include "scaler/scaled_iteration.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>

namespace amp_ext {

GradsByDevice grads_by_device(const TensorList& params, TensorList grads, bool allow_fp16,
                              const NameOf& name_of) {
  std::vector<at::Device> devices;
  for (size_t i = 0; i < grads.size(); ++i) {
    at::Tensor& grad = grads[i];
    if (!grad.defined()) continue;
    TORCH_CHECK(
        !grad.is_complex(), "GradScaler: the gradient of ", name_of(static_cast<int64_t>(i)),
        " must be real, got a complex one. Step its parameter with an optimizer of its own, "
        "without the scaler.");
    const bool is_half = grad.scalar_type() == at::kHalf;
    TORCH_CHECK_VALUE(!is_half || allow_fp16,
                      "Attempting to unscale FP16 gradients. They would vanish in float16. Call "
                      "scaler.step() without unscale_(), with an optimizer of amp_ext.optim, which "
                      "unscales in float32 inside its step. To clip, construct it with "
                      "max_grad_norm=.");
    if (grad.is_sparse() && is_half) params[i].mutable_grad() = grad = grad.coalesce();
    if (grad.is_sparse()) grad = grad._values();
    if (std::find(devices.begin(), devices.end(), grad.device()) == devices.end()) {
      devices.push_back(grad.device());
    }
  }
  GradsByDevice by_device;
  for (const at::Device& device : devices) {
    const at::Tensor nothing = at::empty({0}, at::TensorOptions(device).dtype(at::kFloat));
    TensorList list;
    for (const at::Tensor& grad : grads) {
      list.push_back(grad.defined() && grad.device() == device ? grad : nothing);
    }
    by_device.emplace_back(device, std::move(list));
  }
  return by_device;
}

void ScaledIteration::check_needs_no_reset(const std::string& operation) const {
  TORCH_CHECK(!needs_reset, "GradScaler.", operation,
              ": an earlier unscale_() or step() of this optimizer was interrupted and may have "
              "changed gradients or parameters. Call optimizer.zero_grad() and scaler.update(), "
              "then run backward() again.");
}

template <typename Predicate>
std::optional<int64_t> ScaledIteration::first(const std::vector<ParamGrad>& params,
                                              const Predicate& predicate) const {
  for (size_t index = 0; index < params.size(); ++index) {
    if (!params[index].grad.defined()) continue;
    const auto found = unscaled_.find(params[index].param);
    const Entry* const entry = found == unscaled_.end() ? nullptr : &found->second;
    if (predicate(entry, params[index])) return static_cast<int64_t>(index);
  }
  return {};
}

void ScaledIteration::check_still_scaled(const std::string& operation, const ScaledIteration& other,
                                         const std::vector<ParamGrad>& grads) const {
  const auto index = other.first(grads, [&](const Entry* entry, const ParamGrad& each) {
    return entry != nullptr &&
           (other.loss_was_scaled_ ? entry->is(each) : entry->has_place_of(each));
  });
  TORCH_CHECK(!index.has_value(), "GradScaler.", operation, ": the gradient of ", name_of(*index),
              " was already unscaled with another optimizer, which has the same parameter. Give "
              "each parameter to one optimizer.");
}

void ScaledIteration::check_unscaled(const std::vector<ParamGrad>& grads) const {
  if (!is_unscaled_) return;
  const auto late =
      first(grads, [](const Entry* entry, const ParamGrad&) { return entry == nullptr; });
  TORCH_CHECK(!late.has_value(), "GradScaler: the gradient of ", name_of(*late),
              " appeared after unscale_() and may still be scaled. Run every backward() before "
              "unscale_().");
  if (!loss_was_scaled_) return;
  const auto written = first(grads, [](const Entry* entry, const ParamGrad& each) {
    return entry != nullptr && each.grad.has_storage() && !entry->is(each);
  });
  TORCH_CHECK(!written.has_value(), "GradScaler: the gradient of ", name_of(*written),
              " was changed after unscale_() and a later scale(), so it may carry the scale again. "
              "Call optimizer.zero_grad() and scaler.update(), then run backward() again.");
}

void ScaledIteration::on_loss_scaled(const std::vector<ParamGrad>& grads, bool has_stepped) {
  if (!is_unscaled_) return;
  if (has_stepped) unscaled_.clear();
  if (loss_was_scaled_) return;
  loss_was_scaled_ = true;
  std::unordered_map<const void*, Entry> now;
  for (const ParamGrad& each : grads) {
    if (unscaled_.count(each.param) != 0) now[each.param].see(each);
  }
  unscaled_ = std::move(now);
}

void ScaledIteration::begin_unscaling(const std::vector<ParamGrad>& grads) {
  forget_unscaling();
  for (const ParamGrad& each : grads) {
    if (each.grad.defined()) unscaled_[each.param].see(each);
  }
  is_unscaled_ = needs_reset = true;
}

void ScaledIteration::forget_unscaling() {
  needs_reset = is_unscaled_ = loss_was_scaled_ = false;
  unscaled_.clear();
}

std::vector<at::Tensor> ScaledIteration::scan(LossScale& loss_scale, const GradsByDevice& grads,
                                              const at::Tensor& found_inf,
                                              const OptionalTensor& inv_scale) {
  std::vector<at::Tensor> flags;
  try {
    for (const auto& on_device : grads) {
      flags.push_back(loss_scale.scan(slot, on_device.second, found_inf, inv_scale));
    }
  } catch (const c10::AcceleratorError&) {  // earlier launches may have written gradients
    throw;
  } catch (...) {
    if (inv_scale.has_value() && flags.empty()) forget_unscaling();  // no gradient was written
    throw;
  }
  return flags;
}

void ScaledIteration::Entry::see(const ParamGrad& each) {
  if (!each.grad.defined() || !each.grad.has_storage()) return;
  SeenTensor::remember(grad, each.grad, each.version);
  offset = each.grad.storage_offset();
}

bool ScaledIteration::Entry::has_place_of(const ParamGrad& each) const {
  return grad.has_value() && each.grad.has_storage() && offset == each.grad.storage_offset() &&
         grad->storage._unsafe_get_target() == storage_of(each.grad);
}

bool ScaledIteration::Entry::is(const ParamGrad& each) const {
  return has_place_of(each) && grad->version == each.version;
}

}  // namespace amp_ext
