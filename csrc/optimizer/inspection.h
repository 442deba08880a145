// The result of a trial step on copies: for each parameter, sums that ranks can add up.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/options.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"
#include "optimizer/param_inspection.h"
#include "optimizer/plan.h"

namespace amp_ext {

// Columns of InspectedStep::sums; all are NaN for a parameter without a gradient. Ranks take the
// maximum of kLargestUpdate and the sum of every other column. "Weight" means the master weight, or
// the parameter if it has no master weight.
enum InspectedSum {
  kLargestUpdate,   // largest |update| of an element
  kNumel,           // number of elements of the parameter
  kSquares,         // sum of squares of the weight before the step
  kUpdateSquares,   // sum of squares of the update
  kUnmoved,         // number of elements of the parameter that the step does not change
  kUnmovedMaster,   // number of elements of the weight that the step does not change
  kMomentSquares0,  // sum of squares of buffer 0; the other buffers follow
};
inline constexpr int kInspectedSums = kMomentSquares0 + kMaxBuffers;

// Result of a trial step, in tensors on the device. read() waits for a GPU to copy the tensors.
struct AMP_EXT_API InspectedStep {
  struct Param {
    int64_t group;
    int64_t index_in_group;
    bool has_master;
    std::vector<std::string> buffers;  // names of the buffers
  };

  std::vector<Param> params;  // all parameters of the optimizer, in order
  at::Tensor sums;            // [params, kInspectedSums] float64
  at::Tensor skipped;         // bool, one element: whether the step would be skipped

  optim::Inspection read() const;
};

// Returns what Plan::step() would do, by stepping copies of one parameter at a time. Changes no
// tensor and only calls make() of the store. Throws the errors of a step, except for memory that is
// shared between parameters.
AMP_EXT_API InspectedStep inspect_step(const Plan& plan, GroupTable& table, GradientOptions options,
                                       StateStore& store);

// Scans like Plan::scan(), starting from a found_inf of 0, but stores nothing for the next step or
// for an update of the loss scale.
AMP_EXT_API std::vector<GradScanResult> scan_without_recording(
    const Plan& plan, const OptionalTensor& grad_scale, const optim::ClippingOptions& options);

}  // namespace amp_ext
