// Master weights of 16-bit parameters in states and files: a float32 tensor, or split into the
// parameter and a residual of 16 or 8 bits. The key of a residual names the parameter's dtype, so
// that the master can be restored even after the parameter was converted.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/options.h>

#include <array>
#include <map>
#include <string>

namespace amp_ext::optim {

// Key of a float32 master, and keys of all masters: "low" marks 16-bit, "low8" 8-bit residuals.
inline constexpr const char* kFp32Master = "master_param";
inline constexpr std::array<const char*, 5> kMasterKeys = {
    kFp32Master, "master_low_bf16", "master_low_fp16", "master_low8_bf16", "master_low8_fp16"};

// The masters that a state or a file has for one parameter, by key.
using Masters = std::map<std::string, at::Tensor>;

// Returns the key of the master that the option gives parameters of a dtype; empty for no master.
AMP_EXT_API std::string key_of_master(const MasterWeights& master_weights, at::ScalarType param);

// Returns a new master in the format of `key`, converted from the existing master or, if there is
// none, from the parameter.
AMP_EXT_API at::Tensor convert_master(const at::Tensor& param, const Masters& masters,
                                      const std::string& key);

// Returns the float32 master: the stored one, one joined from its two parts, or the parameter if it
// has no master.
AMP_EXT_API at::Tensor fp32_master(const at::Tensor& param, const Masters& masters);

// Returns a master for a step: the stored tensor if it fits the parameter (a residual as
// `residual_elements`), otherwise one converted to float32. Undefined if there is none.
AMP_EXT_API at::Tensor existing_master(const at::Tensor& param, const Masters& masters);

// Returns the master that a parameter gets from a file, in the format of `key`; the file's own
// tensor if it has this key. If a file has both a residual and a float32 master, the float32 master
// is newer: a program that does not know residuals wrote it.
AMP_EXT_API at::Tensor loaded_master(const at::Tensor& param, const Masters& masters,
                                     const std::string& key);

// True if the tensor under the key of a residual still is one. torch's Python optimizers cast it to
// the parameter's dtype when they load it, and then train without it.
bool is_residual(const at::Tensor& residual);

// Throws unless a residual has the dtype and the shape that its key implies.
void check_residual_layout(const std::string& key, const at::Tensor& residual,
                           const at::Tensor& param, const std::string& where);

// True for the key of a 16-bit residual. It is stored as uint8, with a last dimension of two bytes.
AMP_EXT_API bool has_two_bytes(const std::string& key);

// Returns uninitialized memory for the residual of a parameter, in the parameter's layout.
AMP_EXT_API at::Tensor empty_residual(const std::string& key, const at::Tensor& param);

}  // namespace amp_ext::optim
