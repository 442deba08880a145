// The parts of amp_ext._C. Each function adds its classes and functions to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace amp_ext::python {

namespace py = pybind11;

void define_scaler(py::module_& module);
void define_lists(py::module_& module);
void define_stepper(py::module_& module);

}  // namespace amp_ext::python
