// Checks of the memory behind tensors: dtype, layout and changes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "formats/storage.h"
#include "launches.h"
#include "numeric.h"

namespace amp_ext {

// Number of elements that make another CPU thread pay off: the grain size of parallel_for.
inline constexpr int64_t kGrain = 32768;

// Returns nullopt for a dtype that no kernel supports.
std::optional<DType> dtype_of(at::ScalarType dtype);
std::optional<DType> dtype_of(const at::Tensor& tensor);

// True for a strided tensor with its own storage: not sparse, nested, lazy or negated, and no
// subclass that overrides operators.
inline bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet special({c10::DispatchKey::Python, c10::DispatchKey::Negative,
                                         c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor,
                                         c10::DispatchKey::Functionalize,
                                         c10::DispatchKey::NestedTensor});
  return !tensor.key_set().has_any(special) && tensor.layout() == at::kStrided &&
         tensor.has_storage();
}

// True for a layout that does not store every element; mkldnn and jagged layouts store all.
bool is_sparse(const at::Tensor& tensor);

// Describes a tensor that is not plain, for errors.
std::string layout_and_device_of(const at::Tensor& tensor);

// Throws unless a tensor is plain and its storage holds all of its elements.
void check_is_plain(const std::string& operation, const std::string& name,
                    const at::Tensor& tensor);

// Throws if elements of a tensor that is written share memory, as those of an expanded tensor.
void check_can_be_written(const std::string& operation, const std::string& name,
                          const at::Tensor& tensor);

// True if the storage of a plain tensor holds all of its elements. A resized storage may not.
bool has_all_elements(const at::Tensor& tensor);

inline const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Throws unless a tensor is one element of this dtype on this device, so that kernels can use it.
void check_number(const std::string& operation, const std::string& name, const at::Tensor& tensor,
                  at::ScalarType dtype, const at::Device& device);

// Throws unless `list` has one tensor for each of `params`.
void check_length(const std::string& operation, const std::string& name,
                  const std::vector<at::Tensor>& list, const std::vector<at::Tensor>& params);

// Returns the kernel arguments of a gradient without its parameter. `data` points to the gradient's
// elements, dense in memory; `number` identifies it in reports such as first_nonfinite.
KernelTensorArgs gradient_args(const at::Tensor& grad, void* data, int64_t number);

// Returns the tensor on a device. Only a copy from a GPU to the CPU blocks, because otherwise the
// host could read it too early.
inline at::Tensor to_device(const at::Tensor& tensor, const at::Device& device) {
  return tensor.to(device, /*non_blocking=*/!device.is_cpu());
}

// True if both tensors are dense in the same order, so that one index addresses both.
bool have_same_dense_layout(const at::Tensor& a, const at::Tensor& b);

// Functions for residuals of split masters. A 16-bit residual is stored as pairs of uint8, because
// collectives do not support int16; residual_elements returns an int16 view for kernels.
void check_is_residual(const std::string& operation, const std::string& name,
                       const at::Tensor& residual, const at::Tensor& param);
at::Tensor residual_elements(const at::Tensor& residual);

inline bool is_16_bit(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// Returns the number of blocks of 32 elements in a row of a parameter, or 0 if its moments are not
// quantized in blocks: if it is small, or if a block would not lie in one row. See fits_blocks in
// Python.
inline int64_t blocks_in_row(const at::Tensor& param) {
  if (param.dim() < 2 || param.numel() < 4096 || !param.is_contiguous()) return 0;
  const int64_t elements = param.numel() / param.size(0);
  return elements % 32 == 0 ? elements / 32 : 0;
}

// Returns the version counter, which changes when the tensor is written; 0 for an inference tensor.
inline int64_t version_of(const at::Tensor& tensor) {
  if (tensor.is_inference()) return 0;
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// Returns the address of a tensor's version counter, which views of one tensor share.
inline const void* version_counter_of(const c10::TensorImpl& tensor) {
  const c10::VariableVersion& version = tensor.version_counter();
  const void* counter = nullptr;
  static_assert(sizeof version == sizeof counter, "c10 has no comparison of counters");
  std::memcpy(&counter, &version, sizeof counter);
  return counter;
}

// Tells autograd that a tensor was written, so that a backward pass that saved it earlier throws.
inline void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Recognizes a tensor without owning it. The weak reference keeps other storages from getting the
// same address, but does not keep the elements in memory.
struct SeenTensor {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  int64_t version;

  static void remember(std::optional<SeenTensor>& seen, const at::Tensor& tensor, int64_t version) {
    if (seen.has_value() && seen->storage._unsafe_get_target() == storage_of(tensor)) {
      seen->version = version;
    } else {
      seen = {tensor.storage().getWeakStorageImpl(), version};
    }
  }
  bool is(const at::Tensor& tensor, int64_t version_now) const {
    return storage._unsafe_get_target() == storage_of(tensor) && version == version_now;
  }
};

// Prefetches an object's memory. Inlined, because compilers remove calls of functions without
// effect.
template <typename T>
AMP_EXT_INLINE void prefetch(const T* object) {
  constexpr size_t kLine = 64;  // bytes in a cache line, on most CPUs
  const char* const bytes = reinterpret_cast<const char*>(object);
  for (size_t offset = 0; offset < sizeof(T); offset += kLine) __builtin_prefetch(bytes + offset);
  __builtin_prefetch(bytes + sizeof(T) - 1);
}

// Prefetches the version counters of tensors, for a loop over `tensor_at(0)` to `tensor_at(count -
// 1)` (pointers) that has come to `index`.
template <typename TensorAt>
AMP_EXT_INLINE void prefetch_versions(size_t index, size_t count, const TensorAt& tensor_at) {
  constexpr size_t kAhead = 8;
  if (index + 2 * kAhead < count) __builtin_prefetch(tensor_at(index + 2 * kAhead));
  if (index + kAhead < count) __builtin_prefetch(version_counter_of(*tensor_at(index + kAhead)));
}

// Leaves inference mode and switches autograd off, so that new tensors can be written later. Don't
// write tensors of the caller in this scope.
struct OutsideInferenceMode {
  const c10::InferenceMode off{false};  // also switches autograd on
  const at::NoGradGuard no_grad;
};

}  // namespace amp_ext
