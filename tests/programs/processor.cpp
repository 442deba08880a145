// Prints for which processors and which values of AMP_EXT_CPU_PREFETCH kernels ask for memory
// ahead.
#include "cpu/processor.h"

#include <cstdio>

int main() {
  using amp_ext::cpu::asks_ahead;
  for (const char* vendor : {"GenuineIntel", "AuthenticAMD", ""}) {
    for (const char* wanted : {static_cast<const char*>(nullptr), "", "0", "1", "on"}) {
      const auto asks = asks_ahead(vendor, wanted);
      std::printf("%s", asks.has_value() ? (*asks ? "y" : "n") : "?");
    }
    std::puts("");
  }
  std::puts(amp_ext::cpu::processor_vendor().c_str());
}
