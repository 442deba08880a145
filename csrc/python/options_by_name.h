// Structs of options whose fields Python gives by name: as arguments, or as entries of a dict.
#pragma once

#include <amp_ext/options.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "optimizer/kind.h"
#include "optimizer/states.h"
#include "python/group_options.h"

namespace amp_ext::python {

namespace py = pybind11;

// A field of a struct of options that Python sets by name. Straight from the value: an attribute of
// an object of Python takes ten times as long.
template <typename Options>
struct Field {
  PyObject* name;  // interned, for good
  std::function<void(Options&, py::handle)> set;
};

template <typename Options>
using Fields = std::vector<Field<Options>>;

// A class of options for Python. The functions that set fields share the list of them: this module
// has no state of its own.
template <typename Options>
struct OptionsClass {
  py::class_<Options> type;
  std::shared_ptr<Fields<Options>> fields = std::make_shared<Fields<Options>>();
};

// Defines a field, which `set` writes from a value of the given type.
template <typename Value, typename Options, typename Get, typename Set>
void define_field(OptionsClass<Options>& options, const char* name, const Get& get,
                  const Set& set) {
  options.type.def_property(name, get, set);
  options.fields->push_back(
      {PyUnicode_InternFromString(name), [name, set](Options& self, py::handle value) {
         py::detail::make_caster<Value> caster;
         if (!caster.load(value, /*convert=*/true)) {
           throw py::type_error(c10::str(name, " can't be ", std::string(py::repr(value))));
         }
         set(self, py::detail::cast_op<Value&&>(std::move(caster)));
       }});
}

template <typename Options, typename Struct, typename Value>
void define_field(OptionsClass<Options>& options, const char* name, Value Struct::* member) {
  define_field<Value>(
      options, name, [member](const Options& self) { return self.*member; },
      [member](Options& self, Value value) { self.*member = std::move(value); });
}

// Null if there is none of that name.
template <typename Options>
const Field<Options>* find_field(const Fields<Options>& fields, py::handle name) {
  for (const Field<Options>& field : fields) {
    if (field.name == name.ptr() || PyUnicode_Compare(field.name, name.ptr()) == 0) return &field;
  }
  return nullptr;
}

template <typename Options>
void set_fields(const Fields<Options>& fields, Options& options, const py::kwargs& values) {
  for (const auto& [name, value] : values) {
    const Field<Options>* const field = find_field(fields, name);
    if (field == nullptr) {
      const auto type = py::type::of<Options>().attr("__name__");
      throw py::attribute_error(py::str("{!r} object has no attribute {!r}").format(type, name));
    }
    field->set(options, value);
  }
}

// A struct of options, whose fields Python gives by name.
template <typename Options>
OptionsClass<Options> options_class(py::module_& module, const char* name) {
  OptionsClass<Options> made{py::class_<Options>(module, name)};
  made.type.def(py::init([fields = made.fields](const py::kwargs& values) {
    Options options;
    set_fields(*fields, options, values);
    return options;
  }));
  return made;
}

// A learning rate is a number or a tensor to Python, and travels apart here.
template <typename Options>
void define_lr(OptionsClass<Options>& options) {
  using Lr = std::variant<at::Tensor, double>;
  define_field<Lr>(
      options, "lr",
      [](const Options& self) -> Lr {
        if (self.lr_tensor.has_value()) return *self.lr_tensor;
        return self.lr;
      },
      [](Options& self, const Lr& lr) {
        const double* const number = std::get_if<double>(&lr);
        self.lr = number != nullptr ? *number : 0.0;
        self.lr_tensor = number != nullptr ? OptionalTensor() : std::get<at::Tensor>(lr);
      });
}

inline const char* name_of(BufferRole role) {
  switch (role) {
    case BufferRole::kFirstMoment:
      return "first moment";
    case BufferRole::kSecondMoment:
      return "second moment";
    case BufferRole::kMaximum:
      return "maximum";
    case BufferRole::kOther:
      return "other";
  }
  return nullptr;
}

// Throws if a number is NaN, which would leave nothing but NaN, or the limit is none.
template <typename Hyperparameters>
void check_numbers(const std::string& operation, const Group<Hyperparameters>& options) {
  const auto check = [&](const char* name, double value) {
    TORCH_CHECK(!std::isnan(value), operation, ": ", name, " must be a number, got nan");
  };
  check("lr", options.lr);
  Hyperparameters::for_each_field([&](const char* name, auto member) {
    if constexpr (std::is_floating_point_v<std::decay_t<decltype(options.*member)>>) {
      check(name, options.*member);
    }
  });
  TORCH_CHECK(options.clip_value >= 0.0, operation, ": clip_value must be at least 0, got ",
              options.clip_value);
}

// The hyperparameters of an optimizer, taken from a dict that has all options and may have other
// entries too, and what describes it: `operation`, `fields`, `buffers` and `options`,
// and what follows from the options of a group.
template <typename Hyperparameters>
OptionsClass<Group<Hyperparameters>> hyperparameters_class(py::module_& module) {
  using Options = Group<Hyperparameters>;
  OptionsClass<Options> options{py::class_<Options>(module, Hyperparameters::kName)};
  const auto named = std::make_shared<NamedOptions>(optim::kind_of<Hyperparameters>());
  options.type.def(py::init([named](const py::dict& group) {
    const DictOptions given(*named, group);
    Options options;
    optim::set_fields(options, given);
    const py::handle lr = given.value(named->kind.option("lr"));
    if (!PyFloat_Check(lr.ptr()) && THPVariable_Check(lr.ptr()))
      options.lr_tensor = THPVariable_Unpack(lr.ptr());
    check_numbers(Hyperparameters::kName, options);
    return options;
  }));
  define_lr(options);
  define_field<std::optional<double>>(
      options, "clip_value", [](const Options& self) { return self.clip_value; },
      [](Options& self, const std::optional<double>& limit) {
        self.clip_value = limit.value_or(CommonHyperparameters().clip_value);
      });
  Hyperparameters::for_each_field(
      [&](const char* name, auto member) { define_field(options, name, member); });
  py::list fields;
  for (const Field<Options>& field : *options.fields) fields.append(py::handle(field.name));
  py::list buffers;
  for (const BufferDescription& buffer : Hyperparameters::kBuffers) {
    buffers.append(py::make_tuple(buffer.name, name_of(buffer.role)));
  }
  py::list described;
  for (const auto& option : named->kind.options) described.append(option);
  options.type.attr("operation") = Hyperparameters::kOperation;
  options.type.attr("fields") = py::tuple(fields);
  options.type.attr("buffers") = py::tuple(buffers);
  options.type.attr("options") = py::tuple(described);
  options.type.def_static(
      "buffer_count",
      [named](const py::dict& group) {
        const DictOptions options(*named, group);
        return optim::buffer_count(options, options.kind().needs(options));
      },
      py::arg("group"));
  options.type.def_static(
      "check_as_torch",
      [named](const py::dict& defaults, py::object shown) {
        optim::check_as_torch(DictOptions(*named, defaults, std::move(shown)));
      },
      py::arg("defaults"), py::arg("shown"));
  options.type.def_static(
      "check_options",
      [named](const py::dict& group, std::string where, py::object shown) {
        const DictOptions options(*named, group, std::move(shown), std::move(where));
        group.contains("params") ? optim::check_group(options) : optim::check_values(options);
      },
      py::arg("options"), py::arg("where"), py::arg("shown"));
  options.type.def_static(
      "keeps_step",
      [named](const py::dict& group) {
        const DictOptions options(*named, group);
        return options.kind().needs(options).counted_steps();
      },
      py::arg("group"));
  options.type.def_static(
      "kept",
      [named](std::string kind, const py::dict& group) {
        return optim::kept_by(std::move(kind), DictOptions(*named, group));
      },
      py::arg("kind"), py::arg("group"));
  return options;
}

}  // namespace amp_ext::python
