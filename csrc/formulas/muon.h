// The momentum of Muon, for one element: Jordan et al., "Muon: An optimizer for hidden layers in
// neural networks", 2024. The kernel writes the update in place of the parameter; csrc/ops/muon.cpp
// orthogonalizes it and subtracts it.
#pragma once

#include <amp_ext/hyperparameters.h>

#include "numeric.h"

namespace amp_ext {

template <typename T>
struct Muon {
  using Hyperparameters = MuonHyperparameters;

  // An interpolation that rounds as torch.lerp: a bfloat16 that is rounded to the other side
  // changes the iteration for a matrix of low rank.
  struct Lerp {
    bool from_end;
    T factor;

    static AMP_EXT_INLINE Lerp of(double weight) {
      const T rounded = static_cast<T>(weight);
      const bool from_end = rounded >= T(0.5);
      return {from_end, from_end ? rounded - T(1) : rounded};
    }
    template <typename V>
    AMP_EXT_INLINE V operator()(V start, V end) const {
      return fused_multiply_add(V{} + factor, end - start, select(from_end, end, start));
    }
  };

  Lerp average;  // from the buffer to the gradient
  Lerp update;   // from the gradient to the buffer
  bool nesterov;

  static AMP_EXT_INLINE Muon for_tensor(const MuonHyperparameters& hyperparameters, double /*lr*/,
                                        double /*step*/) {
    const double momentum = hyperparameters.momentum;
    return {Lerp::of(1.0 - momentum), Lerp::of(momentum), hyperparameters.nesterov};
  }

  template <typename V>
  AMP_EXT_INLINE void operator()(V grad, V& param, V& momentum_buffer) const {
    momentum_buffer = average(momentum_buffer, grad);
    param = select(nesterov, update(grad, momentum_buffer), momentum_buffer);
  }

  static bool has_fast_path(const MuonHyperparameters& /*group*/) { return false; }
};

}  // namespace amp_ext
