// The functions that the formulas share, with the same bits on every processor.
//
// Elements (type V) are numbers in one engine and vectors of numbers in another, constants (type T)
// are always numbers. A comparison of vectors is a vector too, hence `select` instead of `if`.
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

// One of two elements, or of an element and a constant.
template <typename Condition, typename First, typename Second>
AMP_EXT_INLINE auto select(Condition condition, First if_true, Second if_false) {
  return condition ? if_true : if_false;
}

// -1, 0 or 1; zeros and NaN are themselves.
template <typename V>
AMP_EXT_INLINE V sign(V value) {
  return select(value > 0, V{} + 1, select(value < 0, V{} - 1, value));
}

AMP_EXT_INLINE float square_root(float value) { return std::sqrt(value); }
AMP_EXT_INLINE double square_root(double value) { return std::sqrt(value); }

// a * b + c, rounded once.
AMP_EXT_INLINE float fused_multiply_add(float a, float b, float c) { return std::fma(a, b, c); }

// a * b + c where a * b is exact, or so small beside c that its rounding is lost.
AMP_EXT_INLINE float add_exact_product(float a, float b, float c) {
  return fused_multiply_add(a, b, c);
}
// The larger of two numbers, neither of which is NaN.
AMP_EXT_INLINE float maximum(float a, float b) { return std::fmax(a, b); }
AMP_EXT_INLINE float magnitude_of(float value) { return std::fabs(value); }

// a * b, not joined with the sign that it is used with: where both signs of a product are used, the
// compiler would multiply twice.
AMP_EXT_INLINE float product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// start + weight * (end - start), from the nearer end, as torch.lerp does: with a weight of 1 it is
// the end.
template <typename T>
struct Interpolation {
  bool from_end;
  T factor;  // of the difference: the weight, or from the end the negative rest to 1

  static AMP_EXT_INLINE Interpolation of(double weight, double rest) {
    const bool from_end = static_cast<T>(weight) >= T(0.5);
    return {from_end, static_cast<T>(from_end ? -rest : weight)};
  }

  template <typename V>
  AMP_EXT_INLINE V operator()(V start, V end) const {
    return select(from_end, end, start) + factor * (end - start);
  }
};

// The larger of two numbers; NaN if either is NaN, as in torch.maximum.
template <typename V>
AMP_EXT_INLINE V larger(V a, V b) {
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
template <typename V>
AMP_EXT_INLINE auto is_finite(V value) {
  return value - value == V{};
}

}  // namespace amp_ext
