// Checks the tensors of a slot before a step. Errors name the tensor.
#pragma once

#include <string>
#include <vector>

#include "optimizer/group_table.h"
#include "optimizer/param_slot.h"

namespace amp_ext {

// How errors name a tensor: "exp_avgs[3]" (lists) or "exp_avg of group 0, param 3" (optimizers).
enum class Naming { kLists, kGroups };

struct ParamSlotChecks {
  std::string operation;
  std::vector<std::string> buffer_names;  // keys of buffers; in list operations, names of lists
  Naming naming;
  const BufferDescription* described = nullptr;  // the formula's buffers; null outside a step

  std::string name_of(const ParamSlot& slot, int list) const;
  std::string code_name(const ParamSlot& slot, int buffer) const;
  void check_grad(const ParamSlot& slot) const;
  // Checks dtypes, sizes and devices of all tensors.
  void check_tensors(const ParamSlot& slot) const;
  // Throws if the gradient still carries the loss scale of an earlier step.
  void check_carries_no_scale(const ParamSlot& slot) const;

 private:
  void check_buffers(const ParamSlot& slot) const;
};

}  // namespace amp_ext
