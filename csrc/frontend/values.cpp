// Reads and prints values of state dicts.
#include "frontend/values.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>

#include <charconv>

namespace amp_ext {

Dict new_dict() { return Dict(c10::AnyType::get(), c10::AnyType::get()); }

c10::impl::GenericList new_list() { return c10::impl::GenericList(c10::AnyType::get()); }

std::optional<c10::IValue> find(const Dict& dict, const std::string& name) {
  for (const auto& entry : dict) {
    if (entry.key().isString() && entry.key().toStringRef() == name) return entry.value();
  }
  return {};
}

namespace {

std::string repr_of_double(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  std::string digits(text, end);
  if (digits.find_first_of(".en") == std::string::npos) digits += ".0";  // also inf and nan
  return digits;
}

template <typename Values>
std::string repr_of_all(const Values& values, const char* open, const char* close) {
  std::string text = open;
  for (const c10::IValue& value : values) {
    if (text.size() > 1) text += ", ";
    text += repr(value);
  }
  return text + close;
}

}  // namespace

std::string repr(const c10::IValue& value) {
  if (value.isNone()) return "None";
  if (value.isBool()) return value.toBool() ? "True" : "False";
  if (value.isInt()) return std::to_string(value.toInt());
  if (value.isDouble()) return repr_of_double(value.toDouble());
  if (value.isString()) return "'" + value.toStringRef() + "'";
  if (value.isList()) return repr_of_all(value.toListRef(), "[", "]");
  if (value.isTuple()) {
    const auto& elements = value.toTupleRef().elements();
    return repr_of_all(elements, "(", elements.size() == 1 ? ",)" : ")");
  }
  return "a " + type_name(value);
}

std::string type_name(const c10::IValue& value) {
  if (value.isNone()) return "NoneType";
  if (value.isBool()) return "bool";
  if (value.isInt()) return "int";
  if (value.isDouble()) return "float";
  if (value.isString()) return "str";
  if (value.isList()) return "list";
  if (value.isTuple()) return "tuple";
  if (value.isGenericDict()) return "dict";
  if (value.isTensor()) return "Tensor";
  return value.tagKind();
}

std::string first_keys(const Dict& dict) {
  constexpr size_t kMost = 8;
  auto keys = new_list();
  for (const auto& entry : dict) {
    if (keys.size() == kMost) {
      keys.push_back("...");
      break;
    }
    keys.push_back(entry.key());
  }
  return repr(keys);
}

std::string all_keys(const Dict& dict) {
  auto keys = new_list();
  for (const auto& entry : dict) keys.push_back(entry.key());
  return repr(keys);
}

std::string shape_of(const at::Tensor& tensor) { return repr_of_sizes(tensor.sizes()); }

std::string repr_of_sizes(at::IntArrayRef sizes) {
  const std::vector<c10::IValue> values(sizes.begin(), sizes.end());
  return repr(c10::ivalue::Tuple::create(values));
}

bool is_number(const c10::IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool();
}

double number_in(const c10::IValue& value) {
  return value.isBool() ? (value.toBool() ? 1.0 : 0.0) : value.toScalar().toDouble();
}

}  // namespace amp_ext
