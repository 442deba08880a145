// A guard of the gradient norm: the C++ counterpart of amp_ext.optim.NormGuard in Python.
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

// Options of NormGuard, set by chained calls: NormGuardOptions().sigma_factor(4).action("clip").
struct NormGuardOptions {
  // Number of standard deviations by which a norm may exceed the mean.
  TORCH_ARG(double, sigma_factor) = 6.0;
  // Length of the averaging window: the newest norm has the weight 2 / (window + 1).
  TORCH_ARG(int64_t, window) = 128;
  // Number of norms that the statistics collect before they declare any norm an outlier.
  TORCH_ARG(int64_t, warmup_steps) = 64;
  // Absolute limit: a larger norm is an outlier from the first step on.
  TORCH_ARG(std::optional<double>, max_norm) = std::nullopt;
  // "skip" skips steps whose norm is an outlier; "clip" scales the gradients down to the limit.
  TORCH_ARG(std::string, action) = "skip";
  // After patience - 1 outliers in a row, the next outlier is accepted and restarts the statistics.
  TORCH_ARG(int64_t, patience) = 16;
};

// Statistics after the last step that the device has finished.
struct NormGuardStats {
  int64_t norms = 0;  // number of norms so far, including inf and NaN
  double last_norm = 0.0;
  double mean = 0.0;
  double deviation = 0.0;    // standard deviation, at least 1 % of the mean
  double limit = 0.0;        // limit above which the next norm is an outlier (inf: no limit)
  int64_t outliers = 0;      // number of norms at which the guard skipped or clipped
  int64_t nonfinite = 0;     // number of norms that were inf or NaN
  int64_t last_outlier = 0;  // position of the last outlier among all norms, from 1; 0: none yet
};

// The last 4,096 norms, oldest first.
struct NormGuardHistory {
  std::vector<int64_t> numbers;  // position of each norm among all norms so far, from 1
  std::vector<double> norms;     // norms of the unscaled gradients; inf for inf and NaN
  std::vector<bool> withheld;    // true if the step was skipped or its gradients were clipped
};

// Skips or clips steps whose gradient norm is far above the previous norms. Rules, state and
// messages are the same as in the Python class, whose documentation also applies here.
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

  // True if the guard skipped the last step. Does not wait for a GPU, unless `wait` is true.
  bool last_step_skipped(bool wait = false) const;
  NormGuardStats stats(bool wait = false) const;
  NormGuardHistory history(bool wait = false) const;

  // Return and load the statistics as plain numbers, in the format of Python's state dict. Loading
  // never changes the options. If loading throws, the statistics stay as they were.
  c10::IValue state_dict() const;
  void load_state_dict(const c10::IValue& state_dict);

 private:
  friend class FusedOptimizer;

  NormGuardOptions options_;
  std::shared_ptr<NormStatistics> statistics_;
  std::weak_ptr<const void> optimizer_;  // FusedOptimizer::identity() of the guard's optimizer
};

// For torch::save(guard, path) and torch::load(guard, path).
AMP_EXT_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                        const NormGuard& guard);
AMP_EXT_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                       NormGuard& guard);

}  // namespace optim

}  // namespace amp_ext
