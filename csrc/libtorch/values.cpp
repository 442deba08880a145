// Reads and prints values of state dicts.
#include "libtorch/values.h"

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

std::string repr_within(const c10::IValue& value, int depth);

template <typename Values>
std::string repr_of_all(const Values& values, const char* open, const char* close, int depth) {
  constexpr int kDeepest = 3;  // a list may lie in itself
  std::string text = open;
  if (depth == kDeepest) return text + "..." + close;
  for (const c10::IValue& value : values) {
    if (text.size() > 1) text += ", ";
    text += repr_within(value, depth + 1);
  }
  return text + close;
}

std::string repr_within(const c10::IValue& value, int depth) {
  if (value.isNone()) return "None";
  if (value.isBool()) return value.toBool() ? "True" : "False";
  if (value.isInt()) return std::to_string(value.toInt());
  if (value.isDouble()) return repr_of_double(value.toDouble());
  if (value.isString()) return "'" + value.toStringRef() + "'";
  if (value.isList()) return repr_of_all(value.toListRef(), "[", "]", depth);
  if (value.isTuple()) {
    const auto& elements = value.toTupleRef().elements();
    return repr_of_all(elements, "(", elements.size() == 1 ? ",)" : ")", depth);
  }
  return "a " + type_name(value);
}

// `around` are the dicts, lists and tuples in which the value lies.
void check_nesting_within(const std::string& operation, const std::string& name,
                          const c10::IValue& value, std::vector<const c10::IValue*>& around) {
  constexpr size_t kMost = 500;
  if (!value.isGenericDict() && !value.isList() && !value.isTuple()) return;
  TORCH_CHECK(around.size() < kMost, operation, ": dicts, lists and tuples must lie in at most ",
              kMost, " others, got one that lies in more");
  for (const c10::IValue* const outer : around) {
    TORCH_CHECK(!value.is(*outer), operation, ": ", name,
                " must not be one of those in which it "
                "lies, got a ",
                type_name(value), " that contains itself");
  }
  around.push_back(&value);
  const auto check = [&](const std::string& key, const c10::IValue& inner) {
    check_nesting_within(operation, name + "[" + key + "]", inner, around);
  };
  if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) check(repr(entry.key()), entry.value());
  } else {
    const at::ArrayRef<c10::IValue> elements =
        value.isList() ? value.toListRef() : value.toTupleRef().elements().asArrayRef();
    for (size_t i = 0; i < elements.size(); ++i) check(std::to_string(i), elements[i]);
  }
  around.pop_back();
}

}  // namespace

std::string repr(const c10::IValue& value) { return repr_within(value, 0); }

void check_nesting(const std::string& operation, const std::string& name,
                   const c10::IValue& value) {
  std::vector<const c10::IValue*> around;
  check_nesting_within(operation, name, value, around);
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
