// Reads the options of a Python parameter group for the checks and the steps of an optimizer.
#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "optimizer/optimizer_description.h"

namespace amp_ext::python {

namespace py = pybind11;

// The description of an optimizer, with its names as Python objects.
struct BoundDescription {
  explicit BoundDescription(const optim::OptimizerDescription& described) : description(described) {
    for (const auto& option : description.options) {
      names.push_back(PyUnicode_InternFromString(option.name));
    }
  }

  const optim::OptimizerDescription& description;
  std::vector<PyObject*> names;  // option names, interned and never freed, for fast dict lookups
  PyObject* params = PyUnicode_InternFromString("params");
  std::string operation;  // name of the operation over lists: "adam_"
  py::tuple fields;       // names of the hyperparameters
  py::tuple buffers;      // a BufferDescription for each buffer
  py::tuple options;      // an OptionDescription for each option
};

// Reads the options from the dict of a group. Throws if an option is missing or has a wrong type.
// Callers then call check_options, whose errors name the option.
class DictOptions final : public optim::GroupOptions {
 public:
  // `shown` and `where` are needed only for checks: `shown` converts a value to text, and `where`
  // begins errors, with "%s" for the option ("Adam: %s of group 0"). If only `shown` is given, as
  // for check_as_torch, a learning rate in a tensor is read too. `group` must outlive this object.
  DictOptions(const BoundDescription& named, const py::dict& group, py::object shown = {},
              std::string where = {})
      : GroupOptions(named.description),
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
    const bool reads_lr = shown_ && where_.empty();
    switch (option.type) {
      case optim::OptionType::kFlag:
        return py::cast<bool>(given) ? 1.0 : 0.0;
      case optim::OptionType::kLimit:
        return given.is_none() ? std::numeric_limits<double>::infinity() : number_in(given);
      case optim::OptionType::kNumbers:
        if (py::len(given) != option.fields.size()) throw py::value_error(option.name);
        return number_in(py::reinterpret_borrow<py::sequence>(given)[index]);
      default:
        return number_in(given, option.type != optim::OptionType::kLearningRate || reads_lr);
    }
  }

  optim::MasterWeights master_weights() const override {
    const py::handle given = value(description().option("master_weights"));
    if (py::isinstance<py::str>(given)) return py::cast<std::string>(given);
    return py::cast<bool>(given);
  }

  optim::StateDType state_dtype() const override {
    const py::handle given = value(description().option("state_dtype"));
    if (given.is_none()) return std::nullopt;
    if (THPDtype_Check(given.ptr())) return py::cast<at::ScalarType>(given);
    return std::string(py::str(given));
  }

  std::optional<std::string> rounding() const override {
    const py::handle given = value(description().option("rounding"));
    return given.is_none() ? std::nullopt : std::optional<std::string>(py::str(given));
  }

  std::optional<double> max_grad_norm() const override {
    const py::handle given = value(description().option("max_grad_norm"));
    return given.is_none() ? std::nullopt : std::optional<double>(number_in(given));
  }

  OptionalTensor lr_tensor() const override {
    const py::handle given = value(description().option("lr"));
    if (PyFloat_Check(given.ptr()) || !THPVariable_Check(given.ptr())) return std::nullopt;
    return THPVariable_Unpack(given.ptr());
  }

  bool has_float16_params() const override {
    for (const py::handle param : group_["params"]) {
      if (!THPVariable_Check(param.ptr())) continue;
      if (THPVariable_Unpack(param.ptr()).scalar_type() == at::kHalf) return true;
    }
    return false;
  }

  std::string name_of(const optim::OptionDescription& option) const override {
    std::string name = where_;
    return name.replace(name.find("%s"), 2, option.name);
  }

  std::string shown(const optim::OptionDescription& option,
                    std::optional<size_t> index) const override {
    py::object given = py::reinterpret_borrow<py::object>(value(option));
    if (index.has_value() && option.type == optim::OptionType::kNumbers)
      given = given[py::int_(*index)];
    return py::cast<std::string>(shown_ ? shown_(given) : py::repr(given));
  }

 private:
  // Returns a number, or the element of a tensor; NaN if the tensor has several elements. Returns 0
  // for a tensor if `is_read` is false, because reading it would wait for the device.
  static double number_in(py::handle value, bool is_read = true) {
    const bool may_be_tensor = !PyFloat_Check(value.ptr()) && !PyLong_Check(value.ptr());
    if (may_be_tensor && THPVariable_Check(value.ptr())) {
      if (THPVariable_Unpack(value.ptr()).numel() != 1) return std::nan("");
      if (!is_read) return 0.0;
    }
    return py::cast<double>(value);
  }

  const BoundDescription& named_;
  const py::dict& group_;
  py::object shown_;
  std::string where_;
};

}  // namespace amp_ext::python
