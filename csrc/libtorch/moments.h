// Moments in states and files: in a dtype, or in codes of 8 bits. A code has a key that names its
// format, so that who knows the names of torch alone does not take it for a moment.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/optim.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "libtorch/values.h"

namespace amp_ext::optim {

// How one moment is kept.
struct MomentFormat {
  std::string name;  // its key in torch
  BufferRole role;
  at::ScalarType dtype;  // of its elements
  std::string code;      // what these are, "q8h", "q8s" or "q8m"; empty: numbers

  // The key of the elements, that of the exponents of groups, empty where there are none, and both.
  std::string key() const;
  std::string exponents_key() const;
  std::vector<std::string> keys() const;
};

// Those that there are, by their keys.
using Moments = std::map<std::string, at::Tensor>;
Moments moments_in(const FusedParamState& state, const std::vector<BufferDescription>& buffers);

// Whether a moment is there in any format, given which keys are.
bool has_moment(const std::function<bool(const std::string&)>& has_key, const std::string& name);
bool has_moment(const FusedParamState& state, const std::string& name);

// Whether a key is one of those of these moments.
bool is_key_of_moment(const std::string& key, const std::vector<BufferDescription>& buffers);

// How a parameter keeps each of its moments, by its dtype and shape.
std::vector<MomentFormat> formats_of(const StateDType& state_dtype,
                                     const std::vector<BufferDescription>& buffers,
                                     const at::Tensor& param);

// The moments of a parameter in these formats: those that there are, in whatever formats, or zeros.
// What is in the format that is wanted is taken as it is.
Moments made_moments(const Moments& moments, const std::vector<MomentFormat>& formats,
                     const at::Tensor& param);

// Copies of the moments in a saved state, in these formats. A number beside a code was written by
// somebody who knows the former only: it is the newer one. `where` has a key's place. Throws if one
// is not of the dtype and the shape that its key says.
Moments read_moments(const Dict& saved, const std::vector<MomentFormat>& formats,
                     const at::Tensor& param,
                     const std::function<std::string(const std::string&)>& where);

}  // namespace amp_ext::optim
