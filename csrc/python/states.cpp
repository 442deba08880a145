// Binds the states of parameters, and the checks and conversions of saved states.
#include "optimizer/states.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "optimizer/saved_groups.h"
#include "optimizer/saved_states.h"
#include "python/group_options.h"
#include "python/module.h"
#include "python/state_snapshot.h"

namespace amp_ext::python {

namespace {

using optim::ParamRef;
using optim::StateMap;
using optim::StateSpec;

std::optional<std::string> state_dtype_name(const StateSpec& spec) {
  const auto& value = spec.state_dtype.value();
  if (const auto* const name = std::get_if<std::string>(&value)) return *name;
  if (!spec.state_dtype.has_value()) return std::nullopt;
  return spec.state_dtype == at::kFloat ? "float32" : "bfloat16";
}

py::dict dict_of(const StateMap& state) {
  py::dict dict;
  for (const auto& [key, tensor] : state) dict[py::str(key)] = tensor;
  return dict;
}

// Runs a function without the GIL.
template <typename Function>
auto without_gil(const Function& function) {
  const py::gil_scoped_release release;
  return function();
}

// Converts a numpy number, or a numpy array with one element, to a Python number. Returns all other
// values as they are.
py::object plain_number(py::handle value) {
  auto same = py::reinterpret_borrow<py::object>(value);
  if (!py::hasattr(value, "item") || !py::hasattr(value, "size")) return same;
  const py::object size = value.attr("size");
  const bool has_one = PyLong_Check(size.ptr()) && PyLong_AsLong(size.ptr()) == 1;
  return has_one ? py::object(value.attr("item")()) : same;
}

// Converts an entry of a saved state. The number in a tensor is read only if `is_step` is true.
optim::SavedValue saved_value(py::handle value, bool is_step) {
  optim::SavedValue saved;
  saved.type = py::cast<std::string>(py::type::of(value).attr("__name__"));
  py::object number;
  if (THPVariable_Check(value.ptr())) {
    saved.tensor = THPVariable_Unpack(value.ptr());
    if (!is_step || saved.tensor.numel() != 1) return saved;
    number = value.attr("detach")().attr("item")();
  } else {
    number = plain_number(value);
  }
  saved.text = py::repr(number);
  if (PyFloat_Check(number.ptr()) || PyLong_Check(number.ptr())) {
    saved.number = PyFloat_AsDouble(number.ptr());
    if (PyErr_Occurred() != nullptr) {  // the int is larger than any double
      PyErr_Clear();
      saved.number = std::numeric_limits<double>::infinity();
    }
  }
  return saved;
}

optim::SavedState saved_state(const StateSpec& spec, const py::dict& dict) {
  optim::SavedState saved;
  saved.keys = py::repr(py::list(dict));
  for (const auto& [name, value] : dict) {
    if (value.is_none() || !PyUnicode_Check(name.ptr())) continue;
    const auto key = py::cast<std::string>(name);
    if (spec.is_key(key)) saved.values.emplace_back(key, saved_value(value, key == "step"));
  }
  return saved;
}

optim::Keys texts_in(const py::handle& keys) {
  optim::Keys texts;
  for (const py::handle key : keys) {
    if (PyUnicode_Check(key.ptr())) texts.push_back(py::cast<std::string>(key));
  }
  return texts;
}

optim::SavedGroup saved_group(const py::dict& group) {
  optim::SavedGroup saved;
  saved.keys = texts_in(group);
  saved.shown_keys = py::repr(py::list(group));
  saved.has_step = group.contains("step");
  for (const std::string& name : optim::saved_flags()) {
    const py::str key(name);
    if (!group.contains(key)) continue;
    const py::object value = group[key];
    saved.flags[name] = {PyObject_IsTrue(value.ptr()) == 1, py::str(value)};
  }
  return saved;
}

void check_saved_groups(std::string operation, std::string name, const BoundDescription& bound,
                        optim::Keys own_keys, std::vector<bool> decouples,
                        const std::vector<py::dict>& groups, const std::vector<py::dict>& states) {
  std::vector<optim::SavedGroup> saved;
  for (const py::dict& group : groups) saved.push_back(saved_group(group));
  optim::Keys state_keys;
  for (const py::dict& state : states) {
    for (std::string& key : texts_in(state)) state_keys.push_back(std::move(key));
  }
  const optim::Loader loader = {std::move(operation), std::move(name), &bound.description,
                                std::move(own_keys), std::move(decouples)};
  optim::check_saved_groups(loader, saved, state_keys);
}

}  // namespace

void define_states(py::module_& module) {
  module.attr("MASTER_KEYS") = py::tuple(py::cast(optim::kMasterKeys));
  module.def("check_saved_groups", &check_saved_groups, py::arg("operation"), py::arg("name"),
             py::arg("description"), py::arg("own_keys"), py::arg("decouples"), py::arg("groups"),
             py::arg("states"));
  module.def("check_lengths", &optim::check_lengths, py::arg("own"), py::arg("saved"));
  module.def(
      "counts_for_states",
      [](const py::dict& group) { return saved_group(group).counts_for_states(); },
      py::arg("group"));
  module.def("fits_blocks", &optim::fits_blocks, py::arg("param"), py::arg("shards_whole_rows"));
  module.def("fp32_master", &optim::fp32_master, py::call_guard<py::gil_scoped_release>(),
             py::arg("param"), py::arg("masters"));
  py::class_<ParamRef>(module, "ParamRef")
      .def(py::init<at::Tensor, at::Tensor, size_t, size_t, bool>(), py::arg("unsharded"),
           py::arg("local"), py::arg("group"), py::arg("index"), py::arg("shards_whole_rows"));
  py::class_<StateSpec>(module, "StateSpec")
      .def_readonly("optimizer", &StateSpec::optimizer)
      .def_property_readonly("names", &StateSpec::names)
      .def_readonly("keeps_step", &StateSpec::keeps_step)
      .def_property_readonly("master_weights",
                             [](const StateSpec& self) { return self.master_weights.value(); })
      .def_property_readonly("state_dtype", &state_dtype_name)
      .def(
          "is_key",
          [](const StateSpec& self, const py::object& key) {
            return py::isinstance<py::str>(key) && self.is_key(py::cast<std::string>(key));
          },
          py::arg("key"))
      .def("master_key", &StateSpec::master_key, py::arg("param"))
      .def("has_codes", &StateSpec::has_codes, py::arg("param"))
      .def(
          "complete_state",
          [](const StateSpec& self, const ParamRef& param, const py::dict& state) {
            StateMap made = state_of(state);
            made = without_gil([&] { return optim::complete_state(self, param, std::move(made)); });
            return dict_of(made);
          },
          py::arg("param"), py::arg("state"))
      .def(
          "check_is_stepped",
          [](const StateSpec& self, const ParamRef& param, const std::string& operation) {
            optim::check_is_stepped(self, param, operation);
          },
          py::arg("param"), py::arg("operation"))
      .def(
          "float32_state",
          [](const StateSpec& self, const ParamRef& param, const py::dict& state) {
            const StateMap now = state_of(state);
            return dict_of(without_gil([&] { return optim::float32_state(self, param, now); }));
          },
          py::arg("param"), py::arg("state"))
      .def(
          "layout_under",
          [](const StateSpec& self, const std::string& key, const at::Tensor& param) {
            return optim::layout_under(self, key, param);
          },
          py::arg("key"), py::arg("param"))
      .def(
          "check_saved_state",
          [](const StateSpec& self, const ParamRef& param, const py::dict& saved,
             const std::string& operation) {
            optim::check_saved_state(self, param, saved_state(self, saved), operation);
          },
          py::arg("param"), py::arg("saved"), py::arg("operation"))
      .def(
          "blocks_in",
          [](const StateSpec& self, const py::dict& saved) {
            py::list found;
            for (const auto& format : optim::blocks_in(self, saved_state(self, saved))) {
              found.append(py::make_tuple(format.name, optim::name_of(format.code), format.keys()));
            }
            return found;
          },
          py::arg("saved"))
      .def(
          "loaded_state",
          [](const StateSpec& self, const ParamRef& param, const py::dict& saved) {
            const optim::SavedState found = saved_state(self, saved);
            return dict_of(without_gil([&] { return optim::loaded_state(self, param, found); }));
          },
          py::arg("param"), py::arg("saved"));
}

}  // namespace amp_ext::python
