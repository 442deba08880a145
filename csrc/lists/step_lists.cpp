// One optimizer step over lists of tensors, with a Plan that is created for this step alone.
#include <amp_ext/ops.h>

#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "optimizer/plan.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

namespace {

// A StateStore that takes the states of a step from the lists that the caller passed.
class StatesInLists : public StateStore {
 public:
  StatesInLists(const StepLists& lists, const std::vector<const TensorList*>& buffers)
      : lists_(lists), buffers_(buffers) {}

  std::vector<ParamState> make(const std::vector<int64_t>& indices) override {
    std::vector<ParamState> states(indices.size());
    for (size_t i = 0; i < indices.size(); ++i) {
      const int64_t index = indices[i];
      ParamState& state = states[i];
      for (const TensorList* list : buffers_) state.buffers.push_back((*list)[index]);
      if (lists_.steps.has_value()) state.step = (*lists_.steps)[index];
      if (lists_.master_params.has_value()) state.master_param = (*lists_.master_params)[index];
      if (lists_.exponents.has_value() && (*lists_.exponents)[index].numel() > 0) {
        state.exponents = (*lists_.exponents)[index];
      }
    }
    return states;
  }
  void keep() override {}

 private:
  const StepLists& lists_;
  const std::vector<const TensorList*>& buffers_;
};

}  // namespace

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
  TORCH_CHECK(!lists.global_offsets.has_value() || lists.global_offsets->size() == params.size(),
              operation, ": global_offsets must have ", params.size(), " elements, as params, got ",
              lists.global_offsets->size());
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
  std::vector<ParamTable::Param> registered;
  for (size_t i = 0; i < params.size(); ++i) {
    check_is_plain(operation, c10::str("params[", i, "]"), params[i]);
    check_is_plain(operation, c10::str("grads[", i, "]"), lists.grads[i]);
    TORCH_CHECK(params[i].device() == device, operation, ": params[", i, "] must be on ", device,
                ", got ", params[i].device());
    const int64_t global_offset = lists.global_offsets.has_value() ? (*lists.global_offsets)[i] : 0;
    TORCH_CHECK(global_offset >= 0, operation, ": global_offsets[", i, "] must be at least 0, got ",
                global_offset);
    registered.push_back({0, static_cast<int64_t>(i), nullptr, {}, global_offset});
  }
  Plan plan(operation, names.buffers);
  plan.register_params({}, registered);
  for (size_t i = 0; i < params.size(); ++i) plan.params().take_param(i, params[i], lists.grads[i]);
  GroupTable table = GroupTable::of(std::vector<Group<Hyperparameters>>{options});
  StatesInLists store(lists, buffers);
  try {
    plan.step(table, gradient_options, store);
  } catch (c10::Error& error) {
    if (!plan.failure().empty()) {
      error.add_context(c10::str(operation, ": ", plan.note_of_failure()));
    }
    throw;
  }
}

#define AMP_EXT_INSTANTIATE(Functor)                                            \
  template void step_(const StepLists&, const Group<Functor##Hyperparameters>&, \
                      const GradientOptions&, const StepNames&);
AMP_EXT_FOR_EACH_OPTIMIZER(AMP_EXT_INSTANTIATE)
#undef AMP_EXT_INSTANTIATE

}  // namespace amp_ext
