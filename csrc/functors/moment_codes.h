// Moments in 8 bits.
//
// A first moment beside a second one is a ratio to its root (RatioCode): at most 7.3 with Adam's
// betas, so that no group needs a scale, and an update errs by a bounded part of itself whatever
// the first moments beside it are. A second moment (RootCode) and a momentum (MomentumCode) are
// measured in a power of two for a group of 32 elements, as numbers of four ranges, of which the
// first is linear.
//
// Nothing that is not finite gets lost: a ratio has a code for it, a group an exponent, by which
// all 32 are NaN.
//
// V is float or a vector of it, U uint32_t or a vector of as many; a code is in the last 8 bits.
#pragma once

#include <cstdint>

#include "functors/numeric.h"
#include "storage.h"

namespace amp_ext {

// Elements that share an exponent.
inline constexpr int kGroupSize = 32;

struct RatioCode {
  static constexpr float kLargestRatio = 8.0f;
  static constexpr float kCodes = 134.9375f;   // 127 * 8.5 / 8: the largest ratio has code 127
  static constexpr float kFirstQuiet = 32.0f;  // the first place that is dithered quietly
  static constexpr uint32_t kNan = 0x80u;

  template <typename V, typename U>
  static AMP_EXT_INLINE V decode(U code, V unit) {
    const V place = to_number(code << 24) * 0x1p-24f;
    const V size = select(place < 0, V{} - place, place);
    const V ratio = place / (2.0f * kCodes - 2.0f * size);
    return select(code == kNan, V{} + float_of(0x7fc00000u), ratio * unit);
  }

  // To nearest, a ratio stands still that changes by less than half a code in a step: a small one
  // without gradients, which would move its parameter until the next; any, where beta1 is near to
  // 1; that of gradients that agree. From kFirstQuiet on dither is nearer to 0.5: there codes are
  // so far apart that it is noise above all.
  template <typename V, typename U>
  static AMP_EXT_INLINE U encode(V moment, V unit, bool dithers, U word) {
    const V size = float_of(bits_of(moment) & 0x7fffffffu);
    const V largest = kLargestRatio * unit;
    const V limited = select(size < largest, size, largest);
    V place = kCodes * limited / (limited + 0.5f * unit);
    place = select(place < 128, place, V{});  // NaN: beside a unit that is 0, or not finite
    // From 2^-13 to 1 - 2^-13, so that a code that was decoded is itself under any word.
    const V dither = to_number(((word >> 20) << 1) + 1u) * 0x1p-13f;
    const V if_dithered = select(place < kFirstQuiet, dither, dither * 0.890625f + 0.0546875f);
    const V added = select(dithers, if_dithered, V{} + 0.5f);
    const U code = to_integer(place + added);
    const U sign = bits_of(moment) >> 31;
    const auto nothing = (moment - moment) + (unit - unit);
    return select(nothing == V{}, (code ^ (U{} - sign)) + sign, U{} + kNan);
  }
};

// What all members of a group are measured in. Its byte is the exponent of a float32; that of inf
// makes NaN of all codes, which are 0 then.
struct GroupUnit {
  static constexpr uint32_t kNan = 255;

  uint32_t byte;

  // `largest` are the bits of the largest magnitude, as it is rounded; `last` is the last unit that
  // there is, above which codes saturate.
  static AMP_EXT_INLINE GroupUnit above(uint32_t largest, uint32_t last) {
    const uint32_t exponent = (largest >> 23) + 1;
    return {largest >= 0x7f800000u ? kNan : exponent < last ? exponent : last};
  }
  AMP_EXT_INLINE bool is_nan() const { return byte == kNan; }
  AMP_EXT_INLINE float value() const { return float_of(byte << 23); }
  AMP_EXT_INLINE float inverse() const { return float_of((254 - byte) << 23); }
};

// Numbers from 0 to 1: below 1/8 linear, above it octaves, each of as many codes.
template <int kMantissaBits>
struct MagnitudeCode {
  static constexpr int kDropped = 23 - kMantissaBits;
  static constexpr uint32_t kRange = 1u << kMantissaBits;
  static constexpr uint32_t kEighth = 0x3e000000u;

  template <typename U>
  static AMP_EXT_INLINE auto decode(U code) {
    const auto linear = to_number(code) * (1.0f / (8 * kRange));
    const auto octave = float_of((code << kDropped) + (kEighth - (kRange << kDropped)));
    return select(as_signed(code) < static_cast<int32_t>(kRange), linear, octave);
  }

  // The bits of a magnitude with what rounds it up, for the unit of its group: cut off at the last
  // code below that, the largest could not grow by less than a code in a step.
  template <typename U>
  static AMP_EXT_INLINE U lifted(U bits, bool dithers, U word) {
    const U sum = bits + added(dithers, word);
    const U limited = select(as_signed(sum) < 0x7f800000, sum, U{} + 0x7f7fffffu);
    const U finite = select(as_signed(bits) < 0x7f800000, limited, bits);
    return select(as_signed(bits) < 0x00800000, bits, finite);  // the least unit has these
  }

  template <typename V, typename U>
  static AMP_EXT_INLINE U encode(V number, bool dithers, U word) {
    // With an eighth more, floats are linear there.
    const auto is_linear = number < 0.125f;
    const U bits = bits_of(select(is_linear, number + 0.125f, number)) - kEighth;
    const U code =
        ((bits + added(dithers, word)) >> kDropped) + select(is_linear, U{}, U{} + kRange);
    constexpr uint32_t kLargest = 4 * kRange - 1;
    return select(as_signed(code) < static_cast<int32_t>(kLargest), code, U{} + kLargest);
  }

 private:
  template <typename U>
  static AMP_EXT_INLINE U added(bool dithers, U word) {
    return select(dithers, word >> (32 - kDropped), U{} + (1u << (kDropped - 1)));
  }
};

// A second moment: its root. None but 0 has code 0, or a small one beside large ones would soon
// divide its first moment by eps alone.
struct RootCode {
  using Magnitude = MagnitudeCode<6>;
  static constexpr uint32_t kLastUnit = 127 + 64;  // the square of which is no number

  template <typename V>
  static AMP_EXT_INLINE V measured(V moment) {
    return square_root(select(moment < 0x1p-126f, V{}, moment));
  }
  template <typename V>
  static AMP_EXT_INLINE V number(V measured) {
    return measured * measured;
  }
  template <typename V, typename U>
  static AMP_EXT_INLINE U encode(V measured, float inverse_unit, bool dithers, U word) {
    const U code = Magnitude::encode(measured * inverse_unit, dithers, word);
    return select(measured > 0, select(code == U{}, U{} + 1u, code), code);
  }
  template <typename U, typename Unit>
  static AMP_EXT_INLINE auto decode(U code, Unit unit) {
    return Magnitude::decode(code) * unit;
  }
};

// A momentum: sign and magnitude.
struct MomentumCode {
  using Magnitude = MagnitudeCode<5>;
  static constexpr uint32_t kLastUnit = 127 + 126;  // the inverse of 2^127 is no normal number

  template <typename V>
  static AMP_EXT_INLINE V measured(V momentum) {
    return momentum;
  }
  template <typename V>
  static AMP_EXT_INLINE V number(V measured) {
    return measured;
  }
  template <typename V, typename U>
  static AMP_EXT_INLINE U encode(V measured, float inverse_unit, bool dithers, U word) {
    const U bits = bits_of(measured);
    const V size = float_of(bits & 0x7fffffffu);
    return Magnitude::encode(size * inverse_unit, dithers, word) | ((bits >> 31) << 7);
  }
  template <typename U, typename Unit>
  static AMP_EXT_INLINE auto decode(U code, Unit unit) {
    const auto size = Magnitude::decode(code & 0x7fu) * unit;
    return float_of(bits_of(size) | ((code >> 7) << 31));
  }
};

}  // namespace amp_ext
