// Functions that the formulas share. They give the same bits on every processor.
//
// Elements (type V) are scalars or vectors of scalars; constants (type T) are scalars. Comparisons
// of vectors give vectors, so formulas use `select`, not `if`.
#pragma once

#include <cmath>
#include <cstdint>

// Marks a function that runs in every engine. An out-of-line copy would be compiled for the
// baseline instruction set, even if its callers use a wider one.
#if defined(__CUDACC__)
#define AMP_EXT_INLINE __host__ __device__ __forceinline__
#else
#define AMP_EXT_INLINE inline __attribute__((always_inline))
#endif

namespace amp_ext {

// Returns if_true where the condition holds, else if_false. With a vector as condition, one of the
// values may be a scalar.
template <typename Condition, typename First, typename Second>
AMP_EXT_INLINE auto select(Condition condition, First if_true, Second if_false) {
  return condition ? if_true : if_false;
}

// Returns -1, 0 or 1; zeros keep their sign, and NaN stays NaN.
template <typename V>
AMP_EXT_INLINE V sign(V value) {
  return select(value > 0, V{} + 1, select(value < 0, V{} - 1, value));
}

AMP_EXT_INLINE float square_root(float value) { return std::sqrt(value); }
AMP_EXT_INLINE double square_root(double value) { return std::sqrt(value); }

// Returns a * b + c with one rounding.
AMP_EXT_INLINE float fused_multiply_add(float a, float b, float c) { return std::fma(a, b, c); }

// Returns a * b + c. The product must be exact, or so small that its rounding does not change the
// sum.
AMP_EXT_INLINE float add_exact_product(float a, float b, float c) {
  return fused_multiply_add(a, b, c);
}
// Returns the larger of two numbers, neither of which may be NaN.
AMP_EXT_INLINE float maximum(float a, float b) { return std::fmax(a, b); }
AMP_EXT_INLINE float magnitude_of(float value) { return std::fabs(value); }

// Returns a * b. On a GPU, the intrinsic keeps the compiler from multiplying twice for code that
// needs both a * b and -(a * b).
AMP_EXT_INLINE float product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// Computes start + weight * (end - start), from `end` if the weight is at least 0.5, as torch.lerp:
// a weight of 1 gives exactly `end`.
template <typename T>
struct Interpolation {
  bool from_end;
  T factor;  // factor of end - start: weight, or weight - 1 if from_end

  static AMP_EXT_INLINE Interpolation of(double weight, double rest) {
    const bool from_end = static_cast<T>(weight) >= T(0.5);
    return {from_end, static_cast<T>(from_end ? -rest : weight)};
  }

  template <typename V>
  AMP_EXT_INLINE V operator()(V start, V end) const {
    return select(from_end, end, start) + factor * (end - start);
  }
};

// Returns the larger of two numbers, or NaN if either is NaN, as torch.maximum.
template <typename V>
AMP_EXT_INLINE V larger(V a, V b) {
  return select(a > b || a != a, a, b);
}

// Returns 1 - base^exponent for an integer exponent, within 2 units in the last place: 1 - pow(...)
// loses digits. With a = 1 - b, 1 - b^2 = a * (2 - a), and 1 - b * c = (1 - b) + (1 - c) * b. No
// term is negative.
AMP_EXT_INLINE double complement_of_power(double base, double exponent) {
  double result = 0.0;
  double factor = 1.0 - base;  // 1 - base^(2^k)
  for (auto bits = static_cast<uint64_t>(exponent); bits != 0; bits >>= 1) {
    if (bits & 1) result = std::fma(result, 1.0 - factor, factor);
    factor = factor * (2.0 - factor);
  }
  return result;
}

// True if a value is neither inf nor NaN.
template <typename V>
AMP_EXT_INLINE auto is_finite(V value) {
  return value - value == V{};
}

}  // namespace amp_ext
