// Which gradients a scaler has unscaled, told from those that may still carry the scale.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
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

// Gives what errors and reports call the parameter at this index among those of all groups; empty
// if it is not known.
using NameOf = std::function<std::string(int64_t index)>;

// The gradients of an optimizer since they were unscaled.
class AMP_EXT_API UnscaledGrads {
 public:
  explicit UnscaledGrads(const std::vector<ParamGrad>& params);

  // A loss is scaled: what is written or replaced from here on may carry the scale. Where the
  // optimizer `has_stepped`, all gradients may be new.
  void note_scale(const std::vector<ParamGrad>& params, bool has_stepped);

  // Throws if a gradient came where none was unscaled, or was written or replaced after a loss had
  // been scaled.
  void check_unscaled(const std::vector<ParamGrad>& params, const NameOf& name_of) const;

  // Throws if one that another optimizer has, on whose behalf `operation` asks, was unscaled here.
  void check_still_scaled(const std::string& operation, const std::vector<ParamGrad>& params,
                          const NameOf& name_of) const;

 private:
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

  std::unordered_map<const void*, Entry> entries_;  // by parameter
  bool loss_was_scaled_ = false;
};

}  // namespace amp_ext
