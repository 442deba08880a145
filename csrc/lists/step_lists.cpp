// One optimizer step over lists of tensors, with a table of slots for this step alone.
#include <ATen/core/grad_mode.h>
#include <amp_ext/ops.h>

#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "optimizer/grad_scan.h"
#include "optimizer/param_table.h"
#include "optimizer/step.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

namespace {

using StepParams = std::vector<StepParam>;

// Fills a table with the parameters of all groups. A parameter without a gradient gets no state.
void fill_slots(ParamTable& table, const std::vector<StepParams>& groups) {
  std::vector<ParamTable::Param> registered;
  std::vector<const StepParam*> params;
  for (size_t group = 0; group < groups.size(); ++group) {
    for (size_t i = 0; i < groups[group].size(); ++i) {
      params.push_back(&groups[group][i]);
      registered.push_back({static_cast<int64_t>(group),
                            static_cast<int64_t>(i),
                            nullptr,
                            {},
                            params.back()->global_offset});
    }
  }
  table.register_params({}, registered);
  for (size_t index = 0; index < params.size(); ++index) {
    ParamSlot& slot = table.slots()[index];
    slot.current_param = c10::MaybeOwned<at::Tensor>::borrowed(params[index]->param);
    slot.owned[kGrad] = params[index]->grad;
    if (slot.has_grad()) table.set_state(static_cast<int64_t>(index), params[index]->state);
  }
}

// Steps all groups once. Nothing has been written if an error occurs before the first launch.
void step_once(const std::vector<StepParams>& groups, GroupTable table, GradientOptions options,
               ParamSlotChecks checks) {
  const at::NoGradGuard no_grad;
  ParamTable params(std::move(checks));
  fill_slots(params, groups);
  check_options(params.operation(), table, options);
  params.check_for_step(params.slots(), table, /*allows_scaled_grads=*/true);
  for (ParamSlot& slot : params.slots()) {
    slot.master_is_current = groups[slot.group][slot.index_in_group].master_is_current;
  }
  const NormSource norm = source_of_norm(options.max_grad_norm.has_value(),
                                         options.sum_of_squares.has_value(), false, false);
  StepScratch scratch;
  GradScans().take(params, options, norm, scratch);
  const std::vector<StepBatch> batches =
      prepare_step(params.checks(), params.slots(), table,
                   {std::move(options), norm != NormSource::kNone}, scratch);
  StepOutcome outcome;
  try {
    launch_step(batches, table, scratch, outcome);
  } catch (c10::Error& error) {
    if (!outcome.text().empty()) {
      error.add_context(
          c10::str(params.operation(), ": the step failed after updating ", outcome.text(),
                   ". Restore the parameters and their states before the next step."));
    }
    throw;
  }
}

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
  for (size_t i = 0; i < params.size(); ++i) {
    check_is_plain(operation, c10::str("params[", i, "]"), params[i]);
    check_is_plain(operation, c10::str("grads[", i, "]"), lists.grads[i]);
    TORCH_CHECK(params[i].device() == device, operation, ": params[", i, "] must be on ", device,
                ", got ", params[i].device());
    if (!lists.global_offsets.has_value()) continue;
    const int64_t global_offset = (*lists.global_offsets)[i];
    TORCH_CHECK(global_offset >= 0, operation, ": global_offsets[", i, "] must be at least 0, got ",
                global_offset);
  }
  StepParams step_params;
  for (size_t i = 0; i < params.size(); ++i) {
    StepParam& param = step_params.emplace_back(StepParam{params[i], lists.grads[i]});
    for (const TensorList* list : buffers) param.state.buffers.push_back((*list)[i]);
    if (lists.steps.has_value()) param.state.step = (*lists.steps)[i];
    if (lists.master_params.has_value()) param.state.master_param = (*lists.master_params)[i];
    if (lists.exponents.has_value() && (*lists.exponents)[i].numel() > 0) {
      param.state.exponents = (*lists.exponents)[i];
    }
    if (lists.global_offsets.has_value()) param.global_offset = (*lists.global_offsets)[i];
  }
  step_once({step_params}, GroupTable::of(std::vector<Group<Hyperparameters>>{options}),
            gradient_options, {operation, names.buffers, Naming::kLists});
}

template <typename Hyperparameters>
void step_groups_(const std::vector<std::vector<StepParam>>& groups,
                  const std::vector<Group<Hyperparameters>>& options,
                  const GradientOptions& gradient_options, const std::string& operation) {
  TORCH_CHECK(options.size() == groups.size(), operation, ": options must have ", groups.size(),
              " elements, one for each group, got ", options.size());
  for (size_t group = 0; group < groups.size(); ++group) {
    for (const StepParam& param : groups[group]) {
      TORCH_CHECK(!param.grad.defined() || param.state.step.defined() ||
                      options[group].timestep >= 1.0 || options[group].why_step() == nullptr,
                  operation, ": the state of each parameter of group ", group,
                  " must have a step, ", options[group].why_step());
    }
  }
  std::vector<std::string> keys;
  for (const BufferDescription& buffer : Hyperparameters::kBuffers) keys.emplace_back(buffer.name);
  step_once(groups, GroupTable::of(options), gradient_options, {operation, keys, Naming::kGroups});
}

#define AMP_EXT_INSTANTIATE(Functor)                                              \
  template void step_(const StepLists&, const Group<Functor##Hyperparameters>&,   \
                      const GradientOptions&, const StepNames&);                  \
  template void step_groups_(const std::vector<std::vector<StepParam>>&,          \
                             const std::vector<Group<Functor##Hyperparameters>>&, \
                             const GradientOptions&, const std::string&);
AMP_EXT_FOR_EACH_OPTIMIZER(AMP_EXT_INSTANTIATE)
#undef AMP_EXT_INSTANTIATE

}  // namespace amp_ext
