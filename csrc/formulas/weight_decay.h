// Weight decay, coupled (added to the gradient) or decoupled (shrinks the parameter).
#pragma once

#include <amp_ext/hyperparameters.h>

#include "numeric.h"

namespace amp_ext {

template <typename T>
struct WeightDecay {
  bool is_coupled;
  T coupled;        // weight_decay, or 0 when decoupled
  T shrink_factor;  // 1 - lr * weight_decay, or 1 when coupled

  static AMP_EXT_INLINE WeightDecay for_tensor(const CommonHyperparameters& hyperparameters,
                                               double lr) {
    const double decay = hyperparameters.weight_decay;
    const bool decoupled = hyperparameters.decoupled_weight_decay;
    const T coupled = static_cast<T>(decoupled ? 0.0 : decay);
    return {coupled != T(0), coupled, static_cast<T>(decoupled ? 1.0 - lr * decay : 1.0)};
  }

  template <typename V>
  AMP_EXT_INLINE void operator()(V& grad, V& param) const {
    // Without decay, 0 * inf would make the gradient of an inf parameter NaN.
    grad = select(is_coupled, grad + coupled * param, grad);
    param = param * shrink_factor;
  }
};

}  // namespace amp_ext
