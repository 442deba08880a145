// The valid ranges of all numbers that users give a GradScaler or a NormGuard: options, new scales
// and entries of state dicts.
#pragma once

#include <amp_ext/export.h>

#include <string>

namespace amp_ext {

// Returns an empty string if `value` is in the range of `name`, otherwise the range in words, for
// example "a finite number above 1". `name` is an option, an entry of a state dict or "new_scale".
// Callers pass NaN as the value of anything that is not a number.
AMP_EXT_API std::string wanted_of_scaler(const std::string& name, double value);

}  // namespace amp_ext
