// Looks at the gradients of a model, and clips them, outside of a step.
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

// Clips the norm of the gradients of all parameters together: where it is above `max_norm`, they
// are multiplied in place by max_norm / (norm + 1e-6). A parameter listed twice counts once.
// Nothing waits for a GPU, unless `error_if_nonfinite`.
//
// Returns the 2-norm before, on the device of the first gradient: one float32, or one float64 if a
// gradient is float64. Throws c10::Error if a gradient is sparse or not floating-point, or the norm
// is inf or NaN and `error_if_nonfinite` is set; nothing has been written then.
//
// Inside a step it costs nothing more: see max_grad_norm of the optimizers.
//
// Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013.
AMP_EXT_API at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                       bool error_if_nonfinite = false);

// The names of tensors that hold inf or NaN, and how many, in the order of the model.
using NonfiniteCounts = std::vector<std::pair<std::string, int64_t>>;

// Counts the infs and NaNs of each gradient, in one launch for each device; with `params` those of
// parameters and buffers instead. Waits for a GPU.
AMP_EXT_API NonfiniteCounts find_nonfinite(const torch::nn::Module& model, bool params = false);

// Of an optimizer's gradients, or parameters, which are called "group 0, param 3".
AMP_EXT_API NonfiniteCounts find_nonfinite(const torch::optim::Optimizer& optimizer,
                                           bool params = false);

}  // namespace amp_ext
