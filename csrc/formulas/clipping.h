// Clipping of gradients by their global norm and by value.
//
// Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013,
// algorithm 1. As in torch.nn.utils.clip_grad_norm_, adding 1e-6 avoids a division by 0.
#pragma once

#include "numeric.h"

namespace amp_ext {

// Returns the factor that clips `total_norm` to `max_norm`: at most 1, NaN if the norm is NaN.
template <typename T>
AMP_EXT_INLINE T clip_coefficient(double max_norm, T total_norm) {
  const double coefficient = max_norm / (static_cast<double>(total_norm) + 1e-6);
  return coefficient > 1.0 ? T(1) : static_cast<T>(coefficient);
}

// Limits the magnitude of a value; NaN stays NaN.
template <typename V, typename T>
AMP_EXT_INLINE V clip_value(V value, T limit) {
  const V below = select(value > limit, limit, value);
  return select(below < -limit, -limit, below);
}

}  // namespace amp_ext
