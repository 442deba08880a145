// The vocabulary between the operations and the engines: tensors as plain pointers, and what a
// launch does to a list of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "functors/clipping.h"
#include "functors/loss_scale.h"
#include "functors/numeric.h"
#include "functors/scaler_report.h"
#include "kernel_list.h"
#include "storage.h"

namespace amp_ext {

inline constexpr int kMaxBuffers = 3;

// The memory of one parameter. All of it is dense, of `numel` elements in one order. An operation
// on gradients alone uses `grad`, `grad_dtype` and `numel`.
struct TensorRecord {
  void* grad = nullptr;
  void* param = nullptr;
  float* master_param = nullptr;    // or null: `param` is computed in
  void* buffers[kMaxBuffers] = {};  // exp_avg, ...: as many as the kernel has
  float* step = nullptr;            // [1], the number of steps taken, or null
  int64_t numel = 0;
  // Index into the launch's hyperparameters; in an operation on gradients alone the number by which
  // it reports this one.
  int32_t group = 0;
  DType grad_dtype = DType::kFloat32;
  DType param_dtype = DType::kFloat32;
  DType buffer_dtype = DType::kFloat32;
};

// What a step reads from the device before it touches a gradient.
struct GradientInputs {
  const float* grad_scale = nullptr;  // [1], or null: gradients are not scaled
  const float* found_inf = nullptr;   // [1], or null; anything but 0: the step does nothing
  const double* sum_of_squares =
      nullptr;                  // [1], of the scaled gradients; null: no clipping by norm
  double max_grad_norm = 0.0;   // of the unscaled gradients
  bool skip_nonfinite = false;  // leaves elements alone whose gradient is inf or NaN
};

// What the step makes of it. A scale without a finite inverse (0, or 1e-39) counts as an overflow:
// its gradients can't be unscaled.
struct GradientFactor {
  float inv_scale;
  float clip_coefficient;
  float grad_norm;  // of the unscaled gradients, if it is clipped by
  bool skip;
  bool skip_nonfinite;

  static AMP_EXT_INLINE GradientFactor read(const GradientInputs& inputs) {
    GradientFactor factor{1.0f, 1.0f, 0.0f, false, inputs.skip_nonfinite};
    if (inputs.grad_scale != nullptr) factor.inv_scale = inverse_scale(*inputs.grad_scale);
    factor.skip =
        (inputs.found_inf != nullptr && *inputs.found_inf != 0.0f) || !is_finite(factor.inv_scale);
    if (inputs.sum_of_squares != nullptr) {
      const double norm = std::sqrt(*inputs.sum_of_squares) * factor.inv_scale;
      factor.grad_norm = static_cast<float>(norm);
      factor.clip_coefficient = amp_ext::clip_coefficient(inputs.max_grad_norm, factor.grad_norm);
    }
    return factor;
  }
};

// One optimizer step over many tensors.
struct StepLaunch {
  OptimizerKernel kernel;
  const TensorRecord* records;  // [count]
  int64_t count;
  const void* hyperparameters;  // [groups] of Functor::Hyperparameters
  GradientInputs inputs;
  float* grad_norm;  // [1], written with the norm, or null
};

// A look at gradients, which are only read.
struct LookLaunch {
  const TensorRecord* records;  // [count]
  int64_t count;
  const float* grad_scale;   // [1], or null; without a finite inverse it counts as an overflow
  float* found_inf;          // [1], set to 1 if a gradient is inf or NaN, else left
  int64_t* first_nonfinite;  // [1], lowered to the least number of such a gradient; or null
  double* sum_of_squares;    // [1], added to; null: no sum is wanted
  bool skip_nonfinite;       // leaves inf and NaN out of the sum
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
    constexpr int64_t kWords = offsetof(ScalerReport, history) / sizeof(int64_t);
    copy_words(report, mirror, 2 + copier, kWords, copiers);
    const int64_t newest = (report->updates - 1) % kHistory;
    if (copier == 0) mirror->history[newest] = report->history[newest];
    copy_words(optimizers, optimizers_mirror, copier,
               number_of_optimizers * sizeof(OptimizerReport) / sizeof(int64_t), copiers);
  }

 private:
  static AMP_EXT_INLINE void copy_words(const void* from, void* to, int64_t first, int64_t words,
                                        int64_t stride) {
    for (int64_t i = first; i < words; i += stride) {
      static_cast<volatile int64_t*>(to)[i] = static_cast<const int64_t*>(from)[i];
    }
  }
};

// One update of a loss scale, after the looks of an iteration.
struct ScaleUpdate {
  LossScaleHyperparameters hyperparameters;
  LossScale state;
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

// The constants of a step for one tensor: everything that does not depend on the element.
template <typename Functor, typename T>
struct TensorConstants {
  Functor update;
  T grad_factor;  // inverse scale and clip coefficient
  T clip_value;
  T direction;  // -1 to maximize
  bool write_back_grads;
  bool skip_nonfinite;

  static AMP_EXT_INLINE TensorConstants
  make(const typename Functor::Hyperparameters& hyperparameters, const float* step,
       const GradientFactor& factor) {
    const double lr = hyperparameters.lr_on_device == nullptr
                          ? hyperparameters.lr
                          : static_cast<double>(*hyperparameters.lr_on_device);
    const double this_step =
        step == nullptr ? hyperparameters.timestep : static_cast<double>(*step) + 1.0;
    return {Functor::for_tensor(hyperparameters, lr, this_step),
            static_cast<T>(factor.inv_scale) * static_cast<T>(factor.clip_coefficient),
            static_cast<T>(hyperparameters.clip_value),
            static_cast<T>(hyperparameters.maximize ? -1.0 : 1.0),
            hyperparameters.write_back_grads,
            factor.skip_nonfinite};
  }

  // The gradient as the optimizer sees it.
  AMP_EXT_INLINE T unscale_and_clip(T grad) const {
    return amp_ext::clip_value(grad * grad_factor, clip_value);
  }

  // Whether a gradient's element is left alone.
  AMP_EXT_INLINE bool skips(T grad) const { return skip_nonfinite && !is_finite(grad); }
};

// Calls the functor for one element: its gradient, unscaled and clipped, the parameter, and its
// first `kBuffers` buffers.
template <int kBuffers, typename Functor, typename T>
AMP_EXT_INLINE void update_element(const TensorConstants<Functor, T>& constants, T grad, T& param,
                                   T& buffer0, T& buffer1, T& buffer2) {
  grad = grad * constants.direction;
  if constexpr (kBuffers == 0) constants.update(grad, param);
  if constexpr (kBuffers == 1) constants.update(grad, param, buffer0);
  if constexpr (kBuffers == 2) constants.update(grad, param, buffer0, buffer1);
  if constexpr (kBuffers == 3) constants.update(grad, param, buffer0, buffer1, buffer2);
}

}  // namespace amp_ext
