// Counts of the updates of a loss scale, in a tensor on the device of the scale.
#pragma once

#include <cstdint>

#include "numeric.h"

namespace amp_ext {

// Value of `first_nonfinite` when a scan has found no inf or NaN.
inline constexpr int64_t kNoTensor = INT64_MAX;

// The entries of a float64 tensor. Counts are numbers of updates.
struct ScaleCounts {
  double updates;
  double skips;  // updates with an overflow
  double consecutive_skips;
  double scale;  // after the last update
  double smallest_scale;
  double largest_scale;
  double nonfinite_key;     // OverflowFlag::key of the last inf or NaN gradient
  double nonfinite_index;   // index of that gradient in its optimizer
  double nonfinite_update;  // number of the update that reported that gradient
  double skipped_tensors;   // number of skipped tensors of all released optimizers
  double end;               // equals `updates`, except while a copy to the host is incomplete
};

// Result of the scan of one optimizer's gradients on one device.
struct OverflowFlag {
  const float* found_inf;  // [1], not 0 after an overflow
  // [1], index of the first gradient with inf or NaN; updates reset it to kNoTensor. May be null.
  int64_t* first_nonfinite;
  double key;  // identifies the optimizer
  // True if found_inf is the number of tensors that were skipped, each for its own gradient.
  bool counts_tensors;
};

// Counts one flag, before count_update(); `found` is true if the flag is set.
AMP_EXT_INLINE void count_flag(const OverflowFlag& flag, bool found, ScaleCounts& counts) {
  if (flag.counts_tensors) counts.skipped_tensors += static_cast<double>(*flag.found_inf);
  if (flag.first_nonfinite == nullptr) return;
  if (found && *flag.first_nonfinite != kNoTensor) {
    counts.nonfinite_key = flag.key;
    counts.nonfinite_index = static_cast<double>(*flag.first_nonfinite);
    counts.nonfinite_update = counts.updates + 1.0;
  }
  *flag.first_nonfinite = kNoTensor;
}

AMP_EXT_INLINE void count_update(bool overflow, float scale_before, float scale_after,
                                 ScaleCounts& counts) {
  if (counts.updates == 0.0) counts.smallest_scale = counts.largest_scale = scale_before;
  counts.updates += 1.0;
  counts.skips += overflow ? 1.0 : 0.0;
  counts.consecutive_skips = overflow ? counts.consecutive_skips + 1.0 : 0.0;
  counts.scale = scale_after;
  const float scales[] = {scale_before, scale_after};  // scale_before may have been set by hand
  for (const float scale : scales) {
    if (counts.smallest_scale > scale) counts.smallest_scale = scale;
    if (counts.largest_scale < scale) counts.largest_scale = scale;
  }
  counts.end = counts.updates;
}

}  // namespace amp_ext
