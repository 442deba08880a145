// The state of a parameter: step count, master and moments. Missing parts are created and others
// converted, as the options of the group require.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "optimizer/masters.h"
#include "optimizer/moments.h"
#include "optimizer/optimizer_description.h"
#include "optimizer/param_slot.h"

namespace amp_ext::optim {

// The tensors of a parameter's state and their keys, in the order of Python's dict.
using StateMap = std::vector<std::pair<std::string, at::Tensor>>;

// Access to a StateMap. tensor_under returns an undefined tensor if there is no such key.
AMP_EXT_API at::Tensor tensor_under(const StateMap& state, const std::string& key);
AMP_EXT_API void set_under(StateMap& state, const std::string& key, at::Tensor tensor);
AMP_EXT_API HasKey keys_in(const StateMap& state);
AMP_EXT_API Masters masters_in(const StateMap& state);

// A parameter and its position in the optimizer. `unsharded` determines the formats, so that all
// ranks have the same. The tensors of the state are shards like `local`.
struct AMP_EXT_API ParamRef {
  at::Tensor unsharded;  // the whole parameter; only dtype, sizes and strides are read
  at::Tensor local;      // this rank's shard, or the whole parameter
  size_t group = 0;
  size_t index = 0;               // index in the group
  bool shards_whole_rows = true;  // whether each shard has complete rows of dimension 0

  // Returns the position as errors print it.
  std::string place() const { return c10::str("group ", group, ", param ", index); }
};

// Describes the state that a parameter of a group needs, given the formula and the options.
struct AMP_EXT_API StateSpec {
  std::string optimizer;                    // the name of the optimizer, for errors
  at::ArrayRef<BufferDescription> buffers;  // all buffers of the formula, in static memory
  int buffer_count = 0;                     // how many of `buffers` the group uses
  bool keeps_step = true;                   // whether states have a step count
  // Whether a state that lacks a buffer is refused. If not, its next step counts as the first.
  bool needs_buffers = true;
  bool needs_step = true;  // whether a state without its step count is refused
  MasterWeights master_weights = true;
  StateDType state_dtype;
  std::optional<std::string> rounding;

  // Return torch's keys of the buffers, such as "exp_avg": those in use, or all of the formula.
  std::vector<std::string> names() const;
  std::vector<std::string> all_names() const;

  // True if the optimizer stores something under `key`.
  bool is_key(const std::string& key) const;

  // Returns the format of each buffer, including buffers that the group does not use.
  std::vector<MomentFormat> formats(const ParamRef& param) const;

  // True if a buffer of the parameter is quantized.
  bool has_codes(const ParamRef& param) const;

  // Returns the key of the parameter's master; empty if it has no master.
  std::string master_key(const ParamRef& param) const;

  // Returns the keys that a state requires but lacks.
  std::vector<std::string> missing_from(const HasKey& has_key) const;

  // True if two specs of the same optimizer require the same states and have the same options.
  friend bool operator==(const StateSpec& a, const StateSpec& b) {
    return a.buffer_count == b.buffer_count && a.keeps_step == b.keeps_step &&
           a.master_weights == b.master_weights && a.state_dtype == b.state_dtype &&
           a.rounding == b.rounding;
  }
};

// Throws unless steps support the dtype and the device of the parameter.
AMP_EXT_API void check_is_stepped(const StateSpec& spec, const ParamRef& param,
                                  const std::string& operation);

// Returns the spec of the states of a group with these options.
AMP_EXT_API StateSpec state_spec_of(std::string optimizer, const GroupOptions& options);
AMP_EXT_API StateSpec state_spec_of(std::string optimizer, const GroupOptions& options,
                                    const StateRequirements& requirements);

// Returns a state with all tensors that `spec` requires. Missing tensors are created, and tensors
// of a wrong dtype, format or device are converted; no given tensor is written. Throws if only some
// of the required entries exist.
AMP_EXT_API StateMap complete_state(const StateSpec& spec, const ParamRef& param, StateMap state);

// Returns the tensors of a complete state that a step reads and writes.
AMP_EXT_API ParamState state_of_step(const StateSpec& spec, const ParamRef& param,
                                     const StateMap& state);

// Returns float32 copies of moments and master, under torch's keys. float64 moments stay float64.
AMP_EXT_API StateMap float32_state(const StateSpec& spec, const ParamRef& param,
                                   const StateMap& state);

// Returns sizes and strides of the tensor under `key` for a parameter, or for a shard of it.
AMP_EXT_API std::pair<std::vector<int64_t>, std::vector<int64_t>> layout_under(
    const StateSpec& spec, const std::string& key, const at::Tensor& param);

}  // namespace amp_ext::optim
