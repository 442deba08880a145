// Masters of 16-bit parameters in states and files: a float32 tensor, or a residual of 16 or 8 bits
// that completes the parameter. The key of a residual names the parameter's dtype, so that the
// master can be restored after the parameter was converted.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/options.h>

#include <array>
#include <map>
#include <string>

namespace amp_ext::optim {

// kFp32Master is the key of a float32 master weight. In the keys of residuals, "low" stands for
// residuals of 16 bits and "low8" for residuals of 8 bits.
inline constexpr const char* kFp32Master = "master_param";
inline constexpr std::array<const char*, 5> kMasterKeys = {
    kFp32Master, "master_low_bf16", "master_low_fp16", "master_low8_bf16", "master_low8_fp16"};

// The master weights or residuals that a state or a file has for one parameter, by key.
using Masters = std::map<std::string, at::Tensor>;

// Returns the key of the master weight of parameters of dtype `param`; empty if they have none.
AMP_EXT_API std::string key_of_master(const MasterWeights& master_weights, at::ScalarType param);

// Returns a new master in the format of `key`, from `masters` or, without a master, from `param`.
AMP_EXT_API at::Tensor convert_master(const at::Tensor& param, const Masters& masters,
                                      const std::string& key);

// Returns the stored float32 master, or the joined one if it is split, or the parameter itself if
// it has no master.
AMP_EXT_API at::Tensor fp32_master(const at::Tensor& param, const Masters& masters);

// Returns the master that a parameter gets from a file, in the format of `key`. A float32 master is
// preferred to a residual, because a program without residuals must have added it later.
AMP_EXT_API at::Tensor loaded_master(const at::Tensor& param, const Masters& masters,
                                     const std::string& key);

// True if a tensor under the key of a residual is usable. A load by torch's Python optimizers casts
// residuals to the parameter's dtype.
bool is_residual(const at::Tensor& residual);

// Throws unless a residual has the dtype and the shape that its key implies.
void check_residual_layout(const std::string& key, const at::Tensor& residual,
                           const at::Tensor& param, const std::string& where);

// True for the key of a 16-bit residual, stored as uint8 with an additional last dimension of 2.
AMP_EXT_API bool has_two_bytes(const std::string& key);

// Returns uninitialized memory for the residual of a parameter, in the parameter's layout.
AMP_EXT_API at::Tensor empty_residual(const std::string& key, const at::Tensor& param);

}  // namespace amp_ext::optim
