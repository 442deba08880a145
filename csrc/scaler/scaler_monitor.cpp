// Allocates the reports of a scaler and reads their mirrors without waiting.
#include "scaler/scaler_monitor.h"

#include <cstring>

#include "devices/dispatch.h"
#include "tensors/mirrored_bytes.h"

namespace amp_ext {

namespace {

constexpr int64_t kFirstRoom = 8;  // number of optimizer reports allocated at first

}  // namespace

ScalerMonitor::ScalerMonitor(at::Device device)
    : device_(device),
      report_(bytes_on_device(device, sizeof(ScalerReport))),
      mirror_(bytes_on_host(device, sizeof(ScalerReport))),
      optimizers_(bytes_on_device(device, kFirstRoom * sizeof(OptimizerReport))),
      optimizers_mirror_(bytes_on_host(device, kFirstRoom * sizeof(OptimizerReport))) {
  const ScalerReport blank;  // some fields start at -1
  std::memcpy(mirror_.mutable_data_ptr(), &blank, sizeof blank);
  report_.copy_(mirror_, /*non_blocking=*/true);
}

ScalerMonitor::~ScalerMonitor() { wait_before_end(device_); }

int64_t ScalerMonitor::add_optimizer() {
  const int64_t size = optimizers_.numel();
  if ((number_of_optimizers_ + 1) * static_cast<int64_t>(sizeof(OptimizerReport)) > size) {
    const at::Tensor larger = bytes_on_device(device_, 2 * size);
    larger.narrow(0, 0, size).copy_(optimizers_);
    const at::Tensor larger_mirror = bytes_on_host(device_, 2 * size);
    std::memcpy(larger_mirror.mutable_data_ptr(), optimizers_mirror_.const_data_ptr(),
                static_cast<size_t>(size));
    // Replays of a captured CUDA graph still write the old tensors, so these must stay alive.
    retired_.push_back(optimizers_);
    retired_.push_back(optimizers_mirror_);
    optimizers_ = larger;
    optimizers_mirror_ = larger_mirror;
  }
  return number_of_optimizers_++;
}

ScalerReport ScalerMonitor::read() const {
  ScalerReport report;
  const auto& mirror = *as<ScalerReport>(mirror_);
  read_consistently(mirror, [&] { report = mirror; });
  return report;
}

OptimizerReport ScalerMonitor::read_optimizer(int64_t slot) const {
  TORCH_CHECK(slot >= 0 && slot < number_of_optimizers_, "ScalerMonitor: slot must be below ",
              number_of_optimizers_, ", got ", slot);
  OptimizerReport report;
  read_consistently(*as<ScalerReport>(mirror_), [&] {
    std::memcpy(&report, as<OptimizerReport>(optimizers_mirror_) + slot, sizeof report);
  });
  return report;
}

ReportMemory ScalerMonitor::memory() const {
  return {as<ScalerReport>(report_), as<ScalerReport>(mirror_), as<OptimizerReport>(optimizers_),
          as<OptimizerReport>(optimizers_mirror_), number_of_optimizers_};
}

}  // namespace amp_ext
