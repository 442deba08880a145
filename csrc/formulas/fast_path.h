// The fast path of a step gives the same bits in fewer instructions, for common options and values.
//
// An engine updates a few neighbouring elements and records in `Unusual` whether one of them needs
// the general formula. If so, the general code updates all of them.
#pragma once

#include <amp_ext/hyperparameters.h>

#include <cstdint>
#include <limits>

#include "formats/storage.h"
#include "numeric.h"

namespace amp_ext {

// Division on the fast path: kFast for normal quotients only; kExact is the division operator.
enum class Division { kFast, kExact };

// True if the options that all optimizers share allow the fast path.
inline bool takes_fast_path(const CommonHyperparameters& group) {
  return !group.write_back_grads && group.clip_value == std::numeric_limits<double>::infinity() &&
         (group.weight_decay == 0.0 || group.decoupled_weight_decay);
}

// True if Interpolation starts from the old value for this weight.
inline bool interpolates_from_start(double weight) {
  return !Interpolation<float>::of(weight, 1.0 - weight).from_end;
}

// Records whether at least one of several elements needs the general formula.
struct Unusual {
  float not_finite = 0.0f;          // becomes NaN after a result that is inf or NaN
  uint32_t smallest = 0xffffffffu;  // smallest value that note_update() recorded
  uint32_t codes = 0;               // four bytes; a set top bit marks an unusual stored value

  AMP_EXT_INLINE void note_result(float result) {
    not_finite = fused_multiply_add(result, 0.0f, not_finite);
  }
  // Records the larger magnitude of update and parameter, unless the update is 0. is_found()
  // returns true if both were below 2^-62.
  AMP_EXT_INLINE void note_update(float update, float param) {
    const uint32_t of_update = 2 * bits_of(update) - 1;  // an update of 0 gives the largest number
    const uint32_t of_param = 2 * bits_of(param);
    const uint32_t larger = of_update > of_param ? of_update : of_param;
    smallest = smallest < larger ? smallest : larger;
  }

  AMP_EXT_INLINE bool is_found() const {
    constexpr uint32_t kLeast = 2 * ((127u - 62u) << 23) - 1;  // 2^-62
    return not_finite != 0.0f || smallest < kLeast || (codes & 0x80808080u) != 0;
  }
};

}  // namespace amp_ext
