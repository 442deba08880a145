// The vocabulary between the operations and the engines: tensors as plain pointers, and what a
// launch does to a list of them. What happens to one element is in element.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

#include "elements/clipping.h"
#include "elements/loss_scale.h"
#include "elements/mirror.h"
#include "elements/norm_guard.h"
#include "elements/numbers.h"
#include "elements/numeric.h"
#include "elements/scaler_report.h"
#include "elements/storage.h"
#include "elements/weight_average.h"
#include "kernels.h"

namespace amp_ext {

// The memory of one parameter. All of it is dense, of `numel` elements in one order. An operation
// on gradients alone uses `grad`, `grad_dtype` and `numel`.
struct KernelTensorArgs {
  void* grad = nullptr;
  void* param = nullptr;
  void* master_param = nullptr;     // as `master` says
  void* buffers[kMaxBuffers] = {};  // exp_avg, ...: as many as the kernel has
  uint8_t* exponents = nullptr;     // [numel / kBlockSize], of the buffer in blocks, or null
  float* step = nullptr;            // [1], as elements/step_counter.h counts, or null
  int64_t numel = 0;
  // Index into the launch's hyperparameters; in an operation on gradients alone the index by which
  // it reports this one.
  int32_t group = 0;
  DType grad_dtype = DType::kFloat32;
  DType param_dtype = DType::kFloat32;
  BufferFormat buffer_formats[kMaxBuffers] = {};
  Master master = Master::kNone;
  uint8_t dithered = 0;       // kDithersParam and kDithersBuffer0 << index of those that are
  int64_t global_offset = 0;  // the place of the first element in the whole tensor
};

// Numbers that are dithered where they are stored in 16 or 8 bits.
inline constexpr uint8_t kDithersParam = 1;
inline constexpr uint8_t kDithersBuffer0 = 2;

// The numbers that these hyperparameters want dithered: those that freeze when they are rounded to
// nearest, because a step changes them by less than half a unit in the last place. For an average
// that is so from this share on of it that a step keeps; second moments are, whatever their share.
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

// Whether a record has the kinds of numbers that a kernel is compiled for.
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

// The kinds of weights and of averages for which kernels of averages are compiled: calls
// run(weight, average) with a value of each pair, until one returns true. A float32 master is a
// weight of its own.
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

// What a step reads from the device before it touches a gradient.
struct GradientInputs {
  const float* grad_scale = nullptr;       // [1], or null: gradients are not scaled
  const float* found_inf = nullptr;        // [1], or null; anything but 0: the step does nothing
  const double* sum_of_squares = nullptr;  // [1], of the scaled gradients; null: nobody asks
  double max_grad_norm = std::numeric_limits<double>::infinity();  // of the unscaled gradients
  bool skip_nonfinite = false;       // leaves elements alone whose gradient is inf or NaN
  NormGuardMemory* guard = nullptr;  // [1], beside sum_of_squares: judges the norm; or null
};

// One optimizer step over many tensors.
struct StepLaunch {
  OptimizerKernel kernel;
  const KernelTensorArgs* all_args;  // [count]
  int64_t count;
  const void* hyperparameters;  // [groups] of Functor::Hyperparameters
  GradientInputs inputs;
  float* grad_norm;   // [1], written with the norm, or null
  bool* is_launched;  // [count], all false: set for those whose kernel was launched
  bool ends_guarded;  // whether the last kernel lets the guard count the norm
  // [1], written with 1 where the step is taken and with 0 where it is skipped, or null.
  float* step_applied = nullptr;
  bool may_take_fast_path = true;  // of the CUDA kernels: the same bits, in less time
};

// One step of the averages of many weights. A record has the weight as its parameter (`param`, with
// the lower part in `master_param` where it is split) and the average as its first buffer.
struct AverageLaunch {
  const KernelTensorArgs* all_args;  // [count]
  int64_t count;
  AverageHyperparameters hyperparameters;
  AverageCounters* counters;  // [1], advanced when all averages are written
  const float* step_applied;  // [1], or null: it has; 0: nothing is written
};

// A look at gradients, which are only read.
struct GradScanLaunch {
  const KernelTensorArgs* all_args;  // [count]
  int64_t count;
  const float* grad_scale;   // [1], or null; without a finite inverse it counts as an overflow
  float* found_inf;          // [1], set to 1 if a gradient is inf or NaN, else left
  int64_t* first_nonfinite;  // [1], lowered to the least index of such a gradient; or null
  double* sum_of_squares;    // [1], added to; null: no sum is wanted
  bool skip_nonfinite;       // leaves inf and NaN out of the sum
  // Beside sum_of_squares: written at the index of each gradient with the sum of its squares, inf
  // if that is not finite; or null.
  double* squares_of_tensors = nullptr;
};

// Where reports are kept. The mirrors are in host memory; a null report keeps none.
struct ReportMemory {
  ScalerReport* report = nullptr;
  ScalerReport* mirror = nullptr;
  OptimizerReport* optimizers = nullptr;         // [number_of_optimizers]
  OptimizerReport* optimizers_mirror = nullptr;  // [number_of_optimizers]
  int64_t number_of_optimizers = 0;

  // Copies to the mirrors all but `started` and `finished`; one of `copiers` that share the work.
  AMP_EXT_INLINE void copy(int64_t copier, int64_t copiers) const {
    constexpr int64_t kWords = sizeof(ScalerSummary) / sizeof(int64_t);
    copy_words(report, mirror, 2 + copier, kWords, copiers);
    const int64_t newest = (report->updates - 1) % kHistory;
    if (copier == 0) mirror->history[newest] = report->history[newest];
    copy_words(optimizers, optimizers_mirror, copier,
               number_of_optimizers * sizeof(OptimizerReport) / sizeof(int64_t), copiers);
  }
};

// One update of a loss scale, after the looks of an iteration.
struct ScaleUpdate {
  LossScaleHyperparameters hyperparameters;
  ScaleMemory state;
  ReportMemory reports;
};

// Where the factor comes from that gradients are multiplied by in place: an inverse scale, or a
// norm and its limit.
struct MultiplyInputs {
  const float* inv_scale = nullptr;   // [1], or null
  const float* total_norm = nullptr;  // [1], if inv_scale is null
  double max_norm = 0.0;

  AMP_EXT_INLINE float factor() const {
    return inv_scale != nullptr ? *inv_scale : clip_coefficient(max_norm, *total_norm);
  }
};

}  // namespace amp_ext
