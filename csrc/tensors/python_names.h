// What Python calls a tensor's dtype, shape and layout, for errors that both languages have.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace amp_ext {

// "torch.float32".
std::string python_name(at::ScalarType dtype);

// "(2, 3)", and of one dimension "(2,)".
std::string python_name(at::IntArrayRef sizes);

// "torch.strided".
std::string python_name(at::Layout layout);

// "['step', 'exp_avg']".
std::string python_list(const std::vector<std::string>& texts);

// Throws unless a tensor of a file, which `where` names, has this dtype and these sizes, and dense
// elements.
void check_is_saved_as(at::ScalarType dtype, const std::vector<int64_t>& sizes,
                       const at::Tensor& saved, const std::string& where);

}  // namespace amp_ext
