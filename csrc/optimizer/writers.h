// Whose state dict it is: keys by which those of other optimizers are told.
#pragma once

#include <amp_ext/export.h>

#include <string>
#include <vector>

namespace amp_ext {

using Keys = std::vector<std::string>;

// Which other optimizer wrote a state dict, with what tells it; empty if none is known. A key that
// the optimizer has as well tells nothing (`own_keys`), nor does one of a class that it extends
// (`classes`, its own name among them).
AMP_EXT_API std::string other_writer(const std::vector<std::string>& classes, const Keys& own_keys,
                                     const std::vector<Keys>& groups, const Keys& states);

}  // namespace amp_ext
