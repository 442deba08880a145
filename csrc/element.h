// Step of one element: unscales and clips the gradient, then calls the formula of the optimizer.
#pragma once

#include <type_traits>
#include <utility>

#include "formulas/clipping.h"
#include "formulas/loss_scale.h"
#include "formulas/step_counter.h"
#include "launches.h"
#include "numeric.h"

namespace amp_ext {

// Decision of a step, made before it processes gradients: whether to skip, and the factors for
// unscaling and clipping. A scale without a finite inverse (0, or 1e-39) counts as an overflow.
struct StepDecision {
  float inv_scale;
  float clip_coefficient;
  double clip_coefficient64;  // coefficient for float64 gradients
  float grad_norm;            // norm of the unscaled gradients; 0 if it was not requested
  bool skip;                  // true after an overflow
  bool skip_nonfinite;

  // Returns the value of the device flag `step_applied`.
  AMP_EXT_INLINE float step_applied() const { return skip ? 0.0f : 1.0f; }

  static AMP_EXT_INLINE StepDecision read(const GradientInputs& inputs) {
    // Load all inputs before the first use, so that a GPU waits only once.
    const bool overflow = inputs.found_inf != nullptr && *inputs.found_inf != 0.0f;
    const float scale = inputs.grad_scale != nullptr ? *inputs.grad_scale : 1.0f;
    const double sum_of_squares = inputs.sum_of_squares != nullptr ? *inputs.sum_of_squares : 0.0;
    double max_norm = inputs.max_grad_norm;
    if (inputs.max_norm != nullptr && *inputs.max_norm < max_norm) max_norm = *inputs.max_norm;
    StepDecision decision{1.0f, 1.0f, 1.0, 0.0f, false, inputs.skip_nonfinite};
    if (inputs.grad_scale != nullptr) decision.inv_scale = inverse_scale(scale);
    decision.skip = overflow || !is_finite(decision.inv_scale);
    if (inputs.sum_of_squares == nullptr) return decision;
    const double norm = std::sqrt(sum_of_squares) * decision.inv_scale;
    decision.grad_norm = static_cast<float>(norm);
    if (inputs.max_norm != nullptr && !is_finite(max_norm)) return decision;  // clips nothing
    decision.clip_coefficient = amp_ext::clip_coefficient(max_norm, decision.grad_norm);
    // If the norm overflows or the coefficient underflows, compute in float64.
    const bool fits = is_finite(decision.grad_norm) && decision.clip_coefficient >= 0x1p-126f;
    decision.clip_coefficient64 =
        fits ? decision.clip_coefficient : amp_ext::clip_coefficient(max_norm, norm);
    return decision;
  }
};

// Constants of a step for one tensor.
template <typename Functor, typename T>
struct TensorConstants {
  Functor update;
  T grad_factor;  // inverse scale times clip coefficient
  T clip_value;
  T direction;    // sign of the gradient: -1 to maximize, else 1
  uint32_t step;  // number of the step, which selects the dither
  bool write_back_grads;
  bool skip_nonfinite;    // leave elements unchanged if their gradient is inf or NaN
  bool zeroes_nonfinite;  // such gradients count as 0, because the parameter is only written

  // `lr` and `step` are from read_lr() and read_step().
  static AMP_EXT_INLINE TensorConstants
  make(const typename Functor::Hyperparameters& hyperparameters, double lr, double step,
       const StepDecision& decision) {
    return {Functor::for_tensor(hyperparameters, lr, step),
            static_cast<T>(decision.inv_scale) *
                static_cast<T>(std::is_same_v<T, double> ? decision.clip_coefficient64
                                                         : decision.clip_coefficient),
            static_cast<T>(hyperparameters.clip_value),
            static_cast<T>(hyperparameters.maximize ? -1.0 : 1.0),
            static_cast<uint32_t>(static_cast<int64_t>(step)),
            hyperparameters.write_back_grads,
            decision.skip_nonfinite && !kWritesUpdate<typename Functor::Hyperparameters>,
            decision.skip_nonfinite && kWritesUpdate<typename Functor::Hyperparameters>};
  }

  static AMP_EXT_INLINE double read_lr(const CommonHyperparameters& hyperparameters) {
    return hyperparameters.lr_on_device == nullptr
               ? hyperparameters.lr
               : static_cast<double>(*hyperparameters.lr_on_device);
  }

  // Returns the number of this step, from 1: *step + 1, or `timestep` if `step` is null.
  static AMP_EXT_INLINE double read_step(const CommonHyperparameters& hyperparameters,
                                         const float* step) {
    return step == nullptr ? hyperparameters.timestep : steps_of(*step) + 1.0;
  }

  // Returns the gradient, unscaled and clipped. update_element() applies the sign for `maximize`.
  template <typename V>
  AMP_EXT_INLINE V unscale_and_clip(V grad) const {
    if constexpr (kWritesUpdate<typename Functor::Hyperparameters>) {
      if (zeroes_nonfinite) grad = select(is_finite(grad), grad, V{});
    }
    return amp_ext::clip_value(grad * grad_factor, clip_value);
  }

  // True if the element with this gradient must stay unchanged.
  AMP_EXT_INLINE bool skips(T grad) const { return skip_nonfinite && !is_finite(grad); }
};

// Calls the formula for one element or vector of elements. `grad` must be unscaled and clipped.
// Unless kRoot is -1, the second moment buffers[kRoot] is replaced by its square root.
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
