// Quantizes, dequantizes and converts moments in states and files.
#include "optimizer/moments.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <amp_ext/ops.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "elements/moment_codes.h"
#include "elements/numbers.h"
#include "tensors/python_names.h"

namespace amp_ext::optim {

namespace {

// Smaller tensors are not quantized in blocks, because that would save little memory.
constexpr int64_t kLeastElements = 4096;

MomentFormat format_of(const BufferDescription& buffer, at::ScalarType dtype, BufferCode code) {
  if (code == BufferCode::kNone) return {buffer.name, buffer.role, dtype, code};
  return {buffer.name, buffer.role, has_blocks(code) ? at::kByte : at::kChar, code};
}

// Returns all formats of a moment: float32, then the quantized ones. Their `role` is a placeholder.
std::vector<MomentFormat> all_formats(const std::string& name) {
  const BufferDescription buffer = {name.c_str(), BufferRole::kFirstMoment};
  std::vector<MomentFormat> formats;
  for (const BufferCode code :
       {BufferCode::kNone, BufferCode::kRatio, BufferCode::kRoot, BufferCode::kMagnitude}) {
    formats.push_back(format_of(buffer, at::kFloat, code));
  }
  return formats;
}

int64_t elements_of_row(const at::Tensor& param) {
  return param.dim() == 0 ? 1 : c10::multiply_integers(param.sizes().slice(1));
}

std::vector<int64_t> sizes_of(const MomentFormat& format, const std::string& key,
                              const at::Tensor& param) {
  return key == format.exponents_key() ? sizes_of_exponents(param) : param.sizes().vec();
}

at::ScalarType dtype_of(const MomentFormat& format, const std::string& key) {
  return key == format.exponents_key() ? at::kByte : format.dtype;
}

// Returns a moment as a floating-point tensor (float32 if it was quantized), or undefined. Ratios
// are relative to the root of the second moment `second`.
at::Tensor dequantized_moment(const Moments& moments, const std::string& name,
                              const at::Tensor& second) {
  for (const MomentFormat& format : all_formats(name)) {
    const auto elements = moments.find(format.key());
    const auto exponents = moments.find(format.exponents_key());
    if (elements == moments.end()) continue;
    if (!format.is_coded()) return elements->second;
    if (format.code == BufferCode::kRatio) {
      if (!second.defined()) continue;
      return dequantize_ratios(elements->second, second.to(elements->second.device(), at::kFloat));
    }
    if (exponents == moments.end()) continue;
    return dequantize_blockwise(elements->second, exponents->second, name_of(format.code));
  }
  return {};
}

// Returns the tensors, by key, of the moment `number` in a format; undefined stands for zeros.
Moments encoded(const at::Tensor& number, const MomentFormat& format, const at::Tensor& param,
                const at::Tensor& second) {
  const auto options = param.options().requires_grad(false);
  if (!format.is_coded()) {
    if (!number.defined()) {
      return {{format.key(), at::zeros_like(param, options.dtype(format.dtype))}};
    }
    const at::Tensor moved = number.to(param.device(), format.dtype);
    if (moved.strides().equals(param.strides())) return {{format.key(), moved}};
    return {{format.key(), at::empty_like(param, options.dtype(format.dtype)).copy_(moved)}};
  }
  if (!number.defined()) {  // a block of zeros has the exponent 1
    Moments made{{format.key(), at::zeros_like(param, options.dtype(format.dtype))}};
    const std::string key = format.exponents_key();
    if (!key.empty()) {
      made[key] = at::ones(sizes_of(format, key, param), options.dtype(at::kByte));
    }
    return made;
  }
  const at::Tensor moment = at::empty_like(param, options.dtype(at::kFloat)).copy_(number);
  if (format.code == BufferCode::kRatio) {
    return {{format.key(), quantize_ratios(moment, second.to(at::kFloat))}};
  }
  auto [codes, exponents] = quantize_blockwise(moment, name_of(format.code));
  return {{format.key(), codes}, {format.exponents_key(), exponents}};
}

bool are_kept(const Moments& moments, const MomentFormat& format, const at::Tensor& param) {
  const auto keys = format.keys();
  return std::all_of(keys.begin(), keys.end(), [&](const std::string& key) {
    const auto found = moments.find(key);
    return found != moments.end() && found->second.scalar_type() == dtype_of(format, key) &&
           found->second.device() == param.device();
  });
}

}  // namespace

const char* name_of(BufferCode code) {
  static constexpr const char* kNames[] = {"", "q8h", "q8s", "q8m"};
  return kNames[static_cast<int>(code)];
}

std::string MomentFormat::key() const { return is_coded() ? name + "_" + name_of(code) : name; }

std::string MomentFormat::exponents_key() const {
  return has_blocks(code) ? name + "_exp" : std::string();
}

std::vector<std::string> MomentFormat::keys() const {
  const std::string exponents = exponents_key();
  if (exponents.empty()) return {key()};
  return {key(), exponents};
}

bool has_moment(const HasKey& has_key, const std::string& name) {
  const auto formats = all_formats(name);
  return std::any_of(formats.begin(), formats.end(), [&](const MomentFormat& format) {
    const auto keys = format.keys();
    return std::all_of(keys.begin(), keys.end(), has_key);
  });
}

bool is_key_of_moment(const std::string& key, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    for (const MomentFormat& format : all_formats(name)) {
      const auto keys = format.keys();
      if (std::find(keys.begin(), keys.end(), key) != keys.end()) return true;
    }
  }
  return false;
}

bool is_key_of_exponents(const std::string& key, const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    const auto formats = all_formats(name);
    return std::any_of(formats.begin(), formats.end(),
                       [&](const MomentFormat& format) { return format.exponents_key() == key; });
  });
}

std::vector<int64_t> sizes_of_exponents(const at::Tensor& param) {
  const int64_t blocks = elements_of_row(param) / kBlockSize;
  if (param.dim() == 0) return {blocks};
  return {param.size(0), blocks};
}

bool fits_blocks(const at::Tensor& param, bool shards_whole_rows) {
  return shards_whole_rows && param.numel() >= kLeastElements && param.dim() >= 2 &&
         elements_of_row(param) % kBlockSize == 0 && param.is_contiguous();
}

std::vector<MomentFormat> formats_of(const StateDType& state_dtype,
                                     at::ArrayRef<BufferDescription> buffers,
                                     const at::Tensor& param, bool shards_whole_rows) {
  const auto* const given = std::get_if<at::ScalarType>(&state_dtype.value());
  const bool is_coded = param.scalar_type() != at::kDouble && state_dtype.is_coded();
  const bool has_blocks_of_codes = is_coded && fits_blocks(param, shards_whole_rows);
  const Codes codes = !has_blocks_of_codes    ? Codes::kRatios
                      : state_dtype == "8bit" ? Codes::kAll
                                              : Codes::kAllButRoots;
  at::ScalarType dtype = is_coded ? at::kBFloat16 : param.scalar_type();
  if (given != nullptr && param.scalar_type() != at::kDouble) dtype = *given;
  std::vector<MomentFormat> formats;
  for (const BufferDescription& buffer : buffers) {
    const bool has_code = is_coded && is_among(buffer.code, codes);
    formats.push_back(format_of(buffer, dtype, has_code ? buffer.code : BufferCode::kNone));
  }
  return formats;
}

Moments dequantized_moments(const Moments& moments, at::ArrayRef<BufferDescription> buffers) {
  at::Tensor second;
  for (const BufferDescription& buffer : buffers) {
    if (buffer.role == BufferRole::kSecondMoment)
      second = dequantized_moment(moments, buffer.name, {});
  }
  Moments dequantized;
  for (const BufferDescription& buffer : buffers) {
    const bool is_second = buffer.role == BufferRole::kSecondMoment;
    const at::Tensor number = is_second ? second : dequantized_moment(moments, buffer.name, second);
    if (number.defined()) dequantized[buffer.name] = number;
  }
  return dequantized;
}

Moments convert_moments(const Moments& moments, const std::vector<MomentFormat>& formats,
                        const at::Tensor& param) {
  Moments made;
  const bool are_all_kept =
      std::all_of(formats.begin(), formats.end(),
                  [&](const MomentFormat& format) { return are_kept(moments, format, param); });
  if (are_all_kept) {
    for (const MomentFormat& format : formats) {
      for (const std::string& key : format.keys()) made[key] = moments.at(key);
    }
    return made;
  }
  std::vector<BufferDescription> buffers;
  for (const MomentFormat& format : formats) buffers.push_back({format.name.c_str(), format.role});
  const Moments numbers = dequantized_moments(moments, buffers);
  const auto is_ratio = [](const MomentFormat& format) {
    return format.code == BufferCode::kRatio;
  };
  std::vector<MomentFormat> ratios_last = formats;
  std::stable_partition(ratios_last.begin(), ratios_last.end(), std::not_fn(is_ratio));
  at::Tensor second;  // second moment after quantization; ratios are relative to its root
  for (const MomentFormat& format : ratios_last) {
    const auto number = numbers.find(format.name);
    made.merge(
        encoded(number != numbers.end() ? number->second : at::Tensor(), format, param, second));
    if (format.role == BufferRole::kSecondMoment)
      second = dequantized_moment(made, format.name, {});
  }
  return made;
}

std::vector<MomentFormat> saved_codes(const HasKey& has_key, const std::string& name) {
  std::vector<MomentFormat> found;
  for (const MomentFormat& format : all_formats(name)) {
    if (format.is_coded() && has_key(format.key())) found.push_back(format);
  }
  return found;
}

void check_code(const at::Tensor& saved, const MomentFormat& format, const std::string& key,
                const at::Tensor& param, const std::string& where) {
  check_is_saved_as(dtype_of(format, key), sizes_of(format, key, param), saved, where);
}

at::Tensor empty_code(const MomentFormat& format, const std::string& key, const at::Tensor& param) {
  const auto options = param.options().dtype(dtype_of(format, key)).requires_grad(false);
  // A moment in blocks is contiguous, even if the parameter has become non-contiguous.
  const bool has_exponents = !format.exponents_key().empty();
  return has_exponents ? at::empty(sizes_of(format, key, param), options)
                       : at::empty_like(param, options);
}

}  // namespace amp_ext::optim
