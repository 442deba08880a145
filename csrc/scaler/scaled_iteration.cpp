// What a scaler refuses, and what an exception leaves of an iteration.
#include "scaler/scaled_iteration.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace amp_ext {

GradsByDevice grads_by_device(const TensorList& params, TensorList grads, bool allow_fp16,
                              const NameOf& name_of) {
  std::vector<at::Device> devices;
  for (size_t i = 0; i < grads.size(); ++i) {
    at::Tensor& grad = grads[i];
    if (!grad.defined()) continue;
    TORCH_CHECK(!grad.is_complex(), "GradScaler: the gradient of ",
                name_of(static_cast<int64_t>(i)),
                " must be real, got a complex one: keep its parameter out of the optimizers that "
                "the scaler steps");
    const bool is_half = grad.scalar_type() == at::kHalf;
    TORCH_CHECK_VALUE(!is_half || allow_fp16,
                      "Attempting to unscale FP16 gradients. They would vanish in float16: call "
                      "scaler.step(optimizer) alone, with an optimizer of amp_ext.optim, which "
                      "unscales them in float32 inside its step; to clip them, construct it with "
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

void ScaledIteration::check_not_spent(const std::string& operation) const {
  TORCH_CHECK(!is_spent, "GradScaler.", operation,
              ": the iteration must not be spent, got an exception in it when gradients or "
              "parameters may have been written: call optimizer.zero_grad() and update(), and "
              "backward anew");
}

void ScaledIteration::check_still_scaled(const std::string& operation, const ScaledIteration& other,
                                         const std::vector<ParamGrad>& grads) const {
  if (other.is_unscaled()) other.unscaled_->check_still_scaled(operation, grads, name_of);
}

void ScaledIteration::check_unscaled(const std::vector<ParamGrad>& grads) const {
  if (is_unscaled()) unscaled_->check_unscaled(grads, name_of);
}

void ScaledIteration::note_scale(const std::vector<ParamGrad>& grads, bool has_stepped) {
  if (is_unscaled()) unscaled_->note_scale(grads, has_stepped);
}

void ScaledIteration::begin_unscaling(const std::vector<ParamGrad>& grads) {
  unscaled_.emplace(grads);
  is_spent = true;
}

void ScaledIteration::forget_unscaling() {
  is_spent = false;
  unscaled_.reset();
}

std::vector<at::Tensor> ScaledIteration::look(LossScale& loss_scale, const GradsByDevice& grads,
                                              const at::Tensor& found_inf,
                                              const OptionalTensor& inv_scale) {
  std::vector<at::Tensor> flags;
  try {
    for (const auto& on_device : grads) {
      flags.push_back(loss_scale.look(slot, on_device.second, found_inf, inv_scale));
    }
  } catch (const c10::AcceleratorError&) {  // a launch was refused, perhaps after others
    throw;
  } catch (...) {
    if (inv_scale.has_value() && flags.empty()) forget_unscaling();  // nothing has been written
    throw;
  }
  return flags;
}

}  // namespace amp_ext
