// 8-bit formats of moments.
//
// An optimizer with both moments stores the first one as its ratio to the root of the second one
// (RatioCode). With Adam's betas the ratio is at most 7.3, so blocks need no scale, and large
// neighbours don't increase the relative error of an update. The unit of a ratio is the power of
// two at or below that root. A second moment (RootCode) or a momentum (MomentumCode) has as unit a
// power of two that a block of 32 elements shares.
//
// inf and NaN are never lost: ratios have a code for NaN, and blocks have an exponent that makes
// all 32 elements NaN.
//
// V is float or a vector of float, U is uint32_t or a vector of as many uint32_t. The 8-bit code is
// in the last bits of a U.
#pragma once

#include <cmath>
#include <cstdint>

#include "elements/numeric.h"
#include "elements/storage.h"

namespace amp_ext {

// Number of elements that share an exponent.
inline constexpr int kBlockSize = 32;

// Returns the unit of a ratio: the power of two at or below the root of a second moment (>= 0).
// Argument and result are float bits, so no root is computed. 0 and subnormal numbers give 2^-64;
// inf and NaN give inf, because half of their exponent would look finite.
template <typename U>
AMP_EXT_INLINE U unit_below_root(U bits) {
  const U unit = ((bits >> 1) + 0x1fc00000u) & 0x7f800000u;
  return select(as_signed(bits) < 0x7f800000, unit, U{} + 0x7f800000u);
}
// Returns the same unit from the bits of the root.
template <typename U>
AMP_EXT_INLINE U unit_below(U bits) {
  return larger_word(bits & 0x7f800000u, U{} + 0x1f800000u);
}

// Returns twice the inverse of the unit of a finite root, given by the bits of the root.
template <typename U>
AMP_EXT_INLINE U twice_inverse_unit(U bits) {
  const U inverse = ~bits & 0x7f800000u;  // the bits of 2^128 minus the bits of the unit
  return smaller_word(inverse, U{} + 0x60000000u);
}
// Returns twice the inverse of the unit, from the bits of a finite second moment.
template <typename U>
AMP_EXT_INLINE U twice_inverse_unit_below_root(U bits) {
  return ~((bits >> 1) + 0x1fc00000u) & 0x7f800000u;
}

// Format of a first moment: the sign, and a 7-bit index into 127 ratios; index 127 is NaN. `unit`
// has the bits of a power of two.
//
// A ratio has the index kOrigin - x with bits(x) = kMirror - bits(ratio + kOffset). Float bits are
// nearly logarithms, so x is about 98 / (ratio + kOffset), a hyperbola that takes only one integer
// subtraction. Neighbouring ratios are (ratio + 0.73)^2 / 97 apart, up to a factor of 1.5.
struct RatioCode {
  static constexpr uint32_t kMirror = 0x82400000u;  // the bits of 128 plus the bits of 0.75
  static constexpr float kOrigin = 132.0f;
  static constexpr float kOffset = 0.734375f;  // its bits are kMirror minus the bits of kOrigin
  static constexpr uint32_t kLargest = 0x41800000;  // the bits of 16, the ratio with index 126
  static constexpr uint32_t kNan = 0x7fu;

  template <typename U>
  static AMP_EXT_INLINE auto decode(U code, U unit) {
    const U place = code & 0x7fu;
    const U sign = (code << 24) & 0x80000000u;
    const U moment = bits_of(decode_number(place | kPlaceBits, unit, sign));
    return float_of(select(place == kNan, U{} + 0x7fc00000u, moment));
  }

  // Decodes an index that is not NaN. `place` has the bits of 2^23 plus the index.
  static constexpr uint32_t kPlaceBits = 0x4b000000u;
  template <typename U>
  static AMP_EXT_INLINE auto decode_number(U place, U unit, U sign) {
    const auto x = (0x1p23f + kOrigin) - float_of(place);
    const auto ratio = float_of(kMirror - bits_of(x)) - kOffset;
    return float_of(bits_of(ratio * float_of(unit)) | sign);
  }

  // With rounding to nearest, a ratio that changes by less than half a code per step would freeze:
  // for example a small ratio while gradients are 0, which would keep moving its parameter, any
  // ratio if beta1 is near 1, or the ratio of gradients that agree.
  template <typename V, typename U>
  static AMP_EXT_INLINE U encode(V moment, U unit, bool dithers, U word) {
    const U sum = sum_of(moment, unit);
    const U added = select(dithers, word >> 19, U{} + 4096u);
    const U code = (((place_of(sum) + added) >> 13) & 0x7fu) | ((bits_of(moment) >> 24) & 0x80u);
    // Encodes NaN if the sum is inf, NaN, or negative because the unit is infinite.
    return select(as_signed(sum >> 23) < 255, code, U{} + kNan);
  }

  // Returns the dithered index, in bits 13 to 19, of a moment whose ratio is finite. The sum is
  // twice that of `encode` and is rounded in the same way.
  template <typename V, typename U>
  static AMP_EXT_INLINE U encode_number(V moment, U twice_inverse, U word) {
    const V sum =
        add_exact_product(magnitude_of(moment), float_of(twice_inverse), V{} + 2.0f * kOffset);
    return place_of<1>(bits_of(sum)) + (word >> 19);
  }

 private:
  // Returns the bits of ratio + kOffset.
  template <typename V, typename U>
  static AMP_EXT_INLINE U sum_of(V moment, U unit) {
    const V inverse = float_of(0x7f000000u - unit);  // -inf if the unit is inf
    return bits_of(float_of(bits_of(moment) & 0x7fffffffu) * inverse + kOffset);
  }
  // Returns the index in units of 2^-13, the resolution of this difference, so that a decoded value
  // is encoded to the same code with any `word`. `sum` is multiplied by 2^kPower.
  template <int kPower = 0, typename U>
  static AMP_EXT_INLINE U place_of(U sum) {
    constexpr uint32_t kLimit = kLargest + (kPower << 23);
    const U limited = smaller_word(sum, U{} + kLimit);
    return bits_of((1024.0f + kOrigin) - float_of(kMirror + (kPower << 23) - limited));
  }
};

// Unit of a block, a power of two. `byte` is its float32 exponent; 255 (inf) marks a block with an
// inf or NaN: all codes are 0, and all elements are decoded as NaN.
struct BlockUnit {
  static constexpr uint32_t kNan = 255;

  uint32_t byte;

  // Returns the unit above the largest magnitude of a block. `largest` has the bits of that
  // magnitude, with its rounding; `last` is the largest unit, beyond which codes saturate;
  // `reserve` is the distance in bits from the largest code to the unit.
  static AMP_EXT_INLINE BlockUnit above(uint32_t largest, uint32_t last, uint32_t reserve) {
    const uint32_t exponent = ((largest + reserve) >> 23) + 1;
    return {largest >= 0x7f800000u ? kNan : exponent < last ? exponent : last};
  }
  AMP_EXT_INLINE bool is_nan() const { return byte == kNan; }
  AMP_EXT_INLINE float value() const { return float_of(byte << 23); }
  AMP_EXT_INLINE float inverse() const { return float_of((254 - byte) << 23); }
};

// Format of a second moment: its root plus 1/16 of the unit. Floats near 1/16 are evenly spaced, so
// small roots need no separate case. Only 0 gets code 0; otherwise a small second moment in a block
// with large ones would become 0, and its first moment would be divided by eps alone.
struct RootCode {
  static constexpr uint32_t kLastUnit = 127 + 64;  // 2^64: its square is inf
  static constexpr uint32_t kReserve = 0x100000;   // the largest code is below 15/16 of the unit
  static constexpr uint32_t kSixteenth = 0x3d800000u;

  // Returns the value to encode. The functor has already computed the root.
  template <typename V>
  static AMP_EXT_INLINE V measured(V root) {
    return select(root < 0x1p-63f, V{}, root);
  }
  template <typename V>
  static AMP_EXT_INLINE V number(V measured) {
    return measured * measured;
  }
  // Adds the rounding. Roots are below 2^64, so the sum does not overflow.
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

  // Constants of the fast path, which always dithers. On a GPU its roots are multiplied by 2^32,
  // and second moments are below 2^64. `largest` has the bits of a block's largest root, with
  // rounding. Within 2^17 above kFastLeast, the rounding hides whether the root counts as 0: the
  // block is unusual.
  static constexpr uint32_t kFastExponent = 32;
  static constexpr uint32_t kFastLeast = (127u - 63u + kFastExponent) << 23;
  static AMP_EXT_INLINE bool is_unusual(uint32_t largest) {
    return largest - kFastLeast < (1u << 17);
  }
  // Returns the exponent byte of the unit of a block; 1 if the block is all zeros.
  static AMP_EXT_INLINE uint32_t fast_unit(uint32_t largest) {
    return largest < kFastLeast ? 1 : ((largest + kReserve) >> 23) + 1 - kFastExponent;
  }
  // Returns the code in bits 17 and up, plus kSixteenth. `root` and `least` are multiplied by
  // 2^kExponent, and `inverse_unit` is divided by it. `least`, 2^-10 of the unit, gives every
  // nonzero root a code of at least 1.
  template <int kExponent = kFastExponent, typename V, typename U>
  static AMP_EXT_INLINE U fast_encode(V root, V least, V inverse_unit, U word) {
    constexpr float kLeastRoot = kExponent == 0 ? 0x1p-63f : 0x1p-31f;
    static_assert(kExponent == 0 || kExponent == kFastExponent);
    const V measured = root < kLeastRoot ? V{} : maximum(root, least);
    return bits_of(add_exact_product(measured, inverse_unit, V{} + 0.0625f)) + (word >> 15);
  }
  // Decodes a code in bits 17 and up, plus kSixteenth. Both products are exact.
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

// Format of a momentum: the sign, and the magnitude as a fraction of the unit. Codes are linear
// below 1/8; above it, each octave (factor of two) has as many codes as the linear part.
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
  // Adds the rounding to the bits of a magnitude, before the unit of its block is chosen. Otherwise
  // the largest magnitude would be limited to the last code below the unit, and could not grow by
  // less than one code per step.
  template <typename U>
  static AMP_EXT_INLINE U lifted(U bits, bool dithers, U word) {
    const U sum = bits + added(dithers, word);
    const U limited = select(as_signed(sum) < 0x7f800000, sum, U{} + 0x7f7fffffu);
    const U finite = select(as_signed(bits) < 0x7f800000, limited, bits);
    return select(as_signed(bits) < 0x00800000, bits, finite);  // their unit is the least one
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
