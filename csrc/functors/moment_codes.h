// Moments in 8 bits.
//
// A first moment beside a second one is a ratio to its root (RatioCode): at most 7.3 in Adam,
// so that no group needs a scale, and an update errs by a bounded part of itself whatever its
// neighbours do. A second moment (RootCode) and a momentum (MomentumCode) are measured in a power
// of two for a group of 32 elements, as numbers of four ranges, of which the first is linear.
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
  static constexpr float kCodes = 134.9375f;     // 127 * 8.5 / 8: the largest ratio has code 127
  static constexpr float kFirstNearest = 32.0f;  // codes that are not dithered, as noise they'd be
  static constexpr uint32_t kNan = 0x80u;

  template <typename V, typename U>
  static AMP_EXT_INLINE V decode(U code, V unit) {
    const V place = to_number(code << 24) * 0x1p-24f;
    const V size = select(place < 0, V{} - place, place);
    const V ratio = place / (2.0f * kCodes - 2.0f * size);
    return select(code == kNan, V{} + float_of(0x7fc00000u), ratio * unit);
  }

  // Without gradients a code that is rounded to nearest stops to fade at 4, and would move its
  // parameter until the next gradient; so the small ones are dithered.
  template <typename V, typename U>
  static AMP_EXT_INLINE U encode(V moment, V unit, bool dithers, U word) {
    const V size = float_of(bits_of(moment) & 0x7fffffffu);
    const V largest = kLargestRatio * unit;
    const V limited = select(size < largest, size, largest);
    V place = kCodes * limited / (limited + 0.5f * unit);
    place = select(place < 128, place, V{});  // NaN: beside a unit that is 0, or not finite
    // From 2^-13 to 1 - 2^-13, so that a code that was decoded is itself under any word.
    const V dither = to_number(((word >> 20) << 1) + 1u) * 0x1p-13f;
    const V added = select(dithers, select(place < kFirstNearest, dither, V{} + 0.5f), V{} + 0.5f);
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

  // `largest` are the bits of the largest magnitude.
  static AMP_EXT_INLINE GroupUnit above(uint32_t largest) {
    const uint32_t exponent = (largest >> 23) + 1;
    // The inverse of 2^127 is no normal number: a momentum of 2^126 and more saturates.
    return {largest >= 0x7f800000u ? kNan : exponent < 253 ? exponent : 253};
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

  template <typename V, typename U>
  static AMP_EXT_INLINE U encode(V number, bool dithers, U word) {
    // With an eighth more, floats are linear there.
    const auto is_linear = number < 0.125f;
    const U bits = bits_of(select(is_linear, number + 0.125f, number)) - kEighth;
    const U added = select(dithers, word >> (32 - kDropped), U{} + (1u << (kDropped - 1)));
    const U code = ((bits + added) >> kDropped) + select(is_linear, U{}, U{} + kRange);
    constexpr uint32_t kLargest = 4 * kRange - 1;
    return select(as_signed(code) < static_cast<int32_t>(kLargest), code, U{} + kLargest);
  }
};

// A second moment: its root. None but 0 has code 0, or a small one beside large ones would soon
// divide its first moment by eps alone.
struct RootCode {
  using Magnitude = MagnitudeCode<6>;

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
