// The 16-bit storage formats, and conversions that round to nearest even.
//
// The conversions use integer arithmetic and do not depend on flush-to-zero modes. Engines use
// native instructions with the same bits where the processor has them.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "numeric.h"

namespace amp_ext {

// Dtypes of tensors.
enum class DType : uint8_t { kFloat32, kFloat64, kFloat16, kBFloat16 };

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

template <typename Storage>
inline constexpr DType kDType = DType::kFloat32;
template <>
inline constexpr DType kDType<double> = DType::kFloat64;
template <>
inline constexpr DType kDType<Half> = DType::kFloat16;
template <>
inline constexpr DType kDType<BFloat16> = DType::kBFloat16;

// Calls `function` with a default value of the C++ type that stores `dtype`.
template <typename Function>
void for_dtype(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat32:
      return function(float());
    case DType::kFloat64:
      return function(double());
    case DType::kFloat16:
      return function(Half());
    case DType::kBFloat16:
      return function(BFloat16());
  }
}

// Type in which elements of a storage type are computed: double for double, else float.
template <typename Storage>
struct ComputeType {
  using type = std::conditional_t<std::is_same_v<Storage, double>, double, float>;
};

// BitPattern is the unsigned integer with the size of an element. The bits of kExponentMask are all
// set for inf and NaN.
template <typename Storage>
struct BitPattern {
  using type = std::conditional_t<sizeof(Storage) == 2, uint16_t,
                                  std::conditional_t<sizeof(Storage) == 4, uint32_t, uint64_t>>;
};
template <typename Storage>
inline constexpr typename BitPattern<Storage>::type kExponentMask = 0;
template <>
inline constexpr uint32_t kExponentMask<float> = 0x7f800000u;
template <>
inline constexpr uint64_t kExponentMask<double> = 0x7ff0000000000000ull;
template <>
inline constexpr uint16_t kExponentMask<Half> = 0x7c00u;
template <>
inline constexpr uint16_t kExponentMask<BFloat16> = 0x7f80u;

// True if a value is inf or NaN.
template <typename Storage>
AMP_EXT_INLINE bool is_nonfinite(Storage value) {
  typename BitPattern<Storage>::type bits;
  memcpy(&bits, &value, sizeof bits);
  return (bits & kExponentMask<Storage>) == kExponentMask<Storage>;
}

AMP_EXT_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

AMP_EXT_INLINE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

AMP_EXT_INLINE int32_t as_signed(uint32_t bits) { return static_cast<int32_t>(bits); }
// Return the smaller and the larger of two words, compared as signed integers.
AMP_EXT_INLINE uint32_t smaller_word(uint32_t a, uint32_t b) {
  return as_signed(a) < as_signed(b) ? a : b;
}
AMP_EXT_INLINE uint32_t larger_word(uint32_t a, uint32_t b) {
  return as_signed(a) < as_signed(b) ? b : a;
}
AMP_EXT_INLINE uint32_t to_integer(float value) { return static_cast<uint32_t>(value); }
AMP_EXT_INLINE float to_number(uint32_t integer) { return static_cast<float>(as_signed(integer)); }

AMP_EXT_INLINE float to_float(BFloat16 value) {
  return float_of(static_cast<uint32_t>(value.bits) << 16);
}

AMP_EXT_INLINE float to_float(Half value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t exponent = value.bits & 0x7c00u;
  const uint32_t mantissa = value.bits & 0x03ffu;
  // Change the exponent bias from 15 to 127; an exponent of all ones (inf, NaN) stays all ones.
  const uint32_t rebias = exponent == 0x7c00u ? (255u - 31u) << 23 : (127u - 15u) << 23;
  const uint32_t quiet = exponent == 0x7c00u && mantissa != 0 ? 0x00400000u : 0u;
  const uint32_t normal = ((exponent | mantissa) << 13) + rebias;
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(mantissa)) * 0x1p-24f);
  return float_of(sign | (exponent == 0 ? subnormal : normal | quiet));
}

AMP_EXT_INLINE void from_float(float value, BFloat16& stored) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  stored.bits = static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

AMP_EXT_INLINE void from_float(float value, Half& stored) {
  const uint32_t sign = (bits_of(value) >> 16) & 0x8000u;
  const uint32_t magnitude = bits_of(value) & 0x7fffffffu;
  // Normal: drop 13 bits of the mantissa, with rounding, and change the exponent bias.
  const uint32_t rounded = (magnitude + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t normal = rounded - ((127u - 15u) << 10);
  // Subnormal: the last bit of 0.5f is worth 2^-24, as in a subnormal float16, so adding rounds.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x01ffu);
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;  // 2^-14
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;            // 65520 rounds to inf
  result = magnitude > 0x7f800000u ? nan : result;
  stored.bits = static_cast<uint16_t>(sign | result);
}

AMP_EXT_INLINE float to_float(float value) { return value; }
AMP_EXT_INLINE void from_float(float value, float& stored) { stored = value; }

}  // namespace amp_ext
