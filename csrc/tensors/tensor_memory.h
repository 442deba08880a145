// Looks through at::Tensor at its memory: dtype, layout, and whether tensors share it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/COWDeleter.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "elements/numeric.h"
#include "elements/storage.h"
#include "launches.h"

namespace amp_ext {

// Elements that are worth a thread of the CPU.
inline constexpr int64_t kGrain = 32768;

// Null for a dtype that no kernel takes.
std::optional<DType> dtype_of(at::ScalarType dtype);
std::optional<DType> dtype_of(const at::Tensor& tensor);

// A strided tensor with memory of its own: not sparse, nested, lazy, negated or a subclass with
// other rules.
inline bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet special({c10::DispatchKey::Python, c10::DispatchKey::Negative,
                                         c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor,
                                         c10::DispatchKey::Functionalize,
                                         c10::DispatchKey::NestedTensor});
  return !tensor.key_set().has_any(special) && tensor.layout() == at::kStrided &&
         tensor.has_storage();
}

// Of one of the layouts that leave elements out; those of mkldnn and of jagged tensors do not.
bool is_sparse(const at::Tensor& tensor);

// What messages call a tensor that is not a plain one.
std::string layout_and_device_of(const at::Tensor& tensor);

// Throws unless a tensor of an operation is a plain one, whose storage holds all of its elements.
void check_is_plain(const std::string& operation, const std::string& name,
                    const at::Tensor& tensor);

// Whether the storage of a plain tensor holds all of its elements: it may have been resized.
bool has_all_elements(const at::Tensor& tensor);

inline const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Whether a lazy clone shares the memory of a tensor until one of the two is written.
inline bool is_lazily_cloned(const at::Tensor& tensor) {
  const c10::StorageImpl* storage = storage_of(tensor);
  return storage != nullptr && storage->data_ptr().get_deleter() == &c10::impl::cow::cow_deleter;
}

// Throws unless it is one number that a kernel reads or writes in place.
void check_number(const std::string& operation, const std::string& name, const at::Tensor& tensor,
                  at::ScalarType dtype, const at::Device& device);

// Throws unless a list has one tensor for each of `params`.
void check_length(const std::string& operation, const std::string& name,
                  const std::vector<at::Tensor>& list, const std::vector<at::Tensor>& params);

// What an operation on gradients alone needs of one, whose elements lie densely at `data`. `number`
// is what reports call it.
KernelTensorArgs gradient_args(const at::Tensor& grad, void* data, int64_t number);

// Both without gaps, with their elements in the same order: one loop over memory pairs them up.
bool have_same_dense_layout(const at::Tensor& a, const at::Tensor& b);

// The lower part of a split master: one of 16 bits has bytes in a last dimension of two, which
// collectives move, and kernels take them as 16-bit elements.
void check_is_residual(const std::string& operation, const std::string& name,
                       const at::Tensor& residual, const at::Tensor& param);
at::Tensor residual_elements(const at::Tensor& residual);

inline bool is_16_bit(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// A number that changes when a tensor is written; inference tensors have none.
inline int64_t version_of(const at::Tensor& tensor) {
  if (tensor.is_inference()) return 0;
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// Tells autograd that a tensor was written, so that it refuses to use an older saved copy.
inline void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// A tensor at some time, without a reference to it. That to its storage keeps another from taking
// its place in memory unnoticed, but not its elements alive.
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

// Asks for an object's memory before it is read. Always inlined: a compiler drops a call of what
// neither writes nor returns anything.
template <typename T>
AMP_EXT_INLINE void prefetch(const T* object) {
  constexpr size_t kLine = 64;  // bytes of a line of the caches, where it is no more
  const char* const bytes = reinterpret_cast<const char*>(object);
  for (size_t offset = 0; offset < sizeof(T); offset += kLine) __builtin_prefetch(bytes + offset);
  __builtin_prefetch(bytes + sizeof(T) - 1);
}

// Lets tensors be made normal ones, without autograd: those that are made in inference mode can't
// be written after it, nor saved for a backward pass. Nothing of the caller's is to be written
// here.
struct OutsideInferenceMode {
  const c10::InferenceMode off{false};  // switches autograd on
  const at::NoGradGuard no_grad;
};

// What tells that a plain tensor's memory is where it was, and as it was. Read at every step for
// every tensor: it touches the tensor and its storage and calls nothing.
struct Fingerprint {
  const void* storage = nullptr;
  int64_t offset = 0;
  int64_t numel = -1;
  uint64_t keys = 0;
  caffe2::TypeMeta dtype;
  bool contiguous = false;
  uint64_t sizes = 0;  // in one number, where they are taken

  static Fingerprint of(const at::Tensor& tensor) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    const c10::StorageImpl* storage = storage_of(tensor);
    return {storage != nullptr ? storage->data() : nullptr,
            impl.storage_offset(),
            impl.numel(),
            impl.key_set().raw_repr(),
            impl.dtype(),
            impl.is_contiguous()};
  }
  // Those of a parameter are enough: it is compared with all others when it has changed.
  void take_sizes(const at::Tensor& tensor) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (impl.has_symbolic_sizes_strides()) return;  // as no plain tensor has
    for (const int64_t size : impl.sizes_default()) sizes = sizes * 0x9E3779B97F4A7C15 + size + 1;
  }
  bool operator==(const Fingerprint& other) const {
    return storage == other.storage && offset == other.offset && numel == other.numel &&
           keys == other.keys && dtype == other.dtype && contiguous == other.contiguous &&
           sizes == other.sizes;
  }
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
