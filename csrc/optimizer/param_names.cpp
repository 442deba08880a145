// Compares names of parameters, without the parts that wrappers add to them.
#include "optimizer/param_names.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iterator>
#include <map>

namespace amp_ext {

namespace {

// Parts that DDP, torch.compile, FSDP and checkpoint_wrapper insert into names of parameters.
const char* const kWrappers[] = {"module", "_orig_mod", "_fsdp_wrapped_module",
                                 "_checkpoint_wrapped_module"};

std::string without_wrappers(const std::string& name) {
  std::string bare;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    if (std::find(std::begin(kWrappers), std::end(kWrappers), part) == std::end(kWrappers)) {
      bare += (bare.empty() ? "" : ".") + part;
    }
    begin = end + 1;
  }
  return bare;
}

std::vector<int64_t> places_of(const Names& own, const Names& saved) {
  std::map<std::string, int64_t> places;
  for (const std::string& name : saved) places.emplace(name, places.size());
  if (places.size() != own.size() || places.size() != saved.size()) return {};
  std::vector<int64_t> found;
  for (const std::string& name : own) {
    const auto place = places.find(name);
    if (place == places.end()) return {};
    found.push_back(place->second);
    places.erase(place);  // so that a second parameter of this name is not found
  }
  return found;
}

Names joined(const std::vector<Names>& groups) {
  Names names;
  for (const Names& group : groups) names.insert(names.end(), group.begin(), group.end());
  return names;
}

}  // namespace

Names without_wrappers(const Names& names) {
  Names bare;
  for (const std::string& name : names) bare.push_back(without_wrappers(name));
  return bare;
}

std::vector<int64_t> indices_by_name(const Names& own, const Names& saved) {
  const std::vector<int64_t> places = places_of(own, saved);
  // Compares full names first: a module may be named like a wrapper ("module").
  return places.empty() ? places_of(without_wrappers(own), without_wrappers(saved)) : places;
}

std::string misplaced_param(const std::vector<Names>& own, const std::vector<Names>& saved) {
  const std::vector<int64_t> places = indices_by_name(joined(own), joined(saved));
  if (places.empty()) return {};
  auto place = places.begin();
  for (size_t group = 0; group < own.size(); ++group) {
    for (const std::string& name : own[group]) {
      size_t there = 0;
      int64_t end = static_cast<int64_t>(saved[0].size());
      while (*place >= end) end += static_cast<int64_t>(saved[++there].size());
      if (there != group) {
        return c10::str("param_names of param_groups[", group, "] must have '", name,
                        "', got it in param_groups[", there, "]");
      }
      ++place;
    }
  }
  return {};
}

}  // namespace amp_ext
