// The tensors in `state` of an optimizer of Python, so that one that was replaced is noticed.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

#include "optimizer/states.h"

namespace amp_ext {

// Those of one parameter, of a dict that has nothing else.
inline optim::StateMap state_of(const pybind11::dict& tensors) {
  optim::StateMap state;
  for (const auto& [key, tensor] : tensors) {
    state.emplace_back(pybind11::cast<std::string>(key), pybind11::cast<at::Tensor>(tensor));
  }
  return state;
}

// Those that a plan updates. Each step compares them with what `state` has by then: a walk through
// its dicts, in their order, that looks up nothing and calls nothing.
class StateSnapshot {
 public:
  // Keeps what `states`, a dict of each parameter's dict, has under these keys. What is no dict
  // can't be walked, and counts as replaced.
  void keep(const pybind11::object& states, const pybind11::set& keys) {
    entries_.clear();
    is_dict_ = PyDict_Check(states.ptr());
    visit(states, [&](PyObject* param, PyObject* key, PyObject* value) {
      if (!PyUnicode_CheckExact(key) || !keys.contains(pybind11::handle(key))) return;
      entries_.push_back({param, pybind11::reinterpret_borrow<pybind11::object>(key),
                          pybind11::reinterpret_borrow<pybind11::object>(value)});
    });
  }

  void clear() {
    const std::vector<Entry> dropped =
        std::exchange(entries_, {});  // what ends with them may call this
    is_dict_ = true;
  }

  // Whether they are still there, each under its key and for its parameter.
  bool unchanged_in(const pybind11::object& states) const {
    auto next = entries_.begin();
    visit(states, [&](PyObject* param, PyObject* key, PyObject* value) {
      if (next != entries_.end() && next->param == param && next->key.ptr() == key &&
          next->value.ptr() == value) {
        ++next;
      }
    });
    return is_dict_ && next == entries_.end();
  }

 private:
  struct Entry {
    const PyObject* param;  // only where it is: it belongs to others
    pybind11::object key;
    pybind11::object value;
  };

  template <typename Visit>
  static void visit(const pybind11::object& states, const Visit& visit_entry) {
    if (!PyDict_Check(states.ptr())) return;
    PyObject *param, *state, *key, *value;
    for (Py_ssize_t place = 0; PyDict_Next(states.ptr(), &place, &param, &state);) {
      if (!PyDict_Check(state)) continue;
      for (Py_ssize_t inner = 0; PyDict_Next(state, &inner, &key, &value);) {
        visit_entry(param, key, value);
      }
    }
  }

  std::vector<Entry> entries_;
  bool is_dict_ = true;
};

}  // namespace amp_ext
