// Matches the parameters of a file with those of an optimizer by name.
#pragma once

#include <amp_ext/export.h>

#include <cstdint>
#include <string>
#include <vector>

namespace amp_ext {

using Names = std::vector<std::string>;

// Returns names without the parts that DistributedDataParallel, torch.compile,
// FullyShardedDataParallel and checkpoint_wrapper add to them.
AMP_EXT_API Names without_wrappers(const Names& names);

// Returns the index in `saved` of each name in `own`. Returns an empty list unless both lists have
// the same names and each name occurs once. Parts that wrappers add to names are ignored.
AMP_EXT_API std::vector<int64_t> indices_by_name(const Names& own, const Names& saved);

// Returns an error text if indices_by_name() matches all names, but a parameter is in another group
// of the file. Loading by position would then give its state to another parameter. Returns an empty
// string if there is no such parameter.
AMP_EXT_API std::string misplaced_param(const std::vector<Names>& own,
                                        const std::vector<Names>& saved);

}  // namespace amp_ext
