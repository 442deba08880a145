// What the descriptions of its buffers say of an optimizer: which codes these take together.
#pragma once

#include <amp_ext/hyperparameters.h>

namespace amp_ext {

// The codes that the buffers of a parameter are in, of those that they may take; a buffer without
// one is in bfloat16 then.
enum class Codes { kAll, kAllButRoots, kRatios };

constexpr bool is_among(BufferCode code, Codes codes) {
  switch (code) {
    case BufferCode::kNone:
      return false;
    case BufferCode::kRatio:
      return true;
    case BufferCode::kRoot:
      return codes == Codes::kAll;
    case BufferCode::kMagnitude:
      return codes != Codes::kRatios;
  }
  return false;
}

// Whether a code has an exponent for each block of elements.
constexpr bool has_blocks(BufferCode code) {
  return code == BufferCode::kRoot || code == BufferCode::kMagnitude;
}

// The first `count` of the buffers that an optimizer describes.
struct BufferDescriptions {
  const BufferDescription* each;
  int count;

  template <typename Hyperparameters>
  static constexpr BufferDescriptions of(int count) {
    return {Hyperparameters::kBuffers, count};
  }

  // The index of the first buffer of a role; -1: there is none.
  constexpr int first_of(BufferRole role) const {
    for (int i = 0; i < count; ++i) {
      if (each[i].role == role) return i;
    }
    return -1;
  }
  constexpr int second_moment() const { return first_of(BufferRole::kSecondMoment); }

  // Whether there is one second moment at most, of which roots are, and to which ratios are, and
  // one buffer in blocks at most, to which the exponents of a record belong; a magnitude is alone.
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

  // Whether a kernel takes them in these codes: none does beside a maximum, of which the formula
  // takes the root instead of that of the second moment. Where two sets come to the same, it is
  // the first that counts.
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
