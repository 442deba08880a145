// Masters of 16-bit parameters in states and files: in float32, or split, with the parameter on
// top. A lower part has a key that names its format: it is read as what it was, whatever has become
// of the parameter.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/options.h>

#include <array>
#include <map>
#include <string>

namespace amp_ext::optim {

// The key of a float32 master, and all keys under which a state may have a master.
inline constexpr const char* kFp32Master = "master_param";
inline constexpr std::array<const char*, 5> kMasterKeys = {
    kFp32Master, "master_low_bf16", "master_low_fp16", "master_low8_bf16", "master_low8_fp16"};

// Those that there are, by their keys.
using Masters = std::map<std::string, at::Tensor>;

// The key of the master that an option wants for parameters of a dtype; empty for none.
AMP_EXT_API std::string key_of_master(const MasterWeights& master_weights, at::ScalarType param);

// A new master under a key: of one in any form, or of the parameter.
AMP_EXT_API at::Tensor convert_master(const at::Tensor& param, const Masters& masters,
                                      const std::string& key);

// The float32 master of a parameter: that which is kept, one made of its parts, or the parameter.
AMP_EXT_API at::Tensor fp32_master(const at::Tensor& param, const Masters& masters);

// That which is kept, if the parameter can be stepped with it as it is, with the elements of
// `residual_elements` if it is a lower part; or one made of its parts. Undefined if there is none.
AMP_EXT_API at::Tensor existing_master(const at::Tensor& param, const Masters& masters);

// The master that a parameter gets of those in a file: the same bytes, if it has them. A file with
// a float32 master beside a lower part was written by somebody who knows the former only: it is the
// newer one.
AMP_EXT_API at::Tensor loaded_master(const at::Tensor& param, const Masters& masters,
                                     const std::string& key);

// Whether a tensor that a file has under the key of a lower part is one: not if torch's optimizers
// in Python have cast it to the parameter's dtype and gone on without it.
bool is_residual(const at::Tensor& residual);

// Throws if a lower part is not of the dtype and the shape that its key says.
void check_residual_layout(const std::string& key, const at::Tensor& residual,
                           const at::Tensor& param, const std::string& where);

// Whether it is the key of lower parts in 16 bits, which have two bytes for each element.
AMP_EXT_API bool has_two_bytes(const std::string& key);

// Memory for the lower part of a parameter, in its layout.
AMP_EXT_API at::Tensor empty_residual(const std::string& key, const at::Tensor& param);

}  // namespace amp_ext::optim
