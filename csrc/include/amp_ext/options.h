// Options and tensor lists of the list operations, as plain structs, and the types of the optimizer
// options that choose the format of states.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>

#include <array>
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

// Options of a step that concern the gradients. All groups of a step have the same values.
struct AMP_EXT_API GradientOptions {
  // One number: the loss scale by which the gradients are multiplied; nullopt if not scaled.
  OptionalTensor grad_scale;
  OptionalTensor found_inf;  // one number; if it is not 0, the step writes nothing
  std::optional<double> max_grad_norm;
  // One float64: the sum of squares of the scaled gradients; if nullopt, the step computes it.
  OptionalTensor sum_of_squares;
  OptionalTensor grad_norm;     // one float32, set to the norm of the unscaled gradients
  bool skip_nonfinite = false;  // leave elements unchanged if their gradient is inf or NaN
};

// Hyperparameters of one parameter group.
template <typename Hyperparameters>
struct AMP_EXT_API Group : Hyperparameters {
  OptionalTensor lr_tensor;  // one element, used as the learning rate instead of `lr`
};

// How the learning rate of Muon depends on the shape of a matrix [out, in]: it is multiplied by
// sqrt(max(1, out / in)), 0.2 * sqrt(max(out, in)), or sqrt(out / in).
enum class AdjustLr { kOriginal, kMatchRmsAdamW, kSpectralUnclamped };

// Options of Muon that concern a whole matrix.
struct AMP_EXT_API MuonOptions {
  // Coefficients a, b and c of each step of the iteration; the last triple is repeated.
  std::vector<std::array<double, 3>> ns_coefficients = {{3.4445, -4.775, 2.0315}};
  int64_t ns_steps = 5;
  double norm_factor = 1.0;  // a matrix is divided by its norm times this factor
  double eps = 1e-7;         // smallest norm by which a matrix is divided
  AdjustLr adjust_lr = AdjustLr::kOriginal;
  bool transposed = false;  // whether weights are stored as [in, out]
  // For more than two dimensions: true for one matrix [out, rest], false for a batch of matrices.
  std::optional<bool> flatten;
  int64_t scratch_bytes = int64_t{256} << 20;  // memory for temporary matrices, at least for one
};

// Tensors of a step. Every list has one entry per parameter.
struct AMP_EXT_API StepLists {
  TensorList params;
  TensorList grads;
  std::vector<OptionalTensorList> buffers;  // a list per buffer, in the order of kBuffers
  OptionalTensorList steps;  // float32 step counters of one element; if nullopt, `timestep` is used
  OptionalTensorList master_params;  // float32 master weights of 16-bit parameters
  // For each parameter, which may be a shard, the index of its first element in the full tensor;
  // nullopt if the parameters are not sharded. Dithering depends on this index.
  std::optional<std::vector<int64_t>> global_offsets;
  // For each parameter, uint8 exponents of the blocks of its 8-bit moment; empty if not blockwise.
  OptionalTensorList exponents;
};

// The state tensors of one parameter in a step. What a parameter lacks is undefined.
struct AMP_EXT_API ParamState {
  // Buffers such as exp_avg, of the parameter's shape. 8-bit buffers are int8 (ratios) or uint8
  // (quantized in blocks along the parameter's memory).
  TensorList buffers;
  at::Tensor master_param;  // float32 of the parameter's shape, or the residual of a split master
  at::Tensor step;          // float32, one element
  at::Tensor exponents;     // uint8, one for each block of the blockwise quantized buffer
};

// One parameter in a step over groups.
struct AMP_EXT_API StepParam {
  at::Tensor param;
  at::Tensor grad;  // if undefined, the parameter is left out
  ParamState state;
  // True if the parameter was not written since its float32 master weight was, so that the step
  // need not compare them.
  bool master_is_current = false;
  int64_t global_offset = 0;  // index of the first element, see StepLists
};

// Names that the error messages of a step use for the operation and for its lists of buffers.
struct AMP_EXT_API StepNames {
  std::string operation;
  std::vector<std::string> buffers;
};

// Returns the names that Python's list operation uses: "adam_", {"exp_avgs", "exp_avg_sqs", ...}.
template <typename Hyperparameters>
StepNames names_of() {
  StepNames names{Hyperparameters::kOperation, {}};
  for (const BufferDescription& buffer : Hyperparameters::kBuffers) {
    names.buffers.push_back(std::string(buffer.name) + "s");
  }
  return names;
}

namespace optim {

// Format of the master weights of 16-bit parameters: true (float32), false (none), "split" or
// "split8". An optimizer refuses other strings.
class MasterWeights {
 public:
  template <typename Flag, std::enable_if_t<std::is_integral_v<Flag>, bool> = true>
  MasterWeights(Flag flag) : value_(flag != 0) {}  // NOLINT: implicit
  // Takes string literals, because C++ does not convert them to std::string implicitly here.
  MasterWeights(const char* form) : value_(std::string(form)) {}  // NOLINT: implicit
  MasterWeights(std::string form) : value_(std::move(form)) {}    // NOLINT: implicit

  const std::variant<bool, std::string>& value() const { return value_; }

  // True if 16-bit parameters have master weights.
  explicit operator bool() const { return value_ != std::variant<bool, std::string>(false); }

  friend bool operator==(const MasterWeights& a, const MasterWeights& b) {
    return a.value_ == b.value_;
  }
  friend bool operator!=(const MasterWeights& a, const MasterWeights& b) { return !(a == b); }

 private:
  std::variant<bool, std::string> value_;
};

// Format of the moments: at::kFloat, at::kBFloat16, the dtype of the parameter (std::nullopt), or 8
// bits ("8bit-bf16", "8bit"). An optimizer refuses other dtypes and strings.
class StateDType {
 public:
  using Value = std::variant<std::monostate, at::ScalarType, std::string>;

  StateDType() = default;                              // nullopt: the dtype of the parameter
  StateDType(std::nullopt_t) {}                        // NOLINT: implicit
  StateDType(at::ScalarType dtype) : value_(dtype) {}  // NOLINT: implicit
  StateDType(std::optional<at::ScalarType> dtype) {    // NOLINT: implicit
    if (dtype.has_value()) value_ = *dtype;
  }
  // Converts the names "float32" and "bfloat16" to dtypes, because Python stores dtypes by name.
  StateDType(std::string name) {  // NOLINT: implicit
    if (name == "float32") {
      value_ = at::kFloat;
    } else if (name == "bfloat16") {
      value_ = at::kBFloat16;
    } else {
      value_ = std::move(name);
    }
  }
  // Takes string literals, because C++ does not convert them to std::string implicitly here.
  StateDType(const char* name) : StateDType(std::string(name)) {}  // NOLINT: implicit
  StateDType(std::nullptr_t) = delete;

  const Value& value() const { return value_; }

  // False if moments have the dtype of the parameter.
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
