// Float32 master weights beside their parameters.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_ext {

// Returns a corrected float32 master. Where it does not round to the parameter, the parameter was
// changed later and replaces it.
at::Tensor refreshed_master(const at::Tensor& param, const at::Tensor& master_param);

}  // namespace amp_ext
