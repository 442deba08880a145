// What a step refuses of a row: tensors that no kernel takes, and gradients that carry a scale.
#include "optimizer/row_checks.h"

#include "devices/dispatch.h"
#include "elements/moment_codes.h"

namespace amp_ext {

namespace {

// The key of a lower part: "master_low_bf16", "master_low8_fp16".
std::string residual_name(const Row& row) {
  return c10::str(row.master() == Master::kLow16 ? "master_low_" : "master_low8_",
                  row.param().scalar_type() == at::kHalf ? "fp16" : "bf16");
}

}  // namespace

// The key of a buffer: "exp_avg", or with its code "exp_avg_q8h".
std::string RowChecks::code_name(const Row& row, int buffer) const {
  const BufferFormat format = row.format(buffer);
  const char* const code = format == BufferFormat::kRatio8                      ? "_q8h"
                           : format != BufferFormat::kBlockwise8                ? ""
                           : described[buffer].role == BufferRole::kFirstMoment ? "_q8m"
                                                                                : "_q8s";
  return buffer_names.at(buffer) + code;
}

std::string RowChecks::name_of(const Row& row, int list) const {
  static const char* const names[] = {"param", "grad", "master_param", "step", "exponent"};
  const bool in_lists = naming == Naming::kLists;
  const bool is_residual_key = list == kMaster && row.has_split_master() && !in_lists;
  if (list == kExponents && !in_lists) {
    int buffer = row.number_of_buffers - 1;
    while (buffer > 0 && !has_blocks(described[buffer].code)) --buffer;
    return c10::str(buffer_names.at(buffer), "_exp of group ", row.group, ", param ",
                    row.index_in_group);
  }
  const std::string name = list >= kBuffer0 && !in_lists ? code_name(row, list - kBuffer0)
                           : list >= kBuffer0            ? buffer_names.at(list - kBuffer0)
                           : is_residual_key             ? residual_name(row)
                           : in_lists                    ? std::string(names[list]) + "s"
                                                         : names[list];
  if (in_lists) return c10::str(name, "[", row.index_in_group, "]");
  return c10::str(name, " of group ", row.group, ", param ", row.index_in_group);
}

void RowChecks::check_grad(const Row& row) const {
  const at::Tensor& grad = row.grad();
  TORCH_CHECK(!is_sparse(grad), operation,
              " does not support sparse gradients: ", name_of(row, kGrad), " must be Strided, got ",
              grad.layout());
  if (!is_plain(grad) || !has_all_elements(grad)) {  // no name is made at every step
    check_is_plain(operation, name_of(row, kGrad), grad);
  }
  TORCH_CHECK(dtype_of(grad).has_value(), operation, ": ", name_of(row, kGrad),
              " must be Float, Double, Half or BFloat16, got ", grad.scalar_type());
}

void RowChecks::check_tensors(const Row& row) const {
  for (int list = 0; list < kLists; ++list) {
    const at::Tensor& tensor = row.tensor(list);
    if (tensor.defined()) check_is_plain(operation, name_of(row, list), tensor);
  }
  const at::Tensor& param = row.param();
  const at::ScalarType dtype = param.scalar_type();
  TORCH_CHECK(dtype_of(param).has_value(), operation, ": ", name_of(row, kParam),
              " must be Float, Double, Half or BFloat16, got ", dtype);
  check_device(operation, name_of(row, kParam), param.device());
  const auto check = [&](int list, bool ok, const auto&... message) {
    TORCH_CHECK(ok, operation, ": ", name_of(row, list), " must be ", message...);
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
      TORCH_CHECK(is_16_bit(dtype), operation, ": ", name_of(row, kMaster),
                  " must be None for a parameter of ", dtype);
      if (row.has_split_master()) continue;
    }
    check(list, got == at::kFloat, at::kFloat, ", got ", got);
  }
  check_buffers(row);
}

// The dtypes of the buffers, and what belongs to those in 8 bits.
void RowChecks::check_buffers(const Row& row) const {
  const at::ScalarType dtype = row.param().scalar_type();
  const auto check = [&](int list, bool ok, const auto&... message) {
    TORCH_CHECK(ok, operation, ": ", name_of(row, list), " must be ", message...);
  };
  // Beside a second moment the ratios are in their code, or none is in any.
  const BufferDescriptions buffers{described, row.number_of_buffers};
  int coded = -1;
  for (int i = 0; i < buffers.count; ++i) {
    const BufferCode code = described[i].code;
    if (code == BufferCode::kRatio || (code != BufferCode::kNone && coded < 0)) coded = i;
  }
  const bool has_codes = dtype != at::kDouble && buffers.are_taken_in(Codes::kAll) &&
                         row.format(coded) == format_of(described[coded].code);
  const at::ScalarType computed = dtype == at::kDouble ? at::kDouble : at::kFloat;
  bool is_in_blocks = false;
  for (int i = 0; i < row.number_of_buffers; ++i) {
    const int list = kBuffer0 + i;
    const at::ScalarType got = row.owned[list].scalar_type();
    is_in_blocks |= row.format(i) == BufferFormat::kBlockwise8;
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
    if (row.has_split_master()) {
      check(list, may_be_bfloat16 || got == computed, "Float or BFloat16 with a split master, got ",
            got);
    }
    check(list, got == dtype || got == computed || may_be_bfloat16, computed,
          dtype == at::kDouble ? ""
          : dtype == at::kHalf ? ", BFloat16 or the parameter's dtype"
                               : " or BFloat16",
          ", got ", got);
    check(list, got == row.owned[kBuffer0].scalar_type(), "of one dtype with the other buffers, ",
          row.owned[kBuffer0].scalar_type(), ", got ", got);
  }
  const at::Tensor& exponents = row.owned[kExponents];
  const int64_t got = exponents.defined() ? exponents.numel() : 0;
  if (is_in_blocks) {
    const int64_t numel = row.param().numel();
    check(kParam, numel % kBlockSize == 0, "of a multiple of ", kBlockSize,
          " elements for moments in groups, got ", numel);
    check(kExponents, got == numel / kBlockSize, "of ", numel / kBlockSize, " elements, got ", got);
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

void RowChecks::check_carries_no_scale(const Row& row) const {
  TORCH_CHECK(!row.seen_grad_is_scaled || !row.grad_is_as_seen(), operation, ": ",
              name_of(row, kGrad),
              " must be new or unscaled, got one that still carries its scale: "
              "scaler.step(optimizer) has already taken this gradient: do not call "
              "optimizer.step() as well, and call zero_grad() before the next backward pass; where "
              "it was unscaled in a way that torch does not count, such as through .data, let an "
              "in-place operation follow that torch counts: grad.mul_(1)");
}

}  // namespace amp_ext
