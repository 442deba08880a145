// The hyperparameters of all parameter groups, type-erased so that one plan serves any optimizer.
#pragma once

#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels.h"
#include "launches.h"

namespace amp_ext {

// Requirements of a group on its states, derived from its hyperparameters.
struct StateRequirements {
  bool buffers;
  bool step;    // the formula uses the number of the step
  bool dither;  // low-precision values are dithered

  // True if the states count their steps, which the formula or dithering needs.
  bool counted_steps() const { return step || dither; }
};

// Returns the name of a hyperparameter that is NaN and would spoil all parameters; null if none is.
template <typename Hyperparameters>
const char* nan_in(const Hyperparameters& hyperparameters) {
  const char* found = std::isnan(hyperparameters.lr) ? "lr" : nullptr;
  Hyperparameters::for_each_field([&](const char* name, auto member) {
    if constexpr (std::is_floating_point_v<std::decay_t<decltype(hyperparameters.*member)>>) {
      if (found == nullptr && std::isnan(hyperparameters.*member)) found = name;
    }
  });
  return found;
}

struct AMP_EXT_API GroupTable {
  struct Entry {
    CommonHyperparameters* common;
    OptionalTensor lr;  // the learning rate, if it is a tensor
    uint8_t dithered;   // bits of KernelTensorArgs::dithered, for any dtypes
    StateRequirements requirements;
    const char* not_a_number;  // result of nan_in
  };
  std::shared_ptr<void> hyperparameters;  // [groups] of Hyperparameters
  std::optional<OptimizerKernel> (*kernel)(int buffers);
  const BufferDescription* buffers;  // all buffers of the formula
  std::vector<Entry> groups;

  template <typename Hyperparameters>
  static GroupTable of(const std::vector<Group<Hyperparameters>>& groups) {
    auto all = std::make_shared<std::vector<Hyperparameters>>(groups.begin(), groups.end());
    GroupTable table{std::shared_ptr<void>(all, all->data()),
                     &kernel_for<Hyperparameters>,
                     Hyperparameters::kBuffers,
                     {}};
    for (size_t i = 0; i < groups.size(); ++i) {
      Hyperparameters& one = (*all)[i];
      const StateRequirements requirements{one.needs_buffers(), one.why_step() != nullptr,
                                           one.dither};
      table.groups.push_back(
          {&one, groups[i].lr_tensor, dithered_numbers(one), requirements, nan_in(one)});
    }
    return table;
  }
};

}  // namespace amp_ext
