// What the parameters of optimizers keep in their states.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "optimizer/masters.h"
#include "optimizer/moments.h"
#include "python/module.h"
#include "python/options_by_name.h"

namespace amp_ext::python {

namespace {

// The option of a group: a text, or a flag, which any object is.
optim::MasterWeights master_weights_of(const py::object& option) {
  if (py::isinstance<py::str>(option)) return py::cast<std::string>(option);
  return py::cast<bool>(option);
}

std::optional<std::string> name_or_none(const std::string& name) {
  return name.empty() ? std::nullopt : std::optional<std::string>(name);
}

std::optional<std::string> key_of_master(const py::object& master_weights, at::ScalarType param) {
  return name_or_none(optim::key_of_master(master_weights_of(master_weights), param));
}

// The option of a group as it is stored.
optim::StateDType state_dtype_of(const std::optional<std::string>& option) {
  return option.has_value() ? optim::StateDType(*option) : optim::StateDType();
}

// Which keys a mapping has with another value than None.
optim::HasKey keys_in(const py::object& mapping) {
  return [&mapping](const std::string& key) { return !mapping.attr("get")(key).is_none(); };
}

// Name and role of each buffer, as a class of hyperparameters gives them.
using Buffers = std::vector<std::pair<std::string, std::string>>;

// Their names stay those of `buffers`.
std::vector<BufferDescription> described(const Buffers& buffers) {
  std::vector<BufferDescription> found;
  for (const auto& [name, role] : buffers) found.push_back({name.c_str(), role_named(role)});
  return found;
}

void define_moments(py::module_& module) {
  using optim::MomentFormat;
  using release_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<MomentFormat>(module, "MomentFormat")
      .def_readonly("name", &MomentFormat::name)
      .def_readonly("dtype", &MomentFormat::dtype)
      .def_property_readonly("code",
                             [](const MomentFormat& self) { return name_or_none(self.code); })
      .def_property_readonly("key", &MomentFormat::key)
      .def_property_readonly(
          "exponents_key",
          [](const MomentFormat& self) { return name_or_none(self.exponents_key()); })
      .def_property_readonly("keys", &MomentFormat::keys);
  module.def(
      "has_moment",
      [](const py::object& state, const std::string& name) {
        return optim::has_moment(keys_in(state), name);
      },
      py::arg("state"), py::arg("name"));
  module.def(
      "is_key_of_moment",
      [](const py::object& key, const std::vector<std::string>& names) {
        return py::isinstance<py::str>(key) &&
               optim::is_key_of_moment(py::cast<std::string>(key), names);
      },
      py::arg("key"), py::arg("names"));
  module.def("has_blocks", &optim::has_blocks, py::arg("param"), py::arg("has_whole_rows"));
  module.def(
      "formats_of",
      [](const std::optional<std::string>& state_dtype, const Buffers& buffers,
         const at::Tensor& param, bool has_whole_rows) {
        return optim::formats_of(state_dtype_of(state_dtype), described(buffers), param,
                                 has_whole_rows);
      },
      py::arg("state_dtype"), py::arg("buffers"), py::arg("param"), py::arg("has_whole_rows"));
  module.def(
      "whole_moments",
      [](const optim::Moments& moments, const Buffers& buffers) {
        return optim::whole_moments(moments, described(buffers));
      },
      release_gil(), py::arg("moments"), py::arg("buffers"));
  module.def("made_moments", &optim::made_moments, release_gil(), py::arg("moments"),
             py::arg("formats"), py::arg("param"));
  module.def(
      "saved_codes",
      [](const py::object& saved, const std::string& name) {
        return optim::saved_codes(keys_in(saved), name);
      },
      py::arg("saved"), py::arg("name"));
  module.def("check_code", &optim::check_code, py::arg("saved"), py::arg("format"), py::arg("key"),
             py::arg("param"), py::arg("where"));
  module.def("empty_code", &optim::empty_code, py::arg("format"), py::arg("key"), py::arg("param"));
}

}  // namespace

void define_states(py::module_& module) {
  define_moments(module);
  using release_gil = py::call_guard<py::gil_scoped_release>;
  module.attr("MASTER_KEYS") = py::tuple(py::cast(optim::kMasterKeys));
  module.def("key_of_master", &key_of_master, py::arg("master_weights"), py::arg("dtype"));
  module.def("made_master", &optim::made_master, release_gil(), py::arg("param"),
             py::arg("masters"), py::arg("key"));
  module.def("whole_master", &optim::whole_master, release_gil(), py::arg("param"),
             py::arg("masters"));
  module.def("loaded_master", &optim::loaded_master, release_gil(), py::arg("param"),
             py::arg("masters"), py::arg("key"));
  module.def("is_lower_part", &optim::is_lower_part, py::arg("key"), py::arg("low"),
             py::arg("param"), py::arg("where"));
  module.def("empty_lower_part", &optim::empty_lower_part, py::arg("key"), py::arg("param"));
}

}  // namespace amp_ext::python
