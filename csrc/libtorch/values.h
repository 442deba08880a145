// State dicts as values of dicts, lists, tuples, numbers and tensors, and how Python writes them.
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

// What a dict has under a name; none where it is not there.
std::optional<c10::IValue> find(const Dict& dict, const std::string& name);

// As Python's repr, in which "..." stands for lists and tuples that lie deep in others, and the
// name of its type.
std::string repr(const c10::IValue& value);
std::string type_name(const c10::IValue& value);

// Throws where a dict, list or tuple lies in itself, or in too many others. `operation` and `name`
// say what the value is in errors.
void check_nesting(const std::string& operation, const std::string& name, const c10::IValue& value);

// The keys of a dict as a list: the first eight, or all.
std::string first_keys(const Dict& dict);
std::string all_keys(const Dict& dict);

// Sizes as Python's tuple: "(2, 3)".
std::string shape_of(const at::Tensor& tensor);
std::string repr_of_sizes(at::IntArrayRef sizes);

// Whether it is a number, a bool or not, and which.
bool is_number(const c10::IValue& value);
double number_in(const c10::IValue& value);

}  // namespace amp_ext
