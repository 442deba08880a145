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

// Returns, for each parameter in `own`, the index of its name in `saved`. Empty unless both sides
// have the same names, each once. Parts that wrappers add to names are ignored.
AMP_EXT_API std::vector<int64_t> indices_by_name(const Names& own, const Names& saved);

// Returns an error text if both sides have the same names, each once, but a name is in another
// group of the file, because loading by position would then give its state to another parameter.
// Otherwise returns "".
AMP_EXT_API std::string misplaced_param(const std::vector<Names>& own,
                                        const std::vector<Names>& saved);

}  // namespace amp_ext
