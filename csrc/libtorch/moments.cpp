// Moments in states and files, with the rules of Python's.
#include "libtorch/moments.h"

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
#include "libtorch/optimizer_impl.h"

namespace amp_ext::optim {

namespace {

// Of smaller tensors blocks save nothing that counts.
constexpr int64_t kLeastElements = 4096;

constexpr const char* kCodes[] = {"q8h", "q8s", "q8m"};

MomentFormat format_of(const BufferDescription& buffer, at::ScalarType dtype,
                       const std::string& code) {
  if (code.empty()) return {buffer.name, buffer.role, dtype, code};
  return {buffer.name, buffer.role, code == "q8h" ? at::kChar : at::kByte, code};
}

// A moment in float32, and in each code, whatever its role.
std::vector<MomentFormat> all_formats(const std::string& name) {
  const BufferDescription buffer = {name.c_str(), BufferRole::kFirstMoment};
  std::vector<MomentFormat> formats = {format_of(buffer, at::kFloat, "")};
  for (const char* const code : kCodes) formats.push_back(format_of(buffer, at::kFloat, code));
  return formats;
}

int64_t elements_of_row(const at::Tensor& param) {
  return param.dim() == 0 ? 1 : c10::multiply_integers(param.sizes().slice(1));
}

// Whether moments of a parameter may be kept in blocks of 32 elements. They lie within the rows of
// dimension 0, and are those of memory: codes in another order would be measured by the exponents
// of others.
bool has_blocks(const at::Tensor& param) {
  return param.numel() >= kLeastElements && param.dim() >= 2 &&
         elements_of_row(param) % kBlockSize == 0 && param.is_contiguous();
}

std::vector<int64_t> sizes_of(const MomentFormat& format, const std::string& key,
                              const at::Tensor& param) {
  if (key != format.exponents_key()) return param.sizes().vec();
  const int64_t blocks = elements_of_row(param) / kBlockSize;
  if (param.dim() == 0) return {blocks};
  return {param.size(0), blocks};
}

at::ScalarType dtype_of(const MomentFormat& format, const std::string& key) {
  return key == format.exponents_key() ? at::kByte : format.dtype;
}

// A moment as numbers, float32 where it is a code; undefined where there is none.
at::Tensor whole_moment(const Moments& moments, const std::string& name, const at::Tensor& second) {
  for (const MomentFormat& format : all_formats(name)) {
    const auto elements = moments.find(format.key());
    const auto exponents = moments.find(format.exponents_key());
    if (elements == moments.end()) continue;
    if (format.code.empty()) return elements->second;
    if (format.code == "q8h") {
      if (!second.defined()) continue;
      return decode_ratios(elements->second, second.to(elements->second.device(), at::kFloat));
    }
    if (exponents == moments.end()) continue;
    return decode_groups(elements->second, exponents->second, format.code);
  }
  return {};
}

// A moment in a format, by its keys; without a number, one of zeros.
Moments encoded(const at::Tensor& number, const MomentFormat& format, const at::Tensor& param,
                const at::Tensor& second) {
  const auto options = param.options().requires_grad(false);
  if (format.code.empty()) {
    if (!number.defined()) {
      return {{format.key(), at::zeros_like(param, options.dtype(format.dtype))}};
    }
    const at::Tensor moved = number.to(param.device(), format.dtype);
    if (moved.strides().equals(param.strides())) return {{format.key(), moved}};
    return {{format.key(), at::empty_like(param, options.dtype(format.dtype)).copy_(moved)}};
  }
  if (!number.defined()) {  // made where the parameter is; a block of zeros has the exponent 1
    Moments made{{format.key(), at::zeros_like(param, options.dtype(format.dtype))}};
    const std::string key = format.exponents_key();
    if (!key.empty()) {
      made[key] = at::ones(sizes_of(format, key, param), options.dtype(at::kByte));
    }
    return made;
  }
  const at::Tensor moment = at::empty_like(param, options.dtype(at::kFloat)).copy_(number);
  if (format.code == "q8h") {
    return {{format.key(), encode_ratios(moment, second.to(at::kFloat))}};
  }
  auto [codes, exponents] = encode_groups(moment, format.code);
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

// A copy of what a file has under a key of a code, laid out as the parameter.
at::Tensor read_code(const c10::IValue& value, const MomentFormat& format, const std::string& key,
                     const at::Tensor& param, const std::string& where) {
  const at::ScalarType dtype = dtype_of(format, key);
  const std::vector<int64_t> sizes = sizes_of(format, key, param);
  const at::Tensor saved = tensor_in(value, where);
  check_is_saved_as(dtype, sizes, saved, where);
  const auto options = param.options().dtype(dtype).requires_grad(false);
  // Contiguous, as blocks are, also for a parameter that has none any more.
  const bool has_exponents = !format.exponents_key().empty();
  return (has_exponents ? at::empty(sizes, options) : at::empty_like(param, options)).copy_(saved);
}

}  // namespace

std::string MomentFormat::key() const { return code.empty() ? name : name + "_" + code; }

std::string MomentFormat::exponents_key() const {
  return code == "q8s" || code == "q8m" ? name + "_exp" : std::string();
}

std::vector<std::string> MomentFormat::keys() const {
  const std::string exponents = exponents_key();
  if (exponents.empty()) return {key()};
  return {key(), exponents};
}

Moments moments_in(const FusedParamState& state, const std::vector<BufferDescription>& buffers) {
  Moments moments;
  for (const auto& [key, tensor] : state.tensors()) {
    if (tensor.defined() && is_key_of_moment(key, buffers)) moments[key] = tensor;
  }
  return moments;
}

bool has_moment(const std::function<bool(const std::string&)>& has_key, const std::string& name) {
  const auto formats = all_formats(name);
  return std::any_of(formats.begin(), formats.end(), [&](const MomentFormat& format) {
    const auto keys = format.keys();
    return std::all_of(keys.begin(), keys.end(), has_key);
  });
}

bool has_moment(const FusedParamState& state, const std::string& name) {
  return has_moment([&](const std::string& key) { return state.get(key).defined(); }, name);
}

bool is_key_of_moment(const std::string& key, const std::vector<BufferDescription>& buffers) {
  for (const BufferDescription& buffer : buffers) {
    for (const MomentFormat& format : all_formats(buffer.name)) {
      const auto keys = format.keys();
      if (std::find(keys.begin(), keys.end(), key) != keys.end()) return true;
    }
  }
  return false;
}

std::vector<MomentFormat> formats_of(const StateDType& state_dtype,
                                     const std::vector<BufferDescription>& buffers,
                                     const at::Tensor& param) {
  const bool has_second = std::any_of(
      buffers.begin(), buffers.end(),
      [](const BufferDescription& buffer) { return buffer.role == BufferRole::kSecondMoment; });
  const auto* const given = std::get_if<at::ScalarType>(&state_dtype.value());
  const bool is_coded = param.scalar_type() != at::kDouble && state_dtype.is_coded();
  const bool has_blocks_of_codes = is_coded && has_blocks(param);
  at::ScalarType dtype = is_coded ? at::kBFloat16 : param.scalar_type();
  if (given != nullptr && param.scalar_type() != at::kDouble) dtype = *given;
  const auto code_of = [&](BufferRole role) {
    if (!is_coded) return "";
    if (role == BufferRole::kFirstMoment && has_second) return "q8h";
    if (!has_blocks_of_codes) return "";
    if (role == BufferRole::kFirstMoment) return "q8m";
    return role == BufferRole::kSecondMoment && state_dtype == "8bit" ? "q8s" : "";
  };
  std::vector<MomentFormat> formats;
  for (const BufferDescription& buffer : buffers) {
    formats.push_back(format_of(buffer, dtype, code_of(buffer.role)));
  }
  return formats;
}

Moments made_moments(const Moments& moments, const std::vector<MomentFormat>& formats,
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
  const auto is_first = [](const MomentFormat& format) {
    return format.role == BufferRole::kFirstMoment;
  };
  // A ratio is to the second moment as it is stored: in what there was, and in what is made.
  at::Tensor second_before, second;
  std::vector<MomentFormat> first_ones_last = formats;
  std::stable_partition(first_ones_last.begin(), first_ones_last.end(), std::not_fn(is_first));
  for (const MomentFormat& format : first_ones_last) {
    const at::Tensor beside = is_first(format) ? second_before : at::Tensor();
    const at::Tensor number = whole_moment(moments, format.name, beside);
    made.merge(encoded(number, format, param, second));
    if (format.role != BufferRole::kSecondMoment) continue;
    second_before = number;
    second = whole_moment(made, format.name, {});
  }
  return made;
}

Moments read_moments(const Dict& saved, const std::vector<MomentFormat>& formats,
                     const at::Tensor& param,
                     const std::function<std::string(const std::string&)>& where) {
  const auto value_of = [&](const std::string& key) {
    return find(saved, key).value_or(c10::IValue());
  };
  Moments found;
  for (const MomentFormat& wanted : formats) {
    if (!value_of(wanted.name).isNone()) continue;
    for (const MomentFormat& format : all_formats(wanted.name)) {
      if (format.code.empty()) continue;
      for (const std::string& key : format.keys()) {
        const c10::IValue value = value_of(key);
        if (!value.isNone()) found[key] = read_code(value, format, key, param, where(key));
        TORCH_CHECK(found.count(key) != 0 || found.count(format.key()) == 0, where(key),
                    " must be there, got ", shown_keys(saved));
      }
    }
  }
  const bool has_codes = !found.empty();
  for (const MomentFormat& wanted : formats) {
    const c10::IValue value = value_of(wanted.name);
    if (value.isNone()) continue;
    // The root of a second moment is the unit of a code: not to be rounded before.
    const bool is_exact = wanted.code.empty() && (!has_codes || wanted.dtype == at::kDouble);
    const auto dtype = is_exact ? wanted.dtype : at::kFloat;
    found[wanted.name] = read_tensor(value, param, dtype, where(wanted.name));
  }
  std::vector<MomentFormat> present;
  for (const MomentFormat& wanted : formats) {
    const auto has_key = [&](const std::string& key) { return found.count(key) != 0; };
    if (has_moment(has_key, wanted.name)) present.push_back(wanted);
  }
  return made_moments(found, present, param);
}

}  // namespace amp_ext::optim
