// Which parameter of a file is which: by their names.
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

// The places in the file of the parameters of a group, whose names are `own`. Empty if names do not
// tell: unless both have the same names, each once. What wrappers add to names does not count.
AMP_EXT_API std::vector<int64_t> indices_by_name(const Names& own, const Names& saved);

// If all groups together have the same names on both sides, each once, and one group has not: which
// name is in which group; empty otherwise. By place, its state would go to another parameter.
AMP_EXT_API std::string misplaced_param(const std::vector<Names>& own,
                                        const std::vector<Names>& saved);

}  // namespace amp_ext
