// Defines amp_ext._C, the extension module that Python loads.
#include "python/module.h"

#include <ATen/record_function.h>
#include <pybind11/stl.h>

#include "devices/dispatch.h"
#include "numeric.h"

PYBIND11_MODULE(_C, module) {
  using namespace amp_ext;
  namespace py = pybind11;
  module.doc() = "Kernels of amp_ext; documented in amp_ext.ops.";
  python::define_scaler(module);
  python::define_lists(module);
  python::define_stepper(module);
  module.def("cpu_isa", &cpu_isa);
  module.def("is_profiled", &at::hasCallbacks);
  module.def(
      "complement_of_power",
      [](double base, double exponent) { return complement_of_power(base, exponent); },
      py::arg("base"), py::arg("exponent"));
}
