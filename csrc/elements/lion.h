// Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2.
#pragma once

#include <amp_ext/hyperparameters.h>

#include "elements/numeric.h"
#include "elements/weight_decay.h"

namespace amp_ext {

template <typename T>
struct Lion {
  using Hyperparameters = LionHyperparameters;

  WeightDecay<T> weight_decay;
  T lr;
  Interpolation<T> direction;  // of exp_avg and the gradient: its sign is the step's
  Interpolation<T> average;

  static AMP_EXT_INLINE Lion for_tensor(const LionHyperparameters& hyperparameters, double lr,
                                        double /*step*/) {
    return {WeightDecay<T>::for_tensor(hyperparameters, lr), static_cast<T>(lr),
            Interpolation<T>::of(1.0 - hyperparameters.beta1, hyperparameters.beta1),
            Interpolation<T>::of(1.0 - hyperparameters.beta2, hyperparameters.beta2)};
  }

  // The sign of NaN is NaN: a gradient of NaN shows in its parameter, as with the other optimizers.
  template <typename V>
  AMP_EXT_INLINE void operator()(V grad, V& param, V& exp_avg) const {
    weight_decay(grad, param);
    param = param - lr * sign(direction(exp_avg, grad));
    exp_avg = average(exp_avg, grad);
  }
};

}  // namespace amp_ext
