// The counter of steps in a state: a float32, as torch's, which adding 1 would leave at 2^24. From
// there on a step takes the next float32, so that the bits count.
#pragma once

#include <cstdint>

#include "elements/numeric.h"
#include "elements/storage.h"

namespace amp_ext {

inline constexpr float kLastCount = 0x1p24f;  // up to here a counter is the number of steps

// The number of steps that a counter stands for.
AMP_EXT_INLINE double steps_of(float counter) {
  if (!(counter > kLastCount)) return static_cast<double>(counter);
  return static_cast<double>(kLastCount) + (bits_of(counter) - bits_of(kLastCount));
}

// The counter after one more step; the largest float32 stays.
AMP_EXT_INLINE float next_counter(float counter) {
  if (!(counter >= kLastCount)) return counter + 1.0f;
  return bits_of(counter) < 0x7f7fffffu ? float_of(bits_of(counter) + 1u) : counter;
}

}  // namespace amp_ext
