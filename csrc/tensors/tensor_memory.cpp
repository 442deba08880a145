// Checks the dtypes and layouts of tensors.
#include "tensors/tensor_memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>

namespace amp_ext {

std::optional<DType> dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      return std::nullopt;
  }
}

std::optional<DType> dtype_of(const at::Tensor& tensor) { return dtype_of(tensor.scalar_type()); }

bool is_sparse(const at::Tensor& tensor) {
  const at::Layout layout = tensor.layout();
  return layout == at::kSparse || layout == at::kSparseCsr || layout == at::kSparseCsc ||
         layout == at::kSparseBsr || layout == at::kSparseBsc;
}

std::string layout_and_device_of(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided ? tensor.toString() : c10::str(tensor.layout());
}

void check_is_plain(const std::string& operation, const std::string& name,
                    const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined() && is_plain(tensor), operation, ": ", name,
              " must be a strided tensor with memory of its own, got ",
              tensor.defined() ? layout_and_device_of(tensor) : "None");
  TORCH_CHECK(has_all_elements(tensor), operation, ": ", name,
              " must have a storage that holds its elements, sizes ", tensor.sizes(),
              ", got a storage of ", tensor.storage().nbytes(), " bytes");
}

void check_can_be_written(const std::string& operation, const std::string& name,
                          const at::Tensor& tensor) {
  TORCH_CHECK(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, operation, ": ", name,
              " is written and must not overlap itself, got sizes ", tensor.sizes(),
              " with strides ", tensor.strides());
}

bool has_all_elements(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  const size_t size = tensor.element_size(), offset = tensor.storage_offset();
  const size_t needed =
      tensor.is_contiguous()
          ? (offset + tensor.numel()) * size
          : at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), size, offset);
  return needed <= tensor.storage().nbytes();
}

void check_number(const std::string& operation, const std::string& name, const at::Tensor& tensor,
                  at::ScalarType dtype, const at::Device& device) {
  check_is_plain(operation, name, tensor);
  TORCH_CHECK(tensor.scalar_type() == dtype, operation, ": ", name, " must be ", dtype, ", got ",
              tensor.scalar_type());
  TORCH_CHECK(tensor.numel() == 1, operation, ": ", name, " must be one element, got sizes ",
              tensor.sizes());
  TORCH_CHECK(tensor.device() == device, operation, ": ", name, " must be on ", device, ", got ",
              tensor.device());
}

void check_length(const std::string& operation, const std::string& name,
                  const std::vector<at::Tensor>& list, const std::vector<at::Tensor>& params) {
  TORCH_CHECK(list.size() == params.size(), operation, ": ", name, " must have ", params.size(),
              " tensors, one for each of params, got ", list.size());
}

KernelTensorArgs gradient_args(const at::Tensor& grad, void* data, int64_t number) {
  KernelTensorArgs args;
  args.grad = data;
  args.grad_dtype = *dtype_of(grad);
  args.numel = grad.numel();
  args.group = static_cast<int32_t>(number);
  return args;
}

bool have_same_dense_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) return a.numel() == b.numel();
  if (!a.is_non_overlapping_and_dense() || !a.sizes().equals(b.sizes())) return false;
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) > 1 && a.stride(dim) != b.stride(dim)) return false;
  }
  return true;
}

}  // namespace amp_ext
