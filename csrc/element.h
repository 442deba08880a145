// What a step does to one element, whatever the optimizer: unscales and clips its gradient, then
// calls the formula.
#pragma once

#include <type_traits>
#include <utility>

#include "elements/clipping.h"
#include "elements/loss_scale.h"
#include "elements/numeric.h"
#include "elements/step_counter.h"
#include "launches.h"

namespace amp_ext {

// What a step makes of its inputs. A scale without a finite inverse (0, or 1e-39) counts as an
// overflow: its gradients can't be unscaled.
struct StepDecision {
  float inv_scale;
  float clip_coefficient;
  double clip_coefficient64;  // of float64 gradients
  float grad_norm;            // of the unscaled gradients, if it is asked for
  bool skip;                  // after an overflow, or because a guard says so
  bool skip_nonfinite;
  bool overflow;

  // As a step leaves it for those who follow it on the device.
  AMP_EXT_INLINE float step_applied() const { return skip ? 0.0f : 1.0f; }

  static AMP_EXT_INLINE StepDecision read(const GradientInputs& inputs) {
    // Loaded before the first is used: a GPU then waits once.
    const bool overflow = inputs.found_inf != nullptr && *inputs.found_inf != 0.0f;
    const float scale = inputs.grad_scale != nullptr ? *inputs.grad_scale : 1.0f;
    const double sum_of_squares = inputs.sum_of_squares != nullptr ? *inputs.sum_of_squares : 0.0;
    double max_norm = inputs.max_grad_norm;
    double limit = 0.0;
    bool clips_outliers = false;
    if (inputs.guard != nullptr) {
      limit = inputs.guard->limit;
      clips_outliers = inputs.guard->hyperparameters.clips;
    }
    StepDecision factor{1.0f, 1.0f, 1.0, 0.0f, false, inputs.skip_nonfinite, false};
    if (inputs.grad_scale != nullptr) factor.inv_scale = inverse_scale(scale);
    factor.overflow = factor.skip = overflow || !is_finite(factor.inv_scale);
    if (inputs.sum_of_squares == nullptr) return factor;
    const double norm = std::sqrt(sum_of_squares) * factor.inv_scale;
    factor.grad_norm = static_cast<float>(norm);
    if (inputs.guard != nullptr) {
      const bool is_out = is_outlier(factor.grad_norm, limit);
      if (is_out && clips_outliers && limit < max_norm) max_norm = limit;
      const bool is_unknown = !is_finite(factor.grad_norm) && !inputs.skip_nonfinite;
      factor.skip |= is_unknown || (is_out && !clips_outliers);
      if (!is_finite(max_norm)) return factor;
    }
    factor.clip_coefficient = amp_ext::clip_coefficient(max_norm, factor.grad_norm);
    // Norm and coefficient may be too large and too small for a float32.
    const bool fits = is_finite(factor.grad_norm) && factor.clip_coefficient >= 0x1p-126f;
    factor.clip_coefficient64 =
        fits ? factor.clip_coefficient : amp_ext::clip_coefficient(max_norm, norm);
    return factor;
  }

  // Lets the guard of a step count its norm, when nobody reads these inputs any more.
  static AMP_EXT_INLINE void end_guarded_step(const GradientInputs& inputs) {
    const StepDecision factor = read(inputs);
    const bool is_absent = factor.overflow || inputs.sum_of_squares == nullptr;
    amp_ext::end_guarded_step(factor.grad_norm, is_absent, factor.skip, *inputs.guard);
  }
};

// The constants of a step for one tensor: everything that does not depend on the element.
template <typename Functor, typename T>
struct TensorConstants {
  Functor update;
  T grad_factor;  // inverse scale and clip coefficient
  T clip_value;
  T direction;    // -1 to maximize
  uint32_t step;  // its number, for dithering
  bool write_back_grads;
  bool skip_nonfinite;

  static AMP_EXT_INLINE TensorConstants
  make(const typename Functor::Hyperparameters& hyperparameters, const float* step,
       const StepDecision& factor) {
    return make(hyperparameters, read_lr(hyperparameters), read_step(hyperparameters, step),
                factor);
  }

  // The same with what read_lr and read_step give, for those who read before they compute.
  static AMP_EXT_INLINE TensorConstants
  make(const typename Functor::Hyperparameters& hyperparameters, double lr, double step,
       const StepDecision& factor) {
    return {Functor::for_tensor(hyperparameters, lr, step),
            static_cast<T>(factor.inv_scale) *
                static_cast<T>(std::is_same_v<T, double> ? factor.clip_coefficient64
                                                         : factor.clip_coefficient),
            static_cast<T>(hyperparameters.clip_value),
            static_cast<T>(hyperparameters.maximize ? -1.0 : 1.0),
            static_cast<uint32_t>(static_cast<int64_t>(step)),
            hyperparameters.write_back_grads,
            factor.skip_nonfinite};
  }

  static AMP_EXT_INLINE double read_lr(const CommonHyperparameters& hyperparameters) {
    return hyperparameters.lr_on_device == nullptr
               ? hyperparameters.lr
               : static_cast<double>(*hyperparameters.lr_on_device);
  }

  // The number of this step, from 1. `step` counts those taken, or is null.
  static AMP_EXT_INLINE double read_step(const CommonHyperparameters& hyperparameters,
                                         const float* step) {
    return step == nullptr ? hyperparameters.timestep : steps_of(*step) + 1.0;
  }

  // The gradient as the optimizer sees it.
  template <typename V>
  AMP_EXT_INLINE V unscale_and_clip(V grad) const {
    return amp_ext::clip_value(grad * grad_factor, clip_value);
  }

  // Whether a gradient's element is left alone.
  AMP_EXT_INLINE bool skips(T grad) const { return skip_nonfinite && !is_finite(grad); }
};

// Calls the functor for one element, or a vector of elements: its gradient, unscaled and clipped,
// the parameter, and its buffers. Buffer number kRoot becomes the root of the second moment that it
// was; -1: none does.
template <int kRoot, typename Functor, typename T, typename V, int... index>
AMP_EXT_INLINE void update_element(const TensorConstants<Functor, T>& constants, V grad, V& param,
                                   [[maybe_unused]] V* buffers,
                                   std::integer_sequence<int, index...>) {
  grad = grad * constants.direction;
  if constexpr (kRoot < 0) {
    constants.update(grad, param, buffers[index]...);
  } else {
    buffers[kRoot] = constants.update(grad, param, buffers[index]...);
  }
}

}  // namespace amp_ext
