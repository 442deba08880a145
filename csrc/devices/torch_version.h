// Checks that the loaded torch is the minor release that the library was built for.
#pragma once

#include <string>

namespace amp_ext {

// Throws unless the loaded torch is the minor release of the build. The dynamic loader would not
// notice: torch 2.12 has all symbols that a library built for 2.13 needs, but some behave
// differently.
void check_torch_version(const std::string& operation);

}  // namespace amp_ext
