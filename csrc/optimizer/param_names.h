// Matches the parameters of a file with those of an optimizer by name.
#pragma once

#include <amp_ext/export.h>

#include <cstdint>
#include <string>
#include <vector>

namespace amp_ext {

using Names = std::vector<std::string>;

// Returns names without the parts that wrappers, such as DistributedDataParallel, add to them.
AMP_EXT_API Names without_wrappers(const Names& names);

// Returns the index in `saved` of each name in `own`, ignoring parts that wrappers add. Empty
// unless both lists have the same names, each once.
AMP_EXT_API std::vector<int64_t> indices_by_name(const Names& own, const Names& saved);

// Returns an error text if all names match, but a parameter is in another group of the file, so
// that loading by position would mix up states; otherwise an empty string.
AMP_EXT_API std::string misplaced_param(const std::vector<Names>& own,
                                        const std::vector<Names>& saved);

}  // namespace amp_ext
