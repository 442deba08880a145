// Finds changes of a parameter's tensors, fills KernelTensorArgs, and copies results back from
// dense copies.
#include "optimizer/param_slot.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <iterator>

namespace amp_ext {

at::ScalarType gradient_dtype(at::ScalarType grad, at::ScalarType param, bool has_codes) {
  if (has_codes) return param;
  if (grad == param || (param == at::kFloat && is_16_bit(grad))) return grad;
  return at::kFloat;
}

// A DTensor and its local shard have separate version counters, and user code may write either.
int64_t ParamSlot::version() const {
  return version_of(param()) + (is_sharded ? version_of(*shard_of) : 0);
}

Master ParamSlot::master() const {
  if (!master_param().defined()) return Master::kNone;
  switch (master_param().scalar_type()) {
    case at::kByte:
    case at::kShort:
      return Master::kResidual16;
    case at::kChar:
      return Master::kResidual8;
    default:
      return Master::kFloat32;
  }
}

BufferFormat ParamSlot::format(int buffer) const {
  const at::Tensor& tensor = owned[kBuffer0 + buffer];
  switch (tensor.scalar_type()) {
    case at::kChar:
      return BufferFormat::kRatio8;
    case at::kByte:
      return BufferFormat::kBlockwise8;
    default:
      return format_of(dtype_of(tensor).value_or(DType::kFloat32));
  }
}

bool ParamSlot::has_codes() const {
  const auto& formats = args.buffer_formats;
  return std::any_of(std::begin(formats), std::end(formats), is_code);
}

bool ParamSlot::has_current_master() const {
  return param_of_master.has_value() && param_of_master->is(param(), version());
}

// A DTensor gradient and its local shard have separate version counters, and either may be written.
int64_t ParamSlot::grad_version() const {
  const at::Tensor* const unsharded = is_sharded ? &shard_of->grad() : nullptr;
  return version_of(grad()) +
         (unsharded != nullptr && unsharded->defined() ? version_of(*unsharded) : 0);
}

bool ParamSlot::grad_is_as_seen() const {
  return seen_grad.has_value() && seen_grad->is(grad(), grad_version()) &&
         seen_grad_data == grad().const_data_ptr();
}

void ParamSlot::see_grad() {
  if (grad_is_as_seen()) return;
  SeenTensor::remember(seen_grad, grad(), grad_version());
  seen_grad_data = grad().const_data_ptr();
  seen_grad_is_scaled = false;
}

bool ParamSlot::take_fingerprint(int list) {
  const at::Tensor& tensor = this->tensor(list);
  if (!tensor.defined()) return false;
  const bool is_written = list != kGrad || writes_grad;
  Fingerprint fingerprint = Fingerprint::of(tensor, is_written);
  if (list == kParam) fingerprint.take_sizes(tensor);
  if (fingerprint == fingerprints[list]) return false;
  fingerprints[list] = fingerprint;
  return true;
}

// Usually a gradient is a new tensor that differs from the last gradient only in its address.
bool ParamSlot::take_new_grad() {
  const at::Tensor& grad = this->grad();
  if (!is_plain(grad) || !grad.is_contiguous() || !grad.sizes().equals(param().sizes()) ||
      grad.device() != param().device() ||
      gradient_dtype(grad.scalar_type(), param().scalar_type(), has_codes()) !=
          grad.scalar_type() ||
      !dtype_of(grad).has_value() || !has_all_elements(grad)) {
    return false;
  }
  args.grad = const_cast<void*>(grad.const_data_ptr());
  args.grad_dtype = *dtype_of(grad);
  grad_is_current = true;
  return true;
}

void ParamSlot::fill_args() {
  contiguous_copies.clear();
  // Kernels visit all tensors in the memory order of the parameter, or of its dense copy.
  at::Tensor layout = param();
  if (!layout.is_non_overlapping_and_dense()) {
    layout = at::empty(param().sizes(), param().options().requires_grad(false));
  }
  const auto memory = [&](const at::Tensor& tensor, at::ScalarType dtype, bool written) -> void* {
    if (!tensor.defined()) return nullptr;
    if (tensor.scalar_type() == dtype && have_same_dense_layout(tensor, layout)) {
      return written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
    }
    const at::Tensor dense = at::empty_strided(layout.sizes(), layout.strides(),
                                               tensor.options().dtype(dtype).requires_grad(false));
    contiguous_copies.push_back({tensor, dense, written});
    return dense.mutable_data_ptr();
  };
  const at::ScalarType param_dtype = param().scalar_type();
  args = KernelTensorArgs();
  for (int i = 0; i < number_of_buffers; ++i) args.buffer_formats[i] = format(i);
  const at::ScalarType grad_dtype = gradient_dtype(grad().scalar_type(), param_dtype, has_codes());
  args.param = memory(param(), param_dtype, true);
  args.param_dtype = *dtype_of(param());
  args.grad = memory(grad(), grad_dtype, writes_grad);
  args.grad_dtype = *dtype_of(grad_dtype);
  args.master = master();
  if (args.master != Master::kNone) {
    args.master_param = memory(master_param(), master_param().scalar_type(), true);
  }
  const bool is_low_precision =
      args.master == Master::kResidual8 || (args.master == Master::kNone && is_16_bit(param_dtype));
  low_precision = is_low_precision ? kDithersParam : 0;
  dithers = 0;
  for (int i = 0; i < number_of_buffers; ++i) {
    const at::Tensor& buffer = owned[kBuffer0 + i];
    args.buffers[i] = memory(buffer, buffer.scalar_type(), true);
    if (buffer.element_size() < 4) low_precision |= kDithersBuffer0 << i;
    if (is_code(args.buffer_formats[i])) dithers |= kDithersBuffer0 << i;
  }
  if (owned[kExponents].defined()) {
    args.exponents = owned[kExponents].mutable_data_ptr<uint8_t>();
  }
  if (owned[kStep].defined()) {
    args.step = owned[kStep].mutable_data_ptr<float>();
  }
  args.numel = param().numel();
  args.global_offset = global_offset;
  args.group = static_cast<int32_t>(group);
  grad_is_current = true;
  // A fingerprint does not show changed strides, so non-contiguous tensors are read in every step.
  args_are_current =
      contiguous_copies.empty() &&
      std::all_of(fingerprints.begin(), fingerprints.end(), [](const Fingerprint& fingerprint) {
        return fingerprint.contiguous || fingerprint.numel < 0;
      });
}

void ParamSlot::mark_written() {
  for (int list = 0; list < kSlotTensors; ++list) {
    const bool written = tensor(list).defined() && (list != kGrad || writes_grad);
    if (written) bump_version(tensor(list));
  }
  if (is_sharded) bump_version(*shard_of);
  master_is_current = true;
}

// With skip_nonfinite, a skipped element must keep its bits. Converting it to the dense copy's
// dtype and back could change a NaN or a large value.
void ParamSlot::copy_back(bool skip_nonfinite) const {
  for (const ContiguousCopy& copy : contiguous_copies) {
    if (!copy.written) continue;
    const at::ScalarType dtype = copy.original.scalar_type();
    if (skip_nonfinite && copy.original.is_same(grad()) && dtype != copy.dense.scalar_type()) {
      const at::Tensor stepped = copy.original.to(copy.dense.scalar_type()).isfinite();
      copy.original.copy_(at::where(stepped, copy.dense.to(dtype), copy.original));
    } else {
      copy.original.copy_(copy.dense);
    }
  }
}

}  // namespace amp_ext
