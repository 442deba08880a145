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
    : checks_{std::move(optimizer), {}, Naming::kGroups}, failure_(std::move(failure)) {}

Plan::Plan(std::string operation, std::vector<std::string> buffer_lists)
    : checks_{std::move(operation), std::move(buffer_lists), Naming::kLists} {}

Plan::Lock::Lock(Plan& plan, const char* operation) : plan_(plan) {
  const auto thread = std::this_thread::get_id();
  std::thread::id user;
  const std::string& optimizer = plan.checks_.operation;
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
  plan_.let_go();
  if (plan_.must_forget_) plan_.drop_slots();
  plan_.user_ = std::thread::id();
}

void Plan::check_not_swapped_in(const std::string& operation) const {
  check_weights_are_in(c10::str(checks_.operation, ".", operation), is_swapped_in_);
}

void Plan::take_over(const Plan& before) {
  scaled_grads_ = before.scaled_grads();
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
  TORCH_CHECK(user_.load() == std::thread::id(), checks_.operation,
              ": track_grad_norms was set during a step. Set it between steps.");
  tracks_grad_norms_ = tracks;
}

void Plan::forget() {
  must_forget_ = user_.load() != std::thread::id();
  if (!must_forget_) drop_slots();
}

void Plan::drop_slots() {
  rounded_params_ = rounded_params();
  scaled_grads_ = scaled_grads();
  must_forget_ = false;
  specs_.clear();
  slots_.clear();
  is_partitioned_ = false;
  scans_.clear();
  written_storages_.clear();
  first_nonfinites_.clear();
  scratch_ = {};
  sample_.reset();
}

void Plan::register_params(std::vector<optim::StateSpec> specs, const std::vector<Param>& params) {
  drop_slots();
  const auto keeps_more = [](const optim::StateSpec& a, const optim::StateSpec& b) {
    return a.buffer_count < b.buffer_count;
  };
  const auto most = std::max_element(specs.begin(), specs.end(), keeps_more);
  if (most != specs.end()) checks_.buffer_names = most->names();
  specs_ = std::move(specs);
  slots_.reserve(params.size());
  has_shards_ = is_partitioned_ = false;
  for (const Param& param : params) {
    add_slot(param);
    has_shards_ |= param.partition.has_value();
    is_partitioned_ |= param.partition.value_or(0) != 0;
  }
}

void Plan::add_slot(const Param& param) {
  ParamSlot& slot = slots_.emplace_back();
  slot.group = param.group;
  slot.index_in_group = param.index_in_group;
  slot.object = param.object;
  slot.is_sharded = param.partition.has_value();
  slot.partition = param.partition.value_or(0);
  slot.global_offset = slot.args.global_offset = param.global_offset;
  const auto rounded = rounded_params_.find(slot.object);
  if (rounded != rounded_params_.end()) {
    slot.param_of_master = rounded->second.param;
    slot.fingerprints[kParam] = rounded->second.fingerprint;
  }
  const auto scaled = scaled_grads_.find(slot.object);
  if (scaled != scaled_grads_.end()) {
    slot.seen_grad = scaled->second.grad;
    slot.seen_grad_data = scaled->second.data;
    slot.seen_grad_is_scaled = true;
  }
  memory_is_checked_ = false;
}

std::unordered_map<const void*, Plan::RoundedParam> Plan::rounded_params() const {
  if (slots_.empty()) return rounded_params_;
  std::unordered_map<const void*, RoundedParam> rounded;
  for (const ParamSlot& slot : slots_) {
    if (!slot.param_of_master.has_value()) continue;
    rounded.insert({slot.object, {*slot.param_of_master, slot.fingerprints[kParam]}});
  }
  return rounded;
}

std::unordered_map<const void*, Plan::ScaledGrad> Plan::scaled_grads() const {
  if (slots_.empty()) return scaled_grads_;
  std::unordered_map<const void*, ScaledGrad> scaled;
  for (const ParamSlot& slot : slots_) {
    if (!slot.seen_grad.has_value() || !slot.seen_grad_is_scaled) continue;
    scaled.insert({slot.object, {*slot.seen_grad, slot.seen_grad_data}});
  }
  return scaled;
}

bool Plan::take_param(int64_t index, const at::Tensor& param) {
  ParamSlot& slot = slots_.at(index);
  if (slot.was_contiguous.has_value() && *slot.was_contiguous != param.is_contiguous())
    return false;
  if (slot.is_sharded) {
    slot.shard_of = c10::MaybeOwned<at::Tensor>::borrowed(param);
  } else {
    take_param(index, param, param.unsafeGetTensorImpl()->grad());
  }
  return true;
}

void Plan::take_param(int64_t index, const at::Tensor& param, at::Tensor grad) {
  ParamSlot& slot = slots_.at(index);
  slot.current_param = c10::MaybeOwned<at::Tensor>::borrowed(param);
  slot.owned[kGrad] = std::move(grad);
}

void Plan::set_shard(int64_t index, at::Tensor param, at::Tensor grad) {
  ParamSlot& slot = slots_.at(index);
  slot.current_param = c10::MaybeOwned<at::Tensor>::owned(std::move(param));
  slot.owned[kGrad] = std::move(grad);
}

void Plan::set_state(int64_t index, ParamState state) {
  ParamSlot& slot = slots_.at(index);
  slot.number_of_buffers = static_cast<int>(state.buffers.size());
  TORCH_CHECK(slot.number_of_buffers <= kMaxBuffers, checks_.operation, ": ",
              checks_.name_of(slot, kParam), " must have up to ", kMaxBuffers, " buffers, got ",
              slot.number_of_buffers);
  if (state.master_param.defined() && state.master_param.scalar_type() != at::kFloat) {
    check_is_residual(checks_.operation, checks_.name_of(slot, kMaster), state.master_param,
                      slot.param());
    state.master_param = residual_elements(state.master_param);
  }
  for (int i = 0; i < kMaxBuffers; ++i) {
    slot.owned[kBuffer0 + i] = i < slot.number_of_buffers ? state.buffers[i] : at::Tensor();
  }
  slot.owned[kMaster] = std::move(state.master_param);
  slot.owned[kStep] = std::move(state.step);
  slot.owned[kExponents] = std::move(state.exponents);
  slot.state_dtype = slot.param().scalar_type();
  slot.state_device = slot.param().device();
  slot.kernel.reset();
  slot.args_are_current = false;
  memory_is_checked_ = false;
  slot.was_contiguous.reset();
  const size_t group = slot.group;
  if (group < specs_.size() && specs_[group].state_dtype.is_coded()) {
    slot.was_contiguous = (slot.is_sharded ? *slot.shard_of : slot.param()).is_contiguous();
  }
}

void Plan::let_go() {
  for (ParamSlot& slot : slots_) {
    slot.current_param = c10::MaybeOwned<at::Tensor>();
    slot.shard_of = c10::MaybeOwned<at::Tensor>();
    slot.owned[kGrad].reset();
    slot.contiguous_copies.clear();
    slot.refreshed_master.reset();
  }
}

std::string Plan::note_of_failure() const {
  if (checks_.naming == Naming::kLists) {
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
  checks_.described = table.buffers;
  progress_ = {};
  if (checks_.naming == Naming::kGroups) take_norms(options);
  check_with_states(table, options, store);
  if (checks_.naming == Naming::kGroups) {
    const StepNorms norms = this->norms(options.max_grad_norm);
    has_grad_norm_ = norms.wants_total();
    has_grad_norms_ = norms.wants_each() && !slots_.empty();
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
    remember_masters();
    choose_sample();
    if (options.grad_scale.has_value() && checks_.naming == Naming::kGroups) {
      remember_scaled_grads(/*are_as_seen=*/!scans.empty());
    }
    remember_step();
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
  for (size_t i = 0; i < slots_.size(); ++i) {
    const ParamSlot& slot = slots_[i];
    if (slot.has_grad() && slot.lacks_state()) missing.push_back(static_cast<int64_t>(i));
  }
  try {
    if (!missing.empty()) {
      std::vector<ParamState> made = store.make(missing);
      for (size_t i = 0; i < missing.size(); ++i) set_state(missing[i], std::move(made[i]));
    }
    check_step(table, options);
    store.keep();
  } catch (...) {
    for (const int64_t index : missing) slots_[index].state_dtype = at::ScalarType::Undefined;
    throw;
  }
}

void Plan::check_inputs(const GradientOptions& options) const {
  check_scalar(checks_.operation, "grad_scale", options.grad_scale);
  check_scalar(checks_.operation, "found_inf", options.found_inf);
  check_scalar(checks_.operation, "sum_of_squares", options.sum_of_squares);
}

void Plan::check_step(const GroupTable& table, const GradientOptions& options) {
  check_inputs(options);
  // After unscale_(), a scaler passes no grad_scale, but it always passes found_inf.
  const bool is_of_scaler = options.grad_scale.has_value() || options.found_inf.has_value();
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (i + kTensorsAhead < slots_.size()) slots_[i + kTensorsAhead].prefetch_tensors();
    if (i + kStoragesAhead < slots_.size()) slots_[i + kStoragesAhead].prefetch_storages();
    ParamSlot& slot = slots_[i];
    if (slot.has_grad()) {
      check_slot(slot, table);
      if (!is_of_scaler) checks_.check_carries_no_scale(slot);
    }
    slot.master_is_current = slot.has_current_master();
  }
  if (!memory_is_checked_) check_memory();
}

std::vector<Plan::Batch> Plan::batches() {
  std::vector<Batch> batches;
  for (ParamSlot& slot : slots_) {
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
                checks_.operation, ": ", checks_.name_of(*slot, kStep),
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

OptimizerKernel Plan::kernel_of(const ParamSlot& slot, const GroupTable& table) const {
  const auto kernel = table.kernel(slot.number_of_buffers);
  TORCH_CHECK(slot.state_dtype == slot.param().scalar_type() && kernel.has_value(),
              checks_.operation, ": ", checks_.name_of(slot, kParam),
              " has a state that fits no kernel, with ", slot.number_of_buffers,
              " buffers. Remove what you added to its state, and call optimizer.rebuild().");
  return *kernel;
}

void Plan::check_groups(const GroupTable& table, const std::optional<double>& max_grad_norm) const {
  const auto count = static_cast<int64_t>(table.groups.size());
  for (const ParamSlot& slot : slots_) {
    TORCH_CHECK(slot.group < count, checks_.operation, ": hyperparameters of group ", slot.group,
                " are missing, got ", count, " groups");
  }
  for (const GroupTable::Entry& group : table.groups) {
    check_scalar(checks_.operation, "lr", group.lr);
    TORCH_CHECK(group.common->clip_value >= 0.0, checks_.operation,
                ": clip_value must be at least 0, got ", group.common->clip_value);
  }
  TORCH_CHECK(!max_grad_norm.has_value() || *max_grad_norm >= 0.0, checks_.operation,
              ": max_grad_norm must be at least 0, got ", *max_grad_norm);
}

void Plan::check_slot(ParamSlot& slot, const GroupTable& table) {
  const bool writes_grad = table.groups[slot.group].common->write_back_grads;
  if (slot.writes_grad != writes_grad) slot.fingerprints[kGrad] = {};  // forces new checks
  slot.writes_grad = writes_grad;
  if (!slot.kernel.has_value()) slot.kernel = kernel_of(slot, table);
  // A gradient that moved needs no overlap check unless the step may write its new memory.
  const bool grad_was_shared = slot.writes_grad && slot.leave_lazy_clone(kGrad);
  if (slot.take_fingerprint(kGrad) || grad_was_shared) {
    slot.grad_is_current = false;
    if (slot.writes_grad || reaches_written_memory(slot.grad())) memory_is_checked_ = false;
  }
  for (int list = 0; list < kLists; ++list) {
    if (list == kGrad) continue;
    const bool was_shared = slot.leave_lazy_clone(list);
    const bool has_moved = slot.take_fingerprint(list);
    if (list == kParam && was_shared) follow_own_memory(slot);
    if (!was_shared && !has_moved) continue;
    slot.args_are_current = false;
    memory_is_checked_ = false;
    // param_of_master alone would not notice another view of the same storage.
    if (list == kParam && has_moved) slot.param_of_master.reset();
  }
  if (slot.args_are_current && (slot.grad_is_current || slot.take_new_grad())) return;
  slot.args_are_current = false;
  checks_.check_grad(slot);
  checks_.check_tensors(slot);
}

// Updates other views of a parameter after leave_lazy_clone() has given their storage new memory.
void Plan::follow_own_memory(const ParamSlot& slot) {
  for (ParamSlot& other : slots_) {
    if (storage_of(other.param()) != storage_of(slot.param())) continue;
    other.fingerprints[kParam].storage = slot.fingerprints[kParam].storage;
    other.args_are_current = false;
  }
}

void Plan::check_memory() {
  std::vector<MemoryUse> uses;
  written_storages_.clear();
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].has_grad()) slots_[i].fingerprints[kGrad] = {};  // left by a refused step
    if (slots_[i].fingerprints[kParam].numel < 0) continue;         // never had a gradient
    for (int list = 0; list < kLists; ++list) {
      const at::Tensor& tensor = slots_[i].tensor(list);
      if (!tensor.defined()) continue;
      const bool written = list != kGrad || slots_[i].writes_grad;
      uses.push_back({&tensor, written, list, static_cast<int64_t>(i)});
      if (written) written_storages_.insert(storage_of(tensor)->data());
    }
  }
  check_no_overlap(checks_.operation, uses, [&](const MemoryUse& use) {
    return checks_.name_of(slots_[use.index], use.list);
  });
  memory_is_checked_ = true;
}

// True if a gradient that a step only reads may share memory with a tensor that the step writes.
// Usually a gradient is the only tensor in its storage, so that no lookup is needed.
bool Plan::reaches_written_memory(const at::Tensor& grad) const {
  if (!is_plain(grad)) return false;  // check_grad will throw
  const at::DataPtr& data = storage_of(grad)->data_ptr();
  const bool is_owned = data.get_context() == data.get();  // false for memory of other libraries
  if (is_owned && grad.storage().use_count() == 1) return false;
  return !is_owned || written_storages_.count(data.get()) != 0;
}

// Runs after all launches, because parameters that are views of one tensor share its version
// counter, which each of them increments.
void Plan::remember_masters() {
  for (ParamSlot& slot : slots_) {
    if (slot.master() != Master::kFloat32 || !slot.master_is_current) continue;
    SeenTensor::remember(slot.param_of_master, slot.param(), slot.version());
  }
}

// Remembers which gradients still carry the loss scale after a step. Gradients that the step wrote
// back count as unscaled. A skipped step leaves them scaled, but only the device knows of it.
void Plan::remember_scaled_grads(bool are_as_seen) {
  for (ParamSlot& slot : slots_) {
    if (!slot.has_grad()) continue;
    if (!are_as_seen) slot.see_grad();
    slot.seen_grad_is_scaled = !slot.writes_grad;
  }
}

}  // namespace amp_ext
