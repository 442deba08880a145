// What the state of a parameter in a file means: a file of ours, of torch's optimizers or of those
// of others, maybe with other options.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "optimizer/states.h"

namespace amp_ext::optim {

// What a file has under a key, read by whoever knows its containers.
struct AMP_EXT_API SavedValue {
  at::Tensor tensor;             // undefined if it is none
  std::optional<double> number;  // also of a tensor with one real element
  std::string type, text;        // as errors print it
};

struct AMP_EXT_API SavedState {
  // Under the keys of the optimizer, in order, without those that are None.
  std::vector<std::pair<std::string, SavedValue>> values;
  std::string keys;  // all that the file has, as errors print them

  // Null where there is none.
  const SavedValue* find(const std::string& key) const;
};

// Throws if a state does not fit a parameter, or a part of it is missing. Its tensors are those of
// the file, whatever part of the parameter this rank has.
AMP_EXT_API void check_saved_state(const StateSpec& spec, const ParamRef& param,
                                   const SavedState& saved, const std::string& operation);

// The state of a parameter, which has been loaded, as the options want it: copies of what a file
// has, in its order; of the parts of this rank.
AMP_EXT_API StateMap loaded_state(const StateSpec& spec, const ParamRef& param,
                                  const SavedState& saved);

// The moments that a file has in codes with exponents, and not as numbers, too.
AMP_EXT_API std::vector<MomentFormat> blocks_in(const StateSpec& spec, const SavedState& saved);

}  // namespace amp_ext::optim
