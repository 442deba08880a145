// The options of a group of Python, as the description of an optimizer asks for them.
#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "optimizer/kind.h"

namespace amp_ext::python {

namespace py = pybind11;

// The options of a kind by their names, interned for good: a dict finds them at once.
struct NamedOptions {
  explicit NamedOptions(const optim::Kind& described) : kind(described) {
    for (const auto& option : kind.options) {
      names.push_back(PyUnicode_InternFromString(option.name));
    }
  }

  const optim::Kind& kind;
  std::vector<PyObject*> names;
};

// Throws what Python does where an option is missing or no number at all: whoever calls it checks
// the types then, and says what is wrong.
class DictOptions final : public optim::GroupOptions {
 public:
  // For checks with what makes the text of a value, and with what errors say, "%s" for the name of
  // an option; without the latter for those of torch, which read a learning rate that is a tensor.
  DictOptions(const NamedOptions& named, const py::dict& group, py::object shown = {},
              std::string where = {})
      : GroupOptions(named.kind),
        named_(named),
        group_(group),
        shown_(std::move(shown)),
        where_(std::move(where)) {}

  py::handle value(const optim::OptionDescription& option) const {
    PyObject* const value = PyDict_GetItemWithError(group_.ptr(), named_.names[option.index]);
    if (value == nullptr) throw py::key_error(option.name);
    return value;
  }

  double number(const optim::OptionDescription& option, size_t index) const override {
    const py::handle given = value(option);
    switch (option.kind) {
      case optim::OptionKind::kFlag:
        return is_true(given) ? 1.0 : 0.0;
      case optim::OptionKind::kNumbers:
        return number_in(element_of(given, index, option.fields.size()));
      case optim::OptionKind::kLimit:
        return given.is_none() ? std::numeric_limits<double>::infinity() : number_in(given);
      default:
        return number_in(given, option.kind != optim::OptionKind::kLearningRate || are_defaults());
    }
  }

  optim::MasterWeights master_weights() const override {
    const py::handle given = value(kind().option("master_weights"));
    if (py::isinstance<py::str>(given)) return py::cast<std::string>(given);
    return PyObject_IsTrue(given.ptr()) != 0;
  }

  optim::StateDType state_dtype() const override {
    const py::handle given = value(kind().option("state_dtype"));
    if (given.is_none()) return std::nullopt;
    if (THPDtype_Check(given.ptr())) return py::cast<at::ScalarType>(given);
    return text_of(given);
  }

  std::optional<std::string> rounding() const override {
    const py::handle given = value(kind().option("rounding"));
    return given.is_none() ? std::nullopt : std::optional<std::string>(text_of(given));
  }

  bool has_float16_params() const override {
    for (const py::handle param : group_["params"]) {
      if (!THPVariable_Check(param.ptr())) continue;
      if (THPVariable_Unpack(param.ptr()).scalar_type() == at::kHalf) return true;
    }
    return false;
  }

  bool takes_tensors() const override { return true; }

  std::string name_of(const optim::OptionDescription& option) const override {
    std::string name = where_;
    return name.replace(name.find("%s"), 2, option.name);
  }

  std::string shown(const optim::OptionDescription& option,
                    std::optional<size_t> index) const override {
    const py::handle given = value(option);
    const bool is_one = index.has_value() && option.kind == optim::OptionKind::kNumbers;
    return py::cast<std::string>(
        shown_(is_one ? element_of(given, *index, option.fields.size()) : given));
  }

 private:
  static constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

  bool are_defaults() const { return shown_ && where_.empty(); }

  // A tensor of several elements is no number; one that is not to be read may be any.
  static double number_in(py::handle value, bool is_read = true) {
    const bool may_be_tensor = !PyFloat_Check(value.ptr()) && !PyLong_Check(value.ptr());
    if (may_be_tensor && THPVariable_Check(value.ptr())) {
      const bool is_number = THPVariable_Unpack(value.ptr()).numel() == 1;
      if (!is_number || !is_read) return is_number ? 0.0 : kNaN;
    }
    const double number = PyFloat_AsDouble(value.ptr());
    if (number == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return number;
  }

  static bool is_true(py::handle value) {
    py::detail::make_caster<bool> caster;
    if (!caster.load(value, /*convert=*/true)) throw py::type_error("a flag must be a bool");
    return static_cast<bool>(caster);
  }

  static py::object element_of(py::handle numbers, size_t index, size_t count) {
    const auto list = py::reinterpret_steal<py::object>(
        PySequence_Fast(numbers.ptr(), "an option must be a tuple of numbers"));
    if (!list) throw py::error_already_set();
    if (PySequence_Fast_GET_SIZE(list.ptr()) != static_cast<Py_ssize_t>(count)) {
      throw py::value_error("an option must have another number of numbers");
    }
    return py::reinterpret_borrow<py::object>(PySequence_Fast_ITEMS(list.ptr())[index]);
  }

  // Of what is no text, one that is none of the forms.
  static std::string text_of(py::handle value) {
    return py::isinstance<py::str>(value) ? py::cast<std::string>(value)
                                          : std::string(py::repr(value));
  }

  const NamedOptions& named_;
  const py::dict& group_;
  py::object shown_;
  std::string where_;
};

}  // namespace amp_ext::python
