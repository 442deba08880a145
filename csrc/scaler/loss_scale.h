// The loss scale of the Python class GradScaler: its tensors, updates and statistics.
#pragma once

#include <ATen/core/Scalar.h>
#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/update_scale.h"
#include "scaler/scaler_monitor.h"
#include "scaler/scaler_stats.h"

namespace amp_ext {

// Returns the name of a parameter, for example "group 0, param 3", or an empty string if it is
// unknown. `index` counts the parameters of all groups in order.
using NameOf = std::function<std::string(int64_t index)>;

// Messages that an update of the scale produces for the log of the caller.
struct LogMessages {
  std::string skips;                // message that many updates in a row were skipped; may be empty
  bool scale_is_too_small = false;  // true: the caller warns with LossScale::warning_of
};

class AMP_EXT_API LossScale {
 public:
  // Options, initial values and tensors. The scaler that owns this object may set them, and replace
  // the tensors, for example after a load.
  LossScaleHyperparameters hyperparameters;
  int64_t warn_after = 10;       // number of updates skipped in a row before a warning
  bool warned_of_scale = false;  // whether the warning about a too small scale was given already
  double init_scale = 65536.0;
  int64_t init_growth_tracker = 0;
  int64_t init_hysteresis_tracker = 1;
  at::Tensor scale, growth_tracker;  // [] float32 and [] int32; undefined before make()
  at::Tensor hysteresis_tracker;     // [] int32; undefined with a hysteresis of 1

  // Creates the tensors from the initial values, as normal tensors even in inference mode.
  void make(const at::Device& device);

  // Loads a state dict, except min_scale and max_scale. `entry` returns the number under a name. If
  // `entry` throws, nothing is loaded.
  using Entry = std::function<std::optional<at::Scalar>(const char* name, bool is_required)>;
  void load(const Entry& entry);

  // Methods about scans of gradients. `slot` is the index of an optimizer's report.

  // Returns the slot of the optimizer at address `key`. Ignores slots whose `is_alive` returns
  // false, because another optimizer may now have their address.
  std::optional<int64_t> find_optimizer(const void* key) const;
  // Returns the slot of an optimizer, and adds a slot if it is unknown. `has_withheld` returns
  // whether the optimizer itself withheld its last step, without an overflow.
  int64_t add_optimizer(const void* key, std::function<bool()> is_alive, NameOf name_of,
                        std::function<bool()> has_withheld);
  const NameOf& names_of(int64_t slot) const { return report_slot_of(slot).name_of; }

  // Starts an iteration of an optimizer, and drops a scan that no update has read. Returns a
  // found_inf of 0 on the scale's device. Callers must not write it.
  const at::Tensor& start_iteration(int64_t slot);

  // Scans the gradients on one device (see grads_by_device), and multiplies them by `inv_scale` if
  // it is given. Returns a copy of `found_inf`, set to 1 if a gradient is inf or NaN.
  at::Tensor scan(int64_t slot, const TensorList& grads, const at::Tensor& found_inf,
                  const OptionalTensor& inv_scale);

  // Returns the tensor ([] int64 on `device`) that a scan lowers to the index of the first gradient
  // with inf or NaN, among all parameters.
  at::Tensor first_nonfinite(int64_t slot, const at::Device& device);

  // Stores the first_nonfinite tensors, one per device, of an optimizer with its own scan.
  // `counts_tensors` is that of its flags, see OverflowFlag.
  void keep_first_nonfinites(int64_t slot, const std::vector<at::Tensor>& first_nonfinites,
                             bool counts_tensors);

  // Makes check_scales() throw after the next update if `differ`, a [] bool, is true.
  void note_different_scales(int64_t slot, const at::Device& device, const at::Tensor& differ);

  // Updates.

  // Allocates the reports that the next update writes. Call it if other threads read reports during
  // update(), which otherwise allocates them.
  void make_room();

  // Updates the scale from the flags of an iteration, pairs of a slot and a found_inf, without
  // waiting for the device. If `set` is not null, update() calls it to set the scale, and flags
  // only enter the statistics. Returns new messages about the last finished update.
  LogMessages update(const std::vector<std::pair<int64_t, at::Tensor>>& flags,
                     const std::function<void()>& set);

  // Returns true once, when a scale `value` is so small that 1 / `value` is inf in float32.
  bool must_warn_of(double value);
  // Returns the text of the warning. `value` is the scale as Python prints it.
  static std::string warning_of(const std::string& value);

  // Throws, once per update, if the update found different scales on different ranks.
  void check_scales();

  // Statistics, as of the last update that the device has finished. Reading them never waits.

  // Returns whether the last step of the optimizer in `slot` (nullopt: of any optimizer) was
  // skipped, or nullopt if there was no step.
  std::optional<bool> step_skipped(std::optional<int64_t> slot) const;
  // `initial_scale` is the scale to report before the first update.
  ScalerStats stats(double initial_scale) const;

 private:
  struct ReportSlot {
    const void* key;
    std::function<bool()> is_alive;
    NameOf name_of;
    std::function<bool()> has_withheld;
    std::vector<at::Tensor> first_nonfinites = {};  // [] int64, one for each device
    bool counts_tensors = false;                    // of the last scan, see OverflowFlag
    bool awaits_update = false;  // a scan may have written first_nonfinites since the last update
  };

  const ReportSlot& report_slot_of(int64_t slot) const {
    return report_slots_.at(static_cast<size_t>(slot));
  }
  ReportSlot& report_slot_of(int64_t slot) { return report_slots_.at(static_cast<size_t>(slot)); }
  void follow(const std::vector<std::pair<int64_t, at::Tensor>>& flags, bool follows);
  LogMessages messages();
  std::string name_of_nonfinite(const ScalerReport& report) const;

  std::deque<ReportSlot> report_slots_;  // by slot
  std::unique_ptr<ScalerMonitor> monitor_;
  at::Tensor no_overflow_;  // [] float32, always 0
  // Messages that were already given.
  struct {
    bool skips = false;
    int64_t different_scales = 0;  // number of the last update that check_scales() reported
  } warned_of_;
};

}  // namespace amp_ext
