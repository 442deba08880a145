// A guard of the norm of gradients, as amp_ext.optim.NormGuard is in Python.
#pragma once

#include <amp_ext/export.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace c10 {
struct IValue;
}  // namespace c10

namespace amp_ext {

class NormStatistics;

namespace optim {

// Set one by one: NormGuardOptions().sigma_factor(4).action("clip").
struct NormGuardOptions {
  // Deviations above the mean of the norms that a norm may be.
  TORCH_ARG(double, sigma_factor) = 6.0;
  // Norms whose plain average would give the newest one the same weight.
  TORCH_ARG(int64_t, window) = 128;
  // Norms that enter the statistics before these judge.
  TORCH_ARG(int64_t, warmup_steps) = 64;
  // A norm above it is an outlier from the first step on.
  TORCH_ARG(std::optional<double>, max_norm) = std::nullopt;
  // "skip" writes nothing at an outlier; "clip" scales the gradients down to the limit.
  TORCH_ARG(std::string, action) = "skip";
  // Outliers in a row of which the last is taken, and begins new statistics.
  TORCH_ARG(int64_t, patience) = 16;
};

// As of the last step that the device has finished.
struct NormGuardStats {
  int64_t norms = 0;  // of steps, with those that were not finite
  double last_norm = 0.0;
  double mean = 0.0;
  double deviation = 0.0;  // at least 1 % of the mean
  double limit = 0.0;      // above which the next norm is an outlier; inf until there is one
  int64_t outliers = 0;
  int64_t nonfinite = 0;
  int64_t last_outlier = 0;  // the number of its norm, from 1; 0: there was none
};

// The last 4,096 norms, oldest first.
struct NormGuardHistory {
  std::vector<int64_t> numbers;  // from 1
  std::vector<double> norms;
  std::vector<bool> withheld;  // whether the step was skipped, or its gradients clipped
};

// Skips the steps whose gradients have a norm that is far above those before, or clips them. Rules,
// state and messages are those of Python's class, whose documentation holds here too.
//
//   auto guard = std::make_shared<amp_ext::optim::NormGuard>();
//   optimizer.norm_guard(guard);
//
// Errors are c10::Error.
class AMP_EXT_API NormGuard {
 public:
  explicit NormGuard(NormGuardOptions options = {});
  ~NormGuard();
  NormGuard(const NormGuard&) = delete;
  NormGuard& operator=(const NormGuard&) = delete;

  const NormGuardOptions& options() const { return options_; }

  // Whether the guard has skipped the last step. Does not wait for a GPU, unless asked.
  bool last_step_skipped(bool wait = false) const;
  NormGuardStats stats(bool wait = false) const;
  NormGuardHistory history(bool wait = false) const;

  // The statistics as plain numbers, as Python's state dict; options stay as constructed. Where a
  // load throws, nothing has been changed.
  c10::IValue state_dict() const;
  void load_state_dict(const c10::IValue& state_dict);

 private:
  friend class FusedOptimizer;

  NormGuardOptions options_;
  std::shared_ptr<NormStatistics> statistics_;
  std::weak_ptr<const void> optimizer_;  // whose guard it is
};

// For torch::save(guard, path) and torch::load(guard, path).
AMP_EXT_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                        const NormGuard& guard);
AMP_EXT_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                       NormGuard& guard);

}  // namespace optim

}  // namespace amp_ext
