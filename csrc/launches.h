// Interface between operations and engines: the arguments of each launch, with plain pointers. The
// step of a single element is in element.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

#include "formats/numbers.h"
#include "formats/storage.h"
#include "formulas/clipping.h"
#include "formulas/loss_scale.h"
#include "formulas/scale_counts.h"
#include "formulas/weight_average.h"
#include "kernels.h"
#include "numeric.h"

namespace amp_ext {

// Pointers and formats of one parameter. Its arrays are dense and in the same order. An operation
// on gradients alone uses only `grad`, `grad_dtype`, `numel` and `group`.
struct KernelTensorArgs {
  void* grad = nullptr;
  void* param = nullptr;
  void* master_param = nullptr;     // float32 master weight or residual (see `master`), or null
  void* buffers[kMaxBuffers] = {};  // exp_avg, ...: the buffers that the kernel uses
  uint8_t* exponents =
      nullptr;            // [numel / kBlockSize], one per block of the blockwise buffer; or null
  float* step = nullptr;  // [1], step counter (see formulas/step_counter.h), or null
  int64_t numel = 0;
  // Index into StepLaunch::hyperparameters; in operations on gradients alone, index of the tensor.
  int32_t group = 0;
  DType grad_dtype = DType::kFloat32;
  DType param_dtype = DType::kFloat32;
  BufferFormat buffer_formats[kMaxBuffers] = {};
  Master master = Master::kNone;
  uint8_t dithered = 0;  // bits of the arrays to dither: kDithersParam, kDithersBuffer0 << index
  int64_t global_offset = 0;  // index of the first element in the full, unsharded tensor
};

// Bits of KernelTensorArgs::dithered for the parameter and the first buffer. They have no effect on
// values stored in 32 or 64 bits.
inline constexpr uint8_t kDithersParam = 1;
inline constexpr uint8_t kDithersBuffer0 = 2;

// Decay rate (such as beta1) from which on first moments and momenta are dithered: a step may
// change them by less than half a unit in the last place, which rounding to nearest would lose.
inline constexpr double kFreezingShare = 0.99;

template <typename Hyperparameters>
constexpr uint8_t dithered_numbers(const Hyperparameters& hyperparameters) {
  if (!hyperparameters.dither) return 0;
  int numbers = kDithersParam;
  for (int i = 0; i < static_cast<int>(std::size(Hyperparameters::kBuffers)); ++i) {
    const BufferDescription& buffer = Hyperparameters::kBuffers[i];
    if (buffer.dither_stride == 0) continue;
    const bool freezes =
        buffer.role == BufferRole::kSecondMoment || hyperparameters.decay_of(i) >= kFreezingShare;
    if (freezes) numbers |= kDithersBuffer0 << i;
  }
  return static_cast<uint8_t>(numbers);
}

// Returns the dithered numbers of the default hyperparameters.
template <typename Hyperparameters>
constexpr uint8_t dithered_by_default() {
  Hyperparameters defaults;
  defaults.dither = true;
  return dithered_numbers(defaults);
}

// True if the formats of the buffers (has_buffers) or of all arrays (has_formats) fit the kernel.
template <typename NumberFormats, int... index>
bool has_buffers(const KernelTensorArgs& args, std::integer_sequence<int, index...>) {
  return (... && (args.buffer_formats[index] == NumberFormats::template Buffer<index>::kFormat));
}
template <typename NumberFormats>
bool has_formats(const KernelTensorArgs& args) {
  using Param = typename NumberFormats::Param;
  return args.grad_dtype == kDType<typename NumberFormats::Grad::Stored> &&
         args.param_dtype == kDType<typename Param::Stored> && args.master == Param::kMaster &&
         has_buffers<NumberFormats>(args, typename NumberFormats::Indices());
}

// Calls run(weight, average) with default values of each pair of formats for which averages are
// compiled, until a call returns true. A float32 master counts as a float32 weight.
template <typename Run>
bool any_formats_of_averages(const Run& run) {
  const auto of_weight = [&](auto weight) {
    return run(weight, Plain<float>()) || run(weight, Plain<BFloat16>());
  };
  return of_weight(Plain<float>()) || of_weight(Plain<Half>()) || of_weight(Plain<BFloat16>()) ||
         of_weight(Split<Half, 16>()) || of_weight(Split<Half, 8>()) ||
         of_weight(Split<BFloat16, 16>()) || of_weight(Split<BFloat16, 8>());
}
template <typename Weight, typename Average>
bool has_formats_of_average(const KernelTensorArgs& args) {
  return args.param_dtype == kDType<typename Weight::Stored> && args.master == Weight::kMaster &&
         args.buffer_formats[0] == Average::kFormat;
}

// Inputs that a step reads from the device before it processes gradients.
struct GradientInputs {
  const float* grad_scale = nullptr;  // [1], or null: gradients are not scaled
  const float* found_inf = nullptr;   // [1], the step writes nothing if it is not 0; or null
  // [1], the sum of squares of all scaled gradients, or null if no norm is needed.
  const double* sum_of_squares = nullptr;
  double max_grad_norm = std::numeric_limits<double>::infinity();  // for the unscaled gradients
  bool skip_nonfinite = false;       // leave elements unchanged if their gradient is inf or NaN
  const double* max_norm = nullptr;  // [1], another limit of the norm, inf for none; or null
};

// One optimizer step of many tensors.
struct StepLaunch {
  OptimizerKernel kernel;
  const KernelTensorArgs* all_args;  // [count]
  int64_t count;
  const void* hyperparameters;  // [groups], the type is Functor::Hyperparameters
  GradientInputs inputs;
  float* grad_norm;   // [1], receives the norm of the unscaled gradients; or null
  bool* is_launched;  // [count], all false; set to true for each tensor whose kernel was launched
  // [1], set to 1 if the step is applied and to 0 if it is skipped; or null.
  float* step_applied = nullptr;
  bool may_take_fast_path = true;  // allow the fast CUDA kernels, which give the same bits
};

// One update of many averages. `param` is the weight, `master_param` its residual, and the first
// buffer is the average.
struct AverageLaunch {
  const KernelTensorArgs* all_args;  // [count]
  int64_t count;
  const double* weight;  // [1], how far the averages move: 0 not at all, 1 to the weights
  const double* number;  // [1], the number of this average; the first one, 1, copies the weights
};

// One scan of gradients, which are only read.
struct GradScanLaunch {
  const KernelTensorArgs* all_args;  // [count]
  int64_t count;
  const float* grad_scale;   // [1], or null; counts as an overflow if it has no finite inverse
  float* found_inf;          // [1], set to 1 if a gradient contains inf or NaN
  int64_t* first_nonfinite;  // [1], lowered to the index of the first such gradient; or null
  double* sum_of_squares;    // [1], the sum is added to it; null: not computed
  bool skip_nonfinite;       // leave elements that are inf or NaN out of the sum
};

// One update of a loss scale, after all gradients of the iteration were scanned.
struct ScaleUpdate {
  LossScaleHyperparameters hyperparameters;
  ScaleMemory state;
  ScaleCounts* counts = nullptr;  // [1], or null

  // Updates the scale, after count_flag() has counted all flags.
  AMP_EXT_INLINE void run(bool overflow) const {
    const float scale_before = *state.scale;
    update_loss_scale(hyperparameters, overflow, state);
    if (counts != nullptr) count_update(overflow, scale_before, *state.scale, *counts);
  }
};

// Inputs of the factor by which gradients are multiplied: `inv_scale`, or if that is null, the
// factor that clips the norm `total_norm` to `max_norm`.
struct MultiplyInputs {
  const float* inv_scale = nullptr;   // [1], or null
  const float* total_norm = nullptr;  // [1], used if inv_scale is null
  double max_norm = 0.0;

  AMP_EXT_INLINE float factor() const {
    return inv_scale != nullptr ? *inv_scale : clip_coefficient(max_norm, *total_norm);
  }
};

}  // namespace amp_ext
