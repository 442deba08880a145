// The step counter of a state, a float32 as in torch. From 2^24 on, adding 1 would change nothing,
// so a step takes the next larger float32.
#pragma once

#include <cstdint>

#include "formats/storage.h"
#include "numeric.h"

namespace amp_ext {

inline constexpr float kLastCount = 0x1p24f;  // up to here a counter is the number of steps

// Returns the number of steps that a counter represents.
AMP_EXT_INLINE double steps_of(float counter) {
  if (!(counter > kLastCount)) return static_cast<double>(counter);
  return static_cast<double>(kLastCount) + (bits_of(counter) - bits_of(kLastCount));
}

// Returns the counter after one more step; the largest float32 is not exceeded.
AMP_EXT_INLINE float next_counter(float counter) {
  if (!(counter >= kLastCount)) return counter + 1.0f;
  return bits_of(counter) < 0x7f7fffffu ? float_of(bits_of(counter) + 1u) : counter;
}

}  // namespace amp_ext
