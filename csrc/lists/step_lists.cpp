// One step of an optimizer over lists of tensors: a plan that lives for this step only.
#include <amp_ext/ops.h>

#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "optimizer/plan.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

template <typename Hyperparameters>
void step_(const StepLists& lists, const Group<Hyperparameters>& options,
           const GradientOptions& gradient_options, const StepNames& names) {
  const std::string& operation = names.operation;
  const TensorList& params = lists.params;
  const auto check = [&](const std::string& name, const OptionalTensorList& list) {
    if (list.has_value()) check_length(operation, name, *list, params);
  };
  check_length(operation, "grads", lists.grads, params);
  std::vector<const TensorList*> buffers;
  for (size_t i = 0; i < lists.buffers.size(); ++i) {
    check(names.buffers.at(i), lists.buffers[i]);
    if (lists.buffers[i].has_value()) buffers.push_back(&*lists.buffers[i]);
  }
  check("steps", lists.steps);
  check("master_params", lists.master_params);
  check("exponents", lists.exponents);
  TORCH_CHECK(!lists.first_elements.has_value() || lists.first_elements->size() == params.size(),
              operation, ": first_elements must have ", params.size(), " elements, as params, got ",
              lists.first_elements->size());
  TORCH_CHECK(!buffers.empty() || !options.needs_buffers(), operation, ": ", names.buffers.at(0),
              " must be given, got None");
  TORCH_CHECK(!lists.steps.has_value() || options.timestep == 0.0, operation,
              ": steps must be None beside a timestep, got ", lists.steps->size(), " tensors");
  TORCH_CHECK(lists.steps.has_value() || options.timestep >= 1.0 || options.why_step() == nullptr,
              operation, ": steps must be given ", options.why_step(), ", got None");
  if (params.empty()) return;
  const at::Device device = params[0].device();
  if (gradient_options.sum_of_squares.has_value()) {
    check_number(operation, "sum_of_squares", *gradient_options.sum_of_squares, at::kDouble,
                 device);
  }
  if (gradient_options.grad_norm.has_value()) {
    check_number(operation, "grad_norm", *gradient_options.grad_norm, at::kFloat, device);
  }
  Plan plan(operation, names.buffers, Naming::kLists);
  for (size_t i = 0; i < params.size(); ++i) {
    check_is_plain(operation, c10::str("params[", i, "]"), params[i]);
    check_is_plain(operation, c10::str("grads[", i, "]"), lists.grads[i]);
    TORCH_CHECK(params[i].device() == device, operation, ": params[", i, "] must be on ", device,
                ", got ", params[i].device());
    ParamState state;
    for (const TensorList* list : buffers) state.buffers.push_back((*list)[i]);
    if (lists.steps.has_value()) state.step = (*lists.steps)[i];
    if (lists.master_params.has_value()) state.master_param = (*lists.master_params)[i];
    if (lists.exponents.has_value() && (*lists.exponents)[i].numel() > 0) {
      state.exponents = (*lists.exponents)[i];
    }
    const int64_t index = plan.add_param(0, static_cast<int64_t>(i), nullptr);
    plan.take_param(index, params[i], lists.grads[i]);
    plan.set_state(index, std::move(state));
    if (lists.first_elements.has_value()) {
      const int64_t first_element = (*lists.first_elements)[i];
      TORCH_CHECK(first_element >= 0, operation, ": first_elements[", i,
                  "] must be at least 0, got ", first_element);
      plan.set_first_element(index, first_element);
    }
  }
  plan.read_grads();
  try {
    plan.step(std::vector<Group<Hyperparameters>>{options}, gradient_options);
  } catch (c10::Error& error) {
    if (!plan.progress()->has_failed) throw;
    error.add_context(c10::str(operation, ": ", plan.progress()->text(),
                               "; restore them with their states before the next step"));
    throw;
  }
}

#define AMP_EXT_INSTANTIATE(Functor)                                            \
  template void step_(const StepLists&, const Group<Functor##Hyperparameters>&, \
                      const GradientOptions&, const StepNames&);
AMP_EXT_FOR_EACH_OPTIMIZER(AMP_EXT_INSTANTIATE)
#undef AMP_EXT_INSTANTIATE

}  // namespace amp_ext
