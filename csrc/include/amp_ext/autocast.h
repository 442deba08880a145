// A scope with automatic mixed precision: the C++ counterpart of torch.autocast in Python.
#pragma once

#include <amp_ext/export.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace amp_ext {

// While an Autocast object lives, this thread's operations on one device type cast floating-point
// inputs: matrix products and convolutions to `dtype`, reductions and losses to float32.
//
//   torch::Tensor loss;
//   {
//     const amp_ext::Autocast autocast(torch::kCUDA, torch::kHalf);
//     loss = torch::mse_loss(model->forward(input), target);
//   }
//
// Scopes can be nested, also with `enabled` set to false, and end when an exception is thrown. Each
// thread opens its own scopes. The process has one cache of cast weights, which is emptied when the
// outermost scope ends, when an optimizer of amp_ext writes parameters, and by GradScaler::step. If
// another optimizer steps without a scaler, the cache keeps outdated weights: end the scope first,
// as above.
class AMP_EXT_API Autocast {
 public:
  // `dtype` is at::kHalf or at::kBFloat16; nullopt takes the dtype that is set for the device type
  // (by default bfloat16 for the CPU, float16 for CUDA). `cache_enabled` says whether each weight
  // is cast only once per scope; nullopt inherits the setting. Throws c10::Error for any other
  // dtype or device type.
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
