// Helpers for state dicts, which are IValues of dicts, lists, tuples, numbers and tensors.
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

namespace amp_ext {

using Dict = c10::impl::GenericDict;

// new_dict returns an empty dict, new_list an empty list. Keys and elements may have any type.
Dict new_dict();
c10::impl::GenericList new_list();

// dict_of returns a state dict as a Dict, and throws if the value is not a dict. entry_of returns
// the entry `name` of a state dict, and throws if this entry is missing.
Dict dict_of(const std::string& operation, const c10::IValue& state_dict);
c10::IValue entry_of(const std::string& operation, const Dict& state_dict, const std::string& name);

// Returns the value under a key that is a string; nullopt if the dict lacks it.
std::optional<c10::IValue> find(const Dict& dict, const std::string& name);

// Returns the elements of a list or a tuple, and an empty array for any other value.
at::ArrayRef<c10::IValue> elements_of(const c10::IValue& value);

// Returns a value as errors print it: the text of a number or a string, or the first thirty
// elements of a list. Any other value may be large, so errors print only the name of its type.
std::string shown(const c10::IValue& value);

// Returns the first thirty keys of a dict as errors print them.
std::string shown_keys(const Dict& dict);

// is_number is true for a number or bool. number_in returns a number or bool (1 if true) as double.
bool is_number(const c10::IValue& value);
double number_in(const c10::IValue& value);

}  // namespace amp_ext
