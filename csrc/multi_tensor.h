// The vocabulary between the operations and the engines: tensors as plain pointers, and what a
// launch does to a list of them.
#pragma once

#include <cstdint>

#include "functors/loss_scale.h"
#include "functors/numeric.h"
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
  int32_t group = 0;  // index into the launch's hyperparameters
  DType grad_dtype = DType::kFloat32;
  DType param_dtype = DType::kFloat32;
  DType buffer_dtype = DType::kFloat32;
};

// One optimizer step over many tensors.
struct StepLaunch {
  OptimizerKernel kernel;
  const TensorRecord* records;  // [count]
  int64_t count;
  const void* hyperparameters;  // [groups] of Functor::Hyperparameters
  const float* grad_scale;      // [1], or null: gradients are not scaled
  const float* found_inf;       // [1], or null; anything but 0 makes the step do nothing
};

// What the step makes of grad_scale and found_inf. A scale without a finite inverse (0, or 1e-39)
// counts as an overflow: its gradients can't be unscaled.
struct GradientGate {
  float inv_scale;
  bool skip;

  static AMP_EXT_INLINE GradientGate read(const float* grad_scale, const float* found_inf) {
    const float inv_scale = grad_scale == nullptr ? 1.0f : inverse_scale(*grad_scale);
    return {inv_scale, (found_inf != nullptr && *found_inf != 0.0f) || !is_finite(inv_scale)};
  }
};

// The constants of a step for one tensor: everything that does not depend on the element.
template <typename Functor, typename T>
struct TensorConstants {
  Functor update;
  T grad_factor;  // inverse scale, negative to maximize

  static AMP_EXT_INLINE TensorConstants
  make(const typename Functor::Hyperparameters& hyperparameters, const float* step,
       float inv_scale) {
    const double lr = hyperparameters.lr_on_device == nullptr
                          ? hyperparameters.lr
                          : static_cast<double>(*hyperparameters.lr_on_device);
    const double this_step = step == nullptr ? 0.0 : static_cast<double>(*step) + 1.0;
    const T grad_factor = hyperparameters.maximize ? -inv_scale : inv_scale;
    return {Functor::for_tensor(hyperparameters, lr, this_step), grad_factor};
  }
};

// Calls the functor for one element: its gradient, the parameter, and its first `kBuffers` buffers.
template <int kBuffers, typename Functor, typename T>
AMP_EXT_INLINE void update_element(const TensorConstants<Functor, T>& constants, T grad, T& param,
                                   T& buffer0, T& buffer1, T& buffer2) {
  grad = grad * constants.grad_factor;
  if constexpr (kBuffers == 0) constants.update(grad, param);
  if constexpr (kBuffers == 1) constants.update(grad, param, buffer0);
  if constexpr (kBuffers == 2) constants.update(grad, param, buffer0, buffer1);
  if constexpr (kBuffers == 3) constants.update(grad, param, buffer0, buffer1, buffer2);
}

}  // namespace amp_ext
