// What a scaler tells of its updates, kept on its device and mirrored in host memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>

#include <cstdint>
#include <vector>

#include "launches.h"

namespace amp_ext {

// The last updates, oldest first: the scale that each step had, and whether it was skipped.
struct ScaleHistory {
  int64_t first_update;  // number of the first one
  std::vector<double> scales;
  std::vector<bool> skipped;
};

// Reads never wait: they tell of the last update that the device has finished.
class AMP_EXT_API ScalerMonitor {
 public:
  explicit ScalerMonitor(at::Device device);
  ~ScalerMonitor();
  ScalerMonitor(const ScalerMonitor&) = delete;
  ScalerMonitor& operator=(const ScalerMonitor&) = delete;

  // Makes room for the report of another optimizer and returns its number.
  int64_t add_optimizer();
  int64_t number_of_optimizers() const { return number_of_optimizers_; }

  ScalerSummary read() const;
  OptimizerReport read_optimizer(int64_t slot) const;
  ScaleHistory history() const;

  ReportMemory memory() const;

 private:
  at::Device device_;
  at::Tensor report_;      // bytes of a ScalerReport
  at::Tensor mirror_;      // likewise, in host memory
  at::Tensor optimizers_;  // bytes of OptimizerReports, with room to spare
  at::Tensor optimizers_mirror_;
  std::vector<at::Tensor> retired_;  // smaller mirrors, which a running update may still write
  int64_t number_of_optimizers_ = 0;
};

}  // namespace amp_ext
