// Reads values of options from Python objects, without exceptions. A value that can't be used is
// left to Python's checks, which have better errors.
#pragma once

#include <amp_ext/options.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <limits>

namespace amp_ext::python {

namespace py = pybind11;

// Clears an error of Python, and returns false. Does not clear interrupts.
inline bool clear_error() {
  if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw py::error_already_set();
  PyErr_Clear();
  return false;
}

// Sets `number` and returns true if the value is a number, or a tensor of one, and not NaN.
inline bool number_in(PyObject* value, double& number) {
  if (value == nullptr) return false;
  if (PyFloat_Check(value)) {
    number = PyFloat_AS_DOUBLE(value);
  } else if (PyNumber_Check(value) != 0) {
    number = PyFloat_AsDouble(value);
    if (PyErr_Occurred() != nullptr) return clear_error();
  } else {
    return false;
  }
  return !std::isnan(number);
}

// Sets `limit`, which is infinite for None.
inline bool limit_in(PyObject* value, double& limit) {
  limit = std::numeric_limits<double>::infinity();
  if (value == nullptr || value == Py_None) return value != nullptr;
  return !THPVariable_Check(value) && number_in(value, limit) && limit >= 0.0;
}

inline bool flag_in(PyObject* value, bool& flag) {
  if (value == Py_True || value == Py_False || value == Py_None) {
    flag = value == Py_True;
    return true;
  }
  double number = 0.0;
  const bool is_number = value != nullptr && !THPVariable_Check(value) && number_in(value, number);
  flag = number != 0.0;
  return is_number;
}

inline bool is_text(PyObject* value, const char* text) {
  return PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, text) == 0;
}

// Reads the options of Muon that concern matrices from a dict. Returns false if an option is
// missing, has a wrong type or is out of range.
bool read_muon_options(PyObject* dict, MuonOptions& options);

}  // namespace amp_ext::python
