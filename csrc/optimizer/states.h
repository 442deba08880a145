// What an optimizer keeps of a parameter: counter, master and moments, made whole as the options of
// its group want them.
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

// The state of a parameter: its tensors by their keys in Python, in order.
using StateMap = std::vector<std::pair<std::string, at::Tensor>>;

// Undefined where there is none.
AMP_EXT_API at::Tensor tensor_under(const StateMap& state, const std::string& key);
AMP_EXT_API void set_under(StateMap& state, const std::string& key, at::Tensor tensor);
AMP_EXT_API HasKey keys_in(const StateMap& state);
AMP_EXT_API Masters masters_in(const StateMap& state);

// A parameter, and where it is listed. What decides how its state is kept is asked of the whole, so
// that every rank has the same; the tensors of the state are those of this rank's part.
struct AMP_EXT_API ParamRef {
  at::Tensor unsharded;  // of which only dtype, sizes and strides are read
  at::Tensor local;      // this rank's part of it, or all of it
  size_t group = 0;
  size_t index = 0;               // in its group
  bool shards_whole_rows = true;  // whether each rank has whole rows of dimension 0

  // As errors say where it is listed.
  std::string place() const { return c10::str("group ", group, ", param ", index); }
};

// What the formula and the options of a group let its parameters keep.
struct AMP_EXT_API StateSpec {
  std::string optimizer;                    // the name of the optimizer, for errors
  at::ArrayRef<BufferDescription> buffers;  // of the formula, which outlive this
  int buffer_count = 0;                     // of those that the group keeps, the first ones
  bool keeps_step = true;                   // whether states count steps
  // Whether a state that lacks one of its buffers is refused. If not, its next step is the first.
  bool needs_buffers = true;
  bool needs_step = true;  // whether one that lacks its counter is, where the group keeps one
  MasterWeights master_weights = true;
  StateDType state_dtype;
  std::optional<std::string> rounding;

  // The keys of buffers where they are not coded: of those that the group keeps, and of all.
  std::vector<std::string> names() const;
  std::vector<std::string> all_names() const;

  // Whether a state has something of the optimizer under a key.
  bool is_key(const std::string& key) const;

  // How each buffer of a parameter is kept, also those that the group does not keep.
  std::vector<MomentFormat> formats(const ParamRef& param) const;

  // Whether one of them is in codes.
  bool has_codes(const ParamRef& param) const;

  // The key of its master; empty for none.
  std::string master_key(const ParamRef& param) const;

  // The keys of what a state would need, given those that it has.
  std::vector<std::string> missing_from(const HasKey& has_key) const;

  // Whether two let the parameters of one optimizer keep the same, and for the same reasons.
  friend bool operator==(const StateSpec& a, const StateSpec& b) {
    return a.buffer_count == b.buffer_count && a.keeps_step == b.keeps_step &&
           a.master_weights == b.master_weights && a.state_dtype == b.state_dtype &&
           a.rounding == b.rounding;
  }
};

// Throws if no step takes parameters of its dtype, or on its device.
AMP_EXT_API void check_is_stepped(const StateSpec& spec, const ParamRef& param,
                                  const std::string& operation);

// What the options of a group of an optimizer let its parameters keep.
AMP_EXT_API StateSpec state_spec_of(std::string optimizer, const GroupOptions& options);
AMP_EXT_API StateSpec state_spec_of(std::string optimizer, const GroupOptions& options,
                                    const StateRequirements& requirements);

// The state of a parameter as the options want it, its dtype and device being so. What the state
// lacks is made, and what the parameter was converted under is converted; nothing is written, and
// tensors that fit are taken as they are. Throws if only a part of a state is there.
AMP_EXT_API StateMap complete_state(const StateSpec& spec, const ParamRef& param, StateMap state);

// The tensors of a whole state that a step reads and writes.
AMP_EXT_API ParamState state_of_step(const StateSpec& spec, const ParamRef& param,
                                     const StateMap& state);

// The moments and the master of a state as float32 numbers under the keys of torch, float64 ones as
// such. All are copies.
AMP_EXT_API StateMap float32_state(const StateSpec& spec, const ParamRef& param,
                                   const StateMap& state);

// Sizes and strides of what a state has under a key for a parameter, or for a part of it.
AMP_EXT_API std::pair<std::vector<int64_t>, std::vector<int64_t>> layout_under(
    const StateSpec& spec, const std::string& key, const at::Tensor& param);

}  // namespace amp_ext::optim
