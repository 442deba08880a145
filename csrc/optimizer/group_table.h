// The hyperparameters of all parameter groups, type-erased so that Plan serves any optimizer.
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

// Parts that the states of a group need, derived from its hyperparameters.
struct StateRequirements {
  bool step;    // a step counter, because the formula depends on it (bias correction)
  bool dither;  // a step counter, because the dither of low-precision values depends on it

  // True if states must count their steps, because the formula or dithering needs the count.
  bool counted_steps() const { return step || dither; }
};

// Returns the name of a hyperparameter that is NaN and would make parameters NaN, or null.
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
    uint8_t dithered;   // values that may be dithered, as bits of KernelTensorArgs::dithered
    StateRequirements requirements;
    const char* not_a_number;  // name of a hyperparameter that is NaN, or null
  };
  std::shared_ptr<void> hyperparameters;  // array of Hyperparameters, one for each group
  std::optional<OptimizerKernel> (*kernel)(int buffers);
  const BufferDescription* buffers;  // array of descriptions of all buffers of the formula
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
      const StateRequirements requirements{one.why_step() != nullptr, one.dither};
      table.groups.push_back(
          {&one, groups[i].lr_tensor, dithered_numbers(one), requirements, nan_in(one)});
    }
    return table;
  }
};

}  // namespace amp_ext
