// Split masters: a 16-bit parameter and a residual of 16 or 8 bits together store a float32 master,
// or only the master's upper 24 bits if the residual has 8 bits.
//
// In bfloat16, and in float16 with residuals of 8 bits, the magnitude's bits are cut in two, as in
// apex's distributed fused Adam. The residual is the lower part, read as a signed number. If its
// sign bit is set, the parameter was rounded up. The parameter is thus the master rounded to
// nearest, ties away from zero. A zero parameter with a negative residual was written from outside:
// the master is then zero.
//
// In float16 with residuals of 16 bits, the parameter is the master rounded to nearest even. The
// residual is (master - parameter) in units of 2^-15 of the parameter's last place, exact if the
// parameter is at least 2^-16 in magnitude. Masters that would round to inf become 65504.
//
// V is float or a vector of float, U is uint32_t or a vector of as many uint32_t.
#pragma once

#include <cstdint>

#include "formats/storage.h"
#include "numeric.h"

namespace amp_ext {

// Returns the bits of the master's magnitude. `residual` has kLowBits bits, and zeros above them.
template <int kLowBits, typename U>
AMP_EXT_INLINE U joined_magnitude(U param, U residual) {
  const U magnitude = param & 0x7fffu;
  const U was_rounded_up = residual >> (kLowBits - 1);
  const U joined = ((magnitude - was_rounded_up) << kLowBits) | residual;
  return select(as_signed(magnitude) < as_signed(was_rounded_up), U{}, joined);
}

// Returns the magnitude of the parameter: `bits` without the last kLowBits (the residual), rounded
// up if these are at least a half.
template <int kLowBits, typename U>
AMP_EXT_INLINE U upper_part(U bits) {
  return (bits >> kLowBits) + ((bits >> (kLowBits - 1)) & 1u);
}

// Drops the last kBits bits: rounds to nearest even, or adds the top bits of `word` as dither.
template <int kBits, typename U>
AMP_EXT_INLINE U without_last_bits(U bits, bool dithers, U word) {
  const U to_even = ((1u << (kBits - 1)) - 1u) + ((bits >> kBits) & 1u);
  return (bits + select(dithers, word >> (32 - kBits), to_even)) >> kBits;
}

// Splits and joins float32 master weights. `param` has the bits of the 16-bit parameter.
template <typename Storage, int kLowBits>
struct SplitMaster;

template <int kLowBits>
struct SplitMaster<BFloat16, kLowBits> {
  template <typename U>
  static AMP_EXT_INLINE auto join(U param, U residual) {
    const U magnitude = joined_magnitude<kLowBits>(param, residual) << (16 - kLowBits);
    return float_of(magnitude | ((param >> 15) << 31));
  }

  // Joins a parameter in the upper half of its word and a residual that is sign-extended and
  // shifted into place. Faster than join(), but gives NaN for a zero parameter with a negative
  // residual.
  template <typename U>
  static AMP_EXT_INLINE auto join_number(U param, U residual) {
    return float_of(param + residual);
  }

  template <typename V, typename U>
  static AMP_EXT_INLINE void split(V master, bool dithers, U word, U& param, U& residual) {
    U kept = bits_of(master);
    if constexpr (kLowBits == 8) kept = without_last_bits<8>(kept, dithers, word);
    param = select(master != master, U{} + 0x7fc0u, upper_part<kLowBits>(kept));
    residual = select(master != master, U{}, kept & ((1u << kLowBits) - 1u));
  }
};

template <>
struct SplitMaster<Half, 8> {
  template <typename U>
  static AMP_EXT_INLINE auto join(U param, U residual) {
    const U joined = joined_magnitude<8>(param, residual);
    const auto normal = (joined << 5) + ((127u - 15u) << 23);
    const auto subnormal = bits_of(to_number(joined) * 0x1p-32f);
    U magnitude = select(as_signed(joined) < (1 << 18), subnormal, normal);
    // inf and NaN have no residual.
    const U special = 0x7f800000u | ((param & 0x03ffu) << 13);
    magnitude = select(as_signed(param & 0x7fffu) < 0x7c00, magnitude, special);
    return float_of(magnitude | ((param >> 15) << 31));
  }

  template <typename V, typename U>
  static AMP_EXT_INLINE void split(V master, bool dithers, U word, U& param, U& residual) {
    const U sign = (bits_of(master) >> 16) & 0x8000u;
    const U magnitude = bits_of(master) & 0x7fffffffu;
    const auto size = as_signed(magnitude);
    // `fine` counts units of 2^-37 if the float16 is subnormal; otherwise its exponent bias is that
    // of float16.
    const V small = select(size < 0x38800000, float_of(magnitude), V{});
    const U fine =
        select(size < 0x38800000, to_integer(small * 0x1p37f), magnitude - ((127u - 15u) << 23));
    U kept = without_last_bits<5>(fine, dithers, word);
    kept = select(as_signed(kept) < 0x7bff7f, kept, U{} + 0x7bff7fu);
    const auto is_finite = size < 0x7f800000;
    const U special = 0x7c00u | select(size > 0x7f800000, U{} + 0x0200u, U{});
    param = sign | select(is_finite, upper_part<8>(kept), special);
    residual = select(is_finite, kept & 0xffu, U{});
  }
};

// A float16 parameter with a residual of 16 bits. Parameter and master are passed as floats.
struct SplitHalf16 {
  // Returns the float32 exponent byte of the residual's unit, 2^-15 of the last place of `param`.
  template <typename V>
  static AMP_EXT_INLINE auto unit_exponent(V param) {
    using U = decltype(bits_of(V{}));
    const U exponent = (bits_of(param) >> 23) & 0xffu;
    return select(as_signed(exponent) < 113, U{} + 113u, exponent) - 25u;  // 10 + 15
  }

  // Returns the value to split: the master, limited to a magnitude of 65504 if it is finite.
  template <typename V>
  static AMP_EXT_INLINE V saturated(V master) {
    const auto size = as_signed(bits_of(master) & 0x7fffffffu);
    const V largest = float_of(0x477fe000u | (bits_of(master) & 0x80000000u));  // +-65504
    const V limited = select(size < 0x477ff000, master, largest);  // 65520 rounds to inf
    return select(size < 0x7f800000, limited, master);
  }

  // `residual` is a signed number in the lower 16 bits.
  template <typename V, typename U>
  static AMP_EXT_INLINE V join(V param, U residual) {
    const V number = to_number(residual << 16) * 0x1p-16f;
    // Just below a power of two, float16 values are only half as far apart. A residual beyond 8192
    // towards zero then belongs to a parameter that was overwritten from outside.
    const U bits = bits_of(param);
    const U mantissa = bits & 0x007fffffu;
    const U nearest = select(as_signed(bits & 0x7fffffffu) > 0x38800000, mantissa, U{} + 1u);
    const V inwards = select(param < 0, number, V{} - number);
    const V limited = select(inwards > 8192, V{} + 8192, inwards);
    const V kept = select(nearest == U{}, limited, inwards);
    const V master =
        param + select(param < 0, kept, V{} - kept) * float_of(unit_exponent(param) << 23);
    return select(is_finite(param), master, param);
  }

  template <typename V>
  static AMP_EXT_INLINE auto residual_of(V master, V param) {
    const V number = (master - param) * float_of((254u - unit_exponent(param)) << 23);
    // Adding 1.5 * 2^23 rounds to an integer, and this integer is then in the last bits.
    using U = decltype(bits_of(V{}));
    return select(is_finite(param), bits_of(number + 0x1.8p23f) & 0xffffu, U{});
  }
};

}  // namespace amp_ext
