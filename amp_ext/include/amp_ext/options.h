// The options of the list operations, as plain structs, the lists that they take, and the options
// of optimizers that say how states are kept.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
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
  std::optional<std::vector<int64_t>> global_offsets;
  OptionalTensorList exponents;  // uint8, of the blocks of moments in 8 bits; empty where are none
};

// How weights are averaged.
struct AMP_EXT_API AverageOptions {
  // Of the average, each time; none: every weight counts the same.
  std::optional<double> decay = 0.999;
  int64_t every = 1;    // an average is taken at each such step, of those that have landed
  bool warmup = false;  // limits the decay to (1 + n) / (10 + n) after n averages
  at::ScalarType dtype = at::kFloat;  // of the averages that a class keeps; or at::kBFloat16
};

// The tensors of a step of averages: every list has one for each parameter.
struct AMP_EXT_API AverageLists {
  TensorList averages;               // float32 or bfloat16
  TensorList params;                 // the weights
  at::Tensor counters;               // two int64: steps that have landed, and averages taken
  OptionalTensorList master_params;  // float32, or the lower parts of split ones
  OptionalTensor step_applied;       // one float32; 0: nothing is written
  std::optional<std::vector<int64_t>> global_offsets;  // as in a step
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

namespace optim {

// How the masters of 16-bit parameters are kept: true, false, "split" or "split8". An optimizer
// refuses other texts.
class MasterWeights {
 public:
  template <typename Flag, std::enable_if_t<std::is_integral_v<Flag>, bool> = true>
  MasterWeights(Flag flag) : value_(flag != 0) {}  // NOLINT: converts
  // Of literals, which would have to become a string first.
  MasterWeights(const char* form) : value_(std::string(form)) {}  // NOLINT: likewise
  MasterWeights(std::string form) : value_(std::move(form)) {}    // NOLINT: likewise

  const std::variant<bool, std::string>& value() const { return value_; }

  // Whether there are any.
  explicit operator bool() const { return value_ != std::variant<bool, std::string>(false); }

  friend bool operator==(const MasterWeights& a, const MasterWeights& b) {
    return a.value_ == b.value_;
  }
  friend bool operator!=(const MasterWeights& a, const MasterWeights& b) { return !(a == b); }

 private:
  std::variant<bool, std::string> value_;
};

// How moments are kept: in at::kFloat, at::kBFloat16, or, for std::nullopt, the parameter's dtype;
// or in codes of 8 bits, "8bit-bf16" or "8bit". An optimizer refuses other dtypes and texts.
class StateDType {
 public:
  using Value = std::variant<std::monostate, at::ScalarType, std::string>;

  StateDType() = default;                              // none, as std::nullopt
  StateDType(std::nullopt_t) {}                        // NOLINT: converts
  StateDType(at::ScalarType dtype) : value_(dtype) {}  // NOLINT: likewise
  StateDType(std::optional<at::ScalarType> dtype) {    // NOLINT: likewise
    if (dtype.has_value()) value_ = *dtype;
  }
  // Also "float32" and "bfloat16", as Python keeps these dtypes.
  StateDType(std::string name) {  // NOLINT: likewise
    if (name == "float32") {
      value_ = at::kFloat;
    } else if (name == "bfloat16") {
      value_ = at::kBFloat16;
    } else {
      value_ = std::move(name);
    }
  }
  // Of literals, which would have to become a string first; a 0 is none.
  StateDType(const char* name) : StateDType(std::string(name)) {}  // NOLINT: likewise
  StateDType(std::nullptr_t) = delete;

  const Value& value() const { return value_; }

  // Whether it is not the parameter's dtype.
  bool has_value() const { return !std::holds_alternative<std::monostate>(value_); }
  bool is_coded() const {
    const auto* const name = std::get_if<std::string>(&value_);
    return name != nullptr && (*name == "8bit-bf16" || *name == "8bit");
  }

  friend bool operator==(const StateDType& a, const StateDType& b) { return a.value_ == b.value_; }
  friend bool operator!=(const StateDType& a, const StateDType& b) { return !(a == b); }

 private:
  Value value_;
};

}  // namespace optim

}  // namespace amp_ext
