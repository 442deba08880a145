// The registered parameters of an optimizer, with their states and what is known of their memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "optimizer/group_table.h"
#include "optimizer/optimizer_description.h"
#include "optimizer/param_slot.h"
#include "optimizer/param_slot_checks.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

// Neighbouring slots of a table.
struct Slots {
  Slots(ParamSlot* first, size_t count) : first(first), count(count) {}
  Slots(std::vector<ParamSlot>& slots) : first(slots.data()), count(slots.size()) {}
  Slots(ParamSlot& slot) : first(&slot), count(1) {}

  ParamSlot* begin() const { return first; }
  ParamSlot* end() const { return first + count; }
  ParamSlot& operator[](size_t index) const { return first[index]; }

  ParamSlot* first;
  size_t count;
};

// One slot for each parameter. States are stored here; parameters and gradients are set before each
// operation and released after it. All methods but the constant ones need a Plan::Lock.
class AMP_EXT_API ParamTable {
 public:
  // A parameter to register.
  struct Param {
    int64_t group;
    int64_t index_in_group;
    const void* object;  // the identity of the parameter: its Python object or its TensorImpl
    // Only for a DTensor: the number of its partition, or 0 if it is replicated. Its local shard
    // must be passed to set_shard().
    std::optional<int64_t> partition = {};
    // Index of the shard's first element in the full tensor; dithered rounding depends on it.
    int64_t global_offset = 0;

    bool operator==(const Param& other) const {
      const auto all = [](const Param& param) {
        return std::tie(param.group, param.index_in_group, param.object, param.partition,
                        param.global_offset);
      };
      return all(*this) == all(other);
    }
  };

  explicit ParamTable(ParamSlotChecks checks) : checks_(std::move(checks)) {}

  // Fills an empty table with slots of these parameters, without states, and stores the specs of
  // the groups' states.
  void register_params(std::vector<optim::StateSpec> specs, const std::vector<Param>& params);

  // Drops parameters and states. What is needed to recognize unchanged parameters and scaled
  // gradients is kept for the next register_params().
  void drop_slots();

  // Remembers from an earlier table of this optimizer which gradients still carry a loss scale, for
  // the next register_params(). Call it on a new table.
  void inherit_scaled_grads(const ParamTable& before);

  const std::vector<ParamSlot>& slots() const { return slots_; }
  std::vector<ParamSlot>& slots() { return slots_; }
  // True if the parameters were registered with these specs, one for each group.
  bool has_specs(const std::vector<optim::StateSpec>& specs) const { return specs == specs_; }
  // True if a parameter is a DTensor, sharded or replicated.
  bool has_dtensors() const { return has_dtensors_; }
  // True if ranks hold different parts of a parameter, so that no rank alone knows the norm of all
  // gradients. A replicated DTensor does not count.
  bool is_partitioned() const { return is_partitioned_; }

  // Sets the present tensor of a parameter and its gradient, the .grad of `param`, for the current
  // operation; the caller keeps `param` alive. Returns false if a quantized state no longer fits
  // the parameter, which must be registered again.
  bool take_param(size_t index, const at::Tensor& param);

  // Sets this rank's shard of a DTensor parameter and of its gradient, which may be undefined. Call
  // it after take_param() in the same operation.
  void set_shard(int64_t index, at::Tensor param, at::Tensor grad);

  // Sets the state of a parameter, whose present tensor must be set.
  void set_state(int64_t index, ParamState state);

  // Drops all references to parameters and gradients, at the end of an operation.
  void release_params();

  // Checks tensors of the slots, and names them in errors.
  const ParamSlotChecks& checks() const { return checks_; }
  const std::string& operation() const { return checks_.operation; }

  // Checks all tensors that a step of `slots` would use, and brings these slots up to date. Throws
  // if a gradient still carries an earlier loss scale, unless that is allowed.
  void check_for_step(Slots slots, const GroupTable& table, bool allows_scaled_grads);

  // True if every gradient is the one that the last scan has read, and was not written since.
  bool gradients_are_as_seen() const;
  // True if a gradient that was read by the last scan has been written or replaced since.
  bool gradients_were_written() const;

  // Remembers after a step of `slots` to which parameters the masters were rounded. If the
  // gradients had a loss scale, remembers also which of them still carry it: those that the step
  // did not write back. `are_as_seen` is true if the gradients are those of the last scan.
  static void remember_step(Slots slots, bool had_scale, bool are_as_seen);

  // Ignores writes to parameters, given by address of the object and number of writes: the
  // remembered versions advance by these numbers. The masters are still up to date, because the
  // parameters have their old bits again.
  void forget_writes(const std::unordered_map<uintptr_t, int64_t>& writes);

 private:
  // What register_params() keeps of a parameter.
  struct Remembered {
    // The parameter when its master was last rounded to it, with its fingerprint. If the parameter
    // is unchanged since, the next step uses the master, even if a user wrote to it.
    std::optional<SeenTensor> param_of_master;
    Fingerprint fingerprint;
    // A gradient that a step with a loss scale used. It carries the scale until it is written.
    std::optional<SeenTensor> scaled_grad;
    const void* scaled_grad_data = nullptr;  // address of its first element
  };

  std::unordered_map<const void*, Remembered> remembered() const;
  OptimizerKernel kernel_of(const ParamSlot& slot, const GroupTable& table) const;
  void check_slot(ParamSlot& slot, const GroupTable& table);

  ParamSlotChecks checks_;
  std::vector<optim::StateSpec> specs_;  // [groups], as registered
  std::vector<ParamSlot> slots_;
  bool has_dtensors_ = false;
  bool is_partitioned_ = false;
  std::unordered_map<const void*, Remembered> remembered_;  // of dropped slots, by Param::object
};

}  // namespace amp_ext
