// Weight decay, coupled (added to the gradient) or decoupled (shrinks the parameter). Cautious
// decay is decoupled, and shrinks only elements that the update does not move away from 0: Chen et
// al., "Cautious Weight Decay", arXiv 2510.12402.
#pragma once

#include <amp_ext/hyperparameters.h>

#include "numeric.h"

namespace amp_ext {

template <typename T>
struct WeightDecay {
  bool is_coupled;
  T coupled;        // weight_decay, or 0 when decoupled
  T shrink_factor;  // 1 - lr * weight_decay, or 1 when coupled
  T other_factor;   // factor if the update moves an element away from 0; 1 when cautious

  static AMP_EXT_INLINE WeightDecay for_tensor(const CommonHyperparameters& hyperparameters,
                                               double lr) {
    const double decay = hyperparameters.weight_decay;
    const bool decoupled = hyperparameters.decoupled_weight_decay;
    const T coupled = static_cast<T>(decoupled ? 0.0 : decay);
    const T factor = static_cast<T>(decoupled ? 1.0 - lr * decay : 1.0);
    return {coupled != T(0), coupled, factor,
            hyperparameters.cautious_weight_decay ? T(1) : factor};
  }

  AMP_EXT_INLINE bool is_cautious() const { return other_factor != shrink_factor; }

  // Adds coupled decay to the gradient.
  template <typename V>
  AMP_EXT_INLINE void add_to(V& grad, V param) const {
    // Without decay, 0 * inf would make the gradient of an inf parameter NaN.
    grad = select(is_coupled, grad + coupled * param, grad);
  }

  // Returns the parameter after decoupled decay. `update` has the sign of what the step subtracts
  // from the parameter. Signs are compared, because the product of small numbers would be 0.
  template <typename V>
  AMP_EXT_INLINE V shrunk(V param, V update) const {
    const auto moves_away = select(param < 0, update, -update) > 0;  // either for a parameter of 0
    return select(moves_away, param * other_factor, param * shrink_factor);
  }

  // Returns a copy without coupled decay, and without the comparison unless decay is cautious.
  template <bool kIsCautious>
  AMP_EXT_INLINE WeightDecay usual() const {
    return {false, T(0), shrink_factor, kIsCautious ? other_factor : shrink_factor};
  }
};

}  // namespace amp_ext
