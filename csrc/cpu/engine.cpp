// Chooses the kernels of one instruction set at run time.
#include "cpu/engine.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace amp_ext::cpu {

#if defined(__x86_64__)
// Reads cpuid, because clang's __builtin_cpu_supports does not know "f16c". The caller also tests
// for AVX2, which includes what the operating system must support.
static bool has_f16c() {
  unsigned int a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

const Engine* select_engine() {
  const char* wanted = std::getenv("AMP_EXT_CPU_ISA");
  const auto is_wanted = [wanted](const Engine& engine) {
    return wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, engine.name) == 0;
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && is_wanted(avx512::kEngine)) return &avx512::kEngine;
  if (has_avx2 && is_wanted(avx2::kEngine)) return &avx2::kEngine;
#endif
  return is_wanted(plain::kEngine) ? &plain::kEngine : nullptr;
}

}  // namespace amp_ext::cpu
