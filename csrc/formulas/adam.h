// Adam and AdamW, with or without AMSGrad, for one element.
//
// Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1; Loshchilov and
// Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2; Reddi, Kale and Kumar, "On
// the Convergence of Adam and Beyond", 2018, algorithm 2. As in torch, AMSGrad takes the maximum
// before the bias correction, and eps is added after the root. denominator_floor keeps NaN.
#pragma once

#include <amp_ext/hyperparameters.h>

#include <limits>

#include "formulas/fast_division.h"
#include "formulas/fast_path.h"
#include "formulas/weight_decay.h"
#include "numeric.h"

namespace amp_ext {

template <typename T>
struct Adam {
  using Hyperparameters = AdamHyperparameters;

  WeightDecay<T> weight_decay;
  Interpolation<T> average;  // gives the new exp_avg from the old one and the gradient
  T beta2;
  T one_minus_beta2;
  T eps;
  T step_size;  // lr / (1 - beta1^step)
  // 1 / sqrt(1 - beta2^step), used as a factor because a division would cost 15 %.
  T inv_bias_correction2_sqrt;
  T root_floor;  // lower bound of sqrt(second moment) before bias correction, or -inf

  // Computes the constants of step number `step`, from 1. In float32, 1 - 0.999 would have a
  // relative error of 1.3e-5.
  static AMP_EXT_INLINE Adam for_tensor(const AdamHyperparameters& hyperparameters, double lr,
                                        double step) {
    const double beta1 = hyperparameters.beta1;
    const double beta2 = hyperparameters.beta2;
    const double bias_correction2 = complement_of_power(beta2, step);
    const double floor = hyperparameters.denominator_floor;
    return {WeightDecay<T>::for_tensor(hyperparameters, lr),
            Interpolation<T>::of(1.0 - beta1, beta1),
            static_cast<T>(beta2),
            static_cast<T>(1.0 - beta2),
            static_cast<T>(hyperparameters.eps),
            static_cast<T>(lr / complement_of_power(beta1, step)),
            static_cast<T>(1.0 / std::sqrt(bias_correction2)),
            floor > 0.0 ? std::sqrt(static_cast<T>(floor * bias_correction2))
                        : -std::numeric_limits<T>::infinity()};
  }

  // The formula. A new term has to stand in fast_update as well, or has_fast_path must refuse it.
  template <typename V>
  AMP_EXT_INLINE V operator()(V grad, V& param, V& exp_avg, V& exp_avg_sq) const {
    update_moments(grad, param, exp_avg, exp_avg_sq);
    return update_param(param, exp_avg, exp_avg_sq);
  }

  // Overload for AMSGrad, in which max_exp_avg_sq replaces exp_avg_sq in the update.
  template <typename V>
  AMP_EXT_INLINE void operator()(V grad, V& param, V& exp_avg, V& exp_avg_sq,
                                 V& max_exp_avg_sq) const {
    update_moments(grad, param, exp_avg, exp_avg_sq);
    max_exp_avg_sq = larger(max_exp_avg_sq, exp_avg_sq);
    update_param(param, exp_avg, max_exp_avg_sq);
  }

  // Returns a copy with flags that are known at compile time, so that the fast path has no branch.
  template <bool kIsCautious>
  AMP_EXT_INLINE Adam usual() const {
    Adam known = *this;
    known.weight_decay = weight_decay.template usual<kIsCautious>();
    known.average.from_end = false;
    known.root_floor = -std::numeric_limits<T>::infinity();
    return known;
  }

  // True if the fast path supports these options. `fast_update` then gives the same bits as the
  // formula above, or marks the element as unusual. The denominator is below 2^61.
  static bool has_fast_path(const AdamHyperparameters& group) {
    return takes_fast_path(group) && interpolates_from_start(1.0 - group.beta1) &&
           group.beta2 >= 0.5 && group.beta2 <= 1.0 - 0x1p-20 && group.eps >= 0x1p-40 &&
           group.eps <= 0x1p20 && group.denominator_floor == 0.0;
  }

  // Returns 2^32 * sqrt(exp_avg_sq), or 2^-63 if exp_avg_sq is 0. Operands are scaled by 2^64, so
  // that nothing is subnormal. If the scaled exp_avg_sq is inf, the parameter becomes NaN, which
  // marks the element as unusual.
  template <typename Seeds, Division kDivision>
  AMP_EXT_INLINE float fast_update(float grad, float& param, float& exp_avg, float& exp_avg_sq,
                                   Unusual& unusual) const {
    update_moments(grad, param, exp_avg, exp_avg_sq);
    // 2^-126 changes only a zero, whose root becomes 2^-63: negligible compared with eps.
    const float scaled = fused_multiply_add(exp_avg_sq, 0x1p64f, 0x1p-126f);
    const float root = root_from(scaled, Seeds::inverse_root(scaled));
    const float denominator = root * (inv_bias_correction2_sqrt * 0x1p-32f) + eps;
    const float numerator = step_size * exp_avg;
    param = weight_decay.shrunk(param, numerator);
    if constexpr (kDivision == Division::kExact) {
      param = param - numerator / denominator;
    } else {
      const float quotient = quotient_from(product(numerator, 0x1p64f), denominator,
                                           fast_reciprocal<Seeds>(denominator));
      // The general code rounds an update below 2^-126 to a subnormal number. This makes no
      // difference for a parameter of 2^-62 or more.
      unusual.note_update(quotient, param);
      param = fused_multiply_add(quotient, -0x1p-64f, param);
    }
    unusual.note_result(param);
    return root;
  }

 private:
  template <typename V>
  AMP_EXT_INLINE void update_moments(V grad, V param, V& exp_avg, V& exp_avg_sq) const {
    weight_decay.add_to(grad, param);
    exp_avg = average(exp_avg, grad);
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * grad * grad;
  }

  // Updates the parameter and returns the square root of the second moment.
  template <typename V>
  AMP_EXT_INLINE V update_param(V& param, V exp_avg, V second_moment) const {
    // The numerator has the sign of the update also where their quotient is too small for a number.
    const V numerator = step_size * exp_avg;
    param = weight_decay.shrunk(param, numerator);
    const V root = square_root(second_moment);
    const V floored = select(root < root_floor, root_floor, root);
    param = param - numerator / (floored * inv_bias_correction2_sqrt + eps);
    return root;
  }
};

}  // namespace amp_ext
