// Numbers that are read on another device than they were made on.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_ext {

// The tensor on a device. The host waits for a copy from a GPU, which it would else read before it
// has arrived; the streams of GPUs wait by themselves.
inline at::Tensor to_device(const at::Tensor& tensor, const at::Device& device) {
  return tensor.to(device, /*non_blocking=*/!device.is_cpu());
}

}  // namespace amp_ext
