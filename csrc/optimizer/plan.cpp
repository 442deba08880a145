// Checks the tensors of one optimizer, replaces out-of-date masters, and launches steps.
#include "optimizer/plan.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include "element.h"
#include "optimizer/scalars.h"
#include "tensors/autocast_cache.h"

namespace amp_ext {

namespace {

constexpr const char* kHowToGoOn =
    "Load a checkpoint into the model and the optimizer with load_state_dict()";

}  // namespace

std::string Plan::Progress::text() const {
  std::string text = c10::str(stepped, " of ", params, " parameters");
  if (stepped_in_part > 0) text += c10::str(", and ", stepped_in_part, " more in part");
  return text;
}

Plan::Plan(std::string optimizer, std::string failure)
    : params_({std::move(optimizer), {}, Naming::kGroups}), failure_(std::move(failure)) {}

Plan::Plan(std::string operation, std::vector<std::string> buffer_lists)
    : params_({std::move(operation), std::move(buffer_lists), Naming::kLists}) {}

Plan::Lock::Lock(Plan& plan, const char* operation) : plan_(plan) {
  const auto thread = std::this_thread::get_id();
  std::thread::id user;
  const std::string& optimizer = plan.params_.operation();
  TORCH_CHECK(
      plan.user_.compare_exchange_strong(user, thread), optimizer, ".", operation, ": thread ",
      thread, " called the optimizer while thread ", user,
      " was inside a call of it. Let one thread at a time use it, for example with a lock.");
  if (plan.failure_.empty() && !plan.is_swapped_in_) return;
  plan.user_ = std::thread::id();
  plan.check_not_swapped_in(operation);
  TORCH_CHECK(false, optimizer, ".", operation, ": an earlier step failed after updating ",
              plan.failure_, ". ", kHowToGoOn, ".");
}

Plan::Lock::~Lock() {
  // After an error, no later step may use the scan that was made for this one.
  if (std::uncaught_exceptions() > exceptions_) plan_.scans_.clear();
  plan_.params_.release_params();
  if (plan_.must_forget_) plan_.drop_slots();
  plan_.user_ = std::thread::id();
}

void check_weights_are_in(const std::string& operation, bool is_swapped) {
  TORCH_CHECK(!is_swapped, operation,
              ": the parameters hold their averages, because a WeightAverage.swap() is active. "
              "Leave the swap first.");
}

void Plan::check_not_swapped_in(const std::string& operation) const {
  check_weights_are_in(c10::str(params_.operation(), ".", operation), is_swapped_in_);
}

void Plan::take_over(const Plan& before) {
  params_.take_scaled_grads(before.params_);
  tracks_step_applied_ = before.tracks_step_applied_;
  steps_ = before.steps_;
  finds_writes_ = before.finds_writes_;
  guard_ = before.guard_;
  retired_guards_ = before.retired_guards_;
  tracks_grad_norms_ = before.tracks_grad_norms_;
}

void Plan::set_guard(std::shared_ptr<NormStatistics> guard) {
  if (is_guarded() && guard_ != guard && !guard_->device().is_cpu()) {
    retired_guards_.push_back(guard_);
  }
  guard_ = std::move(guard);
}

void Plan::set_tracks_grad_norms(bool tracks) {
  TORCH_CHECK(user_.load() == std::thread::id(), params_.operation(),
              ": track_grad_norms was set during a step. Set it between steps.");
  tracks_grad_norms_ = tracks;
}

void Plan::forget() {
  must_forget_ = user_.load() != std::thread::id();
  if (!must_forget_) drop_slots();
}

void Plan::drop_slots() {
  params_.drop_slots();
  must_forget_ = false;
  scans_.clear();
  first_nonfinites_.clear();
  scratch_ = {};
  sample_.reset();
}

void Plan::register_params(std::vector<optim::StateSpec> specs,
                           const std::vector<ParamTable::Param>& params) {
  drop_slots();
  params_.register_params(std::move(specs), params);
}

std::string Plan::note_of_failure() const {
  if (params_.checks().naming == Naming::kLists) {
    return c10::str("the step failed after updating ", failure_,
                    ". Restore the parameters and their states before the next step.");
  }
  return c10::str("the step failed after updating ", failure_, ". ", kHowToGoOn,
                  "; until then the optimizer refuses to step.");
}

// Makes all checks and allocations before the first launch, because a launch can't be undone.
void Plan::step(GroupTable& table, GradientOptions options, StateStore& store,
                const at::Tensor& squares_of_params) {
  const at::NoGradGuard no_grad;
  params_.describe(table.buffers);
  progress_ = {};
  if (params_.checks().naming == Naming::kGroups) take_norms(options);
  check_with_states(table, options, store);
  if (params_.checks().naming == Naming::kGroups) {
    const StepNorms norms = this->norms(options.max_grad_norm);
    has_grad_norm_ = norms.wants_total();
    has_grad_norms_ = norms.wants_each() && !params_.slots().empty();
  }
  bool freshly_scanned = false;
  const std::vector<GradScan> scans =
      scans_for_step(options, squares_of_params.defined(), freshly_scanned);
  std::vector<Batch> all = batches();
  const at::Tensor applied = take_step_applied(all);
  for (Batch& batch : all) {
    batch.inputs = inputs_on(batch.device, options, scans, freshly_scanned);
    if (applied.defined() && applied.device() == batch.device) {
      batch.inputs.step_applied = applied.mutable_data_ptr<float>();
    }
    batch.is_skipped = host_knows_of_skip(batch.device, batch.inputs.pointers);
    if (batch.is_skipped) continue;
    batch.lrs = lrs_on(batch.device, table);
    scratch_.make_room(batch.device);
    make_room(batch, table);
    progress_.params += static_cast<int64_t>(batch.slots.size());
  }
  const bool is_written = std::any_of(
      all.begin(), all.end(), [](const Batch& batch) { return batch.inputs.grad_norm != nullptr; });
  // The last launch on the guard's GPU lets the guard count the norm. Without such a launch, and on
  // the CPU, end_guarded_step() below does it, also for a step without gradients.
  const Batch* last = nullptr;
  std::optional<DeviceInputs> guarded;
  if (is_guarded() && counts_norms_) {
    const at::Device device = guard_->device();
    for (const Batch& batch : all) {
      if (batch.device == device && uses_cuda_engine(device) && !batch.is_skipped) last = &batch;
    }
    if (last == nullptr) guarded = inputs_on(device, options, scans, freshly_scanned);
  }
  write_norms(options, scans, squares_of_params, is_written);
  clear_autocast_cache();
  try {
    for (const Batch& batch : all) {
      if (!batch.is_skipped) {
        step_batch(batch, table, &batch == last);
        continue;
      }
      const StepDecision factor = StepDecision::read(batch.inputs.pointers);
      if (batch.inputs.grad_norm != nullptr) *batch.inputs.grad_norm = factor.grad_norm;
      if (batch.inputs.step_applied != nullptr) *batch.inputs.step_applied = factor.step_applied();
    }
    if (applied.defined() && !applied.is_same(step_applied_)) {
      step_applied_.copy_(applied, /*non_blocking=*/true);
    }
    ++steps_;
    if (guarded.has_value()) {
      const at::Device device = guard_->device();
      engine_of(device).end_guarded_step(device, guarded->pointers);
    }
    params_.remember_masters();
    choose_sample();
    if (options.grad_scale.has_value() && params_.checks().naming == Naming::kGroups) {
      params_.remember_scaled_grads(/*are_as_seen=*/!scans.empty());
    }
    params_.remember_step();
  } catch (...) {
    if (progress_.stepped + progress_.stepped_in_part > 0) failure_ = progress_.text();
    throw;
  }
}

// Initializes missing states and makes every check that can refuse a step, before anything is
// written. The store keeps the new states only if all checks pass; otherwise the slots drop them.
void Plan::check_with_states(const GroupTable& table, const GradientOptions& options,
                             StateStore& store) {
  check_groups(table, options.max_grad_norm);
  std::vector<int64_t> missing;
  for (size_t i = 0; i < params_.slots().size(); ++i) {
    const ParamSlot& slot = params_.slots()[i];
    if (slot.has_grad() && slot.lacks_state()) missing.push_back(static_cast<int64_t>(i));
  }
  try {
    if (!missing.empty()) {
      std::vector<ParamState> made = store.make(missing);
      for (size_t i = 0; i < missing.size(); ++i) params_.set_state(missing[i], std::move(made[i]));
    }
    check_inputs(options);
    // After unscale_(), a scaler passes no grad_scale, but it always passes found_inf.
    const bool is_of_scaler = options.grad_scale.has_value() || options.found_inf.has_value();
    params_.check_for_step(table, /*allows_scaled_grads=*/is_of_scaler);
    store.keep();
  } catch (...) {
    for (const int64_t index : missing)
      params_.slots()[index].state_dtype = at::ScalarType::Undefined;
    throw;
  }
}

void Plan::check_inputs(const GradientOptions& options) const {
  check_scalar(params_.operation(), "grad_scale", options.grad_scale);
  check_scalar(params_.operation(), "found_inf", options.found_inf);
  check_scalar(params_.operation(), "sum_of_squares", options.sum_of_squares);
}

std::vector<Plan::Batch> Plan::batches() {
  std::vector<Batch> batches;
  for (ParamSlot& slot : params_.slots()) {
    if (!slot.has_grad()) continue;
    const at::Device device = slot.param().device();
    auto batch = std::find_if(batches.begin(), batches.end(), [&](const Batch& candidate) {
      return candidate.kernel == *slot.kernel && candidate.device == device;
    });
    if (batch == batches.end()) {
      batch = batches.insert(batch, {device, *slot.kernel, {}, {}, {}, false, {}});
    }
    batch->slots.push_back(&slot);
  }
  return batches;
}

Plan::DeviceInputs Plan::inputs_on(const at::Device& device, const GradientOptions& options,
                                   const std::vector<GradScan>& scans, bool freshly_scanned) const {
  DeviceInputs inputs{};
  if (options.grad_scale.has_value()) inputs.grad_scale = scalar_on(device, *options.grad_scale);
  if (options.found_inf.has_value()) {
    inputs.found_inf = scalar_on(device, *options.found_inf);
    for (const GradScan& scan : scans) {
      // The result of an earlier scan() is already included in options.found_inf.
      if (!freshly_scanned) continue;
      inputs.found_inf = inputs.found_inf.add(to_device(scan.result.found_inf, device));
    }
  }
  const bool reads_norm = norms(options.max_grad_norm).reads_total;
  if (reads_norm) inputs.sum_of_squares = sum_of_squares_on(device, options, scans);
  inputs.pointers = {
      float_data(inputs.grad_scale), float_data(inputs.found_inf),
      inputs.sum_of_squares.defined() ? inputs.sum_of_squares.const_data_ptr<double>() : nullptr,
      options.max_grad_norm.value_or(std::numeric_limits<double>::infinity()),
      options.skip_nonfinite};
  if (is_guarded()) {
    inputs.guard = guard_->bytes_on(device);
    inputs.pointers.guard = static_cast<NormGuardMemory*>(inputs.guard.mutable_data_ptr());
  }
  if (reads_norm && options.grad_norm.has_value() && options.grad_norm->device() == device) {
    inputs.grad_norm = options.grad_norm->mutable_data_ptr<float>();
  }
  return inputs;
}

// Returns the learning rates that are tensors, as numbers unless rate and kernels are on a GPU.
std::vector<std::optional<Plan::LrOnDevice>> Plan::lrs_on(const at::Device& device,
                                                          const GroupTable& table) {
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

void Plan::make_room(Batch& batch, const GroupTable& table) const {
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
                params_.operation(), ": ", params_.checks().name_of(*slot, kStep),
                " must be there to dither, got None");
  }
  batch.is_launched = std::make_unique<bool[]>(batch.slots.size());
}

void Plan::step_batch(const Batch& batch, GroupTable& table, bool ends_guarded) {
  for (ParamSlot* slot : batch.slots) {
    if (slot->refreshed_master.defined()) slot->master_param().copy_(slot->refreshed_master);
    for (const ContiguousCopy& contiguous_copies : slot->contiguous_copies)
      contiguous_copies.dense.copy_(contiguous_copies.original);
  }
  for (size_t group = 0; group < batch.lrs.size(); ++group) {
    if (!batch.lrs[group].has_value()) continue;
    CommonHyperparameters& common = *table.groups[group].common;
    common.lr = batch.lrs[group]->number;
    common.lr_on_device = float_data(batch.lrs[group]->on_device);
  }
  const DeviceInputs& inputs = batch.inputs;
  const StepLaunch launch{batch.kernel,
                          batch.all_args.data(),
                          static_cast<int64_t>(batch.all_args.size()),
                          table.hyperparameters.get(),
                          inputs.pointers,
                          inputs.grad_norm,
                          batch.is_launched.get(),
                          ends_guarded,
                          inputs.step_applied};
  std::exception_ptr failure;
  try {
    engine_of(batch.device).step(batch.device, launch, scratch_);
  } catch (...) {
    failure = std::current_exception();
  }
  finish_batch(batch, failure);
}

// Completes the slots that were launched: marks their tensors as written and copies dense copies
// back, until a copy fails. Then throws `failure`, the launch's error, or else the copy's error.
void Plan::finish_batch(const Batch& batch, std::exception_ptr failure) {
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
    ++(is_whole ? progress_.stepped : progress_.stepped_in_part);
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

void Plan::check_groups(const GroupTable& table, const std::optional<double>& max_grad_norm) const {
  const auto count = static_cast<int64_t>(table.groups.size());
  for (const ParamSlot& slot : params_.slots()) {
    TORCH_CHECK(slot.group < count, params_.operation(), ": hyperparameters of group ", slot.group,
                " are missing, got ", count, " groups");
  }
  for (const GroupTable::Entry& group : table.groups) {
    check_scalar(params_.operation(), "lr", group.lr);
    TORCH_CHECK(group.common->clip_value >= 0.0, params_.operation(),
                ": clip_value must be at least 0, got ", group.common->clip_value);
  }
  TORCH_CHECK(!max_grad_norm.has_value() || *max_grad_norm >= 0.0, params_.operation(),
              ": max_grad_norm must be at least 0, got ", *max_grad_norm);
}

}  // namespace amp_ext
