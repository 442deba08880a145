// Averages of the weights of one optimizer: which weight has which, what an engine is told of them,
// and their exchange with the parameters.
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

// A weight on this rank, as an average takes it.
struct AveragedWeight {
  const void* object;      // the identity of the parameter
  at::Tensor param;        // this rank's part of it
  at::Tensor master;       // float32, or the lower part of a split one; undefined: the parameter
  int64_t global_offset;   // where the part begins in the whole
  int64_t group;           // of the parameter
  int64_t index_in_group;  // likewise
};

// What an optimizer lets its averages do, in a use of its plan.
enum class Averaging { kTake, kList, kRestart, kSwapIn };

// As errors say it: "take_average".
AMP_EXT_API const char* name_of(Averaging averaging);

// What is wrong with the options; empty if nothing is.
AMP_EXT_API std::string wrong_in(const AverageOptions& options);

// One step of averages that have the layout of their weights or another dense one, on one device.
// Tensors of other layouts, and float64 weights, are copied into `staged`, which has to live until
// the launch.
void launch_average(const std::vector<AveragedWeight>& weights,
                    const std::vector<at::Tensor>& averages, const AverageOptions& options,
                    const at::Tensor& counters, const at::Tensor& step_applied,
                    StepScratch& scratch);

// Throws on behalf of an operation if the parameters hold averages.
void check_weights_are_in(const std::string& operation, bool is_swapped);

// What became of the parameters when averages left them.
struct SwapEnd {
  std::unordered_map<const void*, int64_t> writes;  // by object, how often each was written
  std::exception_ptr failure;                       // null: each has its bits again
};

class AMP_EXT_API WeightAverages {
 public:
  explicit WeightAverages(AverageOptions options);

  // Keeps an average of each of these weights, in their order: begins those that are missing at the
  // present weights, and drops those of others.
  void list(const std::vector<AveragedWeight>& weights);
  // How often weights were listed that differ from those before.
  int64_t listings() const { return listings_; }

  // Takes one step into account, of the number that the host counts, unless it is the last one that
  // was taken. The step before the first call was taken before the averages began. A weight that
  // was listed since the last step begins anew as this one leaves it.
  void take(const std::vector<AveragedWeight>& weights, const at::Tensor& step_applied,
            int64_t step);

  // Begins all averages anew at the present weights, after this step; in the same memory, where the
  // weights have dtypes and shapes as before.
  void restart(const std::vector<AveragedWeight>& weights, int64_t step);

  // Puts the averages into the parameters. Where this throws, some may be in.
  void swap_in(const std::vector<AveragedWeight>& weights);
  // Puts the parameters back, if averages are in them: all that fit their bits, whatever fails.
  SwapEnd swap_out();
  bool is_swapped() const { return is_swapped_; }
  // Throws on behalf of an operation while the averages are in the parameters.
  void check_not_swapped(const std::string& operation) const;

  // [weights], of the options' dtype.
  std::vector<at::Tensor> averages() const;
  // Two int64, the steps that have landed and the averages that were taken; undefined without a
  // weight.
  at::Tensor counters() const;
  // The indices of the weights that were listed since the last step, and begin anew at the next.
  std::vector<int64_t> joined() const;
  // Takes over averages, which are copied, the counts of steps that have landed and of averages
  // that were taken, and which weights have joined. All or nothing.
  void load(const std::string& operation, const std::vector<at::Tensor>& averages, int64_t steps,
            int64_t n_averaged, const std::vector<int64_t>& joined);

 private:
  struct Average {
    const void* object;
    at::ScalarType param_dtype;
    at::Tensor tensor;
    bool has_joined;  // since the last step that was taken
  };
  // The averages of one device.
  struct OfDevice {
    at::Device device;
    at::Tensor counters;
    std::vector<int64_t> indices;
  };
  // A tensor that an average has replaced, and what it was.
  struct Replaced {
    at::Tensor tensor;
    at::Tensor saved;
    int64_t version;
    const void* object;  // of a parameter; null: a lower part
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
  std::optional<int64_t> last_step_;  // none before the first call
};

}  // namespace amp_ext
