// Memory for reports on a device and for their mirrors in host memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <cstring>

#include "elements/mirror.h"

namespace amp_ext {

inline at::Tensor bytes_on_device(const at::Device& device, int64_t size) {
  return at::zeros({size}, at::TensorOptions(device).dtype(at::kByte));
}

// Returns zeroed host memory that kernels on the device can write: pinned for CUDA.
inline at::Tensor bytes_on_host(const at::Device& device, int64_t size) {
  const auto options = at::TensorOptions().dtype(at::kByte).pinned_memory(device.is_cuda());
  const at::Tensor bytes = at::empty({size}, options);
  std::memset(bytes.mutable_data_ptr(), 0, static_cast<size_t>(size));
  return bytes;
}

template <typename Report>
Report* as(const at::Tensor& bytes) {
  return static_cast<Report*>(bytes.mutable_data_ptr());
}

// Waits until a device has finished all launched work.
inline void synchronize(const at::Device& device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeDevice(device.index());
}

// Waits for the device before a destructor frees a mirror. Ignores errors.
inline void wait_before_end(const at::Device& device) noexcept {
  try {
    synchronize(device);
  } catch (...) {
  }
}

// Calls copy(), which reads a mirror. Repeats the call if the mirror was written meanwhile.
template <typename Copy>
void read_consistently(const ReportStamps& mirror, const Copy& copy) {
  int64_t finished = 0;
  do {
    finished = __atomic_load_n(&mirror.finished, __ATOMIC_ACQUIRE);
    copy();
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
  } while (__atomic_load_n(&mirror.started, __ATOMIC_RELAXED) != finished);
}

}  // namespace amp_ext
