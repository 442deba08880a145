// The reports of a scaler's updates. Kernels write them on the device and copy them to a mirror in
// host memory, which the host reads without waiting.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>

#include <cstdint>
#include <vector>

#include "launches.h"

namespace amp_ext {

// The reports of one scaler, as of the last update that the device has finished.
class AMP_EXT_API ScalerMonitor {
 public:
  explicit ScalerMonitor(at::Device device);
  ~ScalerMonitor();
  ScalerMonitor(const ScalerMonitor&) = delete;
  ScalerMonitor& operator=(const ScalerMonitor&) = delete;

  // Allocates a report for another optimizer and returns its slot.
  int64_t add_optimizer();
  int64_t number_of_optimizers() const { return number_of_optimizers_; }

  ScalerReport read() const;
  OptimizerReport read_optimizer(int64_t slot) const;

  ReportMemory memory() const;

 private:
  at::Device device_;
  at::Tensor report_;                // bytes of a ScalerReport, on the device
  at::Tensor mirror_;                // copy of report_ in host memory
  at::Tensor optimizers_;            // bytes of OptimizerReports on the device, with spare capacity
  at::Tensor optimizers_mirror_;     // copy of optimizers_ in host memory
  std::vector<at::Tensor> retired_;  // outgrown tensors that replayed CUDA graphs may still write
  int64_t number_of_optimizers_ = 0;
};

}  // namespace amp_ext
