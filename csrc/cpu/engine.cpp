// Chooses the kernels of one instruction set at run time.
#include "cpu/engine.h"

#include <cstdlib>
#include <cstring>

namespace amp_ext::cpu {

const Engine* select_engine() {
  const char* wanted = std::getenv("AMP_EXT_CPU_ISA");
  const auto is_wanted = [wanted](const Engine& engine) {
    return wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, engine.name) == 0;
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  // Every processor with both has F16C, a name that clang's __builtin_cpu_supports does not know.
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && is_wanted(avx512::kEngine)) return &avx512::kEngine;
  if (has_avx2 && is_wanted(avx2::kEngine)) return &avx2::kEngine;
#endif
  return is_wanted(plain::kEngine) ? &plain::kEngine : nullptr;
}

}  // namespace amp_ext::cpu
