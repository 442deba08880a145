// The scalar functions that the formulas share, with the same bits on every processor.
#pragma once

#include <cmath>
#include <cstdint>

// Marks a function that runs in every engine. It is always inlined: a copy kept as a function would
// be compiled for the plain instruction set, also when it is called from a wider one.
#if defined(__CUDACC__)
#define AMP_EXT_INLINE __host__ __device__ __forceinline__
#else
#define AMP_EXT_INLINE inline __attribute__((always_inline))
#endif

namespace amp_ext {

// One of two numbers. Formulas choose with it instead of `if`, which may keep a loop from becoming
// a vector loop.
template <typename T>
AMP_EXT_INLINE T select(bool condition, T if_true, T if_false) {
  return condition ? if_true : if_false;
}

// -1, 0 or 1; zeros and NaN are themselves.
template <typename T>
AMP_EXT_INLINE T sign(T value) {
  return select(value > T(0), T(1), select(value < T(0), T(-1), value));
}

// start + weight * (end - start), from the nearer end, as torch.lerp does: with a weight of 1 it is
// the end. `rest` is 1 - weight.
template <typename T>
AMP_EXT_INLINE T interpolate(T start, T end, T weight, T rest) {
  const T difference = end - start;
  return select(weight < T(0.5), start + weight * difference, end - difference * rest);
}

// The larger of two numbers; NaN if either is NaN, as in torch.maximum.
template <typename T>
AMP_EXT_INLINE T larger(T a, T b) {
  return select(a > b || a != a, a, b);
}

// 1 - base^exponent for a whole exponent, within 2 units in the last place: 1 - pow(...) would lose
// all digits that the power shares with 1. With a = 1 - b a square is 1 - b^2 = a (2 - a), and a
// product 1 - b c = (1 - b) + (1 - c) b: all terms are positive, so nothing cancels.
AMP_EXT_INLINE double complement_of_power(double base, double exponent) {
  double result = 0.0;
  double factor = 1.0 - base;  // 1 - base^(2^k)
  for (auto bits = static_cast<uint64_t>(exponent); bits != 0; bits >>= 1) {
    if (bits & 1) result = std::fma(result, 1.0 - factor, factor);
    factor = factor * (2.0 - factor);
  }
  return result;
}

// False for inf and NaN.
template <typename T>
AMP_EXT_INLINE bool is_finite(T value) {
  return value - value == T(0);
}

}  // namespace amp_ext
