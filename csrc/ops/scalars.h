// Scalars that a step or a scan of the gradients reads from a device, as one float32 element.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/options.h>
#include <c10/util/Exception.h>

#include <string>

#include "tensors/tensor_memory.h"
#include "tensors/to_device.h"

namespace amp_ext {

inline at::Tensor scalar_on(const at::Device& device, const at::Tensor& scalar) {
  return to_device(scalar, device).to(at::kFloat);
}

// Returns 1 / grad_scale, rounded as in the kernels.
inline at::Tensor inverse_of_scale(const at::Tensor& grad_scale) {
  return grad_scale.to(at::kDouble).reciprocal().to(at::kFloat);
}

inline void check_scalar(const std::string& operation, const char* name,
                         const OptionalTensor& scalar) {
  if (!scalar.has_value()) return;
  TORCH_CHECK(is_plain(*scalar) && scalar->numel() == 1 && scalar->is_floating_point(), operation,
              ": ", name, " must be one floating-point element, got ", scalar->scalar_type(),
              " of sizes ", scalar->sizes());
}

inline const float* float_data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}

inline double* double_data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<double>() : nullptr;
}

}  // namespace amp_ext
