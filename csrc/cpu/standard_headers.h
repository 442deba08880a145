// The standard headers of the kernels. They come before the instruction set is chosen, so that what
// the linker may share with other sources runs on every processor.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__AARCH64EL__)
#include <arm_neon.h>
#endif

// Between the two, code may use instructions that not every processor has: AMP_EXT_TARGET("avx2").
#define AMP_EXT_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define AMP_EXT_TARGET(features) \
  AMP_EXT_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define AMP_EXT_END_TARGET AMP_EXT_PRAGMA(clang attribute pop)
#else
#define AMP_EXT_TARGET(features) AMP_EXT_PRAGMA(GCC target(features))
#define AMP_EXT_END_TARGET
#endif
