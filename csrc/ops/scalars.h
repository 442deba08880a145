// Scalars that a step or a scan of the gradients reads from a device, as one float32 element.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/options.h>
#include <c10/util/Exception.h>

#include <string>

#include "devices/dispatch.h"
#include "tensors/tensor_memory.h"

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

// Returns the device of a tensor. Throws unless kernels can use the tensor there.
inline at::Device device_of(const std::string& operation, const std::string& name,
                            const at::Tensor& tensor) {
  check_is_plain(operation, name, tensor);
  check_device(operation, name, tensor.device());
  return tensor.device();
}

// Returns the address of the one element of a number, or null if it is not given. Throws unless it
// has this dtype and is on this device.
template <typename T>
T* number_data(const std::string& operation, const std::string& name, const OptionalTensor& number,
               at::ScalarType dtype, const at::Device& device) {
  if (!number.has_value()) return nullptr;
  check_number(operation, name, *number, dtype, device);
  return number->mutable_data_ptr<T>();
}

}  // namespace amp_ext
