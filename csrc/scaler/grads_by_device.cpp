// The gradients of an optimizer as a scaler looks at them.
#include "scaler/grads_by_device.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace amp_ext {

std::vector<std::pair<at::Device, TensorList>> grads_by_device(const TensorList& params,
                                                               TensorList grads, bool allow_fp16,
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
  std::vector<std::pair<at::Device, TensorList>> by_device;
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

}  // namespace amp_ext
