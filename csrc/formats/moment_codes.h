// 8-bit formats of moments.
//
// Adam stores the first moment as its ratio to the square root of the second moment (RatioCode). An
// element's own second moment sets the scale, so large neighbours don't increase its error. Ratios
// are divided by a unit, the power of two at or below the root. For a second moment (RootCode) or a
// momentum (MomentumCode), the unit is a power of two that 32 elements (a block) share.
//
// inf and NaN are never lost: RatioCode has a code for NaN, and a special exponent makes all 32
// elements of a block NaN.
//
// V is float or a vector of float, U is uint32_t or a vector of as many uint32_t. An 8-bit code is
// in the lowest bits of a U.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/storage.h"
#include "numeric.h"

namespace amp_ext {

// Number of elements that share an exponent.
inline constexpr int kBlockSize = 32;

// Returns the bits of a ratio's unit, the power of two at or below the root of a second moment, by
// halving the exponent. 0 and subnormal numbers give 2^-64; inf and NaN give inf.
template <typename U>
AMP_EXT_INLINE U unit_below_root(U bits) {
  const U unit = ((bits >> 1) + 0x1fc00000u) & 0x7f800000u;
  return select(as_signed(bits) < 0x7f800000, unit, U{} + 0x7f800000u);
}
// Returns the unit of a ratio from the bits of the root itself, instead of the second moment.
template <typename U>
AMP_EXT_INLINE U unit_below(U bits) {
  return larger_word(bits & 0x7f800000u, U{} + 0x1f800000u);
}

// Returns the bits of 2 / unit, from the bits of a finite root (see unit_below).
template <typename U>
AMP_EXT_INLINE U twice_inverse_unit(U bits) {
  const U inverse = ~bits & 0x7f800000u;  // the bits of 2^128 minus the bits of the unit
  return smaller_word(inverse, U{} + 0x60000000u);
}
// Returns the bits of 2 / unit, from the bits of a finite second moment (see unit_below_root).
template <typename U>
AMP_EXT_INLINE U twice_inverse_unit_below_root(U bits) {
  return ~((bits >> 1) + 0x1fc00000u) & 0x7f800000u;
}

// Format of a first moment: the sign, and a 7-bit index that selects one of 127 ratios to the unit;
// index 127 is NaN. `unit` has the bits of a power of two.
//
// A ratio has the index kOrigin - x, where bits(x) = kMirror - bits(ratio + kOffset): x is about
// 98 / (ratio + kOffset), because float bits are nearly logarithms. Neighbouring ratios are
// (ratio + 0.73)^2 / 97 apart, up to a factor of 1.5.
struct RatioCode {
  static constexpr uint32_t kMirror = 0x82400000u;  // the bits of 128 plus the bits of 0.75
  static constexpr float kOrigin = 132.0f;
  static constexpr float kOffset = 0.734375f;  // its bits are kMirror minus the bits of kOrigin
  static constexpr uint32_t kLargest = 0x41800000;  // the bits of 16: ratio + kOffset at index 126
  static constexpr uint32_t kNan = 0x7fu;

  template <typename U>
  static AMP_EXT_INLINE auto decode(U code, U unit) {
    const U place = code & 0x7fu;
    const U sign = (code << 24) & 0x80000000u;
    const U moment = bits_of(decode_number(place | kPlaceBits, unit, sign));
    return float_of(select(place == kNan, U{} + 0x7fc00000u, moment));
  }

  // Dequantizes an index that is not kNan. `place` has the bits of the float 2^23 + index.
  static constexpr uint32_t kPlaceBits = 0x4b000000u;
  template <typename U>
  static AMP_EXT_INLINE auto decode_number(U place, U unit, U sign) {
    const auto x = (0x1p23f + kOrigin) - float_of(place);
    const auto ratio = float_of(kMirror - bits_of(x)) - kOffset;
    return float_of(bits_of(ratio * float_of(unit)) | sign);
  }

  // Quantizes a moment. Rounding to nearest would freeze a ratio that changes by less than half a
  // code per step, for example while gradients are 0.
  template <typename V, typename U>
  static AMP_EXT_INLINE U encode(V moment, U unit, bool dithers, U word) {
    // The bits of moment / unit + kOffset, with the magnitude of the moment.
    const V inverse = float_of(0x7f000000u - unit);  // -inf if the unit is inf
    const U sum = bits_of(float_of(bits_of(moment) & 0x7fffffffu) * inverse + kOffset);
    const U added = select(dithers, word >> 19, U{} + 4096u);
    const U code = (((place_of(sum) + added) >> 13) & 0x7fu) | ((bits_of(moment) >> 24) & 0x80u);
    // NaN if the sum is inf or NaN, or negative because the unit is infinite.
    return select(as_signed(sum >> 23) < 255, code, U{} + kNan);
  }

  // Returns the dithered index of a moment whose ratio is finite, in bits 13 to 19. `sum` is twice
  // the sum in `encode`, with the same rounding.
  template <typename V, typename U>
  static AMP_EXT_INLINE U encode_number(V moment, U twice_inverse, U word) {
    const V sum =
        add_exact_product(magnitude_of(moment), float_of(twice_inverse), V{} + 2.0f * kOffset);
    return place_of<1>(bits_of(sum)) + (word >> 19);
  }

 private:
  // Returns the index in units of 2^-13. A dequantized value gets its old index with any dither.
  // `sum` is multiplied by 2^kPower.
  template <int kPower = 0, typename U>
  static AMP_EXT_INLINE U place_of(U sum) {
    constexpr uint32_t kLimit = kLargest + (kPower << 23);
    const U limited = smaller_word(sum, U{} + kLimit);
    return bits_of((1024.0f + kOrigin) - float_of(kMirror + (kPower << 23) - limited));
  }
};

// Unit of a block, a power of two. `byte` is its biased float32 exponent; 255 marks a block with
// inf or NaN, which is dequantized as NaN.
struct BlockUnit {
  static constexpr uint32_t kNan = 255;

  uint32_t byte;

  // Returns the unit above `largest`, the bits of a block's largest rounded magnitude. `last` is
  // the exponent of the largest unit; `reserve` is the distance, in float bits, from the largest
  // code to the unit.
  static AMP_EXT_INLINE BlockUnit above(uint32_t largest, uint32_t last, uint32_t reserve) {
    const uint32_t exponent = ((largest + reserve) >> 23) + 1;
    return {largest >= 0x7f800000u ? kNan : exponent < last ? exponent : last};
  }
  AMP_EXT_INLINE bool is_nan() const { return byte == kNan; }
  AMP_EXT_INLINE float value() const { return float_of(byte << 23); }
  AMP_EXT_INLINE float inverse() const { return float_of((254 - byte) << 23); }
};

// Format of a second moment: root / unit + 1/16, because floats near 1/16 are evenly spaced. Only a
// root of 0 gets code 0; otherwise a step would divide a first moment by eps alone.
struct RootCode {
  static constexpr uint32_t kLastUnit = 127 + 64;  // 2^64, whose square is inf
  static constexpr uint32_t kReserve = 0x100000;   // the largest code is below 15/16 of the unit
  static constexpr uint32_t kSixteenth = 0x3d800000u;

  // Returns the root to quantize, as computed by the functor. A root below 2^-63 counts as 0.
  template <typename V>
  static AMP_EXT_INLINE V measured(V root) {
    return select(root < 0x1p-63f, V{}, root);
  }
  template <typename V>
  static AMP_EXT_INLINE V number(V measured) {
    return measured * measured;
  }
  // Adds the dither, or half a code, to the bits of a root (below 2^64, so the sum is finite).
  template <typename U>
  static AMP_EXT_INLINE U lifted(U bits, bool dithers, U word) {
    return bits + added(dithers, word);
  }
  template <typename V, typename U>
  static AMP_EXT_INLINE U encode(V measured, float inverse_unit, bool dithers, U word) {
    const U bits = bits_of(measured * inverse_unit + 0.0625f) + added(dithers, word);
    const U code = (bits >> 17) - (kSixteenth >> 17);
    const U limited = select(as_signed(code) < 255, code, U{} + 255u);
    const U root = bits_of(measured);
    const U least = select(as_signed(root) < 1, root, U{} + 1u);
    return select(as_signed(limited) < as_signed(least), least, limited);
  }
  template <typename U, typename Unit>
  static AMP_EXT_INLINE auto decode(U code, Unit unit) {
    return (float_of((code << 17) + kSixteenth) - 0.0625f) * unit;
  }

  // Constants of the fast path, which always dithers. On a GPU, its roots are multiplied by 2^32,
  // and second moments are below 2^64. `largest` has the bits of a block's largest root plus its
  // dither. If it is less than 2^17 above kFastLeast, the root may count as 0, so the block is
  // unusual.
  static constexpr uint32_t kFastExponent = 32;
  static constexpr uint32_t kFastLeast = (127u - 63u + kFastExponent) << 23;
  static AMP_EXT_INLINE bool is_unusual(uint32_t largest) {
    return largest - kFastLeast < (1u << 17);
  }
  // Returns the exponent byte of a block's unit; 1 if all roots of the block count as 0.
  static AMP_EXT_INLINE uint32_t fast_unit(uint32_t largest) {
    return largest < kFastLeast ? 1 : ((largest + kReserve) >> 23) + 1 - kFastExponent;
  }
  // Returns (code << 17) + kSixteenth, plus lower bits to ignore. `root` and `least` are multiplied
  // by 2^kExponent, and `inverse_unit` is divided by it. A root between 0 and `least`, 2^-10 of the
  // unit, is raised to `least`, so that its code is at least 1.
  template <int kExponent = kFastExponent, typename V, typename U>
  static AMP_EXT_INLINE U fast_encode(V root, V least, V inverse_unit, U word) {
    constexpr float kLeastRoot = kExponent == 0 ? 0x1p-63f : 0x1p-31f;
    static_assert(kExponent == 0 || kExponent == kFastExponent);
    const V measured = root < kLeastRoot ? V{} : maximum(root, least);
    return bits_of(add_exact_product(measured, inverse_unit, V{} + 0.0625f)) + (word >> 15);
  }
  // Dequantizes (code << 17) + kSixteenth. The products with the unit below are exact.
  template <typename V, typename U>
  static AMP_EXT_INLINE V fast_decode(U bits, V unit) {
    return add_exact_product(float_of(bits), unit, unit * -0.0625f);
  }

 private:
  template <typename U>
  static AMP_EXT_INLINE U added(bool dithers, U word) {
    return select(dithers, word >> 15, U{} + (1u << 16));
  }
};

// Format of a momentum: sign, and magnitude / unit. Codes are linear below 1/8. Above, each octave
// (factor of two) has as many codes as that linear part.
struct MomentumCode {
  static constexpr uint32_t kLastUnit = 127 + 126;  // the inverse of 2^127 would be subnormal
  static constexpr uint32_t kReserve = 0;

  template <typename V>
  static AMP_EXT_INLINE V measured(V momentum) {
    return momentum;
  }
  template <typename V>
  static AMP_EXT_INLINE V number(V measured) {
    return measured;
  }
  // Adds the dither, or half a code, to the bits of a magnitude before the unit of its block is
  // chosen: a magnitude that reaches the unit then gets a larger unit.
  template <typename U>
  static AMP_EXT_INLINE U lifted(U bits, bool dithers, U word) {
    const U sum = bits + added(dithers, word);
    const U limited = select(as_signed(sum) < 0x7f800000, sum, U{} + 0x7f7fffffu);
    const U finite = select(as_signed(bits) < 0x7f800000, limited, bits);
    return select(as_signed(bits) < 0x00800000, bits,
                  finite);  // any subnormal number gives the smallest unit
  }
  template <typename V, typename U>
  static AMP_EXT_INLINE U encode(V measured, float inverse_unit, bool dithers, U word) {
    const U sign = (bits_of(measured) >> 31) << 7;
    const V size = float_of(bits_of(measured) & 0x7fffffffu) * inverse_unit;
    // Floats between 1/8 and 1/4 are evenly spaced, so adding 1/8 makes the codes linear.
    const auto is_linear = size < 0.125f;
    const U bits = bits_of(select(is_linear, size + 0.125f, size)) - kEighth;
    const U code =
        ((bits + added(dithers, word)) >> kDropped) + select(is_linear, U{}, U{} + kRange);
    constexpr uint32_t kLargest = 4 * kRange - 1;
    return select(as_signed(code) < static_cast<int32_t>(kLargest), code, U{} + kLargest) | sign;
  }
  template <typename U, typename Unit>
  static AMP_EXT_INLINE auto decode(U code, Unit unit) {
    const U place = code & 0x7fu;
    const auto linear = to_number(place) * (1.0f / (8 * kRange));
    const auto octave = float_of((place << kDropped) + (kEighth - (kRange << kDropped)));
    const auto size = select(as_signed(place) < static_cast<int32_t>(kRange), linear, octave);
    return float_of(bits_of(size * unit) | ((code >> 7) << 31));
  }

 private:
  static constexpr int kMantissaBits = 5;
  static constexpr int kDropped = 23 - kMantissaBits;
  static constexpr uint32_t kRange = 1u << kMantissaBits;
  static constexpr uint32_t kEighth = 0x3e000000u;  // the bits of 1/8

  template <typename U>
  static AMP_EXT_INLINE U added(bool dithers, U word) {
    return select(dithers, word >> (32 - kDropped), U{} + (1u << (kDropped - 1)));
  }
};

}  // namespace amp_ext
