// Dynamic loss scaling: the inverse of the scale, and how the scale follows overflows.
//
// Micikevicius et al., "Mixed Precision Training", 2018, section 3.2, with torch's rules.
#pragma once

#include <cstdint>

#include "functors/numeric.h"

namespace amp_ext {

// What gradients are multiplied by. The division is made in double, as torch does.
AMP_EXT_INLINE float inverse_scale(float scale) {
  return static_cast<float>(1.0 / static_cast<double>(scale));
}

struct LossScaleHyperparameters {
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
};

// Backs off after an overflow; grows when the count of clean steps equals the interval, unless the
// grown scale would be inf.
AMP_EXT_INLINE void update_loss_scale(const LossScaleHyperparameters& hyperparameters,
                                      bool overflow, float& scale, int32_t& growth_tracker) {
  if (overflow) {
    scale = static_cast<float>(static_cast<double>(scale) * hyperparameters.backoff_factor);
    growth_tracker = 0;
    return;
  }
  growth_tracker += 1;
  if (growth_tracker != hyperparameters.growth_interval) return;
  const auto grown = static_cast<float>(scale * hyperparameters.growth_factor);
  if (is_finite(grown)) scale = grown;
  growth_tracker = 0;
}

}  // namespace amp_ext
