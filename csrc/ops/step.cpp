// Checks the tensors of a step, and launches the step.
#include "ops/step.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>
#include <utility>

#include "element.h"
#include "formats/moment_codes.h"
#include "ops/masters.h"
#include "ops/scalars.h"
#include "tensors/autocast_cache.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

namespace {

Master master_in(const ParamTensors& tensors) {
  if (tensors.tensors[kMaster] == nullptr) return Master::kNone;
  switch (tensors[kMaster].scalar_type()) {
    case at::kByte:
      return Master::kResidual16;
    case at::kChar:
      return Master::kResidual8;
    default:
      return Master::kFloat32;
  }
}

bool is_split(Master master) {
  return master == Master::kResidual16 || master == Master::kResidual8;
}

// Number of kinds of parameters that a step compares others with, such as matrices in bfloat16 and
// norms in float32, each in a few groups.
constexpr size_t kMaxExamples = 8;

bool are_same(c10::IntArrayRef a, c10::IntArrayRef b) {
  bool same = a.size() == b.size();
  for (size_t i = 0; same && i < a.size(); ++i) same = a[i] == b[i];
  return same;
}

at::ScalarType residual_dtype(Master master) {
  return master == Master::kResidual16 ? at::kShort : at::kChar;
}

bool has_residual_sizes(const at::Tensor& residual, const at::Tensor& param) {
  const auto dims = static_cast<size_t>(param.dim());
  const c10::IntArrayRef sizes = residual.sizes();
  if (residual.scalar_type() == at::kChar) return sizes == param.sizes();
  return residual.scalar_type() == at::kByte && sizes.size() == dims + 1 && sizes.back() == 2 &&
         sizes.slice(0, dims) == param.sizes() && residual.storage_offset() % 2 == 0;
}

BufferFormat format_in(const ParamTensors& tensors, int buffer) {
  const at::Tensor& tensor = tensors[kBuffer0 + buffer];
  switch (tensor.scalar_type()) {
    case at::kChar:
      return BufferFormat::kRatio8;
    case at::kByte:
      return BufferFormat::kBlockwise8;
    default:
      return format_of(dtype_of(tensor).value_or(DType::kFloat32));
  }
}

// Returns the dtype in which kernels read a gradient: its own where they write an update; the
// parameter's if moments are quantized (`has_codes`); otherwise its own if there is such a kernel,
// otherwise float32.
at::ScalarType gradient_dtype(at::ScalarType grad, at::ScalarType param, bool has_codes,
                              bool writes_update) {
  if (writes_update) return grad == at::kDouble ? at::kFloat : grad;
  if (has_codes) return param;
  if (grad == param || (param == at::kFloat && is_16_bit(grad))) return grad;
  return at::kFloat;
}

// The learning rate of a group, as the engine of one device reads it.
struct LrOnDevice {
  at::Tensor on_device;  // one float32 on the device; undefined: `number` is used
  double number = 0.0;
};

// Returns the learning rates that are tensors, as numbers unless rate and kernels are on a GPU.
std::vector<std::optional<LrOnDevice>> lrs_on(const at::Device& device, const StepGroups& groups) {
  std::vector<std::optional<LrOnDevice>> lrs;
  for (const StepGroups::Group& group : groups.groups) {
    lrs.emplace_back();
    if (!group.lr.has_value()) continue;
    if (!uses_cuda(device) || !uses_cuda(group.lr->device())) {
      lrs.back() = {{}, group.lr->item().toDouble()};
    } else {
      lrs.back() = {scalar_on(device, *group.lr), 0.0};
    }
  }
  return lrs;
}

// Writes the norm of the unscaled gradients, rounded as in the kernels.
void write_norm(const GradientOptions& options) {
  const at::Tensor& grad_norm = *options.grad_norm;
  if (!options.sum_of_squares.has_value()) {
    grad_norm.zero_();  // the norm of no gradients
    return;
  }
  const at::Device device = grad_norm.device();
  at::Tensor norm = to_device(*options.sum_of_squares, device).to(at::kDouble).sqrt();
  if (options.grad_scale.has_value()) {
    norm = norm * to_device(inverse_of_scale(*options.grad_scale), device).to(at::kDouble);
  }
  grad_norm.copy_(norm, /*non_blocking=*/true);
}

// With skip_nonfinite, a skipped element must keep its bits. Converting it to the dense copy's
// dtype and back could change a NaN or a large value.
void copy_back(const DenseCopy& copy, bool is_grad, bool skip_nonfinite) {
  const at::ScalarType dtype = copy.original.scalar_type();
  if (skip_nonfinite && is_grad && dtype != copy.dense.scalar_type()) {
    const at::Tensor stepped = copy.original.to(copy.dense.scalar_type()).isfinite();
    copy.original.copy_(at::where(stepped, copy.dense.to(dtype), copy.original));
  } else {
    copy.original.copy_(copy.dense);
  }
}

// Marks the tensors of launched parameters as written and copies dense copies back, until a copy
// fails. Then throws `failure`, the launch's error, or else the copy's error.
void finish(const StepBatch& batch, const bool* is_launched, bool skip_nonfinite,
            StepProgress& progress, std::exception_ptr failure) {
  size_t begin = 0, copy = 0;
  bool copies = true;
  for (size_t i = 0; i < batch.all_args.size(); begin = batch.written_ends[i++]) {
    bool is_whole = true;
    for (; copy < batch.copies.size() && batch.copies[copy].of_args == i; ++copy) {
      const DenseCopy& one = batch.copies[copy];
      if (!is_launched[i] || !one.written) continue;
      try {
        const bool is_grad = one.dense.const_data_ptr() == batch.all_args[i].grad;
        if (copies) copy_back(one, is_grad, skip_nonfinite);
      } catch (...) {
        copies = false;
        if (failure == nullptr) failure = std::current_exception();
      }
      is_whole = copies;
    }
    if (!is_launched[i]) continue;
    for (size_t k = begin; k < batch.written_ends[i]; ++k) {
      prefetch_versions(k, batch.written.size(), [&](size_t at) { return batch.written[at]; });
      batch.written[k]->bump_version();
    }
    ++(is_whole ? progress.stepped : progress.stepped_in_part);
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace

DeviceInputs::DeviceInputs(const at::Device& device, const GradientOptions& options,
                           const OptionalTensor& limit) {
  if (options.grad_scale.has_value()) grad_scale = scalar_on(device, *options.grad_scale);
  if (options.found_inf.has_value()) found_inf = scalar_on(device, *options.found_inf);
  if (options.sum_of_squares.has_value()) {
    sum_of_squares = to_device(*options.sum_of_squares, device).to(at::kDouble);
  }
  pointers = {float_data(grad_scale), float_data(found_inf),
              sum_of_squares.defined() ? sum_of_squares.const_data_ptr<double>() : nullptr,
              options.max_grad_norm.value_or(std::numeric_limits<double>::infinity()),
              options.skip_nonfinite};
  if (limit.has_value()) {
    max_norm = to_device(*limit, device);
    pointers.max_norm = max_norm.const_data_ptr<double>();
  }
  if (options.grad_norm.has_value() && options.grad_norm->device() == device) {
    grad_norm = options.grad_norm->mutable_data_ptr<float>();
  }
}

std::string StepProgress::text() const {
  if (stepped + stepped_in_part == 0) return {};
  std::string text = c10::str(stepped, " of ", params, " parameters");
  if (stepped_in_part > 0) text += c10::str(", and ", stepped_in_part, " more in part");
  return text;
}

void StepBatch::clear() {
  all_args.clear();
  written.clear();
  written_ends.clear();
  copies.clear();
  stale_masters.clear();
}

void Step::clear() {
  for (size_t i = 0; i < in_use_; ++i) batches_[i].clear();
  in_use_ = 0;
}

std::string name_of_tensor(Naming naming, const std::string& name, int64_t group, int64_t index) {
  return naming == Naming::kLists ? c10::str(name, "s[", index, "]")
                                  : c10::str(name, " of group ", group, ", param ", index);
}

std::string Step::name_of(const ParamTensors& tensors, int part, const StepGroups& groups) const {
  static const char* const names[] = {"param", "grad", "master_param", "step", "exponent"};
  const int buffer = part - kBuffer0;
  std::string name = buffer < 0 ? names[part] : buffer_names_.at(buffer);
  if (naming_ == Naming::kLists) {
    return buffer < 0 ? name_of_tensor(naming_, name, tensors.group, tensors.index)
                      : c10::str(name, "[", tensors.index, "]");
  }
  const auto code_of = [&](int index) {
    return groups.buffers[index].role == BufferRole::kFirstMoment ? "_q8m" : "_q8s";
  };
  if (part == kMaster && is_split(master_in(tensors))) {
    name = c10::str(master_in(tensors) == Master::kResidual16 ? "master_low_" : "master_low8_",
                    tensors[kParam].scalar_type() == at::kHalf ? "fp16" : "bf16");
  } else if (part == kExponents) {
    int blockwise = tensors.buffer_count - 1;
    while (blockwise > 0 && !has_blocks(groups.buffers[blockwise].code)) --blockwise;
    name = buffer_names_.at(blockwise) + "_exp";
  } else if (buffer >= 0 && tensors.tensors[part] != nullptr) {
    const BufferFormat format = format_in(tensors, buffer);
    if (format == BufferFormat::kRatio8) name += "_q8h";
    if (format == BufferFormat::kBlockwise8) name += code_of(buffer);
  }
  return name_of_tensor(naming_, name, tensors.group, tensors.index);
}

void Step::check_grad(const at::Tensor& grad, int64_t group, int64_t index) const {
  const auto name = [&] { return name_of_tensor(naming_, "grad", group, index); };
  TORCH_CHECK(!is_sparse(grad), operation_, " does not support sparse gradients: ", name(),
              " must be Strided, got ", grad.layout());
  if (!is_plain(grad) || !has_all_elements(grad)) {  // builds the name only for an error
    check_is_plain(operation_, name(), grad);
  }
  TORCH_CHECK(dtype_of(grad).has_value(), operation_, ": ", name(),
              " must be Float, Double, Half or BFloat16, got ", grad.scalar_type());
}

StepBatch& Step::batch_of(const at::Device& device, OptimizerKernel kernel) {
  for (size_t i = 0; i < in_use_; ++i) {
    if (batches_[i].device == device && batches_[i].kernel == kernel) return batches_[i];
  }
  if (in_use_ == batches_.size()) batches_.emplace_back(device, kernel);
  StepBatch& batch = batches_[in_use_++];
  batch.device = device;
  batch.kernel = kernel;
  return batch;
}

void Step::check_tensors(const ParamTensors& tensors, const StepGroups& groups,
                         Master master) const {
  const bool writes_grad = groups.groups[tensors.group].hyperparameters->write_back_grads;
  const at::Tensor& param = tensors[kParam];
  const at::ScalarType dtype = param.scalar_type();
  const auto check = [&](int part, bool ok, const auto&... message) {
    TORCH_CHECK(ok, operation_, ": ", name_of(tensors, part, groups), " must be ", message...);
  };
  check_grad(tensors[kGrad], tensors.group, tensors.index);
  for (int part = 0; part < kTensorParts; ++part) {
    if (tensors.tensors[part] == nullptr) continue;
    const at::Tensor& tensor = tensors[part];
    if (!is_plain(tensor) || !has_all_elements(tensor)) {  // builds the name only for an error
      check_is_plain(operation_, name_of(tensors, part, groups), tensor);
    }
    const bool is_written = part != kGrad || writes_grad;
    if (is_written && !tensor.is_non_overlapping_and_dense())
      check_can_be_written(operation_, name_of(tensors, part, groups), tensor);
  }
  check(kParam, dtype_of(param).has_value(), "Float, Double, Half or BFloat16, got ", dtype);
  if (in_use_ == 0 || batches_[in_use_ - 1].device != param.device()) {
    check_device(operation_, name_of(tensors, kParam, groups), param.device());
  }
  for (int part = kGrad; part < kTensorParts; ++part) {
    if (tensors.tensors[part] == nullptr) continue;
    const at::Tensor& tensor = tensors[part];
    check(part, tensor.device() == param.device(), "on ", param.device(), ", got ",
          tensor.device());
    if (part == kStep) {
      check(part, tensor.numel() == 1, "one element, got sizes ", tensor.sizes());
      check(part, tensor.scalar_type() == at::kFloat, at::kFloat, ", got ", tensor.scalar_type());
    } else if (part == kMaster && tensor.scalar_type() != at::kFloat) {
      // Parameters whose residuals do not fit are refused with the sizes of the residual. The name
      // is built for an error only.
      const bool is_dense = is_plain(tensor) && tensor.is_contiguous() && has_all_elements(tensor);
      if (!is_dense || !has_residual_sizes(tensor, param)) {
        check_is_residual(operation_, name_of(tensors, part, groups), tensor, param);
      }
    } else if (part != kExponents) {
      check(part, tensor.sizes().equals(param.sizes()), "of sizes ", param.sizes(), ", got ",
            tensor.sizes());
    }
  }
  if (tensors.tensors[kMaster] != nullptr) {
    TORCH_CHECK(is_16_bit(dtype), operation_, ": ", name_of(tensors, kMaster, groups),
                " must be None for a parameter of ", dtype);
  }
  check_buffers(tensors, groups, master);
}

// Checks the dtypes of buffers, and the exponents and gradient that quantized buffers require.
void Step::check_buffers(const ParamTensors& tensors, const StepGroups& groups,
                         Master master) const {
  const BufferDescription* const described = groups.buffers;
  const at::ScalarType dtype = tensors[kParam].scalar_type();
  const auto check = [&](int part, bool ok, const auto&... message) {
    TORCH_CHECK(ok, operation_, ": ", name_of(tensors, part, groups), " must be ", message...);
  };
  // `coded` is the index of the buffer whose dtype tells whether buffers are quantized: the ratios,
  // or else the first buffer that has a quantized format.
  const BufferDescriptions buffers{described, tensors.buffer_count};
  int coded = -1;
  for (int i = 0; i < buffers.count; ++i) {
    const BufferCode code = described[i].code;
    if (code == BufferCode::kRatio || (code != BufferCode::kNone && coded < 0)) coded = i;
  }
  const bool has_codes = dtype != at::kDouble && buffers.are_taken_in(Codes::kAll) &&
                         format_in(tensors, coded) == format_of(described[coded].code);
  const at::ScalarType computed = dtype == at::kDouble ? at::kDouble : at::kFloat;
  bool is_in_blocks = false;
  for (int i = 0; i < tensors.buffer_count; ++i) {
    const int part = kBuffer0 + i;
    const at::ScalarType got = tensors[part].scalar_type();
    is_in_blocks |= format_in(tensors, i) == BufferFormat::kBlockwise8;
    if (has_codes) {
      const bool is_ratio = described[i].code == BufferCode::kRatio;
      const bool may_have_blocks = has_blocks(described[i].code);
      const bool fits = is_ratio ? got == at::kChar
                                 : got == at::kBFloat16 || (may_have_blocks && got == at::kByte);
      const char* const wanted = is_ratio          ? "Char"
                                 : may_have_blocks ? "BFloat16 or Byte"
                                                   : "BFloat16";
      check(
          part, fits, wanted, " beside ",
          described[coded].code == BufferCode::kRatio ? "first moments of Char" : "moments of Byte",
          ", got ", got);
      continue;
    }
    const bool may_be_bfloat16 = got == at::kBFloat16 && dtype != at::kDouble;
    check(part, !is_split(master) || may_be_bfloat16 || got == computed,
          "Float or BFloat16 with a split master, got ", got);
    check(part, got == dtype || got == computed || may_be_bfloat16, computed,
          dtype == at::kDouble ? ""
          : dtype == at::kHalf ? ", BFloat16 or the parameter's dtype"
                               : " or BFloat16",
          ", got ", got);
    check(part, got == tensors[kBuffer0].scalar_type(), "of one dtype with the other buffers, ",
          tensors[kBuffer0].scalar_type(), ", got ", got);
  }
  const at::Tensor* const exponents = tensors.tensors[kExponents];
  const int64_t got = exponents != nullptr ? exponents->numel() : 0;
  if (is_in_blocks) {
    const int64_t numel = tensors[kParam].numel();
    check(kParam, numel % kBlockSize == 0, "of a multiple of ", kBlockSize,
          " elements for moments in groups, got ", numel);
    check(kExponents, got == numel / kBlockSize, "of ", numel / kBlockSize, " elements, got ", got);
    check(kExponents,
          got == 0 || (exponents->scalar_type() == at::kByte && exponents->is_contiguous()),
          "Byte and contiguous, got ", got == 0 ? at::kByte : exponents->scalar_type());
  } else {
    check(kExponents, got == 0, "None for moments without groups, got ", got, " elements");
  }
  const at::ScalarType grad = tensors[kGrad].scalar_type();
  check(kGrad, !has_codes || dtype == at::kFloat || grad == dtype || groups.writes_update,
        "of the parameter's dtype with moments in 8 bits, ", dtype, ", got ", grad);
}

bool Step::add_like_example(const ParamTensors& tensors, const StepGroups::Group& group) {
  const auto found = std::find_if(examples_.begin(), examples_.end(), [&](const Example& one) {
    return one.kinds == tensors.kinds && one.group == tensors.group &&
           one.keys == tensors[kParam].key_set() &&
           one.writes_grad == group.hyperparameters->write_back_grads &&
           one.dithered == group.dithered;
  });
  if (found == examples_.end()) return false;
  const at::Tensor& param = tensors[kParam];
  const c10::IntArrayRef sizes = param.sizes();
  std::array<void*, kTensorParts> elements{};
  std::array<c10::TensorImpl*, kTensorParts> written;
  size_t written_count = 0;
  for (int i = 0; i < found->count; ++i) {
    const int part = found->parts[i];
    c10::TensorImpl& impl = *tensors[part].unsafeGetTensorImpl();
    // A sparse tensor has other keys, and no storage.
    if (impl.key_set() != found->keys || !impl.is_contiguous()) return false;
    c10::StorageImpl& storage = *impl.unsafe_storage().unsafeGetStorageImpl();
    const bool is_residual = part == kMaster && is_split(found->args.master);
    const bool fits = part == kStep ? impl.numel() == 1
                      : is_residual ? has_residual_sizes(tensors[part], param)
                                    : are_same(impl.sizes(), sizes);
    const int64_t offset = impl.storage_offset() * found->itemsizes[part];
    const auto end = static_cast<size_t>(offset + impl.numel() * found->itemsizes[part]);
    if (!fits || end > storage.nbytes()) return false;
    const bool is_written = part != kGrad || found->writes_grad;
    const void* const begin = is_written ? storage.mutable_data() : storage.data();
    elements[part] = static_cast<char*>(const_cast<void*>(begin)) + offset;
    if (is_written) written[written_count++] = &impl;
  }
  StepBatch& batch = batch_of(found->device, found->kernel);
  batch.written.insert(batch.written.end(), written.begin(), written.begin() + written_count);
  batch.written_ends.push_back(batch.written.size());
  KernelTensorArgs& args = batch.all_args.emplace_back(found->args);
  args.param = elements[kParam];
  args.grad = elements[kGrad];
  args.master_param = elements[kMaster];
  std::copy_n(&elements[kBuffer0], kMaxBuffers, args.buffers);
  args.step = static_cast<float*>(elements[kStep]);
  args.numel = param.numel();
  args.global_offset = tensors.global_offset;
  if (args.master == Master::kFloat32 && !tensors.master_is_current) {
    batch.stale_masters.emplace_back(tensors[kMaster], param);
  }
  return true;
}

void Step::add(const ParamTensors& tensors, const StepGroups& groups) {
  const at::Tensor& param = tensors[kParam];
  const StepGroups::Group& group = groups.groups[tensors.group];
  const bool writes_grad = group.hyperparameters->write_back_grads;
  if (add_like_example(tensors, group)) return;
  const Master master = master_in(tensors);
  check_tensors(tensors, groups, master);
  const auto kernel = groups.kernels[tensors.buffer_count];
  TORCH_CHECK(kernel.has_value(), operation_, ": ", name_of(tensors, kParam, groups),
              " has a state that fits no kernel, with ", tensors.buffer_count, " buffers");
  StepBatch& batch = batch_of(param.device(), *kernel);
  KernelTensorArgs& args = batch.all_args.emplace_back();
  const size_t number = batch.all_args.size() - 1;
  bool has_codes = false;
  for (int i = 0; i < tensors.buffer_count; ++i) {
    args.buffer_formats[i] = format_in(tensors, i);
    has_codes |= is_code(args.buffer_formats[i]);
  }
  // Kernels visit all tensors in the memory order of the parameter, or of its dense copy.
  const at::Tensor layout = param.is_non_overlapping_and_dense()
                                ? at::Tensor()
                                : at::empty(param.sizes(), param.options().requires_grad(false));
  const at::Tensor& order = layout.defined() ? layout : param;
  const auto write = [&](const at::Tensor& tensor) {
    if (!tensor.is_inference()) batch.written.push_back(tensor.unsafeGetTensorImpl());
  };
  const auto memory = [&](const at::Tensor& tensor, at::ScalarType dtype, bool written) -> void* {
    if (tensor.scalar_type() == dtype && have_same_dense_layout(tensor, order)) {
      return written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
    }
    const at::Tensor dense = at::empty_strided(order.sizes(), order.strides(),
                                               tensor.options().dtype(dtype).requires_grad(false));
    batch.copies.push_back({tensor, dense, written, number});
    return dense.mutable_data_ptr();
  };
  const at::ScalarType param_dtype = param.scalar_type();
  const at::Tensor& grad = tensors[kGrad];
  const at::ScalarType grad_dtype =
      gradient_dtype(grad.scalar_type(), param_dtype, has_codes, groups.writes_update);
  args.param = memory(param, param_dtype, true);
  args.param_dtype = *dtype_of(param_dtype);
  args.grad = memory(grad, grad_dtype, writes_grad);
  args.grad_dtype = *dtype_of(grad_dtype);
  args.master = master;
  write(param);
  if (writes_grad) write(grad);
  if (master != Master::kNone) {
    const at::Tensor& stored = tensors[kMaster];
    args.master_param = is_split(master)
                            ? memory(residual_elements(stored), residual_dtype(master), true)
                            : memory(stored, at::kFloat, true);
    write(stored);
    if (master == Master::kFloat32 && !tensors.master_is_current) {
      batch.stale_masters.emplace_back(tensors[kMaster], param);
    }
  }
  const bool is_low_precision =
      master == Master::kResidual8 ||
      (master == Master::kNone && is_16_bit(param_dtype) && !groups.writes_update);
  uint8_t low_precision = is_low_precision ? kDithersParam : 0;
  uint8_t dithers = 0;  // bits of quantized buffers, dithered if the group dithers anything
  for (int i = 0; i < tensors.buffer_count; ++i) {
    const at::Tensor& buffer = tensors[kBuffer0 + i];
    args.buffers[i] = memory(buffer, buffer.scalar_type(), true);
    write(buffer);
    if (buffer.element_size() < 4) low_precision |= kDithersBuffer0 << i;
    if (is_code(args.buffer_formats[i])) dithers |= kDithersBuffer0 << i;
  }
  const auto scalars = [&](int part) -> void* {
    if (tensors.tensors[part] == nullptr || tensors[part].numel() == 0) return nullptr;
    write(tensors[part]);
    return tensors[part].mutable_data_ptr();
  };
  args.exponents = static_cast<uint8_t*>(scalars(kExponents));
  args.step = static_cast<float*>(scalars(kStep));
  args.numel = param.numel();
  args.global_offset = tensors.global_offset;
  args.group = static_cast<int32_t>(tensors.group);
  args.dithered = group.dithered != 0 ? (group.dithered & low_precision) | dithers : 0;
  TORCH_CHECK(args.dithered == 0 || args.step != nullptr || group.hyperparameters->timestep >= 1.0,
              operation_, ": ", name_of(tensors, kStep, groups),
              " must be given to dither, got None");
  batch.written_ends.push_back(batch.written.size());
  const bool has_copies = !batch.copies.empty() && batch.copies.back().of_args == number;
  if (!has_codes && !has_copies && !param.is_inference()) {
    if (examples_.size() == kMaxExamples) examples_.clear();
    Example example{tensors.kinds,  tensors.group, param.key_set(), args,
                    param.device(), *kernel,       writes_grad,     group.dithered};
    for (int part = 0; part < kTensorParts; ++part) {
      if (tensors.tensors[part] == nullptr) continue;
      example.parts[example.count++] = static_cast<int8_t>(part);
      example.itemsizes[part] = static_cast<int64_t>(tensors[part].element_size());
    }
    examples_.push_back(example);
  }
}

void Step::run(StepGroups& groups, const StepInputs& inputs, StepScratch& scratch,
               StepProgress& progress) {
  const at::NoGradGuard no_grad;
  const GradientOptions& options = inputs.gradients;
  check_scalar(operation_, "grad_scale", options.grad_scale);
  check_scalar(operation_, "found_inf", options.found_inf);
  check_scalar(operation_, "sum_of_squares", options.sum_of_squares);
  for (const StepGroups::Group& group : groups.groups) check_scalar(operation_, "lr", group.lr);
  // Allocates everything before the first launch.
  struct Prepared {
    DeviceInputs inputs;
    bool is_skipped;  // whether the host knows that the step is skipped
    std::vector<std::optional<LrOnDevice>> lrs;
    TensorList refreshed_masters;
  };
  std::vector<Prepared> prepared;
  prepared.reserve(in_use_);
  for (size_t i = 0; i < in_use_; ++i) {
    const StepBatch& batch = batches_[i];
    Prepared& here = prepared.emplace_back(
        Prepared{DeviceInputs(batch.device, options, inputs.max_norm), false, {}, {}});
    here.is_skipped = host_knows_of_skip(batch.device, here.inputs.pointers);
    progress.was_skipped |= here.is_skipped;
    if (here.is_skipped) continue;
    here.lrs = lrs_on(batch.device, groups);
    progress.params += static_cast<int64_t>(batch.all_args.size());
    scratch.make_room(batch.device);
    for (const auto& [master, param] : batch.stale_masters) {
      here.refreshed_masters.push_back(refreshed_master(param, master));
    }
  }
  // Steps on other devices than that of `step_applied` write into another tensor.
  at::Tensor applied = inputs.step_applied.value_or(at::Tensor());
  if (applied.defined()) {
    const bool is_here =
        std::any_of(batches_.begin(), batches_.begin() + static_cast<std::ptrdiff_t>(in_use_),
                    [&](const StepBatch& batch) { return batch.device == applied.device(); });
    if (in_use_ == 0) {
      applied.zero_();
    } else if (!is_here) {
      applied = at::zeros({}, applied.options().device(batches_[0].device));
    }
  }
  if (options.grad_norm.has_value()) {
    const bool is_written = std::any_of(prepared.begin(), prepared.end(), [](const Prepared& here) {
      return here.inputs.grad_norm != nullptr;
    });
    if (!is_written) write_norm(options);
  }
  clear_autocast_cache();
  for (size_t i = 0; i < in_use_; ++i) {
    StepBatch& batch = batches_[i];
    const Prepared& here = prepared[i];
    float* const applied_here = applied.defined() && applied.device() == batch.device
                                    ? applied.mutable_data_ptr<float>()
                                    : nullptr;
    if (here.is_skipped) {
      const StepDecision decision = StepDecision::read(here.inputs.pointers);
      if (here.inputs.grad_norm != nullptr) *here.inputs.grad_norm = decision.grad_norm;
      if (applied_here != nullptr) *applied_here = decision.step_applied();
      continue;
    }
    for (size_t k = 0; k < batch.stale_masters.size(); ++k) {
      batch.stale_masters[k].first.copy_(here.refreshed_masters[k]);
    }
    for (const DenseCopy& copy : batch.copies) copy.dense.copy_(copy.original);
    for (size_t group = 0; group < here.lrs.size(); ++group) {
      if (!here.lrs[group].has_value()) continue;
      CommonHyperparameters& common = *groups.groups[group].hyperparameters;
      common.lr = here.lrs[group]->number;
      common.lr_on_device = float_data(here.lrs[group]->on_device);
    }
    const auto is_launched = std::make_unique<bool[]>(batch.all_args.size());
    const StepLaunch launch{
        batch.kernel,           batch.all_args.data(), static_cast<int64_t>(batch.all_args.size()),
        groups.hyperparameters, here.inputs.pointers,  here.inputs.grad_norm,
        is_launched.get(),      applied_here};
    std::exception_ptr failure;
    try {
      backend_of(batch.device).step(batch.device, launch, scratch);
    } catch (...) {
      failure = std::current_exception();
    }
    finish(batch, is_launched.get(), options.skip_nonfinite, progress, failure);
  }
  if (applied.defined() && !applied.is_same(*inputs.step_applied)) {
    inputs.step_applied->copy_(applied, /*non_blocking=*/true);
  }
}

}  // namespace amp_ext
