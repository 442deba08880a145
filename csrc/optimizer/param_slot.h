// One parameter of a Plan: its tensors, and the KernelTensorArgs that an engine gets for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>
#include <c10/util/MaybeOwned.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels.h"
#include "launches.h"
#include "ops/masters.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

// Indices of the tensors of a slot, as in `owned` and `fingerprints`.
enum SlotTensor { kParam, kGrad, kMaster, kStep, kExponents, kBuffer0 };
inline constexpr int kSlotTensors = kBuffer0 + kMaxBuffers;

// Returns the dtype in which kernels read a gradient: the parameter's if moments are quantized
// (`has_codes`), otherwise its own if there is such a kernel, otherwise float32.
at::ScalarType gradient_dtype(at::ScalarType grad, at::ScalarType param, bool has_codes);

// A tensor whose layout or dtype kernels can't read, and the dense copy that kernels get instead.
struct ContiguousCopy {
  at::Tensor original;
  at::Tensor dense;
  bool written;  // the kernel writes `dense`, so it must be copied back
};

// How many slots ahead a loop prefetches tensors, and then the storages to which they point.
inline constexpr size_t kTensorsAhead = 4, kStoragesAhead = 2;

struct ParamSlot {
  const void* object;  // identity of the parameter
  // The parameter or this rank's shard, set only during an operation of the plan. Borrowed, because
  // counting a reference takes longer than all other work on the slot.
  c10::MaybeOwned<at::Tensor> current_param;
  std::array<at::Tensor, kSlotTensors> owned;  // indexed by SlotTensor; kParam is unused
  std::optional<SeenTensor> param_of_master;   // parameter when its master was last rounded to it
  bool master_is_current = false;  // whether the parameter is still as in param_of_master
  bool is_sharded = false;
  bool args_are_current = false;  // whether args is up to date, except for the gradient
  bool grad_is_current = false;   // whether args has the present gradient
  bool writes_grad = false;
  bool seen_grad_is_scaled = false;  // whether a step used seen_grad and left the loss scale in it
  at::ScalarType state_dtype = at::ScalarType::Undefined;  // the parameter's dtype at set_state
  at::Device state_device = at::kCPU;                      // the parameter's device at set_state
  std::optional<bool> was_contiguous;  // is_contiguous() at set_state, if the state is quantized
  int number_of_buffers = 0;
  std::optional<OptimizerKernel> kernel;
  std::array<Fingerprint, kSlotTensors> fingerprints;
  KernelTensorArgs args;
  std::optional<SeenTensor> seen_grad;  // gradient at the last scan or the last step with a scale
  const void* seen_grad_data = nullptr;
  std::vector<ContiguousCopy> contiguous_copies;
  at::Tensor refreshed_master;           // corrected float32 master, if the parameter was changed
  c10::MaybeOwned<at::Tensor> shard_of;  // the unsharded parameter, if current_param is a shard
  int64_t partition = 0;
  int64_t global_offset = 0;
  uint8_t low_precision = 0;  // bits of KernelTensorArgs::dithered for 16-bit and 8-bit values
  uint8_t dithers = 0;        // bits of quantized buffers, dithered if the group dithers anything
  int64_t group;
  int64_t index_in_group;

  const at::Tensor& tensor(int list) const { return list == kParam ? param() : owned[list]; }
  const at::Tensor& param() const { return *current_param; }
  const at::Tensor& grad() const { return owned[kGrad]; }
  const at::Tensor& master_param() const { return owned[kMaster]; }
  bool has_grad() const { return grad().defined(); }
  int64_t version() const;
  int64_t grad_version() const;
  Master master() const;
  bool has_split_master() const {
    return master() == Master::kResidual16 || master() == Master::kResidual8;
  }
  bool has_current_master() const;
  // True if the slot has no state for the parameter's present dtype and device.
  bool lacks_state() const {
    return state_dtype != param().scalar_type() || state_device != param().device();
  }
  // True if the gradient is still seen_grad and was not written since see_grad().
  bool grad_is_as_seen() const;
  void see_grad();
  // Prefetch all tensors of the slot, or all storages, which the checks read one after the other.
  AMP_EXT_INLINE void prefetch_tensors() const {
    for (int list = 0; list < kSlotTensors; ++list) {
      if (tensor(list).defined()) prefetch(tensor(list).unsafeGetTensorImpl());
    }
  }
  AMP_EXT_INLINE void prefetch_storages() const {
    for (int list = 0; list < kSlotTensors; ++list) {
      if (tensor(list).defined()) prefetch(storage_of(tensor(list)));
    }
    if (seen_grad.has_value()) prefetch(seen_grad->storage._unsafe_get_target());
  }
  // Prefetch the tensor, or the storages, that a scan of the gradients reads.
  AMP_EXT_INLINE void prefetch_grad() const {
    if (has_grad()) prefetch(grad().unsafeGetTensorImpl());
  }
  AMP_EXT_INLINE void prefetch_grad_storage() const {
    if (has_grad()) prefetch(storage_of(grad()));
    if (seen_grad.has_value()) prefetch(seen_grad->storage._unsafe_get_target());
  }
  BufferFormat format(int buffer) const;  // derived from the buffer's dtype
  bool has_codes() const;                 // whether args has a quantized buffer

  // Updates the fingerprint of a tensor. Returns true if the fingerprint has changed.
  bool take_fingerprint(int list);
  // Puts a new gradient into args and returns true, unless it needs a conversion or a dense copy.
  bool take_new_grad();
  void fill_args();
  void mark_written();
  void copy_back(bool skip_nonfinite) const;
};

}  // namespace amp_ext
