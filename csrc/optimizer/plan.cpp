// The tensors of one optimizer: checks them, keeps masters fresh, and launches the step.
#include "optimizer/plan.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "element.h"
#include "tensors/autocast_cache.h"

namespace amp_ext {

namespace {

// A number that steps read from the device: one float32 there.
at::Tensor scalar_on(const at::Device& device, const at::Tensor& scalar) {
  return scalar.to(device, at::kFloat, /*non_blocking=*/true);
}

void check_scalar(const std::string& operation, const char* name, const OptionalTensor& scalar) {
  if (!scalar.has_value()) return;
  TORCH_CHECK(is_plain(*scalar) && scalar->numel() == 1 && scalar->is_floating_point(), operation,
              ": ", name, " must be one floating-point element, got ", scalar->scalar_type(),
              " of sizes ", scalar->sizes());
}

const float* float_data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}

}  // namespace

std::string StepProgress::text() const {
  std::string text = c10::str(stepped, " of ", params, " parameters have been stepped");
  if (stepped_in_part > 0) text += c10::str(", and ", stepped_in_part, " in part");
  return text;
}

Plan::Plan(std::string operation, std::vector<std::string> buffer_names, Naming naming)
    : checks_{std::move(operation), std::move(buffer_names), naming} {}

int64_t Plan::add_param(int64_t group, int64_t index_in_group, const void* object) {
  Row row;
  row.group = group;
  row.index_in_group = index_in_group;
  row.object = object;
  rows_.push_back(std::move(row));
  memory_is_checked_ = false;
  return static_cast<int64_t>(rows_.size()) - 1;
}

int64_t Plan::add_sharded_param(int64_t group, int64_t index_in_group, const void* object,
                                int64_t partition) {
  const int64_t index = add_param(group, index_in_group, object);
  rows_[index].is_sharded = true;
  rows_[index].partition = partition;
  return index;
}

void Plan::take_param(int64_t index, const at::Tensor& param) {
  Row& row = rows_.at(index);
  auto& place = row.is_sharded ? row.shard_of : row.current_param;
  place = c10::MaybeOwned<at::Tensor>::borrowed(param);
}

void Plan::take_param(int64_t index, const at::Tensor& param, at::Tensor explicit_grad) {
  take_param(index, param);
  rows_.at(index).explicit_grad = std::move(explicit_grad);
}

void Plan::set_shard(int64_t index, at::Tensor param, at::Tensor grad) {
  Row& row = rows_.at(index);
  row.current_param = c10::MaybeOwned<at::Tensor>::owned(std::move(param));
  row.explicit_grad = std::move(grad);
}

void Plan::set_first_element(int64_t index, int64_t first_element) {
  Row& row = rows_.at(index);
  row.first_element = first_element;
  row.record.first_element = first_element;
}

void Plan::set_state(int64_t index, ParamState state) {
  Row& row = rows_.at(index);
  row.number_of_buffers = static_cast<int>(state.buffers.size());
  TORCH_CHECK(row.number_of_buffers <= kMaxBuffers, checks_.operation, ": ",
              checks_.name_of(row, kParam), " must have up to ", kMaxBuffers, " buffers, got ",
              row.number_of_buffers);
  if (state.master_param.defined() && state.master_param.scalar_type() != at::kFloat) {
    check_is_low(checks_.operation, checks_.name_of(row, kMaster), state.master_param, row.param());
    state.master_param = low_elements(state.master_param);
  }
  for (int i = 0; i < kMaxBuffers; ++i) {
    row.owned[kBuffer0 + i] = i < row.number_of_buffers ? state.buffers[i] : at::Tensor();
  }
  row.owned[kMaster] = std::move(state.master_param);
  row.owned[kStep] = std::move(state.step);
  row.owned[kExponents] = std::move(state.exponents);
  row.state_dtype = row.param().scalar_type();
  row.state_device = row.param().device();
  row.kernel.reset();
  row.record_is_current = false;
  memory_is_checked_ = false;
}

void Plan::set_rounded_params(const RoundedParams& rounded) {
  for (Row& row : rows_) {
    const auto found = rounded.entries.find(row.object);
    if (found == rounded.entries.end()) continue;
    row.param_of_master = found->second.param;
    row.fingerprints[kParam] = found->second.fingerprint;
  }
}

RoundedParams Plan::rounded_params() const {
  RoundedParams rounded;
  for (const Row& row : rows_) {
    if (!row.param_of_master.has_value()) continue;
    rounded.entries.insert({row.object, {*row.param_of_master, row.fingerprints[kParam]}});
  }
  return rounded;
}

void Plan::set_scaled_grads(const ScaledGrads& scaled) {
  for (Row& row : rows_) {
    const auto found = scaled.entries.find(row.object);
    if (found == scaled.entries.end()) continue;
    row.seen_grad = found->second.grad;
    row.seen_grad_data = found->second.data;
    row.seen_grad_is_scaled = true;
  }
}

ScaledGrads Plan::scaled_grads() const {
  ScaledGrads scaled;
  for (const Row& row : rows_) {
    if (!row.seen_grad.has_value() || !row.seen_grad_is_scaled) continue;
    scaled.entries.insert({row.object, {*row.seen_grad, row.seen_grad_data}});
  }
  return scaled;
}

std::vector<int64_t> Plan::read_grads() {
  std::vector<int64_t> without_state;
  for (size_t i = 0; i < rows_.size(); ++i) {
    Row& row = rows_[i];
    const bool is_explicit = row.is_sharded || row.explicit_grad.defined();
    row.owned[kGrad] = is_explicit ? row.explicit_grad : row.param().unsafeGetTensorImpl()->grad();
    if (row.has_grad() && (row.state_dtype != row.param().scalar_type() ||
                           row.state_device != row.param().device())) {
      without_state.push_back(i);
    }
  }
  return without_state;
}

void Plan::let_go() {
  for (Row& row : rows_) {
    row.current_param = c10::MaybeOwned<at::Tensor>();
    row.shard_of = c10::MaybeOwned<at::Tensor>();
    row.owned[kGrad].reset();
    row.explicit_grad.reset();
    row.staged.clear();
    row.refreshed_master.reset();
  }
}

std::vector<LookResult> Plan::check_finite(const at::Tensor& found_inf,
                                           const OptionalTensor& grad_scale, bool sum_squares,
                                           bool skip_nonfinite) {
  const at::NoGradGuard no_grad;
  looks_.clear();  // should this one fail, no step takes the last for it
  looks_ = look(found_inf, grad_scale, sum_squares, skip_nonfinite);
  std::vector<LookResult> results;
  for (Look& look : looks_) {
    look.result.first_nonfinite = first_nonfinite_on(look.result.found_inf.device());
    look.records.clear();
    results.push_back(look.result);
  }
  if (is_partitioned()) looks_.clear();
  return results;
}

at::Tensor Plan::first_nonfinite_on(const at::Device& device) {
  for (const at::Tensor& first : first_nonfinites_) {
    if (first.device() == device) return first;
  }
  const OutsideInferenceMode normal;
  const auto options = at::TensorOptions(device).dtype(at::kLong);
  first_nonfinites_.push_back(at::full({}, kNoTensor, options));
  return first_nonfinites_.back();
}

std::vector<Plan::Look> Plan::look(const OptionalTensor& found_inf,
                                   const OptionalTensor& grad_scale, bool sum_squares,
                                   bool skip_nonfinite) {
  check_scalar(checks_.operation, "found_inf", found_inf);
  check_scalar(checks_.operation, "grad_scale", grad_scale);
  std::vector<Look> looks;
  for (size_t index = 0; index < rows_.size(); ++index) {
    Row& row = rows_[index];
    if (!row.has_grad()) {
      row.seen_grad.reset();
      continue;
    }
    checks_.check_grad(row);
    Look& look = look_of(looks, row, found_inf, sum_squares);
    row.see_grad();
    at::Tensor dense = row.grad();
    if (!dense.is_non_overlapping_and_dense()) {
      dense = dense.contiguous();
      row.staged.push_back({row.grad(), dense, false});  // keeps it alive
    }
    look.records.push_back(gradient_record(dense, const_cast<void*>(dense.const_data_ptr()),
                                           static_cast<int64_t>(index)));
  }
  for (Look& look : looks) {
    const LookResult& result = look.result;
    const at::Device device = result.found_inf.device();
    const at::Tensor scale = grad_scale.has_value() ? scalar_on(device, *grad_scale) : at::Tensor();
    // Only a scaler's look is followed by the update that reports and resets it.
    int64_t* const first_nonfinite =
        found_inf.has_value() ? first_nonfinite_on(device).mutable_data_ptr<int64_t>() : nullptr;
    const LookLaunch launch{
        look.records.data(),
        static_cast<int64_t>(look.records.size()),
        float_data(scale),
        result.found_inf.mutable_data_ptr<float>(),
        first_nonfinite,
        sum_squares ? result.sum_of_squares.mutable_data_ptr<double>() : nullptr,
        skip_nonfinite};
    engine_of(device).look(device, launch, scratch_);
  }
  for (Row& row : rows_) row.staged.clear();
  return looks;
}

Plan::Look& Plan::look_of(std::vector<Look>& looks, const Row& row, const OptionalTensor& found_inf,
                          bool sum_squares) const {
  const at::Device device = row.grad().device();
  for (Look& look : looks) {
    const LookResult& result = look.result;
    if (result.found_inf.device() == device && result.partition == row.partition) return look;
  }
  Look look;
  const auto options = at::TensorOptions(device).dtype(at::kFloat);
  look.result.partition = row.partition;
  look.result.found_inf = found_inf.has_value()
                              ? found_inf->to(device, at::kFloat, /*non_blocking=*/true,
                                              /*copy=*/true)
                              : at::zeros({}, options);
  if (sum_squares) look.result.sum_of_squares = at::zeros({}, options.dtype(at::kDouble));
  look.records.reserve(rows_.size());
  return looks.emplace_back(std::move(look));
}

bool Plan::is_partitioned() const {
  return std::any_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.partition != 0; });
}

bool Plan::gradients_are_as_seen() const {
  return std::all_of(rows_.begin(), rows_.end(), [](const Row& row) {
    return row.has_grad() ? row.grad_is_as_seen() : !row.seen_grad.has_value();
  });
}

bool Plan::gradients_were_written() {
  read_grads();
  return std::any_of(rows_.begin(), rows_.end(), [](const Row& row) {
    return row.has_grad() && row.seen_grad.has_value() && !row.grad_is_as_seen();
  });
}

// First all that may fail: checks, and memory for every batch. Then copies and launches alone.
void Plan::run_step(GroupTable& table, const GradientOptions& options, StateStore* store) {
  const at::NoGradGuard no_grad;
  StepProgress& progress = *progress_;
  progress = {};
  if (store != nullptr) {
    check_with_states(table, options, *store);
  } else {
    check_step(table, options);
  }
  bool looks_are_new = false;
  const std::vector<Look> looks = looks_for_step(options, looks_are_new);
  std::vector<Batch> all = batches();
  for (Batch& batch : all) {
    batch.inputs = inputs_on(batch.device, options, looks, looks_are_new);
    batch.is_skipped = host_knows_of_skip(batch.device, batch.inputs.pointers);
    if (batch.is_skipped) continue;
    batch.lrs = lrs_on(batch.device, table);
    scratch_.make_room(batch.device);
    make_room(batch, table);
    progress.params += static_cast<int64_t>(batch.rows.size());
  }
  if (options.max_grad_norm.has_value() && options.grad_norm.has_value() && looks.empty() &&
      !options.sum_of_squares.has_value()) {
    options.grad_norm->zero_();  // of no gradients
  }
  clear_autocast_cache();
  try {
    for (const Batch& batch : all) {
      if (!batch.is_skipped) {
        step_batch(batch, table);
      } else if (batch.inputs.grad_norm != nullptr) {
        *batch.inputs.grad_norm = GradientFactor::read(batch.inputs.pointers).grad_norm;
      }
    }
    remember_masters();
    if (options.grad_scale.has_value() && checks_.naming == Naming::kGroups) {
      remember_scaled_grads(/*are_as_seen=*/!looks.empty());
    }
  } catch (...) {
    progress.has_failed = progress.stepped + progress.stepped_in_part > 0;
    throw;
  }
}

// All that can be refused, before anything is written.
// What the store has made is kept if the step is one to take, and forgotten here if it is not.
void Plan::check_with_states(const GroupTable& table, const GradientOptions& options,
                             StateStore& store) {
  const std::vector<int64_t> missing = read_grads();
  try {
    if (!missing.empty()) {
      std::vector<ParamState> made = store.make(missing);
      for (size_t i = 0; i < missing.size(); ++i) set_state(missing[i], std::move(made[i]));
    }
    check_step(table, options);
    store.keep();
  } catch (...) {
    for (const int64_t index : missing) rows_[index].state_dtype = at::ScalarType::Undefined;
    throw;
  }
}

void Plan::check_step(const GroupTable& table, const GradientOptions& options) {
  check_groups(table, options.max_grad_norm);
  check_scalar(checks_.operation, "grad_scale", options.grad_scale);
  check_scalar(checks_.operation, "found_inf", options.found_inf);
  check_scalar(checks_.operation, "sum_of_squares", options.sum_of_squares);
  // After unscale_ a scaler gives no scale, but what it has found.
  const bool is_of_scaler = options.grad_scale.has_value() || options.found_inf.has_value();
  constexpr size_t kTensorsAhead = 4, kStoragesAhead = 2;  // rows
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (i + kTensorsAhead < rows_.size()) rows_[i + kTensorsAhead].prefetch_tensors();
    if (i + kStoragesAhead < rows_.size()) rows_[i + kStoragesAhead].prefetch_storages();
    Row& row = rows_[i];
    if (row.has_grad()) {
      check_row(row, table);
      if (!is_of_scaler) checks_.check_carries_no_scale(row);
    }
    row.master_is_fresh = row.has_fresh_master();
  }
  if (!memory_is_checked_) check_memory();
}

// The looks that belong to a step, at the gradients as they are: of check_finite, or new ones.
std::vector<Plan::Look> Plan::looks_for_step(const GradientOptions& options, bool& is_new) {
  const bool is_stale = !looks_.empty() && !gradients_are_as_seen();
  is_new = needs_look(options, is_stale);
  std::vector<Look> looks;
  std::swap(looks, looks_);
  if (is_stale) looks.clear();
  if (!is_new) return looks;
  return look({}, {}, options.max_grad_norm.has_value(), options.skip_nonfinite);
}

// Whether a step takes a look of its own, by what it asks for and what is known from the last look
// ("stale": a gradient changed since):
//
//                   nothing   found_inf   a norm whose sum is given   a norm
//   no look         no        no          no                          yes
//   without a sum   no        no          no                          yes
//   with a sum      no        no          no                          no
//   stale           no        yes         yes                         yes
bool Plan::needs_look(const GradientOptions& options, bool is_stale) const {
  const bool wants_norm = options.max_grad_norm.has_value();
  if (is_stale) return wants_norm || options.found_inf.has_value();
  const bool has_sum = options.sum_of_squares.has_value() ||
                       (!looks_.empty() && looks_.front().result.sum_of_squares.defined());
  return wants_norm && !has_sum;
}

std::vector<Plan::Batch> Plan::batches() {
  std::vector<Batch> batches;
  for (Row& row : rows_) {
    if (!row.has_grad()) continue;
    const at::Device device = row.param().device();
    auto batch = std::find_if(batches.begin(), batches.end(), [&](const Batch& candidate) {
      return candidate.kernel == *row.kernel && candidate.device == device;
    });
    if (batch == batches.end()) {
      batch = batches.insert(batch, {device, *row.kernel, {}, {}, {}, false, {}});
    }
    batch->rows.push_back(&row);
  }
  return batches;
}

Plan::DeviceInputs Plan::inputs_on(const at::Device& device, const GradientOptions& options,
                                   const std::vector<Look>& looks, bool looks_are_new) const {
  DeviceInputs inputs{};
  if (options.grad_scale.has_value()) inputs.grad_scale = scalar_on(device, *options.grad_scale);
  if (options.found_inf.has_value()) {
    inputs.found_inf = scalar_on(device, *options.found_inf);
    for (const Look& look : looks) {
      // What the last look found is in the option.
      if (looks_are_new) inputs.found_inf = inputs.found_inf.add(look.result.found_inf.to(device));
    }
  }
  const bool clips = options.max_grad_norm.has_value();
  if (clips && options.sum_of_squares.has_value()) {
    inputs.sum_of_squares = options.sum_of_squares->to(device, at::kDouble, /*non_blocking=*/true);
  } else if (clips) {
    for (const Look& look : looks) {
      const at::Tensor here = look.result.sum_of_squares.to(device, /*non_blocking=*/true);
      at::Tensor& sum = inputs.sum_of_squares;
      sum = sum.defined() ? sum.add(here) : here;
    }
  }
  inputs.pointers = {float_data(inputs.grad_scale), float_data(inputs.found_inf),
                     clips ? inputs.sum_of_squares.const_data_ptr<double>() : nullptr,
                     options.max_grad_norm.value_or(0.0), options.skip_nonfinite};
  if (clips && options.grad_norm.has_value() && options.grad_norm->device() == device) {
    inputs.grad_norm = options.grad_norm->mutable_data_ptr<float>();
  }
  return inputs;
}

// Learning rates that are tensors: a GPU's kernels read them on their device, others get a number.
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
  batch.records.reserve(batch.rows.size());
  for (Row* row : batch.rows) {
    const GroupTable::Entry& group = table.groups[row->group];
    // An interrupt may have left that of the last step, to which the master must not go back.
    // The parameter is a part of a split master, which follows it.
    const bool is_stale =
        row->master_param().defined() && !row->has_split_master() && !row->master_is_fresh;
    row->refreshed_master =
        is_stale ? refreshed_master(row->param(), row->master_param()) : at::Tensor();
    if (!row->record_is_current) row->fill_record();
    TensorRecord& record = batch.records.emplace_back(row->record);
    record.dithered = group.dithered != 0 ? (group.dithered & row->narrow) | row->dithers : 0;
    TORCH_CHECK(record.dithered == 0 || record.step != nullptr || group.common->timestep >= 1.0,
                checks_.operation, ": ", checks_.name_of(*row, kStep),
                " must be there to dither, got None");
  }
  batch.is_launched = std::make_unique<bool[]>(batch.rows.size());
}

void Plan::step_batch(const Batch& batch, GroupTable& table) {
  for (Row* row : batch.rows) {
    if (row->refreshed_master.defined()) row->master_param().copy_(row->refreshed_master);
    for (const Staged& staged : row->staged) staged.dense.copy_(staged.original);
  }
  for (size_t group = 0; group < batch.lrs.size(); ++group) {
    if (!batch.lrs[group].has_value()) continue;
    CommonHyperparameters& common = *table.groups[group].common;
    common.lr = batch.lrs[group]->number;
    common.lr_on_device = float_data(batch.lrs[group]->on_device);
  }
  const DeviceInputs& inputs = batch.inputs;
  const StepLaunch launch{
      batch.kernel,           batch.records.data(), static_cast<int64_t>(batch.records.size()),
      table.hyperparameters,  inputs.pointers,      inputs.grad_norm,
      batch.is_launched.get()};
  std::exception_ptr failure;
  try {
    engine_of(batch.device).step(batch.device, launch, scratch_);
  } catch (...) {
    failure = std::current_exception();
  }
  finish_batch(batch, failure);
}

// Completes what was launched, also where another launch has failed, whose error it throws then. A
// copy that fails is the last one.
void Plan::finish_batch(const Batch& batch, std::exception_ptr failure) {
  bool copies = true;
  for (size_t i = 0; i < batch.rows.size(); ++i) {
    if (!batch.is_launched[i]) continue;
    Row& row = *batch.rows[i];
    row.mark_written();
    try {
      if (copies) row.copy_back(batch.inputs.pointers.skip_nonfinite);
    } catch (...) {
      copies = false;
      if (failure == nullptr) failure = std::current_exception();
    }
    const bool is_whole = copies || std::none_of(row.staged.begin(), row.staged.end(),
                                                 [](const Staged& one) { return one.written; });
    ++(is_whole ? progress_->stepped : progress_->stepped_in_part);
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

OptimizerKernel Plan::kernel_of(const Row& row, const GroupTable& table) const {
  const auto kernel = table.kernel(row.number_of_buffers);
  TORCH_CHECK(row.state_dtype == row.param().scalar_type() && kernel.has_value(), checks_.operation,
              ": ", checks_.name_of(row, kParam), " has the state of no kernel, got ",
              row.number_of_buffers, " buffers");
  return *kernel;
}

void Plan::check_groups(const GroupTable& table, const std::optional<double>& max_grad_norm) const {
  const auto count = static_cast<int64_t>(table.groups.size());
  for (const Row& row : rows_) {
    TORCH_CHECK(row.group < count, checks_.operation, ": hyperparameters of group ", row.group,
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

void Plan::check_row(Row& row, const GroupTable& table) {
  const bool writes_grad = table.groups[row.group].common->write_back_grads;
  if (row.writes_grad != writes_grad) row.fingerprints[kGrad] = {};  // is checked anew
  row.writes_grad = writes_grad;
  if (!row.kernel.has_value()) row.kernel = kernel_of(row, table);
  // What was read safely once is as safe now, unless it came to share memory with what is written.
  const bool grad_was_shared = row.writes_grad && row.leave_lazy_clone(kGrad);
  if (row.take_fingerprint(kGrad) || grad_was_shared) {
    row.grad_is_current = false;
    if (row.writes_grad || reaches_written_memory(row.grad())) memory_is_checked_ = false;
  }
  for (int list = 0; list < kLists; ++list) {
    if (list == kGrad) continue;
    const bool was_shared = row.leave_lazy_clone(list);
    const bool has_moved = row.take_fingerprint(list);
    if (list == kParam && was_shared) follow_own_memory(row);
    if (!was_shared && !has_moved) continue;
    row.record_is_current = false;
    memory_is_checked_ = false;
    // The same memory may have other strides.
    if (list == kParam && has_moved) row.param_of_master.reset();
  }
  if (row.record_is_current && (row.grad_is_current || row.take_new_grad())) return;
  row.record_is_current = false;
  checks_.check_grad(row);
  checks_.check_tensors(row, table.takes_format);
}

// Other parameters may be views of the tensor that has got memory of its own, which they have too.
void Plan::follow_own_memory(const Row& row) {
  for (Row& other : rows_) {
    if (storage_of(other.param()) != storage_of(row.param())) continue;
    other.fingerprints[kParam].storage = row.fingerprints[kParam].storage;
    other.record_is_current = false;
  }
}

void Plan::check_memory() {
  std::vector<MemoryUse> uses;
  written_storages_.clear();
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (!rows_[i].has_grad()) rows_[i].fingerprints[kGrad] = {};  // of one that was refused
    if (rows_[i].fingerprints[kParam].numel < 0) continue;        // has not had a gradient yet
    for (int list = 0; list < kLists; ++list) {
      const at::Tensor& tensor = rows_[i].tensor(list);
      if (!tensor.defined()) continue;
      const bool written = list != kGrad || rows_[i].writes_grad;
      uses.push_back({&tensor, written, list, static_cast<int64_t>(i)});
      if (written) written_storages_.insert(storage_of(tensor)->data());
    }
  }
  check_no_overlap(checks_.operation, uses, [&](const MemoryUse& use) {
    return checks_.name_of(rows_[use.index], use.list);
  });
  memory_is_checked_ = true;
}

// Whether a gradient that is only read may share memory with a tensor that is written: most have
// memory of their own.
bool Plan::reaches_written_memory(const at::Tensor& grad) const {
  if (!is_plain(grad)) return false;  // will be refused
  const at::DataPtr& data = storage_of(grad)->data_ptr();
  const bool is_owned = data.get_context() == data.get();  // no memory that was lent to PyTorch
  if (is_owned && grad.storage().use_count() == 1) return false;
  return !is_owned || written_storages_.count(data.get()) != 0;
}

// Parameters that are views of one tensor share its version, which each of them has changed.
void Plan::remember_masters() {
  for (Row& row : rows_) {
    if (row.master() != Master::kFloat32 || !row.master_is_fresh) continue;
    SeenTensor::remember(row.param_of_master, row.param(), row.version());
  }
}

// Gradients that were written back are unscaled, unless the step was skipped, which only the device
// knows.
void Plan::remember_scaled_grads(bool are_as_seen) {
  for (Row& row : rows_) {
    if (!row.has_grad()) continue;
    if (!are_as_seen) row.see_grad();
    row.seen_grad_is_scaled = !row.writes_grad;
  }
}

}  // namespace amp_ext
