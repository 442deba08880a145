// Square roots and quotients from approximations that a GPU computes in one instruction.
//
// Each is refined by fused multiply-adds until it is rounded to nearest as IEEE 754 asks
// (Markstein, "IA-64 and Elementary Functions", 2000, chapters 8 and 9), without the test for
// operands outside the range in which that holds. `Seeds` has the approximations. A GPU's own
// operators take the same steps, so its approximations are good enough;
// tests/operations/test_gpu.py tries them.
#pragma once

#include "elements/numeric.h"

namespace amp_ext {

// The root of a number in [2^-126, 2^127], rounded to nearest. `inverse_root` approximates
// 1 / sqrt(value).
AMP_EXT_INLINE float root_from(float value, float inverse_root) {
  const float root = value * inverse_root;
  const float rest = fused_multiply_add(-root, root, value);
  return fused_multiply_add(rest, inverse_root * 0.5f, root);
}

// 1 / value, rounded to nearest, for a value in [2^-125, 2^125].
template <typename Seeds>
AMP_EXT_INLINE float fast_reciprocal(float value) {
  const float near = Seeds::reciprocal(value);
  return fused_multiply_add(near, fused_multiply_add(-value, near, 1.0f), near);
}

// numerator / denominator, rounded to nearest, from the reciprocal of the denominator. The
// numerator is 0 or at least 2^-101, the quotient 0 or at least 2^-63, and both are finite. A
// quotient of 0 has the sign of its numerator, since the rest is negated before it is added.
AMP_EXT_INLINE float quotient_from(float numerator, float denominator, float reciprocal) {
  const float quotient = numerator * reciprocal;
  const float excess = fused_multiply_add(denominator, quotient, -numerator);
  return fused_multiply_add(-reciprocal, excess, quotient);
}

}  // namespace amp_ext
