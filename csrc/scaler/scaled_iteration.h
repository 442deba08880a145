// What a scaler knows of an optimizer from its first look to the update. Both languages go by it.
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

// A parameter, by what its owner knows it by, and its gradient, undefined where there is none: of a
// sparse one the values, of a sharded one this rank's part. A write that torch counts changes the
// version.
struct ParamGrad {
  const void* param;
  at::Tensor grad;
  int64_t version = 0;
};

using GradsByDevice = std::vector<std::pair<at::Device, TensorList>>;

// For each device that holds a gradient a tensor for every parameter, so that its index tells which
// it is: the gradient, the values of a sparse one, or an empty tensor in place of another device's.
// `grads` has an undefined tensor where there is none. Throws if one is complex, or of float16
// where that is not allowed. A sparse one of float16 is coalesced: the sum of entries may overflow
// where none of them does.
AMP_EXT_API GradsByDevice grads_by_device(const TensorList& params, TensorList grads,
                                          bool allow_fp16, const NameOf& name_of);

class AMP_EXT_API ScaledIteration {
 public:
  // Of the optimizer with this number in the reports of a loss scale.
  ScaledIteration(int64_t slot, NameOf name_of) : slot(slot), name_of(std::move(name_of)) {}

  int64_t slot;
  NameOf name_of;
  // Whether an exception came when gradients or parameters may have been written: only an update
  // goes on from there. Who steps an optimizer of others says so, since nobody sees how far it
  // comes.
  bool needs_reset = false;

  // Throws on behalf of an operation of the scaler if the iteration is spent.
  void check_needs_no_reset(const std::string& operation) const;

  // Throws if one of these gradients was unscaled as that of another optimizer, which has its
  // parameter, too.
  void check_still_scaled(const std::string& operation, const ScaledIteration& other,
                          const std::vector<ParamGrad>& grads) const;

  // Throws if a gradient came where none was unscaled, or was written or replaced after a loss had
  // been scaled.
  void check_unscaled(const std::vector<ParamGrad>& grads) const;

  // A loss is scaled: what is written or replaced from here on may carry the scale. Where the
  // optimizer `has_stepped`, all gradients may be new.
  void on_loss_scaled(const std::vector<ParamGrad>& grads, bool has_stepped);
  bool is_unscaled() const { return is_unscaled_; }

  // These gradients are to be unscaled. The iteration is spent until all of them are, and whoever
  // unscales them has noted it.
  void begin_unscaling(const std::vector<ParamGrad>& grads);
  // What was begun has left the gradients as they were.
  void forget_unscaling();

  // Looks at gradients, and multiplies them by `inv_scale`, if that is given. Returns for each
  // device a copy of `found_inf`, set to 1 after an overflow.
  std::vector<at::Tensor> scan(LossScale& loss_scale, const GradsByDevice& grads,
                               const at::Tensor& found_inf, const OptionalTensor& inv_scale);

 private:
  // A gradient that was unscaled.
  struct Entry {
    std::optional<SeenTensor> grad;
    int64_t offset = 0;

    void see(const ParamGrad& each);
    bool has_place_of(const ParamGrad& each) const;
    bool is(const ParamGrad& each) const;
  };

  // The index of the first parameter with a gradient of which the predicate is true, whose entry it
  // gets, or null.
  template <typename Predicate>
  std::optional<int64_t> first(const std::vector<ParamGrad>& params,
                               const Predicate& predicate) const;

  std::unordered_map<const void*, Entry> unscaled_;  // by parameter
  bool is_unscaled_ = false;
  bool loss_was_scaled_ = false;  // since then
};

}  // namespace amp_ext
