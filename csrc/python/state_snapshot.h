// A snapshot of the tensors in `optimizer.state`, which detects if a user has replaced a tensor.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

namespace amp_ext {

// The state tensors that a Plan updates, or those of one parameter. Each step compares them with
// `optimizer.state`. The comparison walks through the dicts in order, which is fast because it
// needs no lookups and no calls into Python.
class StateSnapshot {
 public:
  // Stores the tensors under `keys` in `states`, a dict that has a dict of tensors for each
  // parameter. If `states` is not a dict, unchanged_in() returns false. `only` is the parameter
  // whose tensors count; null: all.
  void keep(const pybind11::object& states, const pybind11::set& keys, pybind11::handle only = {}) {
    entries_.clear();
    is_dict_ = PyDict_Check(states.ptr());
    visit(states, only, [&](PyObject* param, PyObject* key, PyObject* value) {
      if (!PyUnicode_CheckExact(key) || !keys.contains(pybind11::handle(key))) return;
      entries_.push_back({param, pybind11::reinterpret_borrow<pybind11::object>(key),
                          pybind11::reinterpret_borrow<pybind11::object>(value)});
    });
  }

  void clear() {
    // Empties entries_ before the objects are freed, since a destructor in Python may call clear().
    const std::vector<Entry> dropped = std::exchange(entries_, {});
    is_dict_ = true;
  }

  // Whether all stored tensors are still in `states`, in order, under their parameters and keys.
  bool unchanged_in(const pybind11::object& states, pybind11::handle only = {}) const {
    auto next = entries_.begin();
    visit(states, only, [&](PyObject* param, PyObject* key, PyObject* value) {
      if (next != entries_.end() && next->param == param && next->key.ptr() == key &&
          next->value.ptr() == value) {
        ++next;
      }
    });
    return is_dict_ && next == entries_.end();
  }

 private:
  struct Entry {
    const PyObject* param;  // compared by address only; not owned
    pybind11::object key;
    pybind11::object value;
  };

  template <typename Visit>
  static void visit(const pybind11::object& states, pybind11::handle only,
                    const Visit& visit_entry) {
    if (!PyDict_Check(states.ptr())) return;
    const auto visit_state = [&](PyObject* param, PyObject* state) {
      if (state == nullptr || !PyDict_Check(state)) return;
      PyObject *key, *value;
      for (Py_ssize_t place = 0; PyDict_Next(state, &place, &key, &value);) {
        visit_entry(param, key, value);
      }
    };
    if (only) return visit_state(only.ptr(), PyDict_GetItem(states.ptr(), only.ptr()));
    PyObject *param, *state;
    for (Py_ssize_t place = 0; PyDict_Next(states.ptr(), &place, &param, &state);) {
      visit_state(param, state);
    }
  }

  std::vector<Entry> entries_;
  bool is_dict_ = true;
};

}  // namespace amp_ext
