// Looks through at::Tensor at its memory: dtype, layout, and whether tensors share it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "storage.h"

namespace amp_ext {

// Null for a dtype that no kernel takes.
std::optional<DType> dtype_of(at::ScalarType dtype);
std::optional<DType> dtype_of(const at::Tensor& tensor);

// A strided tensor with memory of its own: not sparse, lazy, negated or a subclass with other
// rules.
bool is_plain(const at::Tensor& tensor);

// Both without gaps, with their elements in the same order: one loop over memory pairs them up.
bool have_same_dense_layout(const at::Tensor& a, const at::Tensor& b);

// Tells autograd that a tensor was written, so that it refuses to use an older saved copy.
void bump_version(const at::Tensor& tensor);

// What tells that a tensor's memory is where it was. Cheap enough to read at every step.
struct Fingerprint {
  const void* data = nullptr;
  int64_t numel = -1;
  at::ScalarType dtype = at::ScalarType::Undefined;
  bool contiguous = false;

  static Fingerprint of(const at::Tensor& tensor);
  bool operator==(const Fingerprint& other) const {
    return data == other.data && numel == other.numel && dtype == other.dtype &&
           contiguous == other.contiguous;
  }
  bool operator!=(const Fingerprint& other) const { return !(*this == other); }
};

// A tensor of a launch, for the search for shared memory: number `index` of list number `list`.
struct MemoryUse {
  const at::Tensor* tensor;
  bool written;
  int list;
  int64_t index;
};

// Throws if a written tensor shares an element with another tensor or with itself. Interleaved
// views that do not share one pass. `name` gives a tensor's name in messages: "exp_avgs[3]".
void check_no_overlap(const std::string& operation, const std::vector<MemoryUse>& uses,
                      const std::function<std::string(const MemoryUse&)>& name);

}  // namespace amp_ext
