// The update of a loss scale, which counts the results of the gradients' scans.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>

#include <cstdint>
#include <vector>

#include "launches.h"

namespace amp_ext {

// The result of one scan of gradients, as an update reads it. The update resets first_nonfinite.
struct ReportedFlag {
  at::Tensor found_inf;        // [] float32, not 0 after an overflow
  at::Tensor first_nonfinite;  // [] int64 index of the first gradient with inf or NaN, or undefined
  double key = 0.0;            // identifies the optimizer
  bool counts_tensors = false;  // see OverflowFlag
};

// Updates the scale, which backs off if a flag is set and otherwise may grow; see update_scale_().
// `counts` is a float64 tensor with the entries of ScaleCounts.
AMP_EXT_API void update_scale(const at::Tensor& scale, const at::Tensor& growth_tracker,
                              const OptionalTensor& hysteresis_tracker,
                              const LossScaleHyperparameters& hyperparameters,
                              const std::vector<ReportedFlag>& flags,
                              const OptionalTensor& counts = {});

}  // namespace amp_ext
