// The tensors of one optimizer: checks them, keeps masters fresh, and launches the step.
#include "plan.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <utility>

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

void check_scalar(const std::string& operation, const char* name,
                  const std::optional<at::Tensor>& scalar) {
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
  row.param = std::move(param);
  row.explicit_grad = std::move(explicit_grad);
  rows_.push_back(std::move(row));
  memory_is_checked_ = false;
  return static_cast<int64_t>(rows_.size()) - 1;
}

void Plan::set_state(int64_t number, ParamState state) {
  Row& row = rows_.at(number);
  row.state = std::move(state);
  row.state_for = row.param.scalar_type();
  row.param_version = -1;
  row.record_is_current = false;
  memory_is_checked_ = false;
}

void Plan::read_grads() {
  for (Row& row : rows_) {
    row.grad =
        row.explicit_grad.defined() ? row.explicit_grad : row.param.unsafeGetTensorImpl()->grad();
  }
}

std::vector<int64_t> Plan::params_without_state() const {
  std::vector<int64_t> numbers;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    if (row.grad.defined() && row.state_for != row.param.scalar_type()) numbers.push_back(i);
  }
  return numbers;
}

std::vector<at::Tensor> Plan::check_finite(const at::Tensor& found_inf,
                                           const std::optional<at::Tensor>& grad_scale) {
  const Cleanup cleanup{*this};
  const at::NoGradGuard no_grad;
  check_scalar(operation_, "found_inf", found_inf);
  check_scalar(operation_, "grad_scale", grad_scale);
  struct Look {
    at::Tensor found_inf;
    std::vector<TensorRecord> records;
  };
  std::vector<Look> looks;
  for (Row& row : rows_) {
    if (!row.grad.defined()) continue;
    check_grad(row);
    const at::Device device = row.grad.device();
    auto look = std::find_if(looks.begin(), looks.end(), [&](const Look& candidate) {
      return candidate.found_inf.device() == device;
    });
    if (look == looks.end()) {
      const at::Tensor copy =
          found_inf.to(device, at::kFloat, /*non_blocking=*/true, /*copy=*/true);
      look = looks.insert(look, {copy, {}});
    }
    if (!row.grad.is_non_overlapping_and_dense()) row.grad = row.grad.contiguous();
    TensorRecord record;
    record.grad = const_cast<void*>(row.grad.const_data_ptr());
    record.grad_dtype = *dtype_of(row.grad);
    record.numel = row.grad.numel();
    look->records.push_back(record);
  }
  std::vector<at::Tensor> found_infs;
  for (Look& look : looks) {
    const at::Device device = look.found_inf.device();
    const at::Tensor scale = grad_scale.has_value() ? scalar_on(device, *grad_scale) : at::Tensor();
    run_check_finite(device, look.records, float_data(scale),
                     look.found_inf.mutable_data_ptr<float>());
    found_infs.push_back(look.found_inf);
  }
  return found_infs;
}

void Plan::run_step(GroupTable& table, const std::vector<std::optional<at::Tensor>>& lrs,
                    const std::optional<at::Tensor>& grad_scale,
                    const std::optional<at::Tensor>& found_inf) {
  const Cleanup cleanup{*this};
  const at::NoGradGuard no_grad;
  check_groups(table, lrs);
  check_scalar(operation_, "grad_scale", grad_scale);
  check_scalar(operation_, "found_inf", found_inf);
  for (Row& row : rows_) {
    if (row.grad.defined()) check_row(row, table);
  }
  if (!memory_is_checked_) check_memory();

  std::vector<Batch> batches;
  for (Row& row : rows_) {
    if (row.grad.defined()) batch_of(batches, row, table).rows.push_back(&row);
  }
  for (Batch& batch : batches) {
    const at::Device device = batch.device;
    const at::Tensor scale = grad_scale.has_value() ? scalar_on(device, *grad_scale) : at::Tensor();
    const at::Tensor found = found_inf.has_value() ? scalar_on(device, *found_inf) : at::Tensor();
    if (device.is_cpu() && GradientGate::read(float_data(scale), float_data(found)).skip) continue;

    std::vector<at::Tensor> device_lrs(lrs.size());
    for (size_t i = 0; i < lrs.size(); ++i) {
      if (!lrs[i].has_value()) continue;
      if (device.is_cpu() || lrs[i]->is_cpu()) {
        table.common[i]->lr = lrs[i]->item().toDouble();
      } else {
        device_lrs[i] = scalar_on(device, *lrs[i]);
      }
      table.common[i]->lr_on_device = float_data(device_lrs[i]);
    }

    std::vector<TensorRecord> records;
    records.reserve(batch.rows.size());
    for (Row* row : batch.rows) {
      update_stale_master(*row);
      if (!row->record_is_current) fill_record(*row);
      records.push_back(row->record);
    }
    const StepLaunch launch{
        batch.kernel,          records.data(),    static_cast<int64_t>(records.size()),
        table.hyperparameters, float_data(scale), float_data(found)};
    amp_ext::run_step(device, launch, scratch_);
    for (Row* row : batch.rows) mark_written(*row);
  }
}

Plan::Batch& Plan::batch_of(std::vector<Batch>& batches, const Row& row,
                            const GroupTable& table) const {
  const at::Device device = row.param.device();
  const OptimizerKernel kernel = *table.kernel(static_cast<int>(row.state.buffers.size()));
  for (Batch& batch : batches) {
    if (batch.kernel == kernel && batch.device == device) return batch;
  }
  batches.push_back({device, kernel, {}});
  return batches.back();
}

void Plan::check_groups(const GroupTable& table,
                        const std::vector<std::optional<at::Tensor>>& lrs) const {
  TORCH_CHECK(static_cast<int64_t>(lrs.size()) == table.count, operation_,
              ": lrs must have one entry for each of the ", table.count, " groups, got ",
              lrs.size());
  for (const Row& row : rows_) {
    TORCH_CHECK(row.group < table.count, operation_, ": hyperparameters of group ", row.group,
                " are missing, got ", table.count, " groups");
  }
  for (const auto& lr : lrs) check_scalar(operation_, "lr", lr);
}

void Plan::check_row(Row& row, const GroupTable& table) {
  const auto buffers = static_cast<int>(row.state.buffers.size());
  TORCH_CHECK(row.state_for == row.param.scalar_type() && table.kernel(buffers).has_value(),
              operation_, ": ", name_of(row, kParam), " has the state of no kernel, got ", buffers,
              " buffers");
  check_grad(row);
  bool memory_moved = false;
  for (int list = 0; list < kLists; ++list) {
    const at::Tensor& tensor = tensor_of(row, list);
    if (!tensor.defined()) continue;
    TORCH_CHECK(is_plain(tensor), operation_, ": ", name_of(row, list),
                " must be a strided tensor with memory of its own, got ", tensor.toString());
    const Fingerprint fingerprint = Fingerprint::of(tensor);
    if (fingerprint == row.fingerprints[list]) continue;
    row.fingerprints[list] = fingerprint;
    row.record_is_current = false;
    memory_moved |= list != kGrad;
    if (list == kParam) row.param_version = -1;  // other memory under the same master
  }
  if (row.record_is_current) return;
  check_tensors(row);
  if (memory_moved) memory_is_checked_ = false;
}

void Plan::check_grad(const Row& row) const {
  const at::Tensor& grad = row.grad;
  TORCH_CHECK(grad.layout() == at::kStrided, operation_,
              " does not support sparse gradients: ", name_of(row, kGrad), " must be Strided, got ",
              grad.layout());
  TORCH_CHECK(is_plain(grad), operation_, ": ", name_of(row, kGrad),
              " must be a strided tensor with memory of its own, got ", grad.toString());
  TORCH_CHECK(dtype_of(grad).has_value(), operation_, ": ", name_of(row, kGrad),
              " must be Float, Double, Half or BFloat16, got ", grad.scalar_type());
}

void Plan::check_tensors(const Row& row) const {
  const at::Tensor& param = row.param;
  const at::ScalarType dtype = param.scalar_type();
  TORCH_CHECK(dtype_of(param).has_value(), operation_, ": ", name_of(row, kParam),
              " must be Float, Double, Half or BFloat16, got ", dtype);
  check_device(operation_, name_of(row, kParam), param.device());
  const auto check = [&](int list, bool ok, const auto&... message) {
    TORCH_CHECK(ok, operation_, ": ", name_of(row, list), " must be ", message...);
  };
  for (int list = kGrad; list < kLists; ++list) {
    const at::Tensor& tensor = tensor_of(row, list);
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
      check(list, got == row.state.buffers[0].scalar_type(),
            "of one dtype with the other buffers, ", row.state.buffers[0].scalar_type(), ", got ",
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
      const at::Tensor& tensor = tensor_of(rows_[i], list);
      if (!tensor.defined()) continue;
      uses.push_back({&tensor, list != kGrad, list, static_cast<int64_t>(i)});
    }
  }
  check_no_overlap(operation_, uses,
                   [&](const MemoryUse& use) { return name_of(rows_[use.index], use.list); });
  memory_is_checked_ = true;
}

void Plan::update_stale_master(Row& row) {
  const at::Tensor& master = row.state.master_param;
  if (!master.defined() || row.param_version == version_of(row.param)) return;
  refresh_master(row.param, master);
}

void Plan::fill_record(Row& row) {
  // All memory is walked in the order of the parameter's, or of its dense copy.
  at::Tensor layout = row.param;
  if (!layout.is_non_overlapping_and_dense()) {
    layout = at::empty(row.param.sizes(), row.param.options().requires_grad(false));
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
  const at::ScalarType param_dtype = row.param.scalar_type();
  const at::ScalarType grad_dtype = gradient_dtype(row.grad.scalar_type(), param_dtype);
  const ParamState& state = row.state;
  TensorRecord& record = row.record;
  record = TensorRecord();
  record.param = memory(row.param, param_dtype, true);
  record.param_dtype = *dtype_of(row.param);
  record.grad = memory(row.grad, grad_dtype, false);
  record.grad_dtype = *dtype_of(grad_dtype);
  record.master_param = static_cast<float*>(memory(state.master_param, at::kFloat, true));
  record.buffer_dtype = param_dtype == at::kDouble ? DType::kFloat64 : DType::kFloat32;
  for (size_t i = 0; i < state.buffers.size(); ++i) {
    const at::Tensor& buffer = state.buffers[i];
    record.buffers[i] = memory(buffer, buffer.scalar_type(), true);
    record.buffer_dtype = *dtype_of(buffer);
  }
  if (state.step.defined()) record.step = state.step.mutable_data_ptr<float>();
  record.numel = row.param.numel();
  record.group = static_cast<int32_t>(row.group);
  // Other strides would not show in the fingerprint of a tensor that is not contiguous.
  row.record_is_current =
      row.staged.empty() && std::all_of(row.fingerprints.begin(), row.fingerprints.end(),
                                        [](const Fingerprint& fingerprint) {
                                          return fingerprint.contiguous || fingerprint.numel < 0;
                                        });
}

void Plan::mark_written(Row& row) {
  for (const Staged& staged : row.staged) {
    if (staged.written) staged.original.copy_(staged.dense);
  }
  for (int list = 0; list < kLists; ++list) {
    if (list != kGrad) bump_version(tensor_of(row, list));
  }
  row.param_version = version_of(row.param);
}

Plan::Cleanup::~Cleanup() {
  for (Row& row : plan.rows_) {
    row.grad.reset();
    row.staged.clear();
  }
}

const at::Tensor& Plan::tensor_of(const Row& row, int list) const {
  static const at::Tensor undefined;
  switch (list) {
    case kParam:
      return row.param;
    case kGrad:
      return row.grad;
    case kMaster:
      return row.state.master_param;
    case kStep:
      return row.state.step;
    default:
      break;
  }
  const auto buffer = static_cast<size_t>(list - kBuffer0);
  return buffer < row.state.buffers.size() ? row.state.buffers[buffer] : undefined;
}

std::string Plan::name_of(const Row& row, int list) const {
  static const char* const names[] = {"param", "grad", "master_param", "step"};
  const std::string name = list < kBuffer0 ? names[list] : buffer_names_.at(list - kBuffer0);
  if (naming_ == Naming::kLists) {
    return c10::str(name, "s[", row.index_in_group, "]");
  }
  return c10::str(name, " of group ", row.group, ", param ", row.index_in_group);
}

}  // namespace amp_ext
