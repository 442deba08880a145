// What the parameters of optimizers keep in their states.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>

#include "optimizer/masters.h"
#include "python/module.h"

namespace amp_ext::python {

namespace {

// The option of a group: a text, or a flag, which any object is.
optim::MasterWeights master_weights_of(const py::object& option) {
  if (py::isinstance<py::str>(option)) return py::cast<std::string>(option);
  return py::cast<bool>(option);
}

std::optional<std::string> key_of_master(const py::object& master_weights, at::ScalarType param) {
  const std::string key = optim::key_of_master(master_weights_of(master_weights), param);
  return key.empty() ? std::nullopt : std::optional<std::string>(key);
}

}  // namespace

void define_states(py::module_& module) {
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
