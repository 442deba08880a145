// Moments in 8 bits.
//
// A first moment beside a second one is a ratio to its root (RatioCode): at most 7.3 with Adam's
// betas, so that no block needs a scale, and an update errs by a bounded part of itself whatever
// the first moments beside it are. It is measured in the power of two below that root. A second
// moment (RootCode) and a momentum (MomentumCode) are measured in a power of two for a block of 32
// elements.
//
// Nothing that is not finite gets lost: a ratio has a code for it, a block an exponent, by which
// all 32 are NaN.
//
// V is float or a vector of it, U uint32_t or a vector of as many; a code is in the last 8 bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "elements/numeric.h"
#include "elements/storage.h"

namespace amp_ext {

// Elements that share an exponent.
inline constexpr int kBlockSize = 32;

// The power of two at or below the root of a second moment, which is not negative, by its bits: no
// root has to be taken. 2^-64 for 0 and subnormal numbers; inf for inf and NaN, half of whose
// exponent would be that of a finite number.
template <typename U>
AMP_EXT_INLINE U unit_below_root(U bits) {
  const U unit = ((bits >> 1) + 0x1fc00000u) & 0x7f800000u;
  return select(as_signed(bits) < 0x7f800000, unit, U{} + 0x7f800000u);
}
// The same unit, by the bits of the root itself.
template <typename U>
AMP_EXT_INLINE U unit_below(U bits) {
  return larger_word(bits & 0x7f800000u, U{} + 0x1f800000u);
}

// Twice the inverse of the unit below a finite root, by the bits of the root.
template <typename U>
AMP_EXT_INLINE U twice_inverse_unit(U bits) {
  const U inverse = ~bits & 0x7f800000u;  // the bits of 2^128 less those of the unit
  return smaller_word(inverse, U{} + 0x60000000u);
}
// The same by the bits of a finite second moment.
template <typename U>
AMP_EXT_INLINE U twice_inverse_unit_below_root(U bits) {
  return ~((bits >> 1) + 0x1fc00000u) & 0x7f800000u;
}

// A first moment: its sign, and the place of its ratio among 127; place 127 is NaN. `unit` has the
// bits of a power of two.
//
// The place of a ratio is kOrigin - x, where the bits of x and those of ratio + kOffset sum up to
// kMirror: the bits of floats are nearly logarithms, so that ratio + kOffset is nearly 98 / x, a
// hyperbola, by one subtraction of integers. Neighbours are (ratio + 0.73)^2 / 97 apart, within a
// factor of 1.5.
struct RatioCode {
  static constexpr uint32_t kMirror = 0x82400000u;  // the bits of 128 plus those of 0.75
  static constexpr float kOrigin = 132.0f;
  static constexpr float kOffset = 0.734375f;       // its bits are kMirror less those of kOrigin
  static constexpr uint32_t kLargest = 0x41800000;  // the bits of 16, which has place 126
  static constexpr uint32_t kNan = 0x7fu;

  template <typename U>
  static AMP_EXT_INLINE auto decode(U code, U unit) {
    const U place = code & 0x7fu;
    const U sign = (code << 24) & 0x80000000u;
    const U moment = bits_of(decode_number(place | kPlaceBits, unit, sign));
    return float_of(select(place == kNan, U{} + 0x7fc00000u, moment));
  }

  // The same for a code that is a number: `place` are the bits of 2^23 plus its place.
  static constexpr uint32_t kPlaceBits = 0x4b000000u;
  template <typename U>
  static AMP_EXT_INLINE auto decode_number(U place, U unit, U sign) {
    const auto x = (0x1p23f + kOrigin) - float_of(place);
    const auto ratio = float_of(kMirror - bits_of(x)) - kOffset;
    return float_of(bits_of(ratio * float_of(unit)) | sign);
  }

  // To nearest, a ratio stands still that changes by less than half a code in a step: a small one
  // without gradients, which would move its parameter until the next; any, where beta1 is near to
  // 1; that of gradients that agree.
  template <typename V, typename U>
  static AMP_EXT_INLINE U encode(V moment, U unit, bool dithers, U word) {
    const U sum = sum_of(moment, unit);
    const U added = select(dithers, word >> 19, U{} + 4096u);
    const U code = (((place_of(sum) + added) >> 13) & 0x7fu) | ((bits_of(moment) >> 24) & 0x80u);
    // Neither inf, NaN nor negative, as beside an infinite unit.
    return select(as_signed(sum >> 23) < 255, code, U{} + kNan);
  }

  // The dithered place of a moment whose ratio is finite, in the bits 13 to 19. The sum is twice
  // that of `encode`, and rounded alike.
  template <typename V, typename U>
  static AMP_EXT_INLINE U encode_number(V moment, U twice_inverse, U word) {
    const V sum =
        add_exact_product(magnitude_of(moment), float_of(twice_inverse), V{} + 2.0f * kOffset);
    return place_of<1>(bits_of(sum)) + (word >> 19);
  }

 private:
  // The bits of a ratio plus kOffset.
  template <typename V, typename U>
  static AMP_EXT_INLINE U sum_of(V moment, U unit) {
    const V inverse = float_of(0x7f000000u - unit);  // -inf beside inf
    return bits_of(float_of(bits_of(moment) & 0x7fffffffu) * inverse + kOffset);
  }
  // The place in units of 2^-13, the last place of this difference: a code that was decoded is
  // itself under any word.
  // `sum` is multiplied by 2^kPower.
  template <int kPower = 0, typename U>
  static AMP_EXT_INLINE U place_of(U sum) {
    constexpr uint32_t kLimit = kLargest + (kPower << 23);
    const U limited = smaller_word(sum, U{} + kLimit);
    return bits_of((1024.0f + kOrigin) - float_of(kMirror + (kPower << 23) - limited));
  }
};

// What all elements of a block are measured in. Its byte is the exponent of a float32; that of inf
// makes NaN of all codes, which are 0 then.
struct BlockUnit {
  static constexpr uint32_t kNan = 255;

  uint32_t byte;

  // `largest` are the bits of the largest magnitude, as it is rounded; `last` is the last unit that
  // there is, above which codes saturate; `reserve` is what the largest code lies below the unit.
  static AMP_EXT_INLINE BlockUnit above(uint32_t largest, uint32_t last, uint32_t reserve) {
    const uint32_t exponent = ((largest + reserve) >> 23) + 1;
    return {largest >= 0x7f800000u ? kNan : exponent < last ? exponent : last};
  }
  AMP_EXT_INLINE bool is_nan() const { return byte == kNan; }
  AMP_EXT_INLINE float value() const { return float_of(byte << 23); }
  AMP_EXT_INLINE float inverse() const { return float_of((254 - byte) << 23); }
};

// A second moment: its root, with 1/16 more, so that floats are linear near to 0 and no range is a
// case of its own. None but 0 has code 0, or a small one beside large ones would soon divide its
// first moment by eps alone.
struct RootCode {
  static constexpr uint32_t kLastUnit = 127 + 64;  // the square of which is no number
  static constexpr uint32_t kReserve = 0x100000;   // a root is less than 15/16 of its unit
  static constexpr uint32_t kSixteenth = 0x3d800000u;

  // The functor has taken the root.
  template <typename V>
  static AMP_EXT_INLINE V measured(V root) {
    return select(root < 0x1p-63f, V{}, root);
  }
  template <typename V>
  static AMP_EXT_INLINE V number(V measured) {
    return measured * measured;
  }
  // Roots are below 2^64: what is added makes no inf of them.
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

  // The fast path always dithers. That of a GPU has roots times 2^32, of second moments below 2^64.
  // `largest` are the bits of the largest root of a block, lifted. Below kFastLeast, with what is
  // added, they do not tell whether it is measured as 0, and the block is unusual.
  static constexpr uint32_t kFastExponent = 32;
  static constexpr uint32_t kFastLeast = (127u - 63u + kFastExponent) << 23;
  static AMP_EXT_INLINE bool is_unusual(uint32_t largest) {
    return largest - kFastLeast < (1u << 17);
  }
  // The unit of a block; of zeros the least one.
  static AMP_EXT_INLINE uint32_t fast_unit(uint32_t largest) {
    return largest < kFastLeast ? 1 : ((largest + kReserve) >> 23) + 1 - kFastExponent;
  }
  // The code in the bits 17 and up, plus kSixteenth. `root` and `least` are multiplied by
  // 2^kExponent, `inverse_unit` is divided by it. `least` is 2^-10 of the unit: what is not 0 has
  // code 1 at least.
  template <int kExponent = kFastExponent, typename V, typename U>
  static AMP_EXT_INLINE U fast_encode(V root, V least, V inverse_unit, U word) {
    constexpr float kLeastRoot = kExponent == 0 ? 0x1p-63f : 0x1p-31f;
    static_assert(kExponent == 0 || kExponent == kFastExponent);
    const V measured = root < kLeastRoot ? V{} : maximum(root, least);
    return bits_of(add_exact_product(measured, inverse_unit, V{} + 0.0625f)) + (word >> 15);
  }
  // decode() of a code in the bits 17 and up, plus kSixteenth; both products are exact.
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

// A momentum: its sign, and its magnitude from 0 to 1: below 1/8 linear, above it octaves, each of
// as many codes.
struct MomentumCode {
  static constexpr uint32_t kLastUnit = 127 + 126;  // the inverse of 2^127 is no normal number
  static constexpr uint32_t kReserve = 0;

  template <typename V>
  static AMP_EXT_INLINE V measured(V momentum) {
    return momentum;
  }
  template <typename V>
  static AMP_EXT_INLINE V number(V measured) {
    return measured;
  }
  // The bits of a magnitude with what rounds it up, for the unit of its block: cut off at the last
  // code below that, the largest could not grow by less than a code in a step.
  template <typename U>
  static AMP_EXT_INLINE U lifted(U bits, bool dithers, U word) {
    const U sum = bits + added(dithers, word);
    const U limited = select(as_signed(sum) < 0x7f800000, sum, U{} + 0x7f7fffffu);
    const U finite = select(as_signed(bits) < 0x7f800000, limited, bits);
    return select(as_signed(bits) < 0x00800000, bits, finite);  // the least unit has these
  }
  template <typename V, typename U>
  static AMP_EXT_INLINE U encode(V measured, float inverse_unit, bool dithers, U word) {
    const U sign = (bits_of(measured) >> 31) << 7;
    const V size = float_of(bits_of(measured) & 0x7fffffffu) * inverse_unit;
    // With an eighth more, floats are linear there.
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
