// State dicts as values of dicts, lists, tuples, numbers and tensors, and how errors print them.
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

namespace amp_ext {

using Dict = c10::impl::GenericDict;

// Empty ones, with keys and elements of any type.
Dict new_dict();
c10::impl::GenericList new_list();

// The dict that a state dict is, and an entry that it must have. Throw on behalf of an operation.
Dict dict_of(const std::string& operation, const c10::IValue& state_dict);
c10::IValue entry_of(const std::string& operation, const Dict& state_dict, const std::string& name);

// What a dict has under a name; none where it is not there.
std::optional<c10::IValue> find(const Dict& dict, const std::string& name);

// Those of a list or a tuple; none of anything else.
at::ArrayRef<c10::IValue> elements_of(const c10::IValue& value);

// A number, a text, or a list of the first thirty; of anything else, which may be large, what it
// is.
std::string shown(const c10::IValue& value);

// The keys of a dict, likewise.
std::string shown_keys(const Dict& dict);

// Whether it is a number, a bool or not, and which.
bool is_number(const c10::IValue& value);
double number_in(const c10::IValue& value);

}  // namespace amp_ext
