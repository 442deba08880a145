// Checks, prepares and launches the steps of slots.
#include "optimizer/step.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include "element.h"
#include "optimizer/scalars.h"
#include "tensors/autocast_cache.h"

namespace amp_ext {

std::string StepOutcome::text() const {
  if (stepped + stepped_in_part == 0) return {};
  std::string text = c10::str(stepped, " of ", params, " parameters");
  if (stepped_in_part > 0) text += c10::str(", and ", stepped_in_part, " more in part");
  return text;
}

DeviceInputs::DeviceInputs(const at::Device& device, const StepInputs& inputs) {
  const GradientOptions& options = inputs.gradients;
  if (options.grad_scale.has_value()) grad_scale = scalar_on(device, *options.grad_scale);
  if (options.found_inf.has_value()) found_inf = scalar_on(device, *options.found_inf);
  if (inputs.reads_norm && options.sum_of_squares.has_value()) {
    sum_of_squares = to_device(*options.sum_of_squares, device).to(at::kDouble);
  }
  pointers = {float_data(grad_scale), float_data(found_inf),
              sum_of_squares.defined() ? sum_of_squares.const_data_ptr<double>() : nullptr,
              options.max_grad_norm.value_or(std::numeric_limits<double>::infinity()),
              options.skip_nonfinite};
  if (inputs.max_norm.has_value()) {
    max_norm = to_device(*inputs.max_norm, device);
    pointers.max_norm = max_norm.const_data_ptr<double>();
  }
  if (inputs.reads_norm && options.grad_norm.has_value() && options.grad_norm->device() == device) {
    grad_norm = options.grad_norm->mutable_data_ptr<float>();
  }
}

void check_options(const std::string& operation, const GroupTable& table,
                   const GradientOptions& options) {
  for (const GroupTable::Entry& group : table.groups) {
    check_scalar(operation, "lr", group.lr);
    TORCH_CHECK(group.common->clip_value >= 0.0, operation, ": clip_value must be at least 0, got ",
                group.common->clip_value);
  }
  TORCH_CHECK(!options.max_grad_norm.has_value() || *options.max_grad_norm >= 0.0, operation,
              ": max_grad_norm must be at least 0, got ", *options.max_grad_norm);
  check_scalar(operation, "grad_scale", options.grad_scale);
  check_scalar(operation, "found_inf", options.found_inf);
  check_scalar(operation, "sum_of_squares", options.sum_of_squares);
}

void check_step(ParamTable& params, Slots slots, const GroupTable& table,
                const GradientOptions& options, bool is_of_scaler, StateStore& store) {
  check_options(params.operation(), table, options);
  std::vector<int64_t> missing;
  for (const ParamSlot& slot : slots) {
    if (slot.has_grad() && slot.lacks_state()) missing.push_back(&slot - params.slots().data());
  }
  try {
    if (!missing.empty()) {
      std::vector<ParamState> made = store.make(missing);
      for (size_t i = 0; i < missing.size(); ++i) params.set_state(missing[i], std::move(made[i]));
    }
    params.check_for_step(slots, table, /*allows_scaled_grads=*/is_of_scaler);
    store.keep();
  } catch (...) {
    for (const int64_t index : missing)
      params.slots()[index].state_dtype = at::ScalarType::Undefined;
    throw;
  }
}

namespace {

// Returns the learning rates that are tensors, as numbers unless rate and kernels are on a GPU.
std::vector<std::optional<LrOnDevice>> lrs_on(const at::Device& device, const GroupTable& table) {
  std::vector<std::optional<LrOnDevice>> lrs;
  for (const GroupTable::Entry& group : table.groups) {
    lrs.emplace_back();
    if (!group.lr.has_value()) continue;
    if (!uses_cuda_engine(device) || !uses_cuda_engine(group.lr->device())) {
      lrs.back() = {{}, group.lr->item().toDouble()};
    } else {
      lrs.back() = {scalar_on(device, *group.lr), 0.0};
    }
  }
  return lrs;
}

// Fills the arguments of the launch, and allocates corrected masters and dense copies.
void make_room(StepBatch& batch, const ParamSlotChecks& checks, const GroupTable& table) {
  batch.all_args.reserve(batch.slots.size());
  for (ParamSlot* slot : batch.slots) {
    const GroupTable::Entry& group = table.groups[slot->group];
    // Sets refreshed_master in every step, because an interrupted step may have left an old one.
    // Split masters are never out of date: the parameter itself holds their high bits.
    const bool is_out_of_date =
        slot->master_param().defined() && !slot->has_split_master() && !slot->master_is_current;
    slot->refreshed_master =
        is_out_of_date ? refreshed_master(slot->param(), slot->master_param()) : at::Tensor();
    if (!slot->args_are_current) slot->fill_args();
    KernelTensorArgs& args = batch.all_args.emplace_back(slot->args);
    args.dithered =
        group.dithered != 0 ? (group.dithered & slot->low_precision) | slot->dithers : 0;
    TORCH_CHECK(args.dithered == 0 || args.step != nullptr || group.common->timestep >= 1.0,
                checks.operation, ": ", checks.name_of(*slot, kStep),
                " must be given to dither, got None");
  }
  batch.is_launched = std::make_unique<bool[]>(batch.slots.size());
}

// Completes the slots that were launched: marks their tensors as written and copies dense copies
// back, until a copy fails. Then throws `failure`, the launch's error, or else the copy's error.
void finish_batch(const StepBatch& batch, StepOutcome& outcome, std::exception_ptr failure) {
  bool copies = true;
  for (size_t i = 0; i < batch.slots.size(); ++i) {
    if (!batch.is_launched[i]) continue;
    ParamSlot& slot = *batch.slots[i];
    slot.mark_written();
    try {
      if (copies) slot.copy_back(batch.inputs.pointers.skip_nonfinite);
    } catch (...) {
      copies = false;
      if (failure == nullptr) failure = std::current_exception();
    }
    const bool is_whole =
        copies || std::none_of(slot.contiguous_copies.begin(), slot.contiguous_copies.end(),
                               [](const ContiguousCopy& one) { return one.written; });
    ++(is_whole ? outcome.stepped : outcome.stepped_in_part);
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

void launch_batch(const StepBatch& batch, GroupTable& table, StepScratch& scratch,
                  StepOutcome& outcome) {
  for (ParamSlot* slot : batch.slots) {
    if (slot->refreshed_master.defined()) slot->master_param().copy_(slot->refreshed_master);
    for (const ContiguousCopy& copy : slot->contiguous_copies) copy.dense.copy_(copy.original);
  }
  for (size_t group = 0; group < batch.lrs.size(); ++group) {
    if (!batch.lrs[group].has_value()) continue;
    CommonHyperparameters& common = *table.groups[group].common;
    common.lr = batch.lrs[group]->number;
    common.lr_on_device = float_data(batch.lrs[group]->on_device);
  }
  const StepLaunch launch{batch.kernel,
                          batch.all_args.data(),
                          static_cast<int64_t>(batch.all_args.size()),
                          table.hyperparameters.get(),
                          batch.inputs.pointers,
                          batch.inputs.grad_norm,
                          batch.is_launched.get(),
                          batch.step_applied};
  std::exception_ptr failure;
  try {
    engine_of(batch.device).step(batch.device, launch, scratch);
  } catch (...) {
    failure = std::current_exception();
  }
  finish_batch(batch, outcome, failure);
}

// Writes the outputs of a step that the host knows to be skipped.
void skip_batch(const StepBatch& batch) {
  const StepDecision decision = StepDecision::read(batch.inputs.pointers);
  if (batch.inputs.grad_norm != nullptr) *batch.inputs.grad_norm = decision.grad_norm;
  if (batch.step_applied != nullptr) *batch.step_applied = decision.step_applied();
}

}  // namespace

std::vector<StepBatch> prepare_step(const ParamSlotChecks& checks, Slots slots,
                                    const GroupTable& table, const StepInputs& inputs,
                                    StepScratch& scratch) {
  std::vector<StepBatch> batches;
  for (ParamSlot& slot : slots) {
    if (!slot.has_grad()) continue;
    const at::Device device = slot.param().device();
    auto batch = std::find_if(batches.begin(), batches.end(), [&](const StepBatch& candidate) {
      return candidate.kernel == *slot.kernel && candidate.device == device;
    });
    if (batch == batches.end()) {
      batches.push_back({device, *slot.kernel, {device, inputs}});
      batch = std::prev(batches.end());
    }
    batch->slots.push_back(&slot);
  }
  for (StepBatch& batch : batches) {
    batch.is_skipped = host_knows_of_skip(batch.device, batch.inputs.pointers);
    if (batch.is_skipped) continue;
    batch.lrs = lrs_on(batch.device, table);
    scratch.make_room(batch.device);
    make_room(batch, checks, table);
  }
  return batches;
}

void launch_step(const std::vector<StepBatch>& batches, GroupTable& table, StepScratch& scratch,
                 StepOutcome& outcome, StepChunks* chunks) {
  clear_autocast_cache();
  for (const StepBatch& batch : batches) {
    if (!batch.is_skipped) outcome.params += static_cast<int64_t>(batch.slots.size());
  }
  for (size_t i = 0; i < batches.size(); ++i) {
    const StepBatch& batch = batches[i];
    if (batch.is_skipped) {
      skip_batch(batch);
      continue;
    }
    const bool is_first = i == 0 || batches[i - 1].chunk != batch.chunk;
    const bool is_last = i + 1 == batches.size() || batches[i + 1].chunk != batch.chunk;
    if (chunks != nullptr && is_first) chunks->begin(batch.chunk);
    launch_batch(batch, table, scratch, outcome);
    if (chunks != nullptr && is_last) chunks->end(batch.chunk);
  }
}

}  // namespace amp_ext
