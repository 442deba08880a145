// Report of a gradient scaler on its updates, on the device of the scale, mirrored in host memory.
#pragma once

#include <cstdint>

#include "elements/mirror.h"
#include "elements/numeric.h"

namespace amp_ext {

struct ScalerReport : ReportStamps {  // all counts are numbers of updates
  int64_t updates = 0;
  int64_t skips = 0;  // updates with an overflow
  int64_t consecutive_skips = 0;
  int64_t nonfinite_slot = -1;   // slot of the optimizer with the last inf or NaN gradient; or -1
  int64_t nonfinite_index = -1;  // index of that gradient in its optimizer; or -1
  int64_t nonfinite_update = 0;  // number of the update that reported that gradient; or 0
  int64_t skipped_tensors = 0;   // number of skipped tensors of all released optimizers
  double scale = 0.0;            // scale after the last update
  double smallest_scale = 0.0;
  double largest_scale = 0.0;
};

struct OptimizerReport {
  int64_t update = 0;  // number of the last update that had a flag of the optimizer; 0 if none
  int64_t skips = 0;
  int64_t last_was_skipped = 0;
};

// Value of `first_nonfinite` when a scan has found no inf or NaN.
inline constexpr int64_t kNoTensor = INT64_MAX;

// Result of the scan of one optimizer's gradients on one device.
struct OverflowFlag {
  const float* found_inf;  // [1], not 0 after an overflow
  // [1], index of the first gradient with inf or NaN; updates reset it to kNoTensor. May be null.
  int64_t* first_nonfinite;
  int64_t slot;  // index of the optimizer's report in ReportMemory::optimizers
  // True if found_inf is the number of tensors that were skipped, each for its own gradient.
  bool counts_tensors = false;
};

// Adds one flag to the reports, before the scale is updated; `found` is true if the flag is set.
AMP_EXT_INLINE void report_flag(const OverflowFlag& flag, bool found, ScalerReport& report,
                                OptimizerReport* optimizers) {
  OptimizerReport& optimizer = optimizers[flag.slot];
  const bool is_first = optimizer.update != report.updates + 1;
  if (is_first) optimizer.last_was_skipped = 0;
  optimizer.update = report.updates + 1;
  if (flag.counts_tensors) report.skipped_tensors += static_cast<int64_t>(*flag.found_inf);
  if (found && optimizer.last_was_skipped == 0) {
    optimizer.last_was_skipped = 1;
    optimizer.skips += 1;
  }
  if (flag.first_nonfinite == nullptr) return;
  if (found && *flag.first_nonfinite != kNoTensor) {
    report.nonfinite_slot = flag.slot;
    report.nonfinite_index = *flag.first_nonfinite;
    report.nonfinite_update = report.updates + 1;
  }
  *flag.first_nonfinite = kNoTensor;
}

// Adds an update to the report, after report_flag() was called for all of its flags.
AMP_EXT_INLINE void report_update(bool overflow, float scale_before, float scale_after,
                                  ScalerReport& report) {
  if (report.updates == 0) report.smallest_scale = report.largest_scale = scale_before;
  report.updates += 1;
  report.skips += overflow ? 1 : 0;
  report.consecutive_skips = overflow ? report.consecutive_skips + 1 : 0;
  report.scale = scale_after;
  const float scales[] = {scale_before, scale_after};  // scale_before may have been set by hand
  for (const float scale : scales) {
    if (report.smallest_scale > scale) report.smallest_scale = scale;
    if (report.largest_scale < scale) report.largest_scale = scale;
  }
}

}  // namespace amp_ext
