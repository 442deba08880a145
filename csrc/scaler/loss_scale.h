// The loss scale of a gradient scaler: its tensors, how they follow overflows, and what is told of
// that. The scalers of both languages hold one.
#pragma once

#include <ATen/core/Scalar.h>
#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>
#include <amp_ext/scaler_stats.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "scaler/scaler_monitor.h"

namespace amp_ext {

// Gives what errors and reports call the parameter at this index among those of all groups; empty
// if it is not known.
using NameOf = std::function<std::string(int64_t index)>;

// What there is to say after an update: lines for a log, empty if there is none, and whether to
// warn of the scale.
struct LogMessages {
  std::string settled;
  std::string skips;
  bool scale_is_too_small = false;
};

// The tensors that an update of the scale writes.
struct ScaleState {
  at::Tensor scale, growth_tracker;   // one float32 and one int32
  OptionalTensor hysteresis_tracker;  // one int32; none with a hysteresis of 1
};

// A flag of one look, with what that look has found first, which is reset.
struct ReportedFlag {
  at::Tensor found_inf;        // one float32
  at::Tensor first_nonfinite;  // one int64, or undefined
  int64_t slot;                // of the report of the optimizer
};

// Lets the scale follow these flags, and reports that to the monitor, unless it is null.
void update_scale(const ScaleState& state, const LossScaleHyperparameters& hyperparameters,
                  const std::vector<ReportedFlag>& flags, const ScalerMonitor* monitor);

class AMP_EXT_API LossScale {
 public:
  // Options, and what the tensors are made of. Whoever holds the scale may set all of these, and
  // put other tensors in the place of those that were made.
  LossScaleHyperparameters hyperparameters;
  int64_t warn_after = 10;       // updates skipped in a row until it is told
  bool warned_of_scale = false;  // that it is too small: once is enough
  double init_scale = 65536.0;
  int64_t init_growth_tracker = 0;
  int64_t init_hysteresis_tracker = 1;
  at::Tensor scale, growth_tracker;  // one float32 and one int32; undefined until they are made
  at::Tensor hysteresis_tracker;     // one int32; undefined with a hysteresis of 1

  // Makes the tensors, also for use after an inference mode.
  void make(const at::Device& device);

  // Takes what a state dict says, and all of it or nothing. Limits stay. `entry` gives the number
  // that stands under a name, and throws if it is required and not there, or not one to take.
  using Entry = std::function<std::optional<at::Scalar>(const char* name, bool is_required)>;
  void load(const Entry& entry);

  // Looks. Optimizers are known by the numbers of their reports.

  // Finds the number of an optimizer, or gives it one. It is known by an address, which is its own
  // as long as it `is_there`: afterwards it may be that of another one.
  std::optional<int64_t> find_optimizer(const void* key) const;
  int64_t number_of_optimizers() const { return static_cast<int64_t>(report_slots_.size()); }
  // A guard of its own may have skipped its last step, which is no overflow.
  int64_t add_optimizer(const void* key, std::function<bool()> is_alive, NameOf name_of,
                        std::function<bool()> guard_has_skipped);
  const NameOf& names_of(int64_t slot) const { return report_slot_of(slot).name_of; }

  // Forgets what the last look at an optimizer found, if no update has read that. Returns a flag
  // without an overflow beside the scale, to copy.
  const at::Tensor& start_iteration(int64_t slot);

  // Looks at the gradients on one device, one for each parameter (grads_by_device), and multiplies
  // them by `inv_scale`, if that is given. Returns a copy of `found_inf`, set to 1 after an
  // overflow.
  at::Tensor scan(int64_t slot, const TensorList& grads, const at::Tensor& found_inf,
                  const OptionalTensor& inv_scale);

  // One int64 on a device, which a look lowers to the index of the first bad gradient. All
  // parameters of all groups are counted, also those without a gradient.
  at::Tensor first_nonfinite(int64_t slot, const at::Device& device);

  // Takes those of an optimizer that has looked by itself.
  void keep_first_nonfinites(int64_t slot, const std::vector<at::Tensor>& first_nonfinites);

  // Lets the scales of ranks that take part in a look differ, where `differ`, a bool, is true.
  void note_different_scales(int64_t slot, const at::Device& device, const at::Tensor& differ);

  // Updates.

  // Makes room for the reports of the next update; needs no call but where others read meanwhile.
  void make_room();

  // Lets the scale follow the looks of an iteration, all on the device, or only counts them where
  // the caller has something that will `set` it. A flag is found_inf of an optimizer on one device.
  // Returns what to say of the last finished update. Nothing is said twice.
  LogMessages update(const std::vector<std::pair<int64_t, at::Tensor>>& flags,
                     const std::function<void()>& set);

  // Whether to warn of this scale, whose inverse is not finite; and the words, with the scale as
  // the language writes it.
  bool must_warn_of(double value);
  static std::string warning_of(const std::string& value);

  // Throws, once for each update, if it found that ranks had different scales.
  void check_scales();

  // Answers, as of the last update that the device has finished. They never wait.

  // Whether the step of an optimizer, or of any, was skipped; none if there was none.
  std::optional<bool> step_skipped(std::optional<int64_t> slot) const;
  // `initial_scale` is that before the first update.
  ScalerStats stats(double initial_scale) const;
  ScaleHistory history() const;

 private:
  struct ReportSlot {
    const void* key;
    std::function<bool()> is_alive;
    NameOf name_of;
    std::function<bool()> guard_has_skipped;
    std::vector<at::Tensor> first_nonfinites = {};  // one for each device
    bool awaits_update = false;  // whether no update has read and reset them since a look
  };

  const ReportSlot& report_slot_of(int64_t slot) const {
    return report_slots_.at(static_cast<size_t>(slot));
  }
  ReportSlot& report_slot_of(int64_t slot) { return report_slots_.at(static_cast<size_t>(slot)); }
  void follow(const std::vector<std::pair<int64_t, at::Tensor>>& flags, bool follows);
  LogMessages messages();
  std::string name_of_nonfinite(const ScalerSummary& report) const;

  std::deque<ReportSlot> report_slots_;  // by slot
  std::unique_ptr<ScalerMonitor> monitor_;
  at::Tensor no_overflow_;  // one float32 of 0, which nobody writes
  bool warned_of_settling_ = false;
  bool warned_of_skips_ = false;
  int64_t warned_of_different_scales_ = 0;  // the last such update
};

}  // namespace amp_ext
