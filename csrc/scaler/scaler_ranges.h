// Valid ranges of the numbers of a GradScaler and of statistics of norms.
#pragma once

#include <amp_ext/export.h>

#include <string>

namespace amp_ext {

// Returns an empty string if `value` is in the range of `name` (an option, an entry of a state dict
// or "new_scale"), otherwise the range in words: "a finite number above 1". NaN stands for anything
// that is not a number.
AMP_EXT_API std::string wanted_of_scaler(const std::string& name, double value);

}  // namespace amp_ext
