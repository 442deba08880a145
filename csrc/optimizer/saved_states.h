// Checks and converts the state of a parameter from a file of amp_ext, torch or another library,
// written with any options.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "optimizer/states.h"

namespace amp_ext::optim {

// One value of a state in a file; the caller has converted it from Python's containers.
struct AMP_EXT_API SavedValue {
  at::Tensor tensor;             // undefined if the value is no tensor
  std::optional<double> number;  // the value of a number, or of a tensor with one real element
  std::string type, text;        // type and content of the value, as errors print them
};

struct AMP_EXT_API SavedState {
  // All values under keys that the optimizer knows, in the file's order.
  std::vector<std::pair<std::string, SavedValue>> values;
  std::string keys;  // all keys in the file, as errors print them

  // Returns null if there is no value under `key`.
  const SavedValue* find(const std::string& key) const;
};

// Throws if a state does not fit a parameter or lacks a required value. `saved` holds unsharded
// tensors.
AMP_EXT_API void check_saved_state(const StateSpec& spec, const ParamRef& param,
                                   const SavedState& saved, const std::string& operation);

// Returns copies of the tensors of a saved state, in the formats of `spec` and in the file's order.
// `saved` holds this rank's shards.
AMP_EXT_API StateMap loaded_state(const StateSpec& spec, const ParamRef& param,
                                  const SavedState& saved);

// Returns the formats of the moments that a file has only in blockwise quantized form.
AMP_EXT_API std::vector<MomentFormat> blocks_in(const StateSpec& spec, const SavedState& saved);

}  // namespace amp_ext::optim
