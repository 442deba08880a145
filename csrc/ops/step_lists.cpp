// One optimizer step over lists of tensors.
#include <ATen/core/grad_mode.h>
#include <amp_ext/ops.h>

#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "ops/grad_scan.h"
#include "ops/muon.h"
#include "ops/step.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

namespace {

using StepParams = std::vector<StepParam>;

ParamTensors tensors_of(const StepParam& param, size_t group, size_t index) {
  ParamTensors tensors;
  tensors.group = static_cast<int64_t>(group);
  tensors.index = static_cast<int64_t>(index);
  tensors.global_offset = param.global_offset;
  tensors.master_is_current = param.master_is_current;
  tensors.buffer_count = static_cast<int>(param.state.buffers.size());
  const auto take = [&](int part, const at::Tensor& tensor) {
    if (tensor.defined()) tensors.set(part, tensor);
  };
  take(kParam, param.param);
  take(kGrad, param.grad);
  take(kMaster, param.state.master_param);
  take(kStep, param.state.step);
  take(kExponents, param.state.exponents);
  for (int i = 0; i < tensors.buffer_count; ++i) take(kBuffer0 + i, param.state.buffers[i]);
  return tensors;
}

// Sums the squares of the gradients in `scan`, if the step needs their norm.
void find_sum_of_squares(GradientOptions& options, GradScan& scan, StepScratch& scratch) {
  if (!options.max_grad_norm.has_value()) {
    options.sum_of_squares.reset();
    options.grad_norm.reset();
  } else if (!options.sum_of_squares.has_value()) {
    scan.run({}, {}, /*sums_squares=*/true, options.skip_nonfinite, scratch);
    const at::Tensor total = scan.sum_of_squares();
    if (total.defined()) options.sum_of_squares = total;
  }
}

// Calls run(progress), and adds to its error how far the step came.
template <typename Run>
void run_step(const std::string& operation, const Run& run) {
  StepProgress progress;
  try {
    run(progress);
  } catch (c10::Error& error) {
    if (!progress.text().empty()) {
      error.add_context(
          c10::str(operation, ": the step failed after updating ", progress.text(),
                   ". Restore the parameters and their states before the next step."));
    }
    throw;
  }
}

// Steps all groups once. Nothing has been written if an error occurs before the first launch.
template <typename Hyperparameters>
void step_once(const std::vector<StepParams>& groups,
               const std::vector<Group<Hyperparameters>>& options, GradientOptions of_gradients,
               const std::string& operation, Naming naming, std::vector<std::string> buffers) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!of_gradients.max_grad_norm.has_value() || *of_gradients.max_grad_norm >= 0.0,
              operation, ": max_grad_norm must be at least 0, got ", *of_gradients.max_grad_norm);
  std::vector<Hyperparameters> hyperparameters(options.begin(), options.end());
  StepGroups table;
  table.refer_to(hyperparameters);
  Step step(operation, naming, std::move(buffers));
  GradScan scan;
  for (size_t group = 0; group < groups.size(); ++group) {
    TORCH_CHECK(options[group].clip_value >= 0.0, operation,
                ": clip_value must be at least 0, got ", options[group].clip_value);
    TORCH_CHECK(options[group].can_decay(), operation,
                ": cautious_weight_decay must be False for a decay that is added to gradients, got "
                "True. Set decoupled_weight_decay");
    table.groups[group].lr = options[group].lr_tensor;
    for (size_t i = 0; i < groups[group].size(); ++i) {
      const StepParam& param = groups[group][i];
      if (!param.grad.defined()) continue;
      step.add(tensors_of(param, group, i), table);
      scan.add(param.grad, static_cast<int64_t>(i));
    }
  }
  StepScratch scratch;
  find_sum_of_squares(of_gradients, scan, scratch);
  run_step(operation, [&](StepProgress& progress) {
    step.run(table, {std::move(of_gradients), {}, {}}, scratch, progress);
  });
}

// Checks the lists of a step, and returns the tensors of each parameter.
template <typename Hyperparameters>
StepParams params_in(const StepLists& lists, const Group<Hyperparameters>& options,
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
  if (params.empty()) return {};
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
  return step_params;
}

}  // namespace

template <typename Hyperparameters>
void step_(const StepLists& lists, const Group<Hyperparameters>& options,
           const GradientOptions& gradient_options, const StepNames& names) {
  const StepParams params = params_in(lists, options, gradient_options, names);
  if (params.empty()) return;
  step_once<Hyperparameters>({params}, {options}, gradient_options, names.operation, Naming::kLists,
                             names.buffers);
}

void muon_(const StepLists& lists, const Group<MuonHyperparameters>& options,
           const MuonOptions& matrix_options, const GradientOptions& gradient_options,
           const OptionalTensor& skipped_matrices, const StepNames& names) {
  const at::NoGradGuard no_grad;
  const StepParams params = params_in(lists, options, gradient_options, names);
  if (params.empty()) return;
  if (skipped_matrices.has_value()) {
    check_number(names.operation, "skipped_matrices", *skipped_matrices, at::kLong,
                 params[0].param.device());
  }
  std::vector<MuonHyperparameters> hyperparameters{options};
  StepGroups groups;
  groups.refer_to(hyperparameters);
  groups.groups[0].lr = options.lr_tensor;
  MuonStep step(names.operation, Naming::kLists, names.buffers.at(0));
  GradScan scan;
  for (size_t i = 0; i < params.size(); ++i) step.add(tensors_of(params[i], 0, i));
  const std::vector<MuonOptions> of_matrices{matrix_options};
  step.prepare(groups, of_matrices);
  for (size_t i = 0; i < params.size(); ++i) {
    scan.add(params[i].grad, static_cast<int64_t>(i));
  }
  StepScratch scratch;
  StepInputs inputs{gradient_options, {}, {}};
  find_sum_of_squares(inputs.gradients, scan, scratch);
  run_step(names.operation, [&](StepProgress& progress) {
    step.run(groups, inputs, skipped_matrices, scratch, progress);
  });
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
  step_once(groups, options, gradient_options, operation, Naming::kGroups, std::move(keys));
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
