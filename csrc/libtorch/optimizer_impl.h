// The private members of an optimizer of the C++ interface.
#pragma once

#include <amp_ext/norm_guard.h>
#include <amp_ext/optim.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "libtorch/optimizer_class.h"
#include "libtorch/values.h"
#include "optimizer/inspection.h"
#include "optimizer/plan.h"
#include "optimizer/states.h"
#include "tensors/python_names.h"

namespace amp_ext::optim {

struct FusedOptimizer::Impl {
  explicit Impl(const OptimizerClass& optimizer_class)
      : optimizer_class(optimizer_class), plan(std::make_unique<Plan>(optimizer_class.name)) {}

  const OptimizerClass& optimizer_class;
  std::unique_ptr<Plan> plan;
  std::shared_ptr<NormGuard> norm_guard;  // null if there is no guard
  size_t state_count = 0;                 // size of state() when the parameters were registered
  std::vector<Dict> other_entries;  // for each group, unknown entries of the loaded state dict
  Dict other_states = new_dict();   // states of the loaded state dict that belong to no parameter
};

// Returns the name of a parameter for errors, for example "group 0, param 3".
inline std::string place(size_t group, size_t index) {
  return c10::str("group ", group, ", param ", index);
}

}  // namespace amp_ext::optim
