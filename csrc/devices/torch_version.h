// Whether the torch that is loaded is the one that the library was built for.
#pragma once

#include <string>

namespace amp_ext {

// Throws if it is of another minor release. The loader does not tell: releases of torch differ less
// in the names that the library needs (2.12 has all of those of 2.13) than in what lies behind
// them, and a program would go wrong while it trains. Python is told before, by binary.py.
void check_torch_version(const std::string& operation);

}  // namespace amp_ext
