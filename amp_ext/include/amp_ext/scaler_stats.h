// Statistics of the updates of a gradient scaler.
#pragma once

#include <cstdint>
#include <string>

namespace amp_ext {

// Counts since the scaler was created. On a GPU, they are those of the last finished update.
struct ScalerStats {
  int64_t updates = 0;
  int64_t steps = 0;  // updates at which all optimizers had stepped
  int64_t skips = 0;  // updates at which an optimizer skipped its step
  int64_t consecutive_skips = 0;
  double scale = 0.0;  // scale after the last update
  double smallest_scale = 0.0;
  double largest_scale = 0.0;
  // Position of the first gradient with inf or NaN at the last skip, as "group 0, param 3"; empty
  // if unknown.
  std::string last_nonfinite;
};

}  // namespace amp_ext
