// Checks the dtypes and layouts of tensors, and whether tensors share memory.
#include "tensors/tensor_memory.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <tuple>
#include <utility>

namespace amp_ext {

namespace {

// Memory of a tensor with elements: contiguous runs of `run` bytes, one at `begin` and the others
// at `begin` plus multiples of the strides in `steps`.
struct Placed {
  struct Step {
    int64_t size;    // number of runs, at least 2
    int64_t stride;  // distance between the starts of two runs, in bytes
  };

  intptr_t begin;
  intptr_t end;  // end of the last run
  int64_t run;   // bytes of a run
  std::vector<Step> steps;
  const MemoryUse* use;

  explicit Placed(const MemoryUse& use);

  int64_t number_of_runs() const {
    return std::accumulate(steps.begin(), steps.end(), int64_t{1},
                           [](int64_t count, const Step& step) { return count * step.size; });
  }

  // True if each stride is at least the span of all smaller strides, so that no two runs share a
  // byte. With sizes {2, 2} and strides {2, 3}, runs are apart, but the result is false.
  bool is_surely_apart() const {
    int64_t span = run;
    for (const Step& step : steps) {
      if (step.stride < span) return false;
      span += (step.size - 1) * step.stride;
    }
    return true;
  }
};

Placed::Placed(const MemoryUse& use) : use(&use) {
  const at::Tensor& tensor = *use.tensor;
  run = static_cast<int64_t>(tensor.element_size());
  begin = reinterpret_cast<intptr_t>(tensor.const_data_ptr());
  end = begin + run;
  if (tensor.is_non_overlapping_and_dense()) {
    run *= tensor.numel();
    end = begin + run;
    return;
  }
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const int64_t stride = tensor.stride(dim) * static_cast<int64_t>(tensor.element_size());
    if (tensor.size(dim) == 1 || (stride == 0 && !use.written)) continue;
    steps.push_back({tensor.size(dim), stride});
    end += (tensor.size(dim) - 1) * stride;
  }
  std::sort(steps.begin(), steps.end(),
            [](const Step& a, const Step& b) { return a.stride < b.stride; });
  auto outer = steps.begin();
  for (; outer != steps.end() && outer->stride == run; ++outer) run *= outer->size;
  steps.erase(steps.begin(), outer);
}

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

// Bytes [begin, end) of the tensor cluster[owner].
struct Stretch {
  int64_t begin;
  int64_t end;
  size_t owner;
};

// Finds two stretches that share a byte, at least one of them written. Returns their owners, the
// larger index first.
std::optional<std::pair<size_t, size_t>> find_shared(std::vector<Stretch>& stretches,
                                                     const std::vector<Placed>& cluster) {
  std::sort(stretches.begin(), stretches.end(), [](const Stretch& a, const Stretch& b) {
    return std::tie(a.begin, a.owner) < std::tie(b.begin, b.owner);
  });
  const Stretch* furthest = nullptr;  // stretch with the largest end so far
  const Stretch* furthest_written = nullptr;
  for (const Stretch& next : stretches) {
    const bool written = cluster[next.owner].use->written;
    const Stretch* const before = written ? furthest : furthest_written;
    if (before != nullptr && next.begin < before->end) {
      return std::minmax(next.owner, before->owner, std::greater<>());
    }
    if (furthest == nullptr || next.end > furthest->end) furthest = &next;
    if (written && (furthest_written == nullptr || next.end > furthest_written->end)) {
      furthest_written = &next;
    }
  }
  return std::nullopt;
}

// True if a quick test proves that no two tensors of a cluster share a byte: modulo the common
// divisor of all strides, their addresses are disjoint intervals, as for the columns of a matrix.
bool are_surely_apart(const std::vector<Placed>& cluster) {
  int64_t modulus = 0;
  for (const Placed& placed : cluster) {
    if (placed.use->written && !placed.is_surely_apart()) return false;
    for (const Placed::Step& step : placed.steps) modulus = std::gcd(modulus, step.stride);
  }
  if (cluster.size() == 1) return true;
  std::vector<Stretch> stretches;
  for (size_t owner = 0; owner < cluster.size(); ++owner) {
    const Placed& placed = cluster[owner];
    if (placed.run > modulus) return false;  // also if all tensors are dense, so that modulus is 0
    const int64_t begin = (placed.begin - cluster.front().begin) % modulus;
    const int64_t end = begin + placed.run;
    stretches.push_back({begin, std::min(end, modulus), owner});
    if (end > modulus) stretches.push_back({0, end - modulus, owner});
  }
  return !find_shared(stretches, cluster).has_value();
}

// Adds every run of a tensor to `stretches`.
void add_runs(std::vector<Stretch>& stretches, const Placed& placed, size_t owner) {
  std::vector<int64_t> index(placed.steps.size(), 0);
  int64_t begin = placed.begin;
  while (true) {
    stretches.push_back({begin, begin + placed.run, owner});
    size_t dim = 0;
    for (; dim < index.size(); ++dim) {
      const Placed::Step& step = placed.steps[dim];
      begin += step.stride;
      if (++index[dim] < step.size) break;
      begin -= step.stride * step.size;
      index[dim] = 0;
    }
    if (dim == index.size()) return;
  }
}

// Checks tensors whose address ranges overlap. Time and memory grow with the number of runs.
void check_cluster(const Context& context, const std::vector<Placed>& cluster) {
  const bool any_written = std::any_of(cluster.begin(), cluster.end(),
                                       [](const Placed& placed) { return placed.use->written; });
  if (!any_written || are_surely_apart(cluster)) return;
  int64_t number_of_runs = 0;
  for (const Placed& placed : cluster) {
    if (!placed.steps.empty() && placed.steps.front().stride == 0) {
      throw_overlap(context, *placed.use, *placed.use);
    }
    number_of_runs += placed.number_of_runs();
  }
  std::vector<Stretch> stretches;
  stretches.reserve(number_of_runs);
  for (size_t owner = 0; owner < cluster.size(); ++owner) {
    add_runs(stretches, cluster[owner], owner);
  }
  const auto shared = find_shared(stretches, cluster);
  if (!shared.has_value()) return;
  throw_overlap(context, *cluster[shared->first].use, *cluster[shared->second].use);
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

bool is_sparse(const at::Tensor& tensor) {
  switch (tensor.layout()) {
    case at::kSparse:
    case at::kSparseCsr:
    case at::kSparseCsc:
    case at::kSparseBsr:
    case at::kSparseBsc:
      return true;
    default:
      return false;
  }
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

void check_no_overlap(const std::string& operation, const std::vector<MemoryUse>& uses,
                      const std::function<std::string(const MemoryUse&)>& name) {
  const Context context{operation, name};
  std::vector<Placed> placed;
  placed.reserve(uses.size());
  for (const MemoryUse& use : uses) {
    if (use.tensor->numel() != 0) placed.emplace_back(use);
  }
  std::stable_sort(placed.begin(), placed.end(),
                   [](const Placed& a, const Placed& b) { return a.begin < b.begin; });
  std::vector<Placed> cluster;
  intptr_t cluster_end = 0;
  for (Placed& next : placed) {
    if (next.begin >= cluster_end) {
      check_cluster(context, cluster);
      cluster.clear();
    }
    cluster_end = std::max(cluster_end, next.end);
    cluster.push_back(std::move(next));
  }
  check_cluster(context, cluster);
}

}  // namespace amp_ext
