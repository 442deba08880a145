// Dithered rounding: a number between two that can be stored becomes the upper one in as many steps
// as it is near to it. Rounded to nearest, a moment that shrinks by less than half a unit in the
// last place at each step would never shrink.
//
// Not by random numbers but by a Weyl sequence of the step, with a phase of its own for each
// element: it needs no state, is the same on every device and however a tensor is sharded, and errs
// by O(log steps / steps) where random numbers err by O(1 / sqrt(steps)). The phase is the
// finaliser of MurmurHash3 (Appleby), of eight elements together.
//
// Strides of parameters and second moments are fractions of the R-sequence of three dimensions
// (Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences", 2018), made odd. The third
// of them, 0.671, nearly repeats after three steps, and a first moment that forgets within ten
// steps adds up what repeats. With the golden section updates of Adam err less by a sixth; with
// sqrt(2) - 1 those of SGD by a fifth, also in rows that are seldom seen. Lion has the third one,
// with which it turns fewest signs in such rows.
//
// V is float or a vector of it, U uint32_t or a vector of as many.
#pragma once

#include <cstdint>

#include "elements/numeric.h"
#include "elements/storage.h"

namespace amp_ext {

// Of the sequence by which parameters are dithered; those of buffers stand where these are
// described.
inline constexpr uint32_t kParamStride = 0xD1B54A33u;

// What 8 neighbours share, by the halves of an eighth of their places in the whole tensor; `high`
// is of type U or a number. Its last bits are less random than the others, and count least.
template <typename U, typename High>
AMP_EXT_INLINE U dither_hash(U low, High high) {
  U hash = (low ^ (high * 0x9E3779B9u)) * 0x9E3779B1u;
  hash = (hash ^ (hash >> 16)) * 0x85EBCA6Bu;
  return (hash ^ (hash >> 13)) * 0xC2B2AE35u;
}
// Between the phases of neighbours.
inline constexpr uint32_t kPhaseStride = 0x9E3779B9u;
// Of an element, by its place in the whole tensor.
AMP_EXT_INLINE uint32_t dither_phase(uint64_t place) {
  const uint64_t eight = place >> 3;
  return dither_hash(static_cast<uint32_t>(eight), static_cast<uint32_t>(eight >> 32)) +
         static_cast<uint32_t>(place) * kPhaseStride;
}

// The upper 16 bits are the number as a bfloat16, unless it is NaN. `word` is the phase plus the
// stride times the number of the step; its upper bits are what is added before the lower ones are
// cut off.
template <typename V, typename U>
AMP_EXT_INLINE U dithered_to_upper_bits(V value, U word) {
  return bits_of(value) + (word >> 16);
}

// The number as a float16 in the lower 16 bits.
template <typename V, typename U>
AMP_EXT_INLINE U dithered_to_half_bits(V value, U word) {
  const U sign = (bits_of(value) >> 16) & 0x8000u;
  const U magnitude = bits_of(value) & 0x7fffffffu;
  const auto size = as_signed(magnitude);  // every processor compares signed numbers
  const U added = word >> 19;
  const U normal = ((magnitude + added) >> 13) - ((127u - 15u) << 10);
  // Subnormal: in units of 2^-37, of which 2^13 are one of a float16.
  const V small = select(size < 0x38800000, float_of(magnitude), V{});  // 2^-14
  const U subnormal = (to_integer(small * 0x1p37f) + added) >> 13;
  const U nan = 0x7e00u | ((magnitude >> 13) & 0x01ffu);
  U result = select(size < 0x38800000, subnormal, normal);
  result = select(size >= 0x47800000, U{} + 0x7c00u, result);  // 65536
  return sign | select(size > 0x7f800000, nan, result);
}

}  // namespace amp_ext
