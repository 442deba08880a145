// Reports that live on a device and are mirrored in host memory, so that the host reads them
// without waiting. All fields are 8 bytes wide, so that a report can be copied word by word.
#pragma once

#include <cstdint>

#include "elements/numeric.h"

namespace amp_ext {

// First members of every report. In the mirror, the stamps differ while a write is in progress.
struct ReportStamps {
  int64_t started = 0;   // number of the last write that was started
  int64_t finished = 0;  // number of the last write that was finished
};

// Copies every `stride`-th 8-byte word, from index `first` on, so that threads can share a copy.
AMP_EXT_INLINE void copy_words(const void* from, void* to, int64_t first, int64_t words,
                               int64_t stride) {
  for (int64_t i = first; i < words; i += stride) {
    static_cast<volatile int64_t*>(to)[i] = static_cast<const int64_t*>(from)[i];
  }
}

// Orders all earlier writes before all later ones, also as seen by the host.
AMP_EXT_INLINE void fence_for_host() {
#if defined(__CUDA_ARCH__)
  __threadfence_system();
#else
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

// Sets `started` in the mirror to `number`, calls copy() to write the mirror, and sets `finished`.
template <typename Copy>
AMP_EXT_INLINE void write_mirror(ReportStamps* mirror, int64_t number, const Copy& copy) {
  *static_cast<volatile int64_t*>(&mirror->started) = number;
  fence_for_host();
  copy();
  fence_for_host();
  *static_cast<volatile int64_t*>(&mirror->finished) = number;
}

}  // namespace amp_ext
