// The tensors of one optimizer: checks them, keeps masters fresh, and launches the step.
#include "plan.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "element.h"

namespace amp_ext {

namespace {

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
}

bool is_16_bit(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// The dtype that gradients are read in: their own where kernels take it, else float32.
at::ScalarType gradient_dtype(at::ScalarType grad, at::ScalarType param) {
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

void refresh_master(const at::Tensor& param, const at::Tensor& master_param) {
  const at::NoGradGuard no_grad;
  const at::Tensor rounded = master_param.to(param.scalar_type());
  master_param.copy_(at::where(rounded.eq(param), master_param, param.to(at::kFloat)));
}

Plan::Plan(std::string operation, std::vector<std::string> buffer_names, Naming naming)
    : operation_(std::move(operation)), buffer_names_(std::move(buffer_names)), naming_(naming) {}

int64_t Plan::add_param(int64_t group, int64_t index_in_group, at::Tensor param,
                        at::Tensor explicit_grad) {
  Row row;
  row.group = group;
  row.index_in_group = index_in_group;
  row.tensors[kParam] = std::move(param);
  row.explicit_grad = std::move(explicit_grad);
  rows_.push_back(std::move(row));
  memory_is_checked_ = false;
  return static_cast<int64_t>(rows_.size()) - 1;
}

int64_t Plan::add_sharded_param(int64_t group, int64_t index_in_group, ShardOf shard_of) {
  const int64_t number = add_param(group, index_in_group, {});
  rows_[number].shard_of = std::move(shard_of);
  return number;
}

void Plan::set_shard(int64_t number, at::Tensor param, at::Tensor grad) {
  Row& row = rows_.at(number);
  row.tensors[kParam] = std::move(param);
  row.explicit_grad = std::move(grad);
}

void Plan::set_state(int64_t number, ParamState state) {
  Row& row = rows_.at(number);
  row.number_of_buffers = static_cast<int>(state.buffers.size());
  TORCH_CHECK(row.number_of_buffers <= kMaxBuffers, operation_, ": ", name_of(row, kParam),
              " must have up to ", kMaxBuffers, " buffers, got ", row.number_of_buffers);
  for (int i = 0; i < kMaxBuffers; ++i) {
    row.tensors[kBuffer0 + i] = i < row.number_of_buffers ? state.buffers[i] : at::Tensor();
  }
  row.tensors[kMaster] = std::move(state.master_param);
  row.tensors[kStep] = std::move(state.step);
  row.state_for = row.param().scalar_type();
  row.kernel.reset();
  row.param_version = -1;
  row.record_is_current = false;
  memory_is_checked_ = false;
}

std::vector<int64_t> Plan::read_grads() {
  std::vector<int64_t> without_state;
  for (size_t i = 0; i < rows_.size(); ++i) {
    Row& row = rows_[i];
    const bool is_explicit = row.shard_of.has_value() || row.explicit_grad.defined();
    row.tensors[kGrad] =
        is_explicit ? row.explicit_grad : row.param().unsafeGetTensorImpl()->grad();
    if (row.has_grad() && row.state_for != row.param().scalar_type()) without_state.push_back(i);
  }
  return without_state;
}

std::vector<LookResult> Plan::check_finite(const at::Tensor& found_inf,
                                           const OptionalTensor& grad_scale, bool sum_squares,
                                           bool skip_nonfinite) {
  const Cleanup cleanup{*this};
  const at::NoGradGuard no_grad;
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
    row.seen_grad.reset();
    if (!row.has_grad()) continue;
    check_grad(row);
    Look& look = look_of(looks, row, found_inf, sum_squares);
    row.seen_grad = SeenGrad{WeakTensor(row.grad().getIntrusivePtr()), row.grad().const_data_ptr(),
                             version_of(row.grad())};
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
    if (result.found_inf.device() == device && result.partition == row.partition()) return look;
  }
  Look look;
  const auto options = at::TensorOptions(device).dtype(at::kFloat);
  look.result.partition = row.partition();
  look.result.found_inf = found_inf.has_value()
                              ? found_inf->to(device, at::kFloat, /*non_blocking=*/true,
                                              /*copy=*/true)
                              : at::zeros({}, options);
  if (sum_squares) look.result.sum_of_squares = at::zeros({}, options.dtype(at::kDouble));
  look.records.reserve(rows_.size());
  return looks.emplace_back(std::move(look));
}

bool Plan::is_partitioned() const {
  return std::any_of(rows_.begin(), rows_.end(),
                     [](const Row& row) { return row.partition() != 0; });
}

bool Plan::gradients_are_as_seen() const {
  return std::all_of(rows_.begin(), rows_.end(), [](const Row& row) {
    if (!row.has_grad() || !row.seen_grad.has_value()) {
      return row.has_grad() == row.seen_grad.has_value();
    }
    const SeenGrad& seen = *row.seen_grad;
    return seen.tensor._unsafe_get_target() == row.grad().unsafeGetTensorImpl() &&
           seen.data == row.grad().const_data_ptr() && seen.version == version_of(row.grad());
  });
}

void Plan::run_step(GroupTable& table, const GradientOptions& options) {
  const Cleanup cleanup{*this};
  const at::NoGradGuard no_grad;
  check_step(table, options);
  StepScratch& scratch = options.scratch != nullptr ? *options.scratch : scratch_;
  bool looks_are_new = false;
  const std::vector<Look> looks = looks_for_step(options, scratch, looks_are_new);
  if (options.max_grad_norm.has_value() && options.grad_norm.has_value() && looks.empty() &&
      !options.sum_of_squares.has_value()) {
    options.grad_norm->zero_();  // of no gradients
  }
  for (const Batch& batch : batches()) {
    const DeviceInputs inputs = inputs_on(batch.device, options, looks, looks_are_new);
    if (host_knows_of_skip(batch.device, inputs.pointers)) {
      if (inputs.grad_norm != nullptr) {
        *inputs.grad_norm = GradientFactor::read(inputs.pointers).grad_norm;
      }
      continue;
    }
    put_lrs_on(batch.device, table);
    step_batch(batch, table, inputs, scratch);
  }
}

// All that can be refused, before anything is written.
void Plan::check_step(const GroupTable& table, const GradientOptions& options) {
  check_groups(table, options.max_grad_norm);
  check_scalar(operation_, "grad_scale", options.grad_scale);
  check_scalar(operation_, "found_inf", options.found_inf);
  check_scalar(operation_, "sum_of_squares", options.sum_of_squares);
  for (Row& row : rows_) {
    if (!row.has_grad()) continue;
    const bool writes_grad = table.groups[row.group].common->write_back_grads;
    if (row.writes_grad != writes_grad) row.fingerprints[kGrad] = {};  // is checked anew
    row.writes_grad = writes_grad;
    if (!row.kernel.has_value()) row.kernel = kernel_of(row, table);
    check_row(row);
  }
  if (!memory_is_checked_) check_memory();
}

// The looks that belong to a step: those of check_finite, or new ones.
std::vector<Plan::Look> Plan::looks_for_step(const GradientOptions& options, StepScratch& scratch,
                                             bool& is_new) {
  is_new = needs_look(options);
  std::vector<Look> looks;
  std::swap(looks, looks_);
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
bool Plan::needs_look(const GradientOptions& options) const {
  const bool wants_norm = options.max_grad_norm.has_value();
  if (!looks_.empty() && !gradients_are_as_seen()) {
    return wants_norm || options.found_inf.has_value();
  }
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
    if (batch == batches.end()) batch = batches.insert(batch, {device, *row.kernel, {}});
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
void Plan::put_lrs_on(const at::Device& device, GroupTable& table) {
  for (GroupTable::Entry& group : table.groups) {
    if (!group.lr.has_value()) continue;
    group.lr_on_device.reset();
    if (!uses_cuda_engine(device) || !uses_cuda_engine(group.lr->device())) {
      group.common->lr = group.lr->item().toDouble();
    } else {
      group.lr_on_device = scalar_on(device, *group.lr);
    }
    group.common->lr_on_device = float_data(group.lr_on_device);
  }
}

void Plan::step_batch(const Batch& batch, const GroupTable& table, const DeviceInputs& inputs,
                      StepScratch& scratch) {
  std::vector<TensorRecord> records;
  records.reserve(batch.rows.size());
  for (Row* row : batch.rows) {
    update_stale_master(*row);
    if (!row->record_is_current) fill_record(*row);
    records.push_back(row->record);
  }
  const StepLaunch launch{
      batch.kernel,          records.data(),  static_cast<int64_t>(records.size()),
      table.hyperparameters, inputs.pointers, inputs.grad_norm};
  engine_of(batch.device).step(batch.device, launch, scratch);
  for (Row* row : batch.rows) mark_written(*row);
}

OptimizerKernel Plan::kernel_of(const Row& row, const GroupTable& table) const {
  const auto kernel = table.kernel(row.number_of_buffers);
  TORCH_CHECK(row.state_for == row.param().scalar_type() && kernel.has_value(), operation_, ": ",
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

void Plan::check_row(Row& row) {
  if (has_moved(row, kGrad)) row.grad_is_current = false;
  bool memory_moved = row.writes_grad && !row.grad_is_current;
  for (int list = 0; list < kLists; ++list) {
    if (list == kGrad || !has_moved(row, list)) continue;
    row.record_is_current = false;
    memory_moved = true;
    if (list == kParam) row.param_version = -1;  // other memory under the same master
  }
  if (memory_moved) memory_is_checked_ = false;
  if (row.record_is_current && (row.grad_is_current || take_new_grad(row))) return;
  row.record_is_current = false;
  check_grad(row);
  check_tensors(row);
}

bool Plan::has_moved(Row& row, int list) {
  const at::Tensor& tensor = row.tensors[list];
  if (!tensor.defined()) return false;
  const Fingerprint fingerprint = Fingerprint::of(tensor);
  if (fingerprint == row.fingerprints[list]) return false;
  row.fingerprints[list] = fingerprint;
  return true;
}

// Most gradients are new at each step and like the last ones: only the address changes.
bool Plan::take_new_grad(Row& row) {
  const at::Tensor& grad = row.grad();
  if (!is_plain(grad) || !grad.is_contiguous() || !grad.sizes().equals(row.param().sizes()) ||
      grad.device() != row.param().device() ||
      gradient_dtype(grad.scalar_type(), row.param().scalar_type()) != grad.scalar_type() ||
      !dtype_of(grad).has_value()) {
    return false;
  }
  row.record.grad = const_cast<void*>(grad.const_data_ptr());
  row.record.grad_dtype = *dtype_of(grad);
  row.grad_is_current = true;
  return true;
}

void Plan::check_grad(const Row& row) const {
  const at::Tensor& grad = row.grad();
  TORCH_CHECK(grad.layout() == at::kStrided, operation_,
              " does not support sparse gradients: ", name_of(row, kGrad), " must be Strided, got ",
              grad.layout());
  TORCH_CHECK(is_plain(grad), operation_, ": ", name_of(row, kGrad),
              " must be a strided tensor with memory of its own, got ", grad.toString());
  TORCH_CHECK(dtype_of(grad).has_value(), operation_, ": ", name_of(row, kGrad),
              " must be Float, Double, Half or BFloat16, got ", grad.scalar_type());
}

void Plan::check_tensors(const Row& row) const {
  for (int list = 0; list < kLists; ++list) {
    const at::Tensor& tensor = row.tensors[list];
    TORCH_CHECK(!tensor.defined() || is_plain(tensor), operation_, ": ", name_of(row, list),
                " must be a strided tensor with memory of its own, got ", tensor.toString());
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
    const at::Tensor& tensor = row.tensors[list];
    if (!tensor.defined()) continue;
    const at::ScalarType got = tensor.scalar_type();
    check(list, tensor.device() == param.device(), "on ", param.device(), ", got ",
          tensor.device());
    if (list == kStep) {
      check(list, tensor.numel() == 1, "one element, got sizes ", tensor.sizes());
    } else {
      check(list, tensor.sizes().equals(param.sizes()), "of sizes ", param.sizes(), ", got ",
            tensor.sizes());
    }
    if (list == kGrad) continue;
    const at::ScalarType computed = dtype == at::kDouble ? at::kDouble : at::kFloat;
    if (list == kMaster) {
      TORCH_CHECK(is_16_bit(dtype), operation_, ": ", name_of(row, kMaster),
                  " must be None for a parameter of ", dtype);
    }
    if (list >= kBuffer0) {
      const at::ScalarType wanted = got == dtype ? dtype : computed;
      check(list, got == wanted, wanted, is_16_bit(dtype) ? " or the parameter's dtype" : "",
            ", got ", got);
      check(list, got == row.tensors[kBuffer0].scalar_type(),
            "of one dtype with the other buffers, ", row.tensors[kBuffer0].scalar_type(), ", got ",
            got);
    } else {
      check(list, got == at::kFloat, at::kFloat, ", got ", got);
    }
  }
}

void Plan::check_memory() {
  std::vector<MemoryUse> uses;
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i].fingerprints[kParam].numel < 0) continue;  // has not had a gradient yet
    for (int list = 0; list < kLists; ++list) {
      const at::Tensor& tensor = rows_[i].tensors[list];
      if (!tensor.defined()) continue;
      const bool written = list != kGrad || rows_[i].writes_grad;
      uses.push_back({&tensor, written, list, static_cast<int64_t>(i)});
    }
  }
  check_no_overlap(operation_, uses,
                   [&](const MemoryUse& use) { return name_of(rows_[use.index], use.list); });
  memory_is_checked_ = true;
}

void Plan::update_stale_master(Row& row) {
  const at::Tensor& master = row.master_param();
  if (!master.defined() || row.param_version == row.version()) return;
  refresh_master(row.param(), master);
}

void Plan::fill_record(Row& row) {
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
    dense.copy_(tensor);
    row.staged.push_back({tensor, dense, written});
    return dense.mutable_data_ptr();
  };
  const at::ScalarType param_dtype = row.param().scalar_type();
  const at::ScalarType grad_dtype = gradient_dtype(row.grad().scalar_type(), param_dtype);
  TensorRecord& record = row.record;
  record = TensorRecord();
  record.param = memory(row.param(), param_dtype, true);
  record.param_dtype = *dtype_of(row.param());
  record.grad = memory(row.grad(), grad_dtype, row.writes_grad);
  record.grad_dtype = *dtype_of(grad_dtype);
  record.master_param = static_cast<float*>(memory(row.master_param(), at::kFloat, true));
  record.buffer_dtype = param_dtype == at::kDouble ? DType::kFloat64 : DType::kFloat32;
  for (int i = 0; i < row.number_of_buffers; ++i) {
    const at::Tensor& buffer = row.tensors[kBuffer0 + i];
    record.buffers[i] = memory(buffer, buffer.scalar_type(), true);
    record.buffer_dtype = *dtype_of(buffer);
  }
  if (row.tensors[kStep].defined()) {
    record.step = row.tensors[kStep].mutable_data_ptr<float>();
  }
  record.numel = row.param().numel();
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
  return version_of(param()) + (shard_of.has_value() ? version_of(shard_of->param) : 0);
}

void Plan::mark_written(Row& row) const {
  for (const Staged& staged : row.staged) {
    if (staged.written) staged.original.copy_(staged.dense);
  }
  for (int list = 0; list < kLists; ++list) {
    const bool written = row.tensors[list].defined() && (list != kGrad || row.writes_grad);
    if (written) bump_version(row.tensors[list]);
  }
  if (row.shard_of.has_value()) bump_version(row.identity());
  if (row.master_param().defined()) row.param_version = row.version();
}

Plan::Cleanup::~Cleanup() {
  for (Row& row : plan.rows_) {
    row.tensors[kGrad].reset();
    if (row.shard_of.has_value()) row.explicit_grad.reset();
    row.staged.clear();
  }
}

std::string Plan::name_of(const Row& row, int list) const {
  static const char* const names[] = {"param", "grad", "master_param", "step"};
  const bool in_lists = naming_ == Naming::kLists;
  const std::string name = list >= kBuffer0 ? buffer_names_.at(list - kBuffer0)
                           : in_lists       ? std::string(names[list]) + "s"
                                            : names[list];
  if (in_lists) return c10::str(name, "[", row.index_in_group, "]");
  return c10::str(name, " of group ", row.group, ", param ", row.index_in_group);
}

}  // namespace amp_ext
