// Averages of the weights of one optimizer: how they are created, updated and swapped in.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/options.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "devices/dispatch.h"
#include "launches.h"
#include "optimizer/plan.h"

namespace amp_ext {

// A weight on this rank, to be averaged.
struct AveragedWeight {
  const void* object;      // the identity of the parameter
  at::Tensor param;        // this rank's shard, or the whole parameter
  at::Tensor master;       // float32 master or residual; undefined if there is none
  int64_t global_offset;   // index of the shard's first element in the whole tensor
  int64_t group;           // index of the parameter's group
  int64_t index_in_group;  // index of the parameter in the group
};

// Masters that optimizers store, by the indices of their parameters.
using MastersByParam = std::unordered_map<int64_t, at::Tensor>;

// Averages of the weights of one optimizer. The operations take its plan, during an operation of
// the plan, and the masters of parameters from params_without_state().
class AMP_EXT_API WeightAverages {
 public:
  explicit WeightAverages(AverageOptions options);

  // Keeps one average for each of the optimizer's parameters, in this order. A new average starts
  // at the present weight. Averages of parameters that the optimizer no longer has are dropped.
  void register_weights(Plan& plan, const MastersByParam& masters);
  // Returns how often the parameters have changed.
  int64_t registrations() const { return registrations_; }

  // Adds the weights after the last step to the averages, at most once for each step. The first
  // call adds nothing, because its step was taken before the averages existed. The average of a
  // weight that was registered since the last step restarts at the present weight.
  void take(Plan& plan, const MastersByParam& masters);

  // Restarts all averages at the present weights. Averages whose weights still have the same dtype
  // and shape keep their memory.
  void restart(Plan& plan, const MastersByParam& masters);

  // Copies the averages into the parameters, where they stay until swap_out().
  void swap_in(Plan& plan, const MastersByParam& masters);
  // Restores the parameters if they hold averages. Every parameter that still has its dtype, shape
  // and device is restored, even if an error occurs at another parameter.
  void swap_out(Plan& plan);
  // Throws an error that names `operation` if the parameters currently hold the averages.
  void check_not_swapped(const std::string& operation) const;

  // Returns the averages, one for each weight, in the dtype of the options.
  std::vector<at::Tensor> averages() const;
  // Returns a [2] int64 tensor: the number of applied steps and the number of updates of the
  // averages. Undefined if there are no weights.
  at::Tensor counters() const;
  // Returns the indices of weights that were registered since the last step. Their averages restart
  // at the next step.
  std::vector<int64_t> joined() const;
  // Loads saved results of averages(), counters() (as `steps` and `n_averaged`) and joined().
  // Checks everything before it changes anything.
  void load(const std::string& operation, const std::vector<at::Tensor>& averages, int64_t steps,
            int64_t n_averaged, const std::vector<int64_t>& joined);

 private:
  struct Average {
    const void* object;
    at::ScalarType param_dtype;
    at::Tensor tensor;
    bool has_joined;  // whether its weight was registered since the last step
  };
  // Averages on one device.
  struct DeviceAverages {
    at::Device device;
    at::Tensor counters;
    std::vector<int64_t> indices;
  };
  // A tensor that the swap has overwritten, with its values and its version from before.
  struct Replaced {
    at::Tensor tensor;
    at::Tensor saved;
    int64_t version;
    const void* object;  // identity of the parameter; null for a residual
    std::string name;
  };

  static DeviceAverages& on_device(std::vector<DeviceAverages>& devices, const at::Device& device);
  static bool fits(const Average& average, const AveragedWeight& weight);
  void check(const Average& average, const AveragedWeight& weight) const;
  void set_weights(const std::vector<AveragedWeight>& weights, bool begins_anew = false);
  void launch(const std::vector<DeviceAverages>& devices,
              const std::vector<AveragedWeight>& weights, const std::vector<at::Tensor>& averages,
              const AverageOptions& options, const at::Tensor& step_applied);
  void write_averages(const std::vector<AveragedWeight>& weights);
  void begin(const std::vector<AveragedWeight>& weights, const std::vector<at::Tensor>& averages);
  void begin_joined(const std::vector<AveragedWeight>& weights);

  AverageOptions options_;
  std::vector<Average> averages_;
  std::vector<DeviceAverages> devices_;
  bool is_swapped_ = false;
  std::vector<Replaced> replaced_;
  StepScratch scratch_;
  int64_t registrations_ = 0;
  std::optional<int64_t> last_step_;  // Plan::steps() at the last take() or restart(), if any
};

// take(), list(), restart() or swap_in().
using AverageMethod = void (WeightAverages::*)(Plan&, const MastersByParam&);

}  // namespace amp_ext
