// Queries on the buffer descriptions of an optimizer: which 8-bit formats can be used together.
#pragma once

#include <amp_ext/hyperparameters.h>

namespace amp_ext {

// The 8-bit formats in use. Buffers with another 8-bit format are stored in bfloat16 instead.
enum class Codes { kAll, kAllButRoots, kRatios };

constexpr bool is_among(BufferCode code, Codes codes) {
  return code == BufferCode::kRatio || (code == BufferCode::kRoot && codes == Codes::kAll) ||
         (code == BufferCode::kMagnitude && codes != Codes::kRatios);
}

// True if the format has an exponent for each block of elements.
constexpr bool has_blocks(BufferCode code) {
  return code == BufferCode::kRoot || code == BufferCode::kMagnitude;
}

// The first `count` buffer descriptions of an optimizer.
struct BufferDescriptions {
  const BufferDescription* each;
  int count;

  template <typename Hyperparameters>
  static constexpr BufferDescriptions of(int count) {
    return {Hyperparameters::kBuffers, count};
  }

  // Returns the index of the first buffer with this role, or -1.
  constexpr int first_of(BufferRole role) const {
    for (int i = 0; i < count; ++i) {
      if (each[i].role == role) return i;
    }
    return -1;
  }
  constexpr int second_moment() const { return first_of(BufferRole::kSecondMoment); }

  // True if the 8-bit formats can be combined: only the second moment uses kRoot, kRatio needs a
  // second moment, and at most one buffer is blockwise (KernelTensorArgs has one array of
  // exponents).
  constexpr bool fit_together() const {
    int seconds = 0;
    int in_blocks = 0;
    for (int i = 0; i < count; ++i) {
      const bool is_second = each[i].role == BufferRole::kSecondMoment;
      if (each[i].code == BufferCode::kRoot && !is_second) return false;
      if (each[i].code == BufferCode::kRatio && (is_second || second_moment() < 0)) return false;
      seconds += is_second;
      in_blocks += has_blocks(each[i].code);
    }
    return seconds <= 1 && in_blocks <= 1 &&
           !(has(BufferCode::kRatio) && has(BufferCode::kMagnitude));
  }

  // True if kernels are compiled for these buffers with `codes`. AMSGrad has none, because its
  // formula takes the root of the maximum. If two values of `codes` give the same formats, only the
  // first has kernels.
  constexpr bool are_taken_in(Codes codes) const {
    if (first_of(BufferRole::kMaximum) >= 0) return false;
    const bool has_ratios = has(BufferCode::kRatio);
    const bool has_roots = has(BufferCode::kRoot);
    if (codes == Codes::kAll) return has_ratios || has_roots || has(BufferCode::kMagnitude);
    return codes == Codes::kAllButRoots && has_ratios && has_roots;
  }

 private:
  constexpr bool has(BufferCode code) const {
    for (int i = 0; i < count; ++i) {
      if (each[i].code == code) return true;
    }
    return false;
  }
};

}  // namespace amp_ext
