// What a gradient scaler tells of its updates.
#pragma once

#include <cstdint>
#include <string>

namespace amp_ext {

// Counts of a scaler since it was made. Those of a GPU are as of the last update that it finished.
struct ScalerStats {
  int64_t updates = 0;
  int64_t steps = 0;  // updates after which every optimizer had stepped
  int64_t skips = 0;  // updates of which an optimizer's step was skipped
  int64_t consecutive_skips = 0;
  double scale = 0.0;  // after the update
  double smallest_scale = 0.0;
  double largest_scale = 0.0;
  // Of the first gradient with an inf or NaN at the last skip: "group 0, param 3"; empty if
  // unknown.
  std::string last_nonfinite;
};

}  // namespace amp_ext
