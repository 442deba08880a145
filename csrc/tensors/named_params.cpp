// What the parameters of an optimizer are called in errors and reports.
#include "tensors/named_params.h"

#include <c10/util/StringUtil.h>

#include <map>

namespace amp_ext {

std::vector<std::string> names_of_params(const std::vector<NamedGroup>& groups) {
  std::map<std::string, int64_t> uses;
  for (const NamedGroup& group : groups) {
    for (const std::string& name : group.names) ++uses[name];
  }
  std::vector<std::string> all;
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::vector<std::string>& names = groups[i].names;
    for (size_t j = 0; j < static_cast<size_t>(groups[i].size); ++j) {
      const std::string place = c10::str("group ", i, ", param ", j);
      if (j >= names.size()) {
        all.push_back(place);
      } else {
        all.push_back(uses[names[j]] == 1 ? names[j] : c10::str(place, " (", names[j], ")"));
      }
    }
  }
  return all;
}

std::string name_of_param(const std::vector<NamedGroup>& groups, int64_t index) {
  const std::vector<std::string> names = names_of_params(groups);
  return index < static_cast<int64_t>(names.size()) ? names[static_cast<size_t>(index)] : "";
}

}  // namespace amp_ext
