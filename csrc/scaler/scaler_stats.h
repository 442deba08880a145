// Statistics of the updates of a gradient scaler.
#pragma once

#include <cstdint>
#include <string>

namespace amp_ext {

// Statistics since the scaler was created, up to the last update that the device has finished.
struct ScalerStats {
  int64_t updates = 0;
  int64_t steps = 0;  // number of iterations (updates) in which no optimizer skipped its step
  int64_t skips = 0;  // number of iterations (updates) in which an optimizer skipped its step
  int64_t consecutive_skips = 0;
  double scale = 0.0;  // scale after the last update
  double smallest_scale = 0.0;
  double largest_scale = 0.0;
  // Position of the first gradient with inf or NaN at the last skipped step, such as "group 0,
  // param 3"; empty if unknown.
  std::string last_nonfinite;
  // Number of parameters that were skipped one by one, because their optimizer releases its
  // gradients.
  int64_t skipped_tensors = 0;
};

}  // namespace amp_ext
