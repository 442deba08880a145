// Copies scalars to the device where they are read.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_ext {

// Returns the tensor on a device. Only a copy from a GPU to the CPU blocks, because otherwise the
// host could read it too early.
inline at::Tensor to_device(const at::Tensor& tensor, const at::Device& device) {
  return tensor.to(device, /*non_blocking=*/!device.is_cpu());
}

}  // namespace amp_ext
