// Dithered rounding, a deterministic form of stochastic rounding: a value 30 % of the way between
// two storable numbers is rounded up in 30 % of the steps. Rounded to nearest, a moment that
// shrinks by less than half a unit in the last place per step would never shrink.
//
// The threshold between rounding down and up comes from a Weyl sequence over the steps, not from
// random numbers: it needs no state, does not depend on the device or on the sharding of a tensor,
// and its mean error is O(log steps / steps) instead of O(1 / sqrt(steps)). The phase of an element
// is the hash of index / 8 (the finaliser of MurmurHash3, Appleby) plus one of eight evenly spread
// offsets.
//
// A stride is the step of a sequence, as a fraction of 2^32. The strides of parameters and of
// second moments are two of the fractions of the R-sequence in three dimensions (Roberts, "The
// Unreasonable Effectiveness of Quasirandom Sequences", 2018), made odd. The third, 0.671, nearly
// repeats every three steps, so the errors would add up in a first moment, which averages about ten
// steps. Adam uses the golden section instead: its updates have a sixth less error. SGD uses
// sqrt(2) - 1, with a fifth less error. Lion uses 0.671, which flips the fewest signs in rows with
// rare gradients.
//
// V is float or a vector of float, U is uint32_t or a vector of as many uint32_t.
#pragma once

#include <cstdint>

#include "formats/storage.h"
#include "numeric.h"

namespace amp_ext {

// Weyl stride of parameters. The strides of buffers are in amp_ext/hyperparameters.h.
inline constexpr uint32_t kParamStride = 0xD1B54A33u;

// Returns the hash that eight neighbouring elements share. `low` and `high` are the halves of index
// / 8; `high` may be a scalar.
template <typename U, typename High>
AMP_EXT_INLINE U dither_hash(U low, High high) {
  U hash = (low ^ (high * 0x9E3779B9u)) * 0x9E3779B1u;
  hash = (hash ^ (hash >> 16)) * 0x85EBCA6Bu;
  return (hash ^ (hash >> 13)) * 0xC2B2AE35u;
}
// Difference between the phases of neighbouring elements.
inline constexpr uint32_t kPhaseStride = 0x9E3779B9u;
// Returns the phase of an element. `place` is its index in the full, unsharded tensor.
AMP_EXT_INLINE uint32_t dither_phase(uint64_t place) {
  const uint64_t eight = place >> 3;
  return dither_hash(static_cast<uint32_t>(eight), static_cast<uint32_t>(eight >> 32)) +
         static_cast<uint32_t>(place) * kPhaseStride;
}

// Returns bits whose upper half is `value` rounded to bfloat16 with dithering; wrong for NaN.
// `word` is phase + stride * step; its upper 16 bits are the threshold.
template <typename V, typename U>
AMP_EXT_INLINE U dithered_to_upper_bits(V value, U word) {
  return bits_of(value) + (word >> 16);
}

// Returns `value` rounded to float16 with dithering, in the lower 16 bits.
template <typename V, typename U>
AMP_EXT_INLINE U dithered_to_half_bits(V value, U word) {
  const U sign = (bits_of(value) >> 16) & 0x8000u;
  const U magnitude = bits_of(value) & 0x7fffffffu;
  const auto size = as_signed(magnitude);  // not every instruction set compares unsigned integers
  const U added = word >> 19;
  const U normal = ((magnitude + added) >> 13) - ((127u - 15u) << 10);
  // For a subnormal float16, counts units of 2^-37; its last place is worth 2^13 units.
  const V small = select(size < 0x38800000, float_of(magnitude), V{});  // below 2^-14
  const U subnormal = (to_integer(small * 0x1p37f) + added) >> 13;
  const U nan = 0x7e00u | ((magnitude >> 13) & 0x01ffu);
  U result = select(size < 0x38800000, subnormal, normal);
  result = select(size >= 0x47800000, U{} + 0x7c00u, result);  // from 65536 on: inf
  return sign | select(size > 0x7f800000, nan, result);
}

}  // namespace amp_ext
