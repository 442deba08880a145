// What tells one optimizer of the C++ interface from the others.
#pragma once

#include <amp_ext/hyperparameters.h>
#include <amp_ext/optim.h>
#include <amp_ext/options.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "optimizer/kind.h"
#include "optimizer/plan.h"

namespace amp_ext::optim {

// Options as numbers: flags are 0 or 1, betas are beta1 and beta2.
using Numbers = std::vector<std::pair<std::string, double>>;

struct OptimizerKind : Kind {
  const char* name = nullptr;             // in messages and state dicts: "AdamW"
  const char* base_class = nullptr;       // that it extends in Python, or its own
  std::vector<std::string> not_negative;  // numbers among its own options
  bool counts_from_buffer = false;     // torch has no counter: the first step is without a buffer
  const char* fixed_option = nullptr;  // that a state dict can't change either
  // How many of the buffers a group keeps, and whether the formula needs the number of the step; a
  // state dict must have it then.
  int (*buffer_count)(const FusedOptions&) = nullptr;
  bool (*needs_step)(const FusedOptions&) = nullptr;
  std::unique_ptr<FusedOptions> (*make_options)() = nullptr;
  // Throws, in torch's words, if an option of the optimizer is out of range.
  void (*check)(const FusedOptions&) = nullptr;
  void (*step)(Plan&, const std::vector<Numbers>& groups, const GradientOptions&) = nullptr;

  // The keys of the first of the buffers where they are not coded.
  std::vector<std::string> buffer_names(size_t count) const {
    std::vector<std::string> names;
    for (size_t i = 0; i < count; ++i) names.emplace_back(buffers[i].name);
    return names;
  }

  // Whether the states of a group count their steps: for the formula or for the dither.
  bool keeps_step(const FusedOptions& options) const {
    return needs_step(options) || options.dithers();
  }
};

// A number by its name. Throws if it is not there.
inline double number_of(const Numbers& numbers, const char* kind, const std::string& name) {
  for (const auto& [key, value] : numbers) {
    if (key == name) return value;
  }
  TORCH_CHECK(false, kind, ": ", name, " must be there");
}

// A step of a plan with the hyperparameters that have the names of the options.
template <typename Hyperparameters>
void step_plan(Plan& plan, const std::vector<Numbers>& groups, const GradientOptions& options) {
  std::vector<Group<Hyperparameters>> hyperparameters;
  for (const Numbers& numbers : groups) {
    Group<Hyperparameters> group;
    const auto set = [&](const char* name, auto& field) {
      const double number = number_of(numbers, Hyperparameters::kName, name);
      field = static_cast<std::decay_t<decltype(field)>>(number);
    };
    set("lr", group.lr);
    set("clip_value", group.clip_value);
    set("dither", group.dither);
    Hyperparameters::for_each_field([&](const char* name, auto member) {
      if (Hyperparameters::is_option(name)) set(name, group.*member);
    });
    hyperparameters.push_back(std::move(group));
  }
  plan.step(hyperparameters, options);
}

}  // namespace amp_ext::optim
