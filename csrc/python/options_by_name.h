// Sets the fields of C++ structs of options from Python values, by name.
#pragma once

#include <amp_ext/options.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace amp_ext::python {

namespace py = pybind11;

// A field of a struct of options. `set` converts the Python value directly, which takes a tenth of
// the time of setting an attribute of a bound object.
template <typename Options>
struct Field {
  PyObject* name;  // interned, never freed
  std::function<void(Options&, py::handle)> set;
};

template <typename Options>
using Fields = std::vector<Field<Options>>;

// Adds a field to `fields`. `set` writes the field from a Python value converted to `Value`.
template <typename Value, typename Options, typename Set>
void define_field(Fields<Options>& fields, const char* name, const Set& set) {
  fields.push_back({PyUnicode_InternFromString(name), [name, set](Options& self, py::handle value) {
                      py::detail::make_caster<Value> caster;
                      if (!caster.load(value, /*convert=*/true)) {
                        throw py::type_error(
                            c10::str(name, " can't be ", std::string(py::repr(value))));
                      }
                      set(self, py::detail::cast_op<Value&&>(std::move(caster)));
                    }});
}

template <typename Options, typename Struct, typename Value>
void define_field(Fields<Options>& fields, const char* name, Value Struct::* member) {
  define_field<Value>(fields, name,
                      [member](Options& self, Value value) { self.*member = std::move(value); });
}

template <typename Options>
void set_fields(const Fields<Options>& fields, Options& options, const py::kwargs& values) {
  for (const auto& [name, value] : values) {
    PyObject* const wanted = name.ptr();
    const auto field = std::find_if(fields.begin(), fields.end(), [&](const auto& each) {
      return each.name == wanted || PyUnicode_Compare(each.name, wanted) == 0;
    });
    if (field == fields.end())
      throw py::attribute_error(py::str("there is no option {!r}").format(name));
    field->set(options, value);
  }
}

// Throws if a hyperparameter is NaN, which would make parameters NaN, or if clip_value is negative.
template <typename Hyperparameters>
void check_numbers(const std::string& operation, const Group<Hyperparameters>& options) {
  const auto check = [&](const char* name, double number) {
    TORCH_CHECK(!std::isnan(number), operation, ": ", name, " must be a number, got nan");
  };
  check("lr", options.lr);
  Hyperparameters::for_each_field(
      [&](const char* name, auto member) { check(name, static_cast<double>(options.*member)); });
  TORCH_CHECK(options.clip_value >= 0.0, operation, ": clip_value must be at least 0, got ",
              options.clip_value);
}

// Returns the fields of the hyperparameters of an optimizer.
template <typename Hyperparameters>
Fields<Group<Hyperparameters>> fields_of() {
  using Options = Group<Hyperparameters>;
  using Lr = std::variant<at::Tensor, double>;  // one argument in Python, two fields in Group
  Fields<Options> fields;
  define_field<Lr>(fields, "lr", [](Options& self, const Lr& lr) {
    const double* const number = std::get_if<double>(&lr);
    self.lr = number != nullptr ? *number : 0.0;
    self.lr_tensor = number != nullptr ? OptionalTensor() : std::get<at::Tensor>(lr);
  });
  define_field<std::optional<double>>(
      fields, "clip_value", [](Options& self, const std::optional<double>& limit) {
        self.clip_value = limit.value_or(CommonHyperparameters().clip_value);
      });
  Hyperparameters::for_each_field(
      [&](const char* name, auto member) { define_field(fields, name, member); });
  return fields;
}

}  // namespace amp_ext::python
