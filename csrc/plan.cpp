// The tensors of one optimizer: checks them, keeps masters fresh, and launches the step.
#include "plan.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "autocast_cache.h"
#include "element.h"

namespace amp_ext {

namespace {

// The dtype that gradients are read in: their own where kernels take it, else float32. Kernels of
// moments in 8 bits take the parameter's.
at::ScalarType gradient_dtype(at::ScalarType grad, at::ScalarType param, bool has_codes) {
  if (has_codes) return param;
  if (grad == param || (param == at::kFloat && is_16_bit(grad))) return grad;
  return at::kFloat;
}

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

at::Tensor refreshed_master(const at::Tensor& param, const at::Tensor& master_param) {
  const at::NoGradGuard no_grad;
  const at::Tensor rounded = master_param.to(param.scalar_type());
  return at::where(rounded.eq(param), master_param, param.to(at::kFloat));
}

std::string StepProgress::text() const {
  std::string text = c10::str(stepped, " of ", params, " parameters have been stepped");
  if (stepped_in_part > 0) text += c10::str(", and ", stepped_in_part, " in part");
  return text;
}

Plan::Plan(std::string operation, std::vector<std::string> buffer_names, Naming naming)
    : operation_(std::move(operation)), buffer_names_(std::move(buffer_names)), naming_(naming) {}

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
  const int64_t number = add_param(group, index_in_group, object);
  rows_[number].is_sharded = true;
  rows_[number].partition = partition;
  return number;
}

void Plan::take_param(int64_t number, const at::Tensor& param) {
  Row& row = rows_.at(number);
  auto& place = row.is_sharded ? row.shard_of : row.current_param;
  place = c10::MaybeOwned<at::Tensor>::borrowed(param);
}

void Plan::take_param(int64_t number, const at::Tensor& param, at::Tensor explicit_grad) {
  take_param(number, param);
  rows_.at(number).explicit_grad = std::move(explicit_grad);
}

void Plan::set_shard(int64_t number, at::Tensor param, at::Tensor grad) {
  Row& row = rows_.at(number);
  row.current_param = c10::MaybeOwned<at::Tensor>::owned(std::move(param));
  row.explicit_grad = std::move(grad);
}

void Plan::set_first_element(int64_t number, int64_t first_element) {
  Row& row = rows_.at(number);
  row.first_element = first_element;
  row.record.first_element = first_element;
}

void Plan::set_state(int64_t number, ParamState state) {
  Row& row = rows_.at(number);
  row.number_of_buffers = static_cast<int>(state.buffers.size());
  TORCH_CHECK(row.number_of_buffers <= kMaxBuffers, operation_, ": ", name_of(row, kParam),
              " must have up to ", kMaxBuffers, " buffers, got ", row.number_of_buffers);
  if (state.master_param.defined() && state.master_param.scalar_type() != at::kFloat) {
    check_is_low(operation_, name_of(row, kMaster), state.master_param, row.param());
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
  looks_ = look(found_inf, grad_scale, sum_squares, skip_nonfinite, scratch_);
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
                                   bool skip_nonfinite, StepScratch& scratch) {
  check_scalar(operation_, "found_inf", found_inf);
  check_scalar(operation_, "grad_scale", grad_scale);
  std::vector<Look> looks;
  for (size_t number = 0; number < rows_.size(); ++number) {
    Row& row = rows_[number];
    if (!row.has_grad()) {
      row.seen_grad.reset();
      continue;
    }
    check_grad(row);
    Look& look = look_of(looks, row, found_inf, sum_squares);
    row.see_grad();
    at::Tensor dense = row.grad();
    if (!dense.is_non_overlapping_and_dense()) {
      dense = dense.contiguous();
      row.staged.push_back({row.grad(), dense, false});  // keeps it alive
    }
    look.records.push_back(gradient_record(dense, const_cast<void*>(dense.const_data_ptr()),
                                           static_cast<int64_t>(number)));
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
    engine_of(device).look(device, launch, scratch);
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
void Plan::run_step(GroupTable& table, const GradientOptions& options) {
  const at::NoGradGuard no_grad;
  StepProgress& progress = *progress_;
  progress = {};
  check_step(table, options);
  StepScratch& scratch = options.scratch != nullptr ? *options.scratch : scratch_;
  bool looks_are_new = false;
  const std::vector<Look> looks = looks_for_step(options, scratch, looks_are_new);
  std::vector<Batch> all = batches();
  for (Batch& batch : all) {
    batch.inputs = inputs_on(batch.device, options, looks, looks_are_new);
    batch.is_skipped = host_knows_of_skip(batch.device, batch.inputs.pointers);
    if (batch.is_skipped) continue;
    batch.lrs = lrs_on(batch.device, table);
    scratch.make_room(batch.device);
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
        step_batch(batch, table, scratch);
      } else if (batch.inputs.grad_norm != nullptr) {
        *batch.inputs.grad_norm = GradientFactor::read(batch.inputs.pointers).grad_norm;
      }
    }
    remember_masters();
    if (options.grad_scale.has_value() && naming_ == Naming::kGroups) {
      remember_scaled_grads(/*are_as_seen=*/!looks.empty());
    }
  } catch (...) {
    progress.has_failed = progress.stepped + progress.stepped_in_part > 0;
    throw;
  }
}

// All that can be refused, before anything is written.
void Plan::check_step(const GroupTable& table, const GradientOptions& options) {
  check_groups(table, options.max_grad_norm);
  check_scalar(operation_, "grad_scale", options.grad_scale);
  check_scalar(operation_, "found_inf", options.found_inf);
  check_scalar(operation_, "sum_of_squares", options.sum_of_squares);
  // After unscale_ a scaler gives no scale, but what it has found.
  const bool is_of_scaler = options.grad_scale.has_value() || options.found_inf.has_value();
  constexpr size_t kTensorsAhead = 4, kStoragesAhead = 2;  // rows
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (i + kTensorsAhead < rows_.size()) rows_[i + kTensorsAhead].prefetch_tensors();
    if (i + kStoragesAhead < rows_.size()) rows_[i + kStoragesAhead].prefetch_storages();
    Row& row = rows_[i];
    if (row.has_grad()) {
      check_row(row, table);
      if (!is_of_scaler) check_carries_no_scale(row);
    }
    row.master_is_fresh = row.has_fresh_master();
  }
  if (!memory_is_checked_) check_memory();
}

void Plan::check_carries_no_scale(const Row& row) const {
  TORCH_CHECK(!row.seen_grad_is_scaled || !row.grad_is_as_seen(), operation_, ": ",
              name_of(row, kGrad),
              " must be new or unscaled in a step without a scale, got the one of a step with a "
              "scale, which it still carries: step by the gradient scaler, or call zero_grad() and "
              "backward anew; where it was unscaled in a way that torch does not count, such as "
              "through .data, let an in-place operation follow that torch counts: grad.mul_(1)");
}

// The looks that belong to a step, at the gradients as they are: of check_finite, or new ones.
std::vector<Plan::Look> Plan::looks_for_step(const GradientOptions& options, StepScratch& scratch,
                                             bool& is_new) {
  const bool is_stale = !looks_.empty() && !gradients_are_as_seen();
  is_new = needs_look(options, is_stale);
  std::vector<Look> looks;
  std::swap(looks, looks_);
  if (is_stale) looks.clear();
  if (!is_new) return looks;
  return look({}, {}, options.max_grad_norm.has_value(), options.skip_nonfinite, scratch);
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
    if (!row->record_is_current) fill_record(*row);
    TensorRecord& record = batch.records.emplace_back(row->record);
    record.dithered = group.dithered != 0 ? (group.dithered & row->narrow) | row->dithers : 0;
    TORCH_CHECK(record.dithered == 0 || record.step != nullptr || group.common->timestep >= 1.0,
                operation_, ": ", name_of(*row, kStep), " must be there to dither, got None");
  }
  batch.is_launched = std::make_unique<bool[]>(batch.rows.size());
}

void Plan::step_batch(const Batch& batch, GroupTable& table, StepScratch& scratch) {
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
    engine_of(batch.device).step(batch.device, launch, scratch);
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
    mark_written(row);
    try {
      if (copies) copy_back(row, batch.inputs.pointers.skip_nonfinite);
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
  TORCH_CHECK(row.state_dtype == row.param().scalar_type() && kernel.has_value(), operation_, ": ",
              name_of(row, kParam), " has the state of no kernel, got ", row.number_of_buffers,
              " buffers");
  return *kernel;
}

void Plan::check_groups(const GroupTable& table, const std::optional<double>& max_grad_norm) const {
  const auto count = static_cast<int64_t>(table.groups.size());
  for (const Row& row : rows_) {
    TORCH_CHECK(row.group < count, operation_, ": hyperparameters of group ", row.group,
                " are missing, got ", count, " groups");
  }
  for (const GroupTable::Entry& group : table.groups) {
    check_scalar(operation_, "lr", group.lr);
    TORCH_CHECK(group.common->clip_value >= 0.0, operation_,
                ": clip_value must be at least 0, got ", group.common->clip_value);
  }
  TORCH_CHECK(!max_grad_norm.has_value() || *max_grad_norm >= 0.0, operation_,
              ": max_grad_norm must be at least 0, got ", *max_grad_norm);
}

void Plan::check_row(Row& row, const GroupTable& table) {
  const bool writes_grad = table.groups[row.group].common->write_back_grads;
  if (row.writes_grad != writes_grad) row.fingerprints[kGrad] = {};  // is checked anew
  row.writes_grad = writes_grad;
  if (!row.kernel.has_value()) row.kernel = kernel_of(row, table);
  // What was read safely once is as safe now, unless it came to share memory with what is written.
  const bool grad_was_shared = row.writes_grad && leave_lazy_clone(row, kGrad);
  if (take_fingerprint(row, kGrad) || grad_was_shared) {
    row.grad_is_current = false;
    if (row.writes_grad || reaches_written_memory(row.grad())) memory_is_checked_ = false;
  }
  for (int list = 0; list < kLists; ++list) {
    if (list == kGrad) continue;
    const bool was_shared = leave_lazy_clone(row, list);
    const bool has_moved = take_fingerprint(row, list);
    if (!was_shared && !has_moved) continue;
    row.record_is_current = false;
    memory_is_checked_ = false;
    // The same memory may have other strides.
    if (list == kParam && has_moved) row.param_of_master.reset();
  }
  if (row.record_is_current && (row.grad_is_current || take_new_grad(row))) return;
  row.record_is_current = false;
  check_grad(row);
  check_tensors(row, table);
}

// Gives a tensor that will be written memory of its own, with the same elements, where it shares
// some with a lazy clone. Returns whether it did.
bool Plan::leave_lazy_clone(Row& row, int list) {
  const at::Tensor& tensor = row.tensor(list);
  if (!tensor.defined() || !is_lazily_cloned(tensor)) return false;
  const void* const shared = storage_of(tensor)->data();
  const void* const own = tensor.storage().mutable_data();
  if (row.fingerprints[list].storage == shared) row.fingerprints[list].storage = own;
  return true;
}

// Returns whether a tensor is not where or as it was.
bool Plan::take_fingerprint(Row& row, int list) {
  const at::Tensor& tensor = row.tensor(list);
  if (!tensor.defined()) return false;
  Fingerprint fingerprint = Fingerprint::of(tensor);
  if (list == kParam) fingerprint.take_sizes(tensor);
  if (fingerprint == row.fingerprints[list]) return false;
  row.fingerprints[list] = fingerprint;
  return true;
}

// Most gradients are new at each step and like the last ones: only the address changes.
bool Plan::take_new_grad(Row& row) {
  const at::Tensor& grad = row.grad();
  if (!is_plain(grad) || !grad.is_contiguous() || !grad.sizes().equals(row.param().sizes()) ||
      grad.device() != row.param().device() ||
      gradient_dtype(grad.scalar_type(), row.param().scalar_type(), row.has_codes()) !=
          grad.scalar_type() ||
      !dtype_of(grad).has_value() || !has_all_elements(grad)) {
    return false;
  }
  row.record.grad = const_cast<void*>(grad.const_data_ptr());
  row.record.grad_dtype = *dtype_of(grad);
  row.grad_is_current = true;
  return true;
}

void Plan::check_grad(const Row& row) const {
  const at::Tensor& grad = row.grad();
  TORCH_CHECK(!is_sparse(grad), operation_,
              " does not support sparse gradients: ", name_of(row, kGrad), " must be Strided, got ",
              grad.layout());
  if (!is_plain(grad) || !has_all_elements(grad)) {  // no name is made at every step
    check_is_plain(operation_, name_of(row, kGrad), grad);
  }
  TORCH_CHECK(dtype_of(grad).has_value(), operation_, ": ", name_of(row, kGrad),
              " must be Float, Double, Half or BFloat16, got ", grad.scalar_type());
}

void Plan::check_tensors(const Row& row, const GroupTable& table) const {
  for (int list = 0; list < kLists; ++list) {
    const at::Tensor& tensor = row.tensor(list);
    if (tensor.defined()) check_is_plain(operation_, name_of(row, list), tensor);
  }
  const at::Tensor& param = row.param();
  const at::ScalarType dtype = param.scalar_type();
  TORCH_CHECK(dtype_of(param).has_value(), operation_, ": ", name_of(row, kParam),
              " must be Float, Double, Half or BFloat16, got ", dtype);
  check_device(operation_, name_of(row, kParam), param.device());
  const auto check = [&](int list, bool ok, const auto&... message) {
    TORCH_CHECK(ok, operation_, ": ", name_of(row, list), " must be ", message...);
  };
  for (int list = kGrad; list < kLists; ++list) {
    const at::Tensor& tensor = row.tensor(list);
    if (!tensor.defined()) continue;
    const at::ScalarType got = tensor.scalar_type();
    check(list, tensor.device() == param.device(), "on ", param.device(), ", got ",
          tensor.device());
    if (list == kStep) {
      check(list, tensor.numel() == 1, "one element, got sizes ", tensor.sizes());
    } else if (list != kExponents) {
      check(list, tensor.sizes().equals(param.sizes()), "of sizes ", param.sizes(), ", got ",
            tensor.sizes());
    }
    if (list == kGrad || list == kExponents || list >= kBuffer0) continue;
    if (list == kMaster) {
      TORCH_CHECK(is_16_bit(dtype), operation_, ": ", name_of(row, kMaster),
                  " must be None for a parameter of ", dtype);
      if (row.has_split_master()) continue;
    }
    check(list, got == at::kFloat, at::kFloat, ", got ", got);
  }
  check_buffers(row, table);
}

// The dtypes of the buffers, and what belongs to those in 8 bits.
void Plan::check_buffers(const Row& row, const GroupTable& table) const {
  const at::ScalarType dtype = row.param().scalar_type();
  const auto check = [&](int list, bool ok, const auto&... message) {
    TORCH_CHECK(ok, operation_, ": ", name_of(row, list), " must be ", message...);
  };
  const bool has_codes = row.has_codes() && dtype != at::kDouble &&
                         table.takes_format(row.format(0), row.number_of_buffers);
  const at::ScalarType computed = dtype == at::kDouble ? at::kDouble : at::kFloat;
  bool has_groups = false;
  for (int i = 0; i < row.number_of_buffers; ++i) {
    const int list = kBuffer0 + i;
    const at::ScalarType got = row.owned[list].scalar_type();
    has_groups |= row.format(i) == BufferFormat::kGroup8;
    if (has_codes) {
      if (i > 0) {
        check(list, got == at::kBFloat16 || got == at::kByte,
              "BFloat16 or Byte beside first moments of Char, got ", got);
      }
      continue;
    }
    const bool may_be_narrow = got == at::kBFloat16 && dtype != at::kDouble;
    if (row.has_split_master()) {
      check(list, may_be_narrow || got == computed, "Float or BFloat16 with a split master, got ",
            got);
    }
    check(list, got == dtype || got == computed || may_be_narrow, computed,
          dtype == at::kDouble ? ""
          : dtype == at::kHalf ? ", BFloat16 or the parameter's dtype"
                               : " or BFloat16",
          ", got ", got);
    check(list, got == row.owned[kBuffer0].scalar_type(), "of one dtype with the other buffers, ",
          row.owned[kBuffer0].scalar_type(), ", got ", got);
  }
  const at::Tensor& exponents = row.owned[kExponents];
  const int64_t got = exponents.defined() ? exponents.numel() : 0;
  if (has_groups) {
    const int64_t numel = row.param().numel();
    check(kParam, numel % kGroupSize == 0, "of a multiple of ", kGroupSize,
          " elements for moments in groups, got ", numel);
    check(kExponents, got == numel / kGroupSize, "of ", numel / kGroupSize, " elements, got ", got);
    check(kExponents,
          got == 0 || (exponents.scalar_type() == at::kByte && exponents.is_contiguous()),
          "Byte and contiguous, got ", exponents.scalar_type());
  } else {
    check(kExponents, got == 0, "None for moments without groups, got ", got, " elements");
  }
  const at::ScalarType grad = row.grad().scalar_type();
  check(kGrad, !has_codes || dtype == at::kFloat || grad == dtype,
        "of the parameter's dtype with moments in 8 bits, ", dtype, ", got ", grad);
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
  check_no_overlap(operation_, uses,
                   [&](const MemoryUse& use) { return name_of(rows_[use.index], use.list); });
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

void Plan::fill_record(Row& row) {
  row.staged.clear();
  // All memory is walked in the order of the parameter's, or of its dense copy.
  at::Tensor layout = row.param();
  if (!layout.is_non_overlapping_and_dense()) {
    layout = at::empty(row.param().sizes(), row.param().options().requires_grad(false));
  }
  const auto memory = [&](const at::Tensor& tensor, at::ScalarType dtype, bool written) -> void* {
    if (!tensor.defined()) return nullptr;
    if (tensor.scalar_type() == dtype && have_same_dense_layout(tensor, layout)) {
      return written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
    }
    const at::Tensor dense = at::empty_strided(layout.sizes(), layout.strides(),
                                               tensor.options().dtype(dtype).requires_grad(false));
    row.staged.push_back({tensor, dense, written});
    return dense.mutable_data_ptr();
  };
  const at::ScalarType param_dtype = row.param().scalar_type();
  const at::ScalarType grad_dtype =
      gradient_dtype(row.grad().scalar_type(), param_dtype, row.has_codes());
  TensorRecord& record = row.record;
  record = TensorRecord();
  record.param = memory(row.param(), param_dtype, true);
  record.param_dtype = *dtype_of(row.param());
  record.grad = memory(row.grad(), grad_dtype, row.writes_grad);
  record.grad_dtype = *dtype_of(grad_dtype);
  record.master = row.master();
  if (record.master != Master::kNone) {
    record.master_param = memory(row.master_param(), row.master_param().scalar_type(), true);
  }
  const bool is_narrow =
      record.master == Master::kLow8 || (record.master == Master::kNone && is_16_bit(param_dtype));
  row.narrow = is_narrow ? kDithersParam : 0;
  row.dithers = 0;
  for (int i = 0; i < row.number_of_buffers; ++i) {
    const at::Tensor& buffer = row.owned[kBuffer0 + i];
    record.buffers[i] = memory(buffer, buffer.scalar_type(), true);
    record.buffer_formats[i] = row.format(i);
    if (buffer.element_size() < 4) row.narrow |= kDithersBuffer0 << i;
    if (is_code(row.format(i))) row.dithers |= kDithersBuffer0 << i;
  }
  if (row.owned[kExponents].defined()) {
    record.exponents = row.owned[kExponents].mutable_data_ptr<uint8_t>();
  }
  if (row.owned[kStep].defined()) {
    record.step = row.owned[kStep].mutable_data_ptr<float>();
  }
  record.numel = row.param().numel();
  record.first_element = row.first_element;
  record.group = static_cast<int32_t>(row.group);
  row.grad_is_current = true;
  // Other strides would not show in the fingerprint of a tensor that is not contiguous.
  row.record_is_current =
      row.staged.empty() && std::all_of(row.fingerprints.begin(), row.fingerprints.end(),
                                        [](const Fingerprint& fingerprint) {
                                          return fingerprint.contiguous || fingerprint.numel < 0;
                                        });
}

// A write to a sharded parameter shows there; one to its shard, here.
int64_t Plan::Row::version() const {
  return version_of(param()) + (is_sharded ? version_of(*shard_of) : 0);
}

Master Plan::Row::master() const {
  if (!master_param().defined()) return Master::kNone;
  switch (master_param().scalar_type()) {
    case at::kByte:
    case at::kShort:
      return Master::kLow16;
    case at::kChar:
      return Master::kLow8;
    default:
      return Master::kFloat32;
  }
}

BufferFormat Plan::Row::format(int buffer) const {
  const at::Tensor& tensor = buffer < number_of_buffers ? owned[kBuffer0 + buffer] : param();
  switch (tensor.scalar_type()) {
    case at::kChar:
      return BufferFormat::kRatio8;
    case at::kByte:
      return BufferFormat::kGroup8;
    default:
      return format_of(dtype_of(tensor).value_or(DType::kFloat32));
  }
}

bool Plan::Row::has_fresh_master() const {
  return param_of_master.has_value() && param_of_master->is(param(), version());
}

// A write to a sharded gradient shows there; one to its shard, here.
int64_t Plan::Row::grad_version() const {
  const at::Tensor* const whole = is_sharded ? &shard_of->grad() : nullptr;
  return version_of(grad()) + (whole != nullptr && whole->defined() ? version_of(*whole) : 0);
}

bool Plan::Row::grad_is_as_seen() const {
  return seen_grad.has_value() && seen_grad->is(grad(), grad_version()) &&
         seen_grad_data == grad().const_data_ptr();
}

void Plan::Row::see_grad() {
  if (grad_is_as_seen()) return;
  SeenTensor::remember(seen_grad, grad(), grad_version());
  seen_grad_data = grad().const_data_ptr();
  seen_grad_is_scaled = false;
}

void Plan::mark_written(Row& row) {
  for (int list = 0; list < kLists; ++list) {
    const bool written = row.tensor(list).defined() && (list != kGrad || row.writes_grad);
    if (written) bump_version(row.tensor(list));
  }
  if (row.is_sharded) bump_version(*row.shard_of);
  row.master_is_fresh = true;
}

// An element of a gradient that was skipped stays as it was, also where converting it to the dtype
// of the dense copy and back would change it: the bits of NaN, and a number too large for that
// dtype.
void Plan::copy_back(const Row& row, bool skip_nonfinite) {
  for (const Staged& staged : row.staged) {
    if (!staged.written) continue;
    const at::ScalarType dtype = staged.original.scalar_type();
    if (skip_nonfinite && staged.original.is_same(row.grad()) &&
        dtype != staged.dense.scalar_type()) {
      const at::Tensor stepped = staged.original.to(staged.dense.scalar_type()).isfinite();
      staged.original.copy_(at::where(stepped, staged.dense.to(dtype), staged.original));
    } else {
      staged.original.copy_(staged.dense);
    }
  }
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

// The key of a lower part: "master_low_bf16", "master_low8_fp16".
std::string Plan::low_name(const Row& row) {
  return c10::str(row.master() == Master::kLow16 ? "master_low_" : "master_low8_",
                  row.param().scalar_type() == at::kHalf ? "fp16" : "bf16");
}

// The key of a buffer: "exp_avg", or with its code "exp_avg_q8h". A group is of second moments,
// which are no first buffer, or of a momentum.
std::string Plan::code_name(const Row& row, int buffer) const {
  const BufferFormat format = row.format(buffer);
  const char* const code = format == BufferFormat::kRatio8   ? "_q8h"
                           : format != BufferFormat::kGroup8 ? ""
                           : buffer == 0                     ? "_q8m"
                                                             : "_q8s";
  return buffer_names_.at(buffer) + code;
}

std::string Plan::name_of(const Row& row, int list) const {
  static const char* const names[] = {"param", "grad", "master_param", "step", "exponent"};
  const bool in_lists = naming_ == Naming::kLists;
  const bool is_low = list == kMaster && row.has_split_master() && !in_lists;
  if (list == kExponents && !in_lists) {
    return c10::str(buffer_names_.at(row.number_of_buffers - 1), "_exp of group ", row.group,
                    ", param ", row.index_in_group);
  }
  const std::string name = list >= kBuffer0 && !in_lists ? code_name(row, list - kBuffer0)
                           : list >= kBuffer0            ? buffer_names_.at(list - kBuffer0)
                           : is_low                      ? low_name(row)
                           : in_lists                    ? std::string(names[list]) + "s"
                                                         : names[list];
  if (in_lists) return c10::str(name, "[", row.index_in_group, "]");
  return c10::str(name, " of group ", row.group, ", param ", row.index_in_group);
}

}  // namespace amp_ext
