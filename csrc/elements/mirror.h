// Reports that are kept on a device and copied to host memory, so that reading them never waits.
// All their fields have eight bytes: they are copied as such.
#pragma once

#include <cstdint>

#include "elements/numeric.h"

namespace amp_ext {

// Numbers that a report remembers one by one.
inline constexpr int kHistory = 4096;

// What every report begins with. In the copy on the host they differ while it is written.
struct ReportStamps {
  int64_t started = 0;   // the number of the write that has begun
  int64_t finished = 0;  // of the last one that has ended
};

// Copies every `stride`-th word from number `first` on.
AMP_EXT_INLINE void copy_words(const void* from, void* to, int64_t first, int64_t words,
                               int64_t stride) {
  for (int64_t i = first; i < words; i += stride) {
    static_cast<volatile int64_t*>(to)[i] = static_cast<const int64_t*>(from)[i];
  }
}

// What was written before comes before what is written after, also as the host sees it.
AMP_EXT_INLINE void fence_for_host() {
#if defined(__CUDA_ARCH__)
  __threadfence_system();
#else
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

// Calls copy(), which writes to a mirror, between the two stamps of it.
template <typename Copy>
AMP_EXT_INLINE void write_mirror(ReportStamps* mirror, int64_t number, const Copy& copy) {
  *static_cast<volatile int64_t*>(&mirror->started) = number;
  fence_for_host();
  copy();
  fence_for_host();
  *static_cast<volatile int64_t*>(&mirror->finished) = number;
}

}  // namespace amp_ext
