// One move of an average towards a weight.
#pragma once

#include <cstdint>

#include "numeric.h"

namespace amp_ext {

// The constants of one move. A weight of 0 leaves the averages as they are.
struct AverageStep {
  bool is_taken;
  bool is_first;  // true for the first average, a copy of the weight
  Interpolation<float> towards_weight;
  uint64_t number;  // number of this average, from 1

  static AMP_EXT_INLINE AverageStep of(double weight, double number) {
    return {weight != 0.0, number <= 1.0, Interpolation<float>::of(weight, 1.0 - weight),
            static_cast<uint64_t>(number)};
  }

  template <typename V>
  AMP_EXT_INLINE V operator()(V average, V weight) const {
    return select(is_first, weight, towards_weight(average, weight));
  }

  // Returns the index that a tensor's first element has in the dithering of an average. It differs
  // at each average, because an average moves by small fractions of the distance between two
  // storable values. The thresholds of a Weyl sequence would let it settle up to 40 % of that
  // distance off.
  AMP_EXT_INLINE int64_t dither_place(int64_t global_offset) const {
    constexpr uint64_t kStride = 0x9E3779B97F4A7C18u;      // eight times an odd number
    constexpr uint64_t kPlaces = (uint64_t{1} << 62) - 1;  // leaves room to add an index
    return static_cast<int64_t>((static_cast<uint64_t>(global_offset) + number * kStride) &
                                kPlaces);
  }
};

}  // namespace amp_ext
