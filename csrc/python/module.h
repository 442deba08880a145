// The parts of the module that Python loads. Each adds its classes and functions.
#pragma once

#include <pybind11/pybind11.h>

namespace amp_ext::python {

namespace py = pybind11;

void define_scaler(py::module_& module);
void define_lists(py::module_& module);
void define_guard(py::module_& module);
void define_plan(py::module_& module);
void define_states(py::module_& module);

}  // namespace amp_ext::python
