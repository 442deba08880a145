// A scope in which operations choose their precision, as torch.autocast does in Python.
#pragma once

#include <amp_ext/export.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace amp_ext {

// From its construction to its end, operations of this thread on one type of device cast floating
// inputs: matrix products and convolutions to `dtype`, reductions and losses to float32.
//
//   torch::Tensor loss;
//   {
//     const amp_ext::Autocast autocast(torch::kCUDA, torch::kHalf);
//     loss = torch::mse_loss(model->forward(input), target);
//   }
//
// Scopes nest, also with `enabled` false inside, and end in any case, with an exception too. Each
// thread opens its own. The cache of cast weights is one for the process and is emptied at the end
// of the outermost scope, by every step of an optimizer of amp_ext that writes parameters, and by
// GradScaler::step. Other optimizers that step inside a scope without a scaler leave it stale: end
// the scope before, as above.
class AMP_EXT_API Autocast {
 public:
  // `dtype`: at::kHalf or at::kBFloat16; none: the one that is set for this type of device, as
  // bfloat16 for the CPU and float16 for CUDA. `cache_enabled`: whether a weight is cast once in a
  // scope; none: as outside. Throws c10::Error on another dtype or type of device.
  [[nodiscard]] explicit Autocast(c10::DeviceType device_type,
                                  std::optional<c10::ScalarType> dtype = {}, bool enabled = true,
                                  std::optional<bool> cache_enabled = {});
  ~Autocast();

  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType device_type_;
  bool was_enabled_;
  bool cache_was_enabled_;
  c10::ScalarType dtype_before_;
};

}  // namespace amp_ext
