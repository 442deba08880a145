// What an optimizer of the C++ interface keeps from step to step.
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
#include "optimizer/plan.h"
#include "optimizer/states.h"
#include "tensors/python_names.h"

namespace amp_ext::optim {

struct FusedOptimizer::Impl {
  explicit Impl(const OptimizerClass& optimizer_class)
      : optimizer_class(optimizer_class), plan(std::make_unique<Plan>(optimizer_class.name)) {}

  const OptimizerClass& optimizer_class;
  std::unique_ptr<Plan> plan;
  bool inspects_next = false;
  std::optional<InspectedStep> inspected;  // by the step that was asked for it
  std::shared_ptr<NormGuard> norm_guard;   // or null
  size_t state_count = 0;                  // when its parameters were listed
  std::vector<Dict> other_entries;         // by group, of the state dict that was loaded
  Dict other_states = new_dict();          // of it likewise, which belong to no parameter
};

// How errors call a parameter.
inline std::string place(size_t group, size_t index) {
  return c10::str("group ", group, ", param ", index);
}

}  // namespace amp_ext::optim
