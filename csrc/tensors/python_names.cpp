// Formats dtypes, shapes and layouts as Python prints them.
#include "tensors/python_names.h"

#include <c10/util/StringUtil.h>

#include <array>

namespace amp_ext {

std::string python_name(at::ScalarType dtype) {
  return c10::str("torch.", c10::getDtypeNames(dtype).first);
}

std::string python_name(at::IntArrayRef sizes) {
  return c10::str("(", c10::Join(", ", sizes), sizes.size() == 1 ? ",)" : ")");
}

std::string python_name(at::Layout layout) {
  constexpr std::array kNames = {"strided",    "sparse_coo", "sparse_csr", "_mkldnn",
                                 "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"};
  const auto index = static_cast<size_t>(layout);
  return index < kNames.size() ? c10::str("torch.", kNames[index]) : c10::str(layout);
}

std::string python_list(const std::vector<std::string>& texts) {
  return texts.empty() ? "[]" : c10::str("['", c10::Join("', '", texts), "']");
}

void check_is_saved_as(at::ScalarType dtype, const std::vector<int64_t>& sizes,
                       const at::Tensor& saved, const std::string& where) {
  TORCH_CHECK_VALUE(saved.scalar_type() == dtype && saved.sizes().equals(sizes), where, " must be ",
                    python_name(dtype), " of shape ", python_name(at::IntArrayRef(sizes)), ", got ",
                    python_name(saved.scalar_type()), " of ", python_name(saved.sizes()));
  TORCH_CHECK_VALUE(saved.layout() == at::kStrided && !saved.is_meta(), where,
                    " must be dense and hold its elements, got ", python_name(saved.layout()));
}

}  // namespace amp_ext
