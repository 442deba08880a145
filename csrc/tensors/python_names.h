// Formats dtypes, shapes and layouts as Python prints them, for errors in Python and in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace amp_ext {

// Returns "torch.float32", for example.
std::string python_name(at::ScalarType dtype);

// Returns "(2, 3)", for example, and "(2,)" for one dimension.
std::string python_name(at::IntArrayRef sizes);

// Returns "torch.strided", for example.
std::string python_name(at::Layout layout);

// Returns "['step', 'exp_avg']", for example.
std::string python_list(const std::vector<std::string>& texts);

// Throws unless `saved` is dense and has this dtype and these sizes. `where` names it in errors.
void check_is_saved_as(at::ScalarType dtype, const std::vector<int64_t>& sizes,
                       const at::Tensor& saved, const std::string& where);

}  // namespace amp_ext
