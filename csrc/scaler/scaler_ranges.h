// The ranges of all that a gradient scaler or a guard of norms is set to: options, new scales,
// entries of state dicts.
#pragma once

#include <amp_ext/export.h>

#include <string>

namespace amp_ext {

// What a number of a scaler or a guard must be, in words, if `value` is not; empty if it is. `name`
// is that of an option, of an entry of a state dict, or "new_scale"; for what is no number `value`
// is NaN.
AMP_EXT_API std::string wanted_of_scaler(const std::string& name, double value);

}  // namespace amp_ext
