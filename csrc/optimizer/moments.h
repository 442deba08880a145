// Moments in states and files: in a dtype, or in codes of 8 bits. A code has a key that names its
// format, so that who knows the names of torch alone does not take it for a moment.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace amp_ext::optim {

// As keys of states name it: "q8h", "q8s" or "q8m"; empty where a buffer has no code.
AMP_EXT_API const char* name_of(BufferCode code);

// How one moment is kept.
struct AMP_EXT_API MomentFormat {
  std::string name;  // its key in torch
  BufferRole role;
  at::ScalarType dtype;  // of its elements
  std::string code;      // what these are, "q8h", "q8s" or "q8m"; empty: numbers

  // The key of the elements, that of the exponents of blocks, empty where there are none, and both.
  std::string key() const;
  std::string exponents_key() const;
  std::vector<std::string> keys() const;
};

// Those that there are, by their keys.
using Moments = std::map<std::string, at::Tensor>;

// Whether a moment is there in any format, given which keys are.
using HasKey = std::function<bool(const std::string&)>;
AMP_EXT_API bool has_moment(const HasKey& has_key, const std::string& name);

// Whether a key is one of those of the moments with these names.
AMP_EXT_API bool is_key_of_moment(const std::string& key, const std::vector<std::string>& names);

// Whether it is one of those of exponents, and which sizes these have.
AMP_EXT_API bool is_key_of_exponents(const std::string& key, const std::vector<std::string>& names);
std::vector<int64_t> sizes_of_exponents(const at::Tensor& param);

// Whether moments of a parameter may be kept in blocks of 32 elements. They lie within the rows of
// dimension 0, so that a part of it has whole ones: it must be the only one that is sharded, which
// `shards_whole_rows` says. And the parameter must be contiguous: its blocks are those of memory,
// and codes that another layout, or a file that knows no strides, puts in another order would be
// measured by the exponents of others.
AMP_EXT_API bool has_blocks(const at::Tensor& param, bool shards_whole_rows = true);

// How a parameter keeps each of its moments, by its dtype and shape: those of the whole, never of a
// rank's part, so that every rank has the same.
AMP_EXT_API std::vector<MomentFormat> formats_of(const StateDType& state_dtype,
                                                 at::ArrayRef<BufferDescription> buffers,
                                                 const at::Tensor& param,
                                                 bool shards_whole_rows = true);

// Moments as numbers, float32 where they are codes, by their names.
AMP_EXT_API Moments dequantized_moments(const Moments& moments,
                                        at::ArrayRef<BufferDescription> buffers);

// The moments of a parameter in these formats: those that there are, in whatever formats, or zeros.
// What is in the format that is wanted is taken as it is.
AMP_EXT_API Moments convert_moments(const Moments& moments,
                                    const std::vector<MomentFormat>& formats,
                                    const at::Tensor& param);

// The formats of codes whose elements a file has for a moment.
AMP_EXT_API std::vector<MomentFormat> saved_codes(const HasKey& has_key, const std::string& name);

// Throws if what a file has under a key of a code is not of the dtype and the shape that it says.
AMP_EXT_API void check_code(const at::Tensor& saved, const MomentFormat& format,
                            const std::string& key, const at::Tensor& param,
                            const std::string& where);

// Memory for it, laid out as the parameter is.
AMP_EXT_API at::Tensor empty_code(const MomentFormat& format, const std::string& key,
                                  const at::Tensor& param);

}  // namespace amp_ext::optim
