// The fast path of a step: the usual options and numbers, with the same bits in fewer instructions.
//
// An engine computes some neighbouring elements by it, and collects in `Unusual` whether one of
// them needs the general formula. Then it stores none of them, and the general code updates them.
#pragma once

#include <amp_ext/hyperparameters.h>

#include <cstdint>
#include <limits>

#include "elements/numeric.h"
#include "elements/storage.h"

namespace amp_ext {

// How the fast path divides: by a short sequence, or by an operator, where quotients may be
// subnormal.
enum class Division { kFast, kExact };

// Whether the options that all optimizers have are the usual ones.
inline bool takes_fast_path(const CommonHyperparameters& group) {
  return !group.write_back_grads && group.clip_value == std::numeric_limits<double>::infinity() &&
         (group.weight_decay == 0.0 || group.decoupled_weight_decay);
}

// Whether an average of this weight for the newest value is taken from its start.
inline bool interpolates_from_start(double weight) {
  return !Interpolation<float>::of(weight, 1.0 - weight).from_end;
}

// Marks of elements that only the general formula computes right.
struct Unusual {
  float not_finite = 0.0f;          // NaN after a result that is inf or NaN
  uint32_t smallest = 0xffffffffu;  // least of twice the bits of a magnitude
  uint32_t codes = 0;               // the upper bit of a byte for a code that is NaN

  AMP_EXT_INLINE void note_result(float result) {
    not_finite = fused_multiply_add(result, 0.0f, not_finite);
  }
  // Notes an update that is tiny but not 0, unless the parameter is large beside it.
  AMP_EXT_INLINE void note_update(float update, float param) {
    const uint32_t of_update = 2 * bits_of(update) - 1;  // 0 is not small
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
