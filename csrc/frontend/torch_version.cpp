// Stops a program that is started with another torch than the library was built for.
//
// The loader does not: releases of torch differ less in the names that the library needs (2.12 has
// all of those of 2.13) than in what lies behind them, and such a program would go wrong while it
// trains. Python is told before, by binary.py.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace amp_ext {

namespace {

constexpr int kExitCodeOfLoader = 127;

int major_of(uint64_t version) { return static_cast<int>(version >> 56); }
int minor_of(uint64_t version) { return static_cast<int>(version >> 48 & 0xff); }

// When the library is loaded, before anything of it can be called.
__attribute__((constructor)) void check_torch_version() {
  const uint64_t built_for = TORCH_ABI_VERSION;
  const uint64_t loaded = aoti_torch_abi_version();
  if (built_for >> 48 == loaded >> 48) return;
  std::fprintf(stderr, "libamp_ext.so was built for torch %d.%d, but torch %d.%d is loaded\n",
               major_of(built_for), minor_of(built_for), major_of(loaded), minor_of(loaded));
  std::_Exit(kExitCodeOfLoader);
}

}  // namespace

}  // namespace amp_ext
