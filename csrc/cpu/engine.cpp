// Builds the kernels for each instruction set and picks one at run time.
#include "cpu/engine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>

#include "functors/numeric.h"
#include "kernel_list.h"
#include "launches.h"
#include "storage.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace amp_ext::cpu {

namespace plain {
#include "cpu/engine_body.h"
}  // namespace plain

const Engine kPlainEngine = {"plain", plain::step, plain::look, plain::multiply,
                             plain::count_nonfinite};

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define AMP_EXT_ENGINE_HAS_F16C
namespace avx2 {
#include "cpu/engine_body.h"
}  // namespace avx2
#undef AMP_EXT_ENGINE_HAS_F16C
#pragma GCC pop_options

const Engine kAvx2Engine = {"avx2", avx2::step, avx2::look, avx2::multiply, avx2::count_nonfinite};
#endif

const Engine* select_engine() {
  const char* wanted = std::getenv("AMP_EXT_CPU_ISA");
  const auto is_wanted = [wanted](const Engine& engine) {
    return wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, engine.name) == 0;
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  if (has_avx2 && is_wanted(kAvx2Engine)) return &kAvx2Engine;
#endif
  return is_wanted(kPlainEngine) ? &kPlainEngine : nullptr;
}

}  // namespace amp_ext::cpu
