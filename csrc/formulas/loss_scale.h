// Dynamic loss scaling: the inverse of the scale, and the rules by which it changes.
//
// Micikevicius et al., "Mixed Precision Training", 2018, section 3.2, with torch's rules.
#pragma once

#include <amp_ext/hyperparameters.h>

#include <cstdint>

#include "numeric.h"

namespace amp_ext {

// Returns the factor that unscales gradients. The division is in double, as in torch.
AMP_EXT_INLINE float inverse_scale(float scale) {
  return static_cast<float>(1.0 / static_cast<double>(scale));
}

// Device memory that an update of the scale reads and writes.
struct ScaleMemory {
  float* scale;             // [1], the loss scale
  int32_t* growth_tracker;  // [1], number of updates without overflow since the scale changed
  // [1], overflows left until the scale shrinks; if null, every overflow shrinks the scale.
  int32_t* hysteresis_tracker;
};

// Lowers the scale after an overflow, and raises it after growth_interval clean steps unless it
// would become inf. Once the hysteresis is used up, every overflow lowers the scale until it grows.
AMP_EXT_INLINE void update_loss_scale(const LossScaleHyperparameters& hyperparameters,
                                      bool overflow, const ScaleMemory& state) {
  if (!hyperparameters.dynamic) return;
  const float scale = *state.scale;
  if (overflow) {
    *state.growth_tracker = 0;
    if (state.hysteresis_tracker != nullptr && *state.hysteresis_tracker > 1) {
      *state.hysteresis_tracker -= 1;
      return;
    }
    const double backed_off = static_cast<double>(scale) * hyperparameters.backoff_factor;
    // An overflow must not raise a scale that was set below min_scale by hand.
    const double lowest = hyperparameters.min_scale < static_cast<double>(scale)
                              ? hyperparameters.min_scale
                              : static_cast<double>(scale);
    *state.scale = static_cast<float>(backed_off < lowest ? lowest : backed_off);
    return;
  }
  *state.growth_tracker += 1;
  if (*state.growth_tracker != hyperparameters.growth_interval) return;
  *state.growth_tracker = 0;
  double wanted = static_cast<double>(scale) * hyperparameters.growth_factor;
  if (wanted > hyperparameters.max_scale) {
    wanted = larger<double>(hyperparameters.max_scale, scale);  // keep a larger scale, set by hand
  }
  const auto grown = static_cast<float>(wanted);
  if (!is_finite(grown) || grown == scale) return;
  *state.scale = grown;
  if (state.hysteresis_tracker != nullptr) *state.hysteresis_tracker = hyperparameters.hysteresis;
}

}  // namespace amp_ext
