// What a step would do to each parameter, as sums that ranks can add.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/inspection.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"

namespace amp_ext {

// The sums of one parameter. A row is NaN where there is no gradient.
enum InspectedSum {
  kLargestUpdate,  // over ranks the largest; all others are added
  kNumel,          // a number wherever there is a gradient
  kSquares,        // of the parameter
  kUpdateSquares,
  kUnmoved,         // elements
  kUnmovedMaster,   // likewise
  kMomentSquares0,  // of each buffer
};
inline constexpr int kInspectedSums = kMomentSquares0 + kMaxBuffers;

// What the trial of a step has found, where the parameters are: reading it waits for a GPU.
struct AMP_EXT_API InspectedStep {
  struct Param {
    int64_t group;
    int64_t index_in_group;
    bool has_master;
    std::vector<std::string> buffers;  // names
  };

  std::vector<Param> params;  // all of the plan
  at::Tensor sums;            // [params, kInspectedSums] float64
  at::Tensor skipped;         // one bool

  optim::Inspection read() const;
};

}  // namespace amp_ext
