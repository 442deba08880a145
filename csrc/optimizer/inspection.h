// Result of a trial step: for each parameter, sums that ranks can add up.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/inspection.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"

namespace amp_ext {

// Columns of InspectedStep::sums; NaN for a parameter without a gradient. Ranks add them up, and
// take the maximum of kLargestUpdate. Weight means the master, or the parameter if it has no
// master.
enum InspectedSum {
  kLargestUpdate,   // largest |update| of an element
  kNumel,           // number of elements of the parameter
  kSquares,         // sum of squares of the weight before the step
  kUpdateSquares,   // sum of squares of the update
  kUnmoved,         // number of elements of the parameter that stay the same
  kUnmovedMaster,   // number of elements of the weight that stay the same
  kMomentSquares0,  // sum of squares of buffer 0; the other buffers follow
};
inline constexpr int kInspectedSums = kMomentSquares0 + kMaxBuffers;

// Sums of a trial step, still on the device: read() waits for a GPU.
struct AMP_EXT_API InspectedStep {
  struct Param {
    int64_t group;
    int64_t index_in_group;
    bool has_master;
    std::vector<std::string> buffers;  // names of the buffers
  };

  std::vector<Param> params;  // all parameters of the plan
  at::Tensor sums;            // [params, kInspectedSums] float64
  at::Tensor skipped;         // bool, one element

  optim::Inspection read() const;
};

}  // namespace amp_ext
