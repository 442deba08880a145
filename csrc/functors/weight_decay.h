// Weight decay, coupled (added to the gradient) or decoupled (shrinks the parameter).
#pragma once

#include "functors/hyperparameters.h"
#include "functors/numeric.h"

namespace amp_ext {

template <typename T>
struct WeightDecay {
  T coupled;        // weight_decay, or 0 when decoupled
  T shrink_factor;  // 1 - lr * weight_decay, or 1 when coupled

  static AMP_EXT_INLINE WeightDecay for_tensor(const CommonHyperparameters& hyperparameters,
                                               double lr) {
    const double decay = hyperparameters.weight_decay;
    const bool decoupled = hyperparameters.decoupled_weight_decay;
    return {static_cast<T>(decoupled ? 0.0 : decay),
            static_cast<T>(decoupled ? 1.0 - lr * decay : 1.0)};
  }

  AMP_EXT_INLINE void operator()(T& grad, T& param) const {
    // Without decay an inf in a parameter stays out of its gradient: 0 * inf is NaN.
    grad = select(coupled != T(0), grad + coupled * param, grad);
    param = param * shrink_factor;
  }
};

}  // namespace amp_ext
