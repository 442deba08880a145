// Averages of the weights of one optimizer: how they are created, updated and swapped in.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/options.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "devices/dispatch.h"
#include "launches.h"

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

// Operations that Plan::average runs on the averages of an optimizer's weights.
enum class Averaging { kTake, kList, kRestart, kSwapIn };

// Returns the name of the operation for errors: "take_average", for example.
AMP_EXT_API const char* name_of(Averaging averaging);

// Returns an error text if the options are invalid; empty if they are valid.
AMP_EXT_API std::string wrong_in(const AverageOptions& options);

// Launches one update of averages that are dense and all on one device. Float64 weights, and
// weights whose layout differs from their averages', are copied first. `counters` are those of
// WeightAverages::counters(), and an undefined `step_applied` means that the step was applied.
void launch_average(const std::vector<AveragedWeight>& weights,
                    const std::vector<at::Tensor>& averages, const AverageOptions& options,
                    const at::Tensor& counters, const at::Tensor& step_applied,
                    StepScratch& scratch);

// Throws an error that names `operation` if the parameters currently hold the averages.
void check_weights_are_in(const std::string& operation, bool is_swapped);

// Result of restoring the parameters after they held averages.
struct SwapEnd {
  std::unordered_map<const void*, int64_t> writes;  // by parameter: how often the swap wrote it
  std::exception_ptr failure;  // first error; null if all parameters are restored exactly
};

class AMP_EXT_API WeightAverages {
 public:
  explicit WeightAverages(AverageOptions options);

  // Keeps one average for each of `weights`, in this order. A new average starts at the present
  // weight. Averages of other weights are dropped.
  void list(const std::vector<AveragedWeight>& weights);
  // Returns how often `list` has changed the list of weights.
  int64_t listings() const { return listings_; }

  // Adds the weights after step number `step` to the averages, at most once for each step. The
  // first call adds nothing, because its step was taken before the averages existed. The average of
  // a weight that was registered since the last step restarts at the present weight.
  void take(const std::vector<AveragedWeight>& weights, const at::Tensor& step_applied,
            int64_t step);

  // Restarts all averages at the present weights, after step number `step`. Averages whose weights
  // still have the same dtype and shape keep their memory.
  void restart(const std::vector<AveragedWeight>& weights, int64_t step);

  // Copies the averages into the parameters. After an error, some parameters may hold averages.
  void swap_in(const std::vector<AveragedWeight>& weights);
  // Restores the parameters if they hold averages. Every parameter that still has its dtype, shape
  // and device is restored, even if an error occurs at another parameter.
  SwapEnd swap_out();
  bool is_swapped() const { return is_swapped_; }
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
  struct OfDevice {
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

  static OfDevice& on_device(std::vector<OfDevice>& devices, const at::Device& device);
  static bool fits(const Average& average, const AveragedWeight& weight);
  void check(const Average& average, const AveragedWeight& weight) const;
  void list(const std::vector<AveragedWeight>& weights, bool begins_anew);
  void launch(const std::vector<OfDevice>& devices, const std::vector<AveragedWeight>& weights,
              const std::vector<at::Tensor>& averages, const AverageOptions& options,
              const at::Tensor& step_applied);
  void begin(const std::vector<AveragedWeight>& weights, const std::vector<at::Tensor>& averages);
  void begin_joined(const std::vector<AveragedWeight>& weights);

  AverageOptions options_;
  std::vector<Average> averages_;
  std::vector<OfDevice> devices_;
  bool is_swapped_ = false;
  std::vector<Replaced> replaced_;
  StepScratch scratch_;
  int64_t listings_ = 0;
  std::optional<int64_t> last_step_;  // step number of the last take() or restart(), if any
};

}  // namespace amp_ext
