// Looks through at::Tensor at its memory: dtype, layout, and whether tensors share it.
#include "tensor_memory.h"

#include <algorithm>
#include <numeric>

namespace amp_ext {

namespace {

// The bytes from the first to behind the last element of a tensor that has elements.
struct ByteRange {
  intptr_t begin;
  intptr_t end;
};

ByteRange byte_range(const at::Tensor& tensor) {
  int64_t first = 0;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const int64_t extent = (tensor.size(dim) - 1) * tensor.stride(dim);
    (extent < 0 ? first : last) += extent;
  }
  const auto item_size = static_cast<int64_t>(tensor.element_size());
  const auto data = reinterpret_cast<intptr_t>(tensor.const_data_ptr());
  return {data + first * item_size, data + (last + 1) * item_size};
}

// Calls visit(address) for each element.
template <typename Visit>
void for_each_element(const at::Tensor& tensor, Visit&& visit) {
  const auto item_size = static_cast<int64_t>(tensor.element_size());
  const auto data = reinterpret_cast<intptr_t>(tensor.const_data_ptr());
  std::vector<int64_t> index(tensor.dim(), 0);
  int64_t offset = 0;
  for (int64_t visited = 0; visited < tensor.numel(); ++visited) {
    visit(data + offset * item_size);
    for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
      offset += tensor.stride(dim);
      if (++index[dim] < tensor.size(dim)) break;
      offset -= tensor.stride(dim) * tensor.size(dim);
      index[dim] = 0;
    }
  }
}

struct Placed {
  ByteRange range;
  const MemoryUse* use;
  bool dense;
};

struct Context {
  const std::string& operation;
  const std::function<std::string(const MemoryUse&)>& name;
};

[[noreturn]] void throw_overlap(const Context& context, const MemoryUse& a, const MemoryUse& b) {
  const MemoryUse& written = a.written ? a : b;
  const MemoryUse& other = a.written ? b : a;
  TORCH_CHECK(&a != &b, context.operation, ": ", context.name(written),
              " is written and must not overlap itself, got sizes ", written.tensor->sizes(),
              " with strides ", written.tensor->strides());
  TORCH_CHECK(false, context.operation, ": ", context.name(written),
              " is written and must not share memory with ", context.name(other));
}

// Ranges that touch each other, some of them with gaps: marks every element's owner.
void check_elements(const Context& context, const std::vector<Placed>& cluster) {
  intptr_t begin = cluster.front().range.begin;
  intptr_t end = begin;
  int64_t unit = 0;
  for (const Placed& placed : cluster) {
    end = std::max(end, placed.range.end);
    unit = std::gcd(unit, static_cast<int64_t>(placed.use->tensor->element_size()));
    unit = std::gcd(unit, static_cast<int64_t>(placed.range.begin - begin));
  }
  std::vector<int32_t> owners((end - begin) / unit, -1);  // written tensors first, then the others
  for (const bool written : {true, false}) {
    for (size_t i = 0; i < cluster.size(); ++i) {
      const MemoryUse& use = *cluster[i].use;
      if (use.written != written) continue;
      const auto units_per_element = static_cast<int64_t>(use.tensor->element_size()) / unit;
      for_each_element(*use.tensor, [&](intptr_t address) {
        for (int64_t k = 0; k < units_per_element; ++k) {
          int32_t& owner = owners[(address - begin) / unit + k];
          if (owner >= 0) throw_overlap(context, use, *cluster[owner].use);
          if (written) owner = static_cast<int32_t>(i);
        }
      });
    }
  }
}

void check_cluster(const Context& context, const std::vector<Placed>& cluster) {
  const bool any_written = std::any_of(cluster.begin(), cluster.end(),
                                       [](const Placed& placed) { return placed.use->written; });
  if (!any_written) return;
  const bool all_dense = std::all_of(cluster.begin(), cluster.end(),
                                     [](const Placed& placed) { return placed.dense; });
  if (all_dense && cluster.size() == 1) return;
  check_elements(context, cluster);
}

}  // namespace

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

void check_is_plain(const std::string& operation, const std::string& name,
                    const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined() && is_plain(tensor), operation, ": ", name,
              " must be a strided tensor with memory of its own, got ",
              tensor.defined() ? tensor.toString() : "None");
  TORCH_CHECK(has_all_elements(tensor), operation, ": ", name,
              " must have a storage that holds its elements, sizes ", tensor.sizes(),
              ", got a storage of ", tensor.storage().nbytes(), " bytes");
}

bool has_all_elements(const at::Tensor& tensor) {
  const int64_t numel = tensor.numel();
  if (numel == 0) return true;
  int64_t last = numel - 1;
  if (!tensor.is_contiguous()) {
    last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      last += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
  }
  const auto elements = static_cast<uint64_t>(tensor.storage_offset() + last + 1);
  return elements * tensor.element_size() <= tensor.storage().nbytes();
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

TensorRecord gradient_record(const at::Tensor& grad, void* data, int64_t number) {
  TensorRecord record;
  record.grad = data;
  record.grad_dtype = *dtype_of(grad);
  record.numel = grad.numel();
  record.group = static_cast<int32_t>(number);
  return record;
}

bool have_same_dense_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) return a.numel() == b.numel();
  if (!a.is_non_overlapping_and_dense() || !a.sizes().equals(b.sizes())) return false;
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) > 1 && a.stride(dim) != b.stride(dim)) return false;
  }
  return true;
}

void check_no_overlap(const std::string& operation, const std::vector<MemoryUse>& uses,
                      const std::function<std::string(const MemoryUse&)>& name) {
  const Context context{operation, name};
  std::vector<Placed> placed;
  placed.reserve(uses.size());
  for (const MemoryUse& use : uses) {
    if (use.tensor->numel() == 0) continue;
    placed.push_back({byte_range(*use.tensor), &use, use.tensor->is_non_overlapping_and_dense()});
  }
  std::sort(placed.begin(), placed.end(),
            [](const Placed& a, const Placed& b) { return a.range.begin < b.range.begin; });
  std::vector<Placed> cluster;
  intptr_t cluster_end = 0;
  for (const Placed& next : placed) {
    if (next.range.begin >= cluster_end) {
      check_cluster(context, cluster);
      cluster.clear();
    }
    cluster_end = std::max(cluster_end, next.range.end);
    cluster.push_back(next);
  }
  check_cluster(context, cluster);
}

}  // namespace amp_ext
