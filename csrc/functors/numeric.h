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

// The larger of two numbers; NaN if either is NaN, as in torch.maximum.
template <typename T>
AMP_EXT_INLINE T larger(T a, T b) {
  return (a > b || a != a) ? a : b;
}

// base^exponent for a whole exponent, by repeated squaring: `pow` differs between libraries.
AMP_EXT_INLINE double whole_power(double base, double exponent) {
  double result = 1.0;
  for (auto bits = static_cast<uint64_t>(exponent); bits != 0; bits >>= 1) {
    if (bits & 1) result *= base;
    base *= base;
  }
  return result;
}

// False for inf and NaN.
template <typename T>
AMP_EXT_INLINE bool is_finite(T value) {
  return value - value == T(0);
}

}  // namespace amp_ext
