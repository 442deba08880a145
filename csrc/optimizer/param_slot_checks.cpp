// Refuses tensors that no kernel supports, and gradients that still carry a loss scale.
#include "optimizer/param_slot_checks.h"

#include "devices/dispatch.h"
#include "elements/moment_codes.h"

namespace amp_ext {

namespace {

// Returns the key of a residual: "master_low_bf16", "master_low8_fp16".
std::string residual_name(const ParamSlot& slot) {
  return c10::str(slot.master() == Master::kResidual16 ? "master_low_" : "master_low8_",
                  slot.param().scalar_type() == at::kHalf ? "fp16" : "bf16");
}

}  // namespace

// Returns the key of a buffer: "exp_avg", or "exp_avg_q8h" if it is quantized.
std::string ParamSlotChecks::code_name(const ParamSlot& slot, int buffer) const {
  const BufferFormat format = slot.format(buffer);
  const char* const code = format == BufferFormat::kRatio8                      ? "_q8h"
                           : format != BufferFormat::kBlockwise8                ? ""
                           : described[buffer].role == BufferRole::kFirstMoment ? "_q8m"
                                                                                : "_q8s";
  return buffer_names.at(buffer) + code;
}

std::string ParamSlotChecks::name_of(const ParamSlot& slot, int list) const {
  static const char* const names[] = {"param", "grad", "master_param", "step", "exponent"};
  const bool in_lists = naming == Naming::kLists;
  const bool is_residual_key = list == kMaster && slot.has_split_master() && !in_lists;
  if (list == kExponents && !in_lists) {
    int buffer = slot.number_of_buffers - 1;
    while (buffer > 0 && !has_blocks(described[buffer].code)) --buffer;
    return c10::str(buffer_names.at(buffer), "_exp of group ", slot.group, ", param ",
                    slot.index_in_group);
  }
  const std::string name = list >= kBuffer0 && !in_lists ? code_name(slot, list - kBuffer0)
                           : list >= kBuffer0            ? buffer_names.at(list - kBuffer0)
                           : is_residual_key             ? residual_name(slot)
                           : in_lists                    ? std::string(names[list]) + "s"
                                                         : names[list];
  if (in_lists) return c10::str(name, "[", slot.index_in_group, "]");
  return c10::str(name, " of group ", slot.group, ", param ", slot.index_in_group);
}

void ParamSlotChecks::check_grad(const ParamSlot& slot) const {
  const at::Tensor& grad = slot.grad();
  TORCH_CHECK(!is_sparse(grad), operation,
              " does not support sparse gradients: ", name_of(slot, kGrad),
              " must be Strided, got ", grad.layout());
  if (!is_plain(grad) || !has_all_elements(grad)) {  // builds the name only for an error
    check_is_plain(operation, name_of(slot, kGrad), grad);
  }
  TORCH_CHECK(dtype_of(grad).has_value(), operation, ": ", name_of(slot, kGrad),
              " must be Float, Double, Half or BFloat16, got ", grad.scalar_type());
}

void ParamSlotChecks::check_tensors(const ParamSlot& slot) const {
  for (int list = 0; list < kSlotTensors; ++list) {
    const at::Tensor& tensor = slot.tensor(list);
    if (!tensor.defined()) continue;
    // The name of a tensor is built only for an error, or where one is likely.
    if (!is_plain(tensor) || !has_all_elements(tensor)) {
      check_is_plain(operation, name_of(slot, list), tensor);
    }
    const bool is_written = list != kGrad || slot.writes_grad;
    if (is_written && !tensor.is_non_overlapping_and_dense()) {
      check_can_be_written(operation, name_of(slot, list), tensor);
    }
  }
  const at::Tensor& param = slot.param();
  const at::ScalarType dtype = param.scalar_type();
  TORCH_CHECK(dtype_of(param).has_value(), operation, ": ", name_of(slot, kParam),
              " must be Float, Double, Half or BFloat16, got ", dtype);
  const bool has_engine = param.is_cpu() || uses_cuda_engine(param.device());
  check_device(operation, has_engine ? std::string() : name_of(slot, kParam), param.device());
  const auto check = [&](int list, bool ok, const auto&... message) {
    TORCH_CHECK(ok, operation, ": ", name_of(slot, list), " must be ", message...);
  };
  for (int list = kGrad; list < kSlotTensors; ++list) {
    const at::Tensor& tensor = slot.tensor(list);
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
      TORCH_CHECK(is_16_bit(dtype), operation, ": ", name_of(slot, kMaster),
                  " must be None for a parameter of ", dtype);
      if (slot.has_split_master()) continue;
    }
    check(list, got == at::kFloat, at::kFloat, ", got ", got);
  }
  check_buffers(slot);
}

// Checks the dtypes of buffers, and the exponents and gradient that quantized buffers require.
void ParamSlotChecks::check_buffers(const ParamSlot& slot) const {
  const at::ScalarType dtype = slot.param().scalar_type();
  const auto check = [&](int list, bool ok, const auto&... message) {
    TORCH_CHECK(ok, operation, ": ", name_of(slot, list), " must be ", message...);
  };
  // `coded` is the index of the buffer whose dtype tells whether buffers are quantized: the ratios,
  // or else the first buffer that has a quantized format.
  const BufferDescriptions buffers{described, slot.number_of_buffers};
  int coded = -1;
  for (int i = 0; i < buffers.count; ++i) {
    const BufferCode code = described[i].code;
    if (code == BufferCode::kRatio || (code != BufferCode::kNone && coded < 0)) coded = i;
  }
  const bool has_codes = dtype != at::kDouble && buffers.are_taken_in(Codes::kAll) &&
                         slot.format(coded) == format_of(described[coded].code);
  const at::ScalarType computed = dtype == at::kDouble ? at::kDouble : at::kFloat;
  bool is_in_blocks = false;
  for (int i = 0; i < slot.number_of_buffers; ++i) {
    const int list = kBuffer0 + i;
    const at::ScalarType got = slot.owned[list].scalar_type();
    is_in_blocks |= slot.format(i) == BufferFormat::kBlockwise8;
    if (has_codes) {
      const bool is_ratio = described[i].code == BufferCode::kRatio;
      const bool may_have_blocks = has_blocks(described[i].code);
      const bool fits = is_ratio ? got == at::kChar
                                 : got == at::kBFloat16 || (may_have_blocks && got == at::kByte);
      const char* const wanted = is_ratio          ? "Char"
                                 : may_have_blocks ? "BFloat16 or Byte"
                                                   : "BFloat16";
      check(
          list, fits, wanted, " beside ",
          described[coded].code == BufferCode::kRatio ? "first moments of Char" : "moments of Byte",
          ", got ", got);
      continue;
    }
    const bool may_be_bfloat16 = got == at::kBFloat16 && dtype != at::kDouble;
    if (slot.has_split_master()) {
      check(list, may_be_bfloat16 || got == computed, "Float or BFloat16 with a split master, got ",
            got);
    }
    check(list, got == dtype || got == computed || may_be_bfloat16, computed,
          dtype == at::kDouble ? ""
          : dtype == at::kHalf ? ", BFloat16 or the parameter's dtype"
                               : " or BFloat16",
          ", got ", got);
    check(list, got == slot.owned[kBuffer0].scalar_type(), "of one dtype with the other buffers, ",
          slot.owned[kBuffer0].scalar_type(), ", got ", got);
  }
  const at::Tensor& exponents = slot.owned[kExponents];
  const int64_t got = exponents.defined() ? exponents.numel() : 0;
  if (is_in_blocks) {
    const int64_t numel = slot.param().numel();
    check(kParam, numel % kBlockSize == 0, "of a multiple of ", kBlockSize,
          " elements for moments in groups, got ", numel);
    check(kExponents, got == numel / kBlockSize, "of ", numel / kBlockSize, " elements, got ", got);
    check(kExponents,
          got == 0 || (exponents.scalar_type() == at::kByte && exponents.is_contiguous()),
          "Byte and contiguous, got ", exponents.scalar_type());
  } else {
    check(kExponents, got == 0, "None for moments without groups, got ", got, " elements");
  }
  const at::ScalarType grad = slot.grad().scalar_type();
  check(kGrad, !has_codes || dtype == at::kFloat || grad == dtype,
        "of the parameter's dtype with moments in 8 bits, ", dtype, ", got ", grad);
}

void ParamSlotChecks::check_carries_no_scale(const ParamSlot& slot) const {
  TORCH_CHECK(
      !slot.seen_grad_is_scaled || !slot.grad_is_as_seen(), operation, ": ", name_of(slot, kGrad),
      " still carries the loss scale, because scaler.step(optimizer) has already used this "
      "gradient. Don't call optimizer.step() as well, and call zero_grad() before the next "
      "backward(). If you unscaled the gradient in a way that torch does not count, such as "
      "through .data, add an in-place operation that torch counts: grad.mul_(1).");
}

}  // namespace amp_ext
