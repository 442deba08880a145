// One parameter of a plan: the tensors that belong to it, and the record of them that an engine
// takes.
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
#include "tensors/tensor_memory.h"

namespace amp_ext {

// The state of one parameter. An undefined tensor stands for one that the optimizer does not keep.
struct ParamState {
  // exp_avg, ...: of the parameter's shape; in 8 bits int8 for ratios to the second moment, uint8
  // for groups, in the order of the parameter's memory
  std::vector<at::Tensor> buffers;
  at::Tensor master_param;  // float32, of the parameter's shape, or the lower part of one
  at::Tensor step;          // float32, one element
  at::Tensor exponents;     // uint8, one for each group of the buffer in groups
};

// The tensors of a row.
enum List { kParam, kGrad, kMaster, kStep, kExponents, kBuffer0 };
inline constexpr int kLists = kBuffer0 + kMaxBuffers;

// The dtype that gradients are read in: their own where kernels take it, else float32. Kernels of
// moments in 8 bits take the parameter's.
at::ScalarType gradient_dtype(at::ScalarType grad, at::ScalarType param, bool has_codes);

// Where the master does not round to its parameter, the parameter has been changed behind it: there
// the master becomes the parameter. Returns what it becomes.
at::Tensor refreshed_master(const at::Tensor& param, const at::Tensor& master_param);

// A tensor whose memory a kernel can't walk, and room for the dense copy that it walks instead.
struct ContiguousCopy {
  at::Tensor original;
  at::Tensor dense;
  bool written;
};

// How many rows ahead a loop over them fetches tensors, and their storages once those have arrived.
inline constexpr size_t kTensorsAhead = 4, kStoragesAhead = 2;

struct ParamSlot {
  const void* object;
  // Only during a use of the plan, as the gradient. A reference of our own would cost more than the
  // rest.
  c10::MaybeOwned<at::Tensor> current_param;
  std::array<at::Tensor, kLists> owned;       // by List; none for kParam
  std::optional<SeenTensor> param_of_master;  // the parameter that the master was last rounded to
  bool master_is_current = false;             // at the start of this step
  bool is_sharded = false;
  bool args_are_current = false;
  bool grad_is_current = false;  // the gradient in the record is
  bool writes_grad = false;
  bool seen_grad_is_scaled = false;  // a step took it with a scale, and left it as it was
  at::ScalarType state_dtype = at::ScalarType::Undefined;  // the parameter's at set_state
  at::Device state_device = at::kCPU;                      // likewise
  std::optional<bool> was_contiguous;  // at set_state, where only contiguous ones have blocks
  int number_of_buffers = 0;
  std::optional<OptimizerKernel> kernel;
  std::array<Fingerprint, kLists> fingerprints;
  KernelTensorArgs args;
  std::optional<SeenTensor> seen_grad;  // the one that the last look or step with a scale saw
  const void* seen_grad_data = nullptr;
  std::vector<ContiguousCopy> contiguous_copies;
  at::Tensor refreshed_master;           // what a master becomes that its parameter has left behind
  c10::MaybeOwned<at::Tensor> shard_of;  // the parameter of a shard
  int64_t partition = 0;
  int64_t global_offset = 0;
  uint8_t low_precision = 0;  // the numbers in 16 or 8 bits, as in `dithered` of a record
  uint8_t dithers = 0;        // those among them that are always dithered, if any is
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
  bool has_split_master() const { return master() == Master::kLow16 || master() == Master::kLow8; }
  bool has_current_master() const;
  // Also where dtype or device have changed.
  bool lacks_state() const {
    return state_dtype != param().scalar_type() || state_device != param().device();
  }
  // Whether the gradient is the one that was seen, and was not written since.
  bool grad_is_as_seen() const;
  void see_grad();
  // Where much else has run since the last step, each tensor and its storage is a miss of the
  // caches, for which checks would wait one after the other.
  AMP_EXT_INLINE void prefetch_tensors() const {
    for (int list = 0; list < kLists; ++list) {
      if (tensor(list).defined()) prefetch(tensor(list).unsafeGetTensorImpl());
    }
  }
  AMP_EXT_INLINE void prefetch_storages() const {
    for (int list = 0; list < kLists; ++list) {
      if (tensor(list).defined()) prefetch(storage_of(tensor(list)));
    }
    if (seen_grad.has_value()) prefetch(seen_grad->storage._unsafe_get_target());
  }
  // The same of what a scan of the gradients reads.
  AMP_EXT_INLINE void prefetch_grad() const {
    if (has_grad()) prefetch(grad().unsafeGetTensorImpl());
  }
  AMP_EXT_INLINE void prefetch_grad_storage() const {
    if (has_grad()) prefetch(storage_of(grad()));
    if (seen_grad.has_value()) prefetch(seen_grad->storage._unsafe_get_target());
  }
  BufferFormat format(int buffer) const;  // by its dtype
  bool has_codes() const;                 // as the record says

  // Gives a tensor that will be written memory of its own, with the same elements, where it shares
  // some with a lazy clone. Returns whether it did.
  bool leave_lazy_clone(int list);
  // Returns whether a tensor is not where or as it was.
  bool take_fingerprint(int list);
  // Whether a new gradient is like the last one, so that the record only needs its address.
  bool take_new_grad();
  void fill_args();
  void mark_written();
  // Whether one of a few elements, chosen by `seed`, is not what the float32 master rounds to. The
  // record must be current, and the tensors on the CPU.
  bool differs_from_master(uint64_t seed) const;
  void copy_back(bool skip_nonfinite) const;
};

}  // namespace amp_ext
