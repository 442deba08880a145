// One step of an optimizer over lists of tensors. Throws c10::Error on bad input, before anything
// is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "api.h"
#include "kernel_list.h"
#include "plan.h"

namespace amp_ext {

// The tensors of a step: every list has one for each parameter.
struct StepLists {
  TensorList params;
  TensorList grads;
  std::vector<OptionalTensorList> buffers;  // in the order of the hyperparameters' kBuffers
  OptionalTensorList steps;          // float32, one element each; None: `timestep` is the number
  OptionalTensorList master_params;  // float32, of 16-bit parameters
};

// The names of the lists of an optimizer's buffers.
template <typename Hyperparameters>
std::vector<std::string> list_names() {
  std::vector<std::string> names;
  for (const BufferDescription& buffer : Hyperparameters::kBuffers) {
    names.push_back(std::string(buffer.name) + "s");
  }
  return names;
}

// One step of the optimizer that has these hyperparameters.
template <typename Hyperparameters>
AMP_EXT_API void step_(const StepLists& lists, const Group<Hyperparameters>& options,
                       const GradientOptions& gradient_options);

enum class OptimizerType { kSgd, kMomentum, kAdam };

// The options of optimizer_update_.
struct UpdateOptions {
  double lr = 0.0;
  OptionalTensor lr_tensor;  // replaces lr
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  double timestep = 1.0;
  std::optional<double> clip_value;
  std::optional<double> max_grad_norm;
  OptionalTensor grad_norm;              // one float32, written if there is a max_grad_norm
  std::shared_ptr<StepScratch> scratch;  // null: memory of this call
};

// One step under the classic contract of CUDA training code: decoupled weight decay, elements left
// alone whose gradient is inf or NaN, and a denominator of Adam that never falls below 1e-6.
// `buffers` has velocities for kMomentum, exp_avgs and exp_avg_sqs for kAdam.
AMP_EXT_API void optimizer_update_(OptimizerType type, const StepLists& lists,
                                   const UpdateOptions& options);

}  // namespace amp_ext
