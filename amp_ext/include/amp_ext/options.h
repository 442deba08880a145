// The options of the list operations, as plain structs, and the lists that they take.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>

#include <optional>
#include <string>
#include <vector>

namespace amp_ext {

using OptionalTensor = std::optional<at::Tensor>;
using TensorList = std::vector<at::Tensor>;
using OptionalTensorList = std::optional<TensorList>;

// What a step makes of the gradients, beside the hyperparameters of a group.
struct AMP_EXT_API GradientOptions {
  OptionalTensor grad_scale;  // one number, the scale that the gradients carry
  OptionalTensor found_inf;   // one number; anything but 0: nothing is written
  std::optional<double> max_grad_norm;
  OptionalTensor
      sum_of_squares;           // one float64, of the scaled gradients; None: the step looks itself
  OptionalTensor grad_norm;     // one float32, written with the norm of the unscaled gradients
  bool skip_nonfinite = false;  // leaves elements alone whose gradient is inf or NaN
};

// The hyperparameters of one group of parameters.
template <typename Hyperparameters>
struct AMP_EXT_API Group : Hyperparameters {
  OptionalTensor lr_tensor;  // the learning rate if that is a tensor of one element: replaces lr
};

// The tensors of a step: every list has one for each parameter.
struct AMP_EXT_API StepLists {
  TensorList params;
  TensorList grads;
  std::vector<OptionalTensorList> buffers;  // in the order of the hyperparameters' kBuffers
  OptionalTensorList steps;          // float32, one element each; None: `timestep` is the number
  OptionalTensorList master_params;  // float32, of 16-bit parameters
  // Where the first element of each parameter stands in the whole of which it is a part; None: it
  // is the whole. What is dithered depends on it.
  std::optional<std::vector<int64_t>> first_elements;
  OptionalTensorList exponents;  // uint8, of the blocks of moments in 8 bits; empty where are none
};

// What errors of a step call the operation and the lists of its buffers.
struct AMP_EXT_API StepNames {
  std::string operation;
  std::vector<std::string> buffers;
};

// As Python's operation of the same step has them.
template <typename Hyperparameters>
StepNames names_of() {
  StepNames names{Hyperparameters::kOperation, {}};
  for (const BufferDescription& buffer : Hyperparameters::kBuffers) {
    names.buffers.push_back(std::string(buffer.name) + "s");
  }
  return names;
}

}  // namespace amp_ext
