// Moments in states and files: as floating-point tensors, or quantized to 8 bits. The key of a
// quantized moment names its format (exp_avg_q8h), so that code that knows only torch's keys does
// not mistake it for the moment.
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

// Returns the format as keys name it: "q8h" for kRatio, "q8s" for kRoot, "q8m" for kMagnitude, or
// "".
AMP_EXT_API const char* name_of(BufferCode code);

// The format in which one moment is stored.
struct AMP_EXT_API MomentFormat {
  std::string name;  // the moment's key in torch: "exp_avg"
  BufferRole role;
  at::ScalarType dtype;  // dtype of the stored elements
  std::string code;      // "q8h", "q8s" or "q8m"; empty: not quantized

  // Key of the elements; key of the blocks' exponents, empty if the format has none; list of both.
  std::string key() const;
  std::string exponents_key() const;
  std::vector<std::string> keys() const;
};

// The tensors of the moments of one parameter, by key.
using Moments = std::map<std::string, at::Tensor>;

// True if a moment is present in any format; `has_key` tells which keys a state has.
using HasKey = std::function<bool(const std::string&)>;
AMP_EXT_API bool has_moment(const HasKey& has_key, const std::string& name);

// True if `key` belongs to a moment with one of these names, in any format.
AMP_EXT_API bool is_key_of_moment(const std::string& key, const std::vector<std::string>& names);

// True if `key` is for the blocks' exponents of one of these moments. sizes_of_exponents returns
// the sizes of such a tensor.
AMP_EXT_API bool is_key_of_exponents(const std::string& key, const std::vector<std::string>& names);
std::vector<int64_t> sizes_of_exponents(const at::Tensor& param);

// True if moments of a parameter may be quantized in blocks of 32 elements. A shard must have
// complete blocks, which lie within the rows of dimension 0: no other dimension may be sharded
// (`shards_whole_rows`). The parameter must be contiguous, because another order of the elements
// would assign them to the exponents of other blocks.
AMP_EXT_API bool has_blocks(const at::Tensor& param, bool shards_whole_rows = true);

// Returns the format of each moment. `param` is the unsharded parameter, even if this rank holds a
// shard, so that dtype and shape give every rank the same formats.
AMP_EXT_API std::vector<MomentFormat> formats_of(const StateDType& state_dtype,
                                                 at::ArrayRef<BufferDescription> buffers,
                                                 const at::Tensor& param,
                                                 bool shards_whole_rows = true);

// Returns the moments as floating-point tensors by name; quantized ones become float32.
AMP_EXT_API Moments dequantized_moments(const Moments& moments,
                                        at::ArrayRef<BufferDescription> buffers);

// Returns the moments in these formats, converted from any others; missing moments are zeros. If
// all moments have these formats already, they are returned unchanged.
AMP_EXT_API Moments convert_moments(const Moments& moments,
                                    const std::vector<MomentFormat>& formats,
                                    const at::Tensor& param);

// Returns the quantized formats in which a file has a moment.
AMP_EXT_API std::vector<MomentFormat> saved_codes(const HasKey& has_key, const std::string& name);

// Throws unless a saved tensor has the dtype and shape that its key and quantized format require.
AMP_EXT_API void check_code(const at::Tensor& saved, const MomentFormat& format,
                            const std::string& key, const at::Tensor& param,
                            const std::string& where);

// Returns uninitialized memory for `key` of a quantized format: contiguous if the format has
// exponents, otherwise in the parameter's layout.
AMP_EXT_API at::Tensor empty_code(const MomentFormat& format, const std::string& key,
                                  const at::Tensor& param);

}  // namespace amp_ext::optim
