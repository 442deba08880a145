// Checks and clips the gradients of a model outside of an optimizer step.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace amp_ext {

// Clips the global norm of the gradients of all parameters: if it is above `max_norm`, every
// gradient is multiplied in place by max_norm / (norm + 1e-6). A parameter that is listed twice
// counts once. The call does not wait for a GPU, unless `error_if_nonfinite` is set.
//
// Returns the 2-norm before clipping, on the device of the first gradient: one float32, or one
// float64 if a gradient is float64. Throws c10::Error, before it writes anything, if a gradient is
// sparse or not floating-point, or if `error_if_nonfinite` is set and the norm is inf or NaN.
//
// The option max_grad_norm of the optimizers clips inside the step, at no extra cost.
AMP_EXT_API at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                       bool error_if_nonfinite = false);

// Names of the tensors that contain inf or NaN, with the number of such elements, in model order.
using NonfiniteCounts = std::vector<std::pair<std::string, int64_t>>;

// Counts inf and NaN in each gradient, or in each parameter and buffer if `params` is true, with
// one kernel launch per device. Waits for a GPU.
AMP_EXT_API NonfiniteCounts find_nonfinite(const torch::nn::Module& model, bool params = false);

// Counts inf and NaN in the gradients (or parameters) of an optimizer. The names in the result are
// positions, such as "group 0, param 3".
AMP_EXT_API NonfiniteCounts find_nonfinite(const torch::optim::Optimizer& optimizer,
                                           bool params = false);

}  // namespace amp_ext
