// What tells one optimizer of the C++ interface from the others.
#pragma once

#include <amp_ext/hyperparameters.h>
#include <amp_ext/optim.h>
#include <amp_ext/options.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plan.h"

namespace amp_ext::optim {

// Options as numbers; lists of pairs of them, too.
using Numbers = std::vector<std::pair<std::string, double>>;

struct OptimizerKind {
  const char* name;                          // in messages and state dicts: "AdamW"
  std::vector<std::string> buffer_names;     // all that the formula may keep
  std::vector<std::string> required;         // options that a state dict must have
  std::vector<std::string> own_options;      // options that torch does not have, nor all of ours
  std::vector<std::string> constants;        // options of Python that are always false here
  int (*buffer_count)(const FusedOptions&);  // how many of the buffers a group keeps
  bool (*keeps_step)(const FusedOptions&);   // whether the formula needs the number of the step
  bool counts_from_buffer;   // torch saves no counter: a state with a buffer has taken a step
  const char* fixed_option;  // that a state dict can't change either, or null
  std::unique_ptr<FusedOptions> (*make_options)();
  // Throws, in torch's words, if an option of the optimizer is out of range.
  void (*check)(const FusedOptions&);
  void (*step)(Plan& plan, const std::vector<Numbers>& groups, const GradientOptions& options);
};

// A number by its name.
inline double number_of(const Numbers& numbers, const std::string& name, double otherwise) {
  for (const auto& [key, value] : numbers) {
    if (key == name) return value;
  }
  return otherwise;
}

// A step of a plan with the hyperparameters that have the names of the options.
template <typename Hyperparameters>
void step_plan(Plan& plan, const std::vector<Numbers>& groups, const GradientOptions& options) {
  std::vector<Group<Hyperparameters>> hyperparameters;
  for (const Numbers& numbers : groups) {
    Group<Hyperparameters> group;
    group.lr = number_of(numbers, "lr", group.lr);
    group.clip_value = number_of(numbers, "clip_value", group.clip_value);
    Hyperparameters::for_each_field([&](const char* name, auto member) {
      group.*member = number_of(numbers, name, group.*member);
    });
    hyperparameters.push_back(std::move(group));
  }
  plan.step(hyperparameters, options);
}

}  // namespace amp_ext::optim
