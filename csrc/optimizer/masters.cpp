// Converts master weights between the float32 and the split form, for states and files.
#include "optimizer/masters.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/nextafter.h>
#include <ATen/ops/where.h>
#include <amp_ext/ops.h>

#include <vector>

#include "tensors/python_names.h"
#include "tensors/tensor_memory.h"

namespace amp_ext::optim {

namespace {

struct LowerPart {
  const char* key;
  int64_t bits;
  at::ScalarType param;  // dtype of the parameter
};

constexpr LowerPart kLowerParts[] = {{kMasterKeys[1], 16, at::kBFloat16},
                                     {kMasterKeys[2], 16, at::kHalf},
                                     {kMasterKeys[3], 8, at::kBFloat16},
                                     {kMasterKeys[4], 8, at::kHalf}};

int64_t bits_of(const std::string& key) {
  for (const LowerPart& part : kLowerParts) {
    if (part.key == key) return part.bits;
  }
  return 0;  // the key of a float32 master, which has no residual
}

// Returns the master in float32, joined if it is split. Undefined if there is none, or if
// converting a float16 parameter has lost the upper part of a split master.
at::Tensor decoded_master(const at::Tensor& param, const Masters& masters) {
  const auto fp32 = masters.find(kFp32Master);
  if (fp32 != masters.end()) return fp32->second;
  for (const LowerPart& part : kLowerParts) {
    const auto residual = masters.find(part.key);
    if (residual == masters.end()) continue;
    // A bfloat16 parameter that was converted to another dtype can be converted back; float16
    // can't.
    if (part.param != param.scalar_type() && part.param != at::kBFloat16) continue;
    return join_fp32(param.detach().to(part.param), residual->second.to(param.device()));
  }
  return {};
}

// Returns `values` (or the parameter, if undefined) as float32 in the parameter's layout.
at::Tensor in_float32(const at::Tensor& param, const at::Tensor& values) {
  const at::Tensor copy = param.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  return values.defined() ? copy.copy_(values) : copy;
}

}  // namespace

std::string key_of_master(const MasterWeights& master_weights, at::ScalarType param) {
  if (!master_weights || !is_16_bit(param)) return {};
  const int64_t bits = master_weights == "split" ? 16 : master_weights == "split8" ? 8 : 0;
  for (const LowerPart& part : kLowerParts) {
    if (part.bits == bits && part.param == param) return part.key;
  }
  return kFp32Master;
}

at::Tensor convert_master(const at::Tensor& param, const Masters& masters, const std::string& key) {
  at::Tensor decoded = decoded_master(param, masters);
  const at::Tensor upper = param.detach();
  if (key != kFp32Master) {
    return split_fp32(upper, decoded.defined() ? decoded : upper.to(at::kFloat), bits_of(key));
  }
  if (decoded.defined()) {
    // Splitting rounds ties away from zero, but the parameter was rounded to even. Move such a tie
    // to the next float32 towards the parameter.
    const at::Tensor nearest = at::nextafter(decoded, upper.to(at::kFloat));
    decoded = at::where(decoded.to(upper.scalar_type()).eq(upper), decoded, nearest);
  }
  return in_float32(param, decoded);
}

at::Tensor fp32_master(const at::Tensor& param, const Masters& masters) {
  const auto fp32 = masters.find(kFp32Master);
  const bool is_split = masters.size() > (fp32 != masters.end() ? 1U : 0U);
  if (is_split) return in_float32(param, decoded_master(param, masters));
  return fp32 != masters.end() ? fp32->second : param;
}

at::Tensor loaded_master(const at::Tensor& param, const Masters& masters, const std::string& key) {
  const auto same = masters.find(key);
  const bool is_newest = key == kFp32Master || masters.count(kFp32Master) == 0;
  return same != masters.end() && is_newest ? same->second : convert_master(param, masters, key);
}

bool is_residual(const at::Tensor& residual) { return !residual.is_floating_point(); }

void check_residual_layout(const std::string& key, const at::Tensor& residual,
                           const at::Tensor& param, const std::string& where) {
  const at::ScalarType dtype = has_two_bytes(key) ? at::kByte : at::kChar;
  std::vector<int64_t> sizes = param.sizes().vec();
  if (has_two_bytes(key)) sizes.push_back(2);
  check_is_saved_as(dtype, sizes, residual, where);
}

bool has_two_bytes(const std::string& key) { return bits_of(key) == 16; }

at::Tensor empty_residual(const std::string& key, const at::Tensor& param) {
  const auto options = param.options().requires_grad(false);
  if (!has_two_bytes(key)) return at::empty_like(param, options.dtype(at::kChar));
  return at::empty_like(param, options.dtype(at::kShort)).unsqueeze(-1).view(at::kByte);
}

}  // namespace amp_ext::optim
