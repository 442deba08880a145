// Compares versions of torch's C interface: integers with the major release in the highest byte,
// then the minor release and the patch.
#include "devices/torch_version.h"

#include <c10/util/Exception.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include <cstdint>

namespace amp_ext {

namespace {

std::string minor_release(uint64_t version) {
  return c10::str(version >> 56, ".", version >> 48 & 0xff);
}

}  // namespace

void check_torch_version(const std::string& operation) {
  const uint64_t built_for = TORCH_ABI_VERSION;
  static const uint64_t loaded = aoti_torch_abi_version();
  TORCH_CHECK(built_for >> 48 == loaded >> 48, operation, ": libamp_ext.so was built for torch ",
              minor_release(built_for), ", but torch ", minor_release(loaded),
              " is loaded. Rebuild amp_ext for the torch that is loaded.");
}

}  // namespace amp_ext
