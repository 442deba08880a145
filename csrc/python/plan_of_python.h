// The plan of a Python optimizer, and the options that its operations read.
#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "optimizer/plan.h"
#include "optimizer/session.h"
#include "python/group_options.h"
#include "python/module.h"
#include "python/state_snapshot.h"

namespace amp_ext::python {

// Names of attributes, interned and never freed.
struct Names {
  PyObject* param_groups = PyUnicode_InternFromString("param_groups");
  PyObject* state = PyUnicode_InternFromString("state");
  PyObject* is_used = PyUnicode_InternFromString("is_used");
};

// The compiled half of StepPlan, whose Python half handles dicts and DTensors. StepPlan is passed
// to each call: a stored reference would hide a cycle from Python's garbage collector.
class PlanOfPython : public Plan {
 public:
  PlanOfPython(std::string optimizer, std::shared_ptr<BoundDescription> described,
               const PlanOfPython* before, std::string failure)
      : Plan(std::move(optimizer), std::move(failure)), described(std::move(described)) {
    if (before != nullptr) take_over(*before);
  }

  void forget() {
    Plan::forget();
    states.clear();
    state_keys = py::set();
  }

  // Reads the options of the parameter groups, and returns the groups. Throws if an option is
  // invalid or is a torch.dtype, which Python's check of the groups replaces by its name.
  std::vector<py::dict> read_groups(GroupSettings& settings, py::handle optimizer) const {
    std::vector<py::dict> groups;
    for (const py::handle group : py::object(py::getattr(optimizer, names.param_groups)))
      groups.push_back(py::cast<py::dict>(group));
    std::vector<DictOptions> options;
    options.reserve(groups.size());
    std::vector<const optim::GroupOptions*> read;
    for (const py::dict& group : groups) read.push_back(&options.emplace_back(*described, group));
    settings.read(params().operation(), described->description, read);
    const std::optional<double> max_grad_norm = settings.clipping.max_grad_norm;
    if (max_grad_norm.has_value() && !(*max_grad_norm >= 0.0))
      throw py::value_error("max_grad_norm");
    for (size_t i = 0; i < options.size(); ++i) {
      const GroupTable::Entry& entry = settings.table.groups[i];
      if (entry.not_a_number != nullptr) throw py::value_error(entry.not_a_number);
      if (!(entry.common->clip_value >= 0.0)) throw py::value_error("clip_value");
      const py::handle dtype = options[i].value(described->description.option("state_dtype"));
      if (THPDtype_Check(dtype.ptr())) throw py::value_error("state_dtype");
    }
    return groups;
  }

  // Returns the member of PlanAnswer in Python, which callers compare with `is`.
  py::object answer(PlanAnswer answer) const { return answers[static_cast<size_t>(answer)]; }

  const std::shared_ptr<BoundDescription> described;
  const Names names;
  const py::tuple answers{py::type::of<PlanOfPython>().attr("_answers")};
  StateSnapshot states;
  py::set state_keys;  // keys of the state tensors that steps read and write
};

// A parameter to register: the fields of a ParamTable::Param, with the parameter itself as object.
using ParamRow = std::tuple<int64_t, int64_t, py::handle, std::optional<int64_t>, int64_t>;
std::vector<ParamTable::Param> params_in(const std::vector<ParamRow>& rows);

// Puts completed states into optimizer.state. Existing dicts are updated in place, because users
// may hold references to them. Everything that may run Python code comes before the first write.
void put_states(const py::object& states, const py::dict& made);

// Converts the result of init_states(), and adds the keys of the states to `keys`.
std::vector<ParamState> states_of_step(const py::object& initialized, py::set& keys);

}  // namespace amp_ext::python
