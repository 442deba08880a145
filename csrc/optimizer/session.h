// One operation of an optimizer on its plan.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/options.h>

#include <string>
#include <utility>
#include <vector>

#include "optimizer/group_table.h"
#include "optimizer/optimizer_description.h"
#include "optimizer/plan.h"

namespace amp_ext {

// What the caller of an operation must do next.
enum class PlanAnswer {
  kRegisterParams,   // parameters or options have changed: register the parameters, then ask again
  kNeedsGlobalNorm,  // add up the sums of squares over all ranks, and pass them
  kDone,
};

inline OptionalTensor if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// The options of all parameter groups.
struct AMP_EXT_API GroupSettings {
  optim::ClippingOptions clipping;
  GroupTable table;
  std::vector<optim::StateSpec> specs;  // [groups]

  // Reads the options. Throws if the clipping options of groups differ.
  virtual void read(const std::string& optimizer, const optim::OptimizerDescription& description,
                    const std::vector<const optim::GroupOptions*>& groups);
};

// Holds the lock of the plan, and the options of the parameter groups once they are read.
struct Session : GroupSettings {
  Session(Plan& plan, const char* operation) : plan(plan), lock(plan, operation) {}

  // Passes all parameters to the plan. `for_each_param` calls its argument with the group and the
  // identity of each parameter, and with a function that returns the tensor, until the call returns
  // false. Returns false if the parameters or the options differ from the registered ones.
  template <typename ForEachParam>
  bool take_params(const ForEachParam& for_each_param) {
    if (!plan.params().has_specs(specs)) return false;
    const std::vector<ParamSlot>& slots = plan.params().slots();
    size_t index = 0;
    const bool are_registered =
        for_each_param([&](int64_t group, const void* object, const auto& param) {
          if (index == slots.size() || slots[index].object != object || slots[index].group != group)
            return false;
          return plan.params().take_param(index++, param());
        });
    return are_registered && index == slots.size();
  }

  GradientOptions gradient_options(OptionalTensor grad_scale, OptionalTensor found_inf,
                                   OptionalTensor sum_of_squares = {}) const {
    return {std::move(grad_scale),
            std::move(found_inf),
            clipping.max_grad_norm,
            std::move(sum_of_squares),
            {},
            clipping.skip_nonfinite};
  }

  Plan& plan;
  Plan::Lock lock;
};

}  // namespace amp_ext
