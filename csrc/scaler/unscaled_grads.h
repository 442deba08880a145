// Which gradients a scaler has unscaled, told from those that may still carry the scale.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

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

// The gradients of an optimizer since they were unscaled. Questions are answered by the index of
// the first parameter of which they are true.
class AMP_EXT_API UnscaledGrads {
 public:
  explicit UnscaledGrads(const std::vector<ParamGrad>& params);

  // A loss is scaled: what is written or replaced from here on may carry the scale. Where the
  // optimizer `has_stepped`, all gradients may be new.
  void note_scale(const std::vector<ParamGrad>& params, bool has_stepped);

  // Which gradient came where none was unscaled?
  std::optional<int64_t> first_late(const std::vector<ParamGrad>& params) const;

  // Which one was written or replaced after a loss had been scaled?
  std::optional<int64_t> first_written(const std::vector<ParamGrad>& params) const;

  // Which one, of a parameter of another optimizer, was unscaled here?
  std::optional<int64_t> first_unscaled(const std::vector<ParamGrad>& params) const;

 private:
  struct Entry {
    std::optional<SeenTensor> grad;
    int64_t offset = 0;

    void see(const ParamGrad& each);
    bool has_place_of(const ParamGrad& each) const;
    bool is(const ParamGrad& each) const;
  };

  template <typename Predicate>
  std::optional<int64_t> first(const std::vector<ParamGrad>& params,
                               const Predicate& predicate) const;

  std::unordered_map<const void*, Entry> entries_;  // by parameter
  bool loss_was_scaled_ = false;
};

}  // namespace amp_ext
