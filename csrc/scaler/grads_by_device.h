// The gradients of an optimizer as a scaler looks at them.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/options.h>

#include <utility>
#include <vector>

#include "scaler/unscaled_grads.h"

namespace amp_ext {

// For each device that holds a gradient a tensor for every parameter, so that its index tells which
// it is: the gradient, the values of a sparse one, or an empty tensor in place of another device's.
// `grads` has an undefined tensor where there is none. Throws if one is complex, or of float16
// where that is not allowed. A sparse one of float16 is coalesced: the sum of entries may overflow
// where none of them does.
AMP_EXT_API std::vector<std::pair<at::Device, TensorList>> grads_by_device(const TensorList& params,
                                                                           TensorList grads,
                                                                           bool allow_fp16,
                                                                           const NameOf& name_of);

}  // namespace amp_ext
