// Reads the values of state dicts and prints them in errors.
#include "libtorch/values.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace amp_ext {

Dict new_dict() { return Dict(c10::AnyType::get(), c10::AnyType::get()); }

c10::impl::GenericList new_list() { return c10::impl::GenericList(c10::AnyType::get()); }

std::optional<c10::IValue> find(const Dict& dict, const std::string& name) {
  for (const auto& entry : dict) {
    if (entry.key().isString() && entry.key().toStringRef() == name) return entry.value();
  }
  return {};
}

at::ArrayRef<c10::IValue> elements_of(const c10::IValue& value) {
  if (value.isList()) return value.toListRef();
  return value.isTuple() ? value.toTupleRef().elements().asArrayRef() : at::ArrayRef<c10::IValue>();
}

namespace {

// Returns a number, None or a string (in quotes) as text, and any other value as its type's name.
std::string shown_alone(const c10::IValue& value) {
  if (value.isString()) return "'" + value.toStringRef() + "'";
  return value.isNone() || is_number(value) ? c10::str(value) : value.tagKind();
}

}  // namespace

std::string shown(const c10::IValue& value) {
  constexpr size_t kMost = 30;
  if (!value.isList() && !value.isTuple()) return shown_alone(value);
  const auto elements = elements_of(value);
  std::vector<std::string> texts;
  for (const c10::IValue& element : elements.slice(0, std::min(elements.size(), kMost))) {
    texts.push_back(shown_alone(element));
  }
  if (elements.size() > kMost) texts.push_back("...");
  return c10::str("[", c10::Join(", ", texts), "]");
}

std::string shown_keys(const Dict& dict) {
  auto keys = new_list();
  for (const auto& entry : dict) keys.push_back(entry.key());
  return shown(keys);
}

Dict dict_of(const std::string& operation, const c10::IValue& state_dict) {
  TORCH_CHECK(state_dict.isGenericDict(), operation, ": state_dict must be a dict, got ",
              shown(state_dict));
  return state_dict.toGenericDict();
}

c10::IValue entry_of(const std::string& operation, const Dict& state_dict,
                     const std::string& name) {
  const auto entry = find(state_dict, name);
  TORCH_CHECK(entry.has_value(), operation, ": state_dict must have '", name, "', got ",
              shown_keys(state_dict));
  return *entry;
}

bool is_number(const c10::IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool();
}

double number_in(const c10::IValue& value) {
  return value.isBool() ? (value.toBool() ? 1.0 : 0.0) : value.toScalar().toDouble();
}

}  // namespace amp_ext
