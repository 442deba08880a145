// Stochastic gradient descent, plain or with (Nesterov) momentum, for one element.
//
// Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in deep
// learning", 2013, in torch's form: the learning rate multiplies the complete update.
#pragma once

#include <amp_ext/hyperparameters.h>

#include "formulas/fast_path.h"
#include "formulas/weight_decay.h"
#include "numeric.h"

namespace amp_ext {

template <typename T>
struct Sgd {
  using Hyperparameters = SgdHyperparameters;

  WeightDecay<T> weight_decay;
  T lr;
  T momentum;
  T buffer_weight;  // weight of the old momentum_buffer in the new one
  T grad_weight;    // weight of the gradient in the new momentum_buffer
  bool nesterov;

  // Computes the constants of step number `step`, from 1. The first step is not dampened. Without
  // dampening, `step` may be 0 (no counter).
  static AMP_EXT_INLINE Sgd for_tensor(const SgdHyperparameters& hyperparameters, double lr,
                                       double step) {
    const bool first = step == 1.0;
    const double momentum = hyperparameters.momentum;
    return {WeightDecay<T>::for_tensor(hyperparameters, lr),
            static_cast<T>(lr),
            static_cast<T>(momentum),
            static_cast<T>(first ? 0.0 : momentum),
            static_cast<T>(first ? 1.0 : 1.0 - hyperparameters.dampening),
            hyperparameters.nesterov};
  }

  template <typename V>
  AMP_EXT_INLINE void operator()(V grad, V& param) const {
    weight_decay.add_to(grad, param);
    subtract(lr * grad, param);
  }

  template <typename V>
  AMP_EXT_INLINE void operator()(V grad, V& param, V& momentum_buffer) const {
    weight_decay.add_to(grad, param);
    momentum_buffer = buffer_weight * momentum_buffer + grad_weight * grad;
    subtract(lr * select(nesterov, grad + momentum * momentum_buffer, momentum_buffer), param);
  }

  // Members of the fast path: see adam.h.
  static bool has_fast_path(const SgdHyperparameters& group) { return takes_fast_path(group); }
  template <bool kIsCautious>
  AMP_EXT_INLINE Sgd usual() const {
    Sgd known = *this;
    known.weight_decay = weight_decay.template usual<kIsCautious>();
    return known;
  }
  template <typename Seeds, Division>
  AMP_EXT_INLINE void fast_update(float grad, float& param, Unusual& unusual) const {
    (*this)(grad, param);
    unusual.note_result(param);
  }
  template <typename Seeds, Division>
  AMP_EXT_INLINE void fast_update(float grad, float& param, float& momentum_buffer,
                                  Unusual& unusual) const {
    (*this)(grad, param, momentum_buffer);
    unusual.note_result(param);
    unusual.note_result(momentum_buffer);
  }

 private:
  template <typename V>
  AMP_EXT_INLINE void subtract(V update, V& param) const {
    param = weight_decay.shrunk(param, update) - update;
  }
};

}  // namespace amp_ext
