// The standard headers of the kernels. Include them before choosing the instruction set: the linker
// may share their inline functions with other sources, so these must run on every processor.
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

// AMP_EXT_TARGET("avx2") lets the code up to AMP_EXT_END_TARGET use AVX2 instructions, for example.
#define AMP_EXT_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define AMP_EXT_TARGET(features) \
  AMP_EXT_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define AMP_EXT_END_TARGET AMP_EXT_PRAGMA(clang attribute pop)
#else
#define AMP_EXT_TARGET(features) AMP_EXT_PRAGMA(GCC target(features))
#define AMP_EXT_END_TARGET
#endif
