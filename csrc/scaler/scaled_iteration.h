// The iteration of one optimizer, from the scaler's first scan of its gradients to the update.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/options.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "scaler/loss_scale.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

// A parameter with its gradient.
struct ParamGrad {
  const void* param;    // identity of the parameter: a TensorImpl* or a PyObject*
  at::Tensor grad;      // gradient (values if sparse, local shard if a DTensor), or undefined
  int64_t version = 0;  // the gradient's version counter, which in-place writes increase
};

using GradsByDevice = std::vector<std::pair<at::Device, TensorList>>;

// Sorts gradients by device. Each list has one tensor for each parameter: the gradient, the values
// of a sparse gradient, or an empty tensor. Sparse float16 gradients are coalesced first, because a
// sum of finite entries may overflow. Throws if a gradient is complex, or is float16 and
// `allow_fp16` is false.
AMP_EXT_API GradsByDevice grads_by_device(const TensorList& params, TensorList grads,
                                          bool allow_fp16, const NameOf& name_of);

class AMP_EXT_API ScaledIteration {
 public:
  ScaledIteration(int64_t slot, NameOf name_of) : slot(slot), name_of(std::move(name_of)) {}

  int64_t slot;    // index of the optimizer's report, see LossScale::add_optimizer
  NameOf name_of;  // returns the name of a parameter by its index
  // True if an exception may have left gradients or parameters partly written; only update() is
  // allowed then. Also true during a step of another package's optimizer.
  bool needs_reset = false;

  // Throws an error that names `operation`, a method of the scaler, if needs_reset is true.
  void check_needs_no_reset(const std::string& operation) const;

  // Throws if a gradient was already unscaled in `other`, the iteration of another optimizer.
  void check_still_scaled(const std::string& operation, const ScaledIteration& other,
                          const std::vector<ParamGrad>& grads) const;

  // Throws if a gradient may carry the scale in spite of unscale_(): it did not exist then, or was
  // written or replaced after the next loss was scaled.
  void check_unscaled(const std::vector<ParamGrad>& grads) const;

  // Notes that a loss is scaled: gradients that are written or replaced from now on may carry the
  // scale. If the optimizer `has_stepped`, all of its gradients may be new.
  void on_loss_scaled(const std::vector<ParamGrad>& grads, bool has_stepped);
  bool is_unscaled() const { return is_unscaled_; }

  // Remembers the gradients that are about to be unscaled, and sets needs_reset. The caller clears
  // it when all are unscaled.
  void begin_unscaling(const std::vector<ParamGrad>& grads);
  // Undoes begin_unscaling if no gradient was written.
  void forget_unscaling();

  // Scans gradients, and multiplies them by `inv_scale` if it is given. Returns for each device a
  // copy of `found_inf`, set to 1 if a gradient is inf or NaN.
  std::vector<at::Tensor> scan(LossScale& loss_scale, const GradsByDevice& grads,
                               const at::Tensor& found_inf, const OptionalTensor& inv_scale);

 private:
  // State of a gradient at the time when it was unscaled.
  struct Entry {
    std::optional<SeenTensor> grad;  // its storage and version, or nullopt if it has no storage
    int64_t offset = 0;              // the gradient's offset in the storage

    void see(const ParamGrad& each);
    bool has_place_of(const ParamGrad& each) const;
    bool is(const ParamGrad& each) const;
  };

  // Returns the index of the first parameter with a gradient for which predicate(entry, param) is
  // true. `entry` is null if the gradient was not unscaled.
  template <typename Predicate>
  std::optional<int64_t> first(const std::vector<ParamGrad>& params,
                               const Predicate& predicate) const;

  std::unordered_map<const void*, Entry> unscaled_;  // by parameter
  bool is_unscaled_ = false;
  bool loss_was_scaled_ = false;  // whether a loss was scaled after the gradients were unscaled
};

}  // namespace amp_ext
