// What the parameters of an optimizer are called in errors and reports.
#pragma once

#include <amp_ext/export.h>

#include <cstdint>
#include <string>
#include <vector>

namespace amp_ext {

// A group of an optimizer: how many parameters it has, and their names if it was given any.
struct NamedGroup {
  int64_t size;
  std::vector<std::string> names = {};
};

// The names of the parameters of all groups: "layer.weight". One without a name has its place,
// "group 0, param 3", and one whose name stands for several has both.
AMP_EXT_API std::vector<std::string> names_of_params(const std::vector<NamedGroup>& groups);

// The name of the one at this index among those of all groups; empty if there is none.
AMP_EXT_API std::string name_of_param(const std::vector<NamedGroup>& groups, int64_t index);

}  // namespace amp_ext
