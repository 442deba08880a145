// Defines amp_ext._C, the extension module that Python loads.
#include "python/module.h"

#include <ATen/record_function.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>

#include "devices/dispatch.h"
#include "elements/numeric.h"
#include "files/atomic_file.h"
#include "optimizer/optimizer_description.h"

PYBIND11_MODULE(_C, module) {
  using namespace amp_ext;
  namespace py = pybind11;
  module.doc() = "Kernels of amp_ext; documented in amp_ext.ops.";
  python::define_scaler(module);
  python::define_lists(module);
  python::define_plan(module);
  python::define_gradient_release(module);
  module.def("cpu_isa", &cpu_isa);
  module.def("configured_options", &optim::configured_options);
  module.def("names_of_all_buffers", &optim::names_of_all_buffers);
  module.def("names_of_all_options", &optim::names_of_all_options);
  module.def("names_of_refused_flags", &optim::names_of_refused_flags);
  module.def(
      "open_atomic",
      [](const std::string& path) {
        AtomicFile file;
        {
          const py::gil_scoped_release release;
          file = open_atomic(path);
        }
        // Returns paths as bytes, since they may not be valid UTF-8.
        return std::make_tuple(py::bytes(file.refusal), file.error, file.descriptor,
                               py::bytes(file.temporary), py::bytes(file.target));
      },
      py::arg("path"));
  module.def("is_profiled", &at::hasCallbacks);
  module.def(
      "complement_of_power",
      [](double base, double exponent) { return complement_of_power(base, exponent); },
      py::arg("base"), py::arg("exponent"));
}
