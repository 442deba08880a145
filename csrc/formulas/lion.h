// Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
#pragma once

#include <amp_ext/hyperparameters.h>

#include "formulas/fast_path.h"
#include "formulas/weight_decay.h"
#include "numeric.h"

namespace amp_ext {

template <typename T>
struct Lion {
  using Hyperparameters = LionHyperparameters;

  WeightDecay<T> weight_decay;
  T lr;
  Interpolation<T> direction;  // average of exp_avg and the gradient; the step takes its sign
  Interpolation<T> average;

  static AMP_EXT_INLINE Lion for_tensor(const LionHyperparameters& hyperparameters, double lr,
                                        double /*step*/) {
    return {WeightDecay<T>::for_tensor(hyperparameters, lr), static_cast<T>(lr),
            Interpolation<T>::of(1.0 - hyperparameters.beta1, hyperparameters.beta1),
            Interpolation<T>::of(1.0 - hyperparameters.beta2, hyperparameters.beta2)};
  }

  // sign(NaN) is NaN, so a NaN gradient makes its parameter NaN, as with the other optimizers.
  template <typename V>
  AMP_EXT_INLINE void operator()(V grad, V& param, V& exp_avg) const {
    weight_decay.add_to(grad, param);
    const V update = lr * sign(direction(exp_avg, grad));
    param = weight_decay.shrunk(param, update) - update;
    exp_avg = average(exp_avg, grad);
  }

  // Members of the fast path: see adam.h.
  static bool has_fast_path(const LionHyperparameters& group) {
    return takes_fast_path(group) && interpolates_from_start(1.0 - group.beta1) &&
           interpolates_from_start(1.0 - group.beta2);
  }
  template <bool kIsCautious>
  AMP_EXT_INLINE Lion usual() const {
    Lion known = *this;
    known.weight_decay = weight_decay.template usual<kIsCautious>();
    known.direction.from_end = known.average.from_end = false;
    return known;
  }
  template <typename Seeds, Division>
  AMP_EXT_INLINE void fast_update(float grad, float& param, float& exp_avg,
                                  Unusual& unusual) const {
    (*this)(grad, param, exp_avg);
    unusual.note_result(param);
    unusual.note_result(exp_avg);  // its sign, which the step uses, would hide an inf
  }
};

}  // namespace amp_ext
