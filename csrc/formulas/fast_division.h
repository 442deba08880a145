// Square roots and quotients, computed from approximations that a GPU has as single instructions.
//
// Fused multiply-adds refine each approximation to the result of IEEE 754 round-to-nearest
// (Markstein, "IA-64 and Elementary Functions", 2000, chapters 8 and 9). Each function is valid
// only in the range that its comment states. `Seeds` supplies the approximations, which a GPU's own
// operators refine, too. tests/kernels/test_gpu.py checks the results.
#pragma once

#include "numeric.h"

namespace amp_ext {

// Returns sqrt(value), rounded to nearest, for a value in [2^-126, 2^127]. `inverse_root`
// approximates 1 / sqrt(value).
AMP_EXT_INLINE float root_from(float value, float inverse_root) {
  const float root = value * inverse_root;
  const float rest = fused_multiply_add(-root, root, value);
  return fused_multiply_add(rest, inverse_root * 0.5f, root);
}

// Returns 1 / value, rounded to nearest, for a value in [2^-125, 2^125].
template <typename Seeds>
AMP_EXT_INLINE float fast_reciprocal(float value) {
  const float near = Seeds::reciprocal(value);
  return fused_multiply_add(near, fused_multiply_add(-value, near, 1.0f), near);
}

// Returns n / d, rounded to nearest, from the reciprocal of d. Requires finite n and n / d, |n| >=
// 2^-101 or n = 0, and |n / d| >= 2^-63 or n = 0. Subtracting the error gives 0 / d the sign of n.
AMP_EXT_INLINE float quotient_from(float numerator, float denominator, float reciprocal) {
  const float quotient = numerator * reciprocal;
  const float excess = fused_multiply_add(denominator, quotient, -numerator);
  return fused_multiply_add(-reciprocal, excess, quotient);
}

}  // namespace amp_ext
