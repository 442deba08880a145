// Moments in states and files: floating-point tensors, or quantized to 8 bits. The keys of
// quantized moments name the format (exp_avg_q8h), so that code that knows only torch's keys does
// not read them.
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

// Returns the suffix of a quantized format in keys, such as "q8h" for kRatio; "" for kNone.
AMP_EXT_API const char* name_of(BufferCode code);

// The format in which one moment is stored.
struct AMP_EXT_API MomentFormat {
  std::string name;  // the moment's key in torch: "exp_avg"
  BufferRole role;
  at::ScalarType dtype;  // dtype of the stored elements
  BufferCode code;       // quantized format, or kNone

  bool is_coded() const { return code != BufferCode::kNone; }
  // key() is the key of the elements, exponents_key() that of the block exponents, or empty. keys()
  // has the keys that are not empty.
  std::string key() const;
  std::string exponents_key() const;
  std::vector<std::string> keys() const;
};

// The tensors of one parameter's moments, by key: "exp_avg_sq_q8s", "exp_avg_sq_exp", for example.
using Moments = std::map<std::string, at::Tensor>;

// HasKey returns whether a state has a key. has_moment returns whether a state has all keys of the
// moment `name` in one of the formats.
using HasKey = std::function<bool(const std::string&)>;
AMP_EXT_API bool has_moment(const HasKey& has_key, const std::string& name);

// True if `key` belongs to a moment with one of these names, in any format.
AMP_EXT_API bool is_key_of_moment(const std::string& key, const std::vector<std::string>& names);

// is_key_of_exponents is true if `key` is the key of the block exponents of one of these moments.
// sizes_of_exponents returns the shape of the block exponents for a parameter.
AMP_EXT_API bool is_key_of_exponents(const std::string& key, const std::vector<std::string>& names);
std::vector<int64_t> sizes_of_exponents(const at::Tensor& param);

// True if moments of a parameter can be quantized in blocks of 32 elements. The parameter must be
// contiguous and have at least two dimensions, 4096 elements, and rows of a multiple of 32
// elements. Only dimension 0 may be sharded (`shards_whole_rows`), because a block lies in a row.
AMP_EXT_API bool fits_blocks(const at::Tensor& param, bool shards_whole_rows = true);

// Returns the format of each moment, by the dtype and shape of `param`. Pass the unsharded
// parameter, because all ranks must have the same formats.
AMP_EXT_API std::vector<MomentFormat> formats_of(const StateDType& state_dtype,
                                                 at::ArrayRef<BufferDescription> buffers,
                                                 const at::Tensor& param,
                                                 bool shards_whole_rows = true);

// Returns the moments as floating-point tensors, by name. Quantized moments become float32.
AMP_EXT_API Moments dequantized_moments(const Moments& moments,
                                        at::ArrayRef<BufferDescription> buffers);

// Returns the moments in these formats. Moments in other formats are converted, and missing ones
// become zeros. If nothing changes, returns the same tensors.
AMP_EXT_API Moments convert_moments(const Moments& moments,
                                    const std::vector<MomentFormat>& formats,
                                    const at::Tensor& param);

// Returns the quantized formats in which a file has a moment.
AMP_EXT_API std::vector<MomentFormat> saved_codes(const HasKey& has_key, const std::string& name);

// Throws unless a saved tensor has the dtype and shape that its key and quantized format require.
AMP_EXT_API void check_code(const at::Tensor& saved, const MomentFormat& format,
                            const std::string& key, const at::Tensor& param,
                            const std::string& where);

// Returns uninitialized memory for the tensor under `key` of a quantized moment: contiguous if the
// format has exponents, otherwise in the parameter's layout.
AMP_EXT_API at::Tensor empty_code(const MomentFormat& format, const std::string& key,
                                  const at::Tensor& param);

}  // namespace amp_ext::optim
