// Whose state dict it is: keys by which those of other optimizers are told.
#pragma once

#include <ATen/core/ivalue.h>

#include <map>
#include <string>
#include <vector>

#include "frontend/values.h"

namespace amp_ext {

// Which other optimizer wrote a state dict, with what tells it; empty if none is known. `own_keys`
// tell nothing.
std::string other_writer(const std::string& optimizer, const std::vector<std::string>& own_keys,
                         const std::vector<Dict>& groups,
                         const std::map<std::string, c10::IValue>& states);

}  // namespace amp_ext
