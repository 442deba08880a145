// Helpers for state dicts, which are IValues of dicts, lists, tuples, numbers and tensors.
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

namespace amp_ext {

using Dict = c10::impl::GenericDict;

// Return an empty dict and an empty list, with keys and elements of any type.
Dict new_dict();
c10::impl::GenericList new_list();

// dict_of returns a state dict as a Dict, and throws if it is no dict. entry_of returns its entry
// `name`, and throws if there is none.
Dict dict_of(const std::string& operation, const c10::IValue& state_dict);
c10::IValue entry_of(const std::string& operation, const Dict& state_dict, const std::string& name);

// Returns the value under a key that is a string; nullopt if the dict lacks it.
std::optional<c10::IValue> find(const Dict& dict, const std::string& name);

// Returns the elements of a list or a tuple, and an empty array for any other value.
at::ArrayRef<c10::IValue> elements_of(const c10::IValue& value);

// Returns a value as errors print it: numbers, strings and the first thirty elements of a list as
// they are, and anything else, which may be large, by the name of its type.
std::string shown(const c10::IValue& value);

// Returns the first thirty keys of a dict as errors print them.
std::string shown_keys(const Dict& dict);

// is_number is true for a number or a bool; number_in returns either as a double (1 for true).
bool is_number(const c10::IValue& value);
double number_in(const c10::IValue& value);

}  // namespace amp_ext
