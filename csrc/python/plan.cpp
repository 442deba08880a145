// The plan of a Python optimizer, which notices changes of param_groups and state.
#include "optimizer/plan.h"

#include <amp_ext/options.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "optimizer/session.h"
#include "python/module.h"
#include "python/plan_of_python.h"

namespace amp_ext::python {

void put_states(const py::object& states, const py::dict& made) {
  struct Change {
    py::dict there, wanted, before;  // `before` keeps replaced values alive during the writes
  };
  std::vector<Change> changes;
  py::dict added;
  for (const auto& [param, state] : made) {
    const py::object there = states.attr("get")(param);
    if (PyDict_CheckExact(there.ptr())) {
      changes.push_back({there, py::reinterpret_borrow<py::dict>(state), there.attr("copy")()});
    } else {
      added[param] = state;
    }
  }
  states.attr("update")(added);
  for (const auto& [there, wanted, before] : changes) {
    PyDict_Update(there.ptr(), wanted.ptr());
    for (const auto& [key, value] : before) {
      if (PyDict_Contains(wanted.ptr(), key.ptr()) == 0) PyDict_DelItem(there.ptr(), key.ptr());
    }
  }
}

std::vector<ParamState> states_of_step(const py::object& initialized, py::set& keys) {
  using Tensors = std::tuple<py::list, TensorList, OptionalTensor, OptionalTensor, OptionalTensor>;
  std::vector<ParamState> states;
  for (const py::handle each : initialized) {
    auto [own_keys, buffers, master, step, exponents] = py::cast<Tensors>(each);
    for (const py::handle key : own_keys) keys.add(key);
    const auto of = [](OptionalTensor& tensor) { return std::move(tensor).value_or(at::Tensor()); };
    states.push_back({std::move(buffers), of(master), of(step), of(exponents)});
  }
  return states;
}

std::vector<ParamTable::Param> params_in(const std::vector<ParamRow>& rows) {
  std::vector<ParamTable::Param> params;
  for (const auto& [group, index, param, partition, global_offset] : rows) {
    params.push_back({group, index, param.ptr(), partition, global_offset});
  }
  return params;
}

namespace {

// An operation of a Python optimizer, which passes parameters and shards to its plan. `is_current`
// is false if the groups can't be read, or if parameters, options or states differ from the
// registered ones. Python then registers the parameters again.
struct Operation : Session {
  PlanOfPython& mine;
  py::object states;
  bool is_current = false;

  Operation(PlanOfPython& mine, py::handle step_plan, py::handle optimizer, const char* operation)
      : Session(mine, operation), mine(mine), states(py::getattr(optimizer, mine.names.state)) {
    try {
      const std::vector<py::dict> groups = mine.read_groups(*this, optimizer);
      is_current = mine.states.unchanged_in(states) &&
                   take_params([&](const auto& take) { return for_each_param(groups, take); });
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;  // KeyboardInterrupt, for example
    } catch (const std::exception&) {
    }
    if (!is_current || !plan.params().has_dtensors()) return;
    for (const py::handle shard : step_plan.attr("shards")()) {
      auto [index, param, grad] = py::cast<std::tuple<int64_t, at::Tensor, OptionalTensor>>(shard);
      plan.params().set_shard(index, std::move(param), std::move(grad).value_or(at::Tensor()));
    }
  }

  // Returns false if a call of `take` does, or if "params" is an iterator or a set: reading these
  // again may give other parameters.
  template <typename Take>
  bool for_each_param(const std::vector<py::dict>& groups, const Take& take) const {
    for (size_t group = 0; group < groups.size(); ++group) {
      PyObject* const registered =
          PyDict_GetItemWithError(groups[group].ptr(), mine.described->params);
      if (registered == nullptr || PyIter_Check(registered) || PyAnySet_Check(registered))
        return false;
      const auto params = py::reinterpret_steal<py::object>(
          PySequence_Fast(registered, "params must be an iterable of tensors"));
      if (!params) throw py::error_already_set();
      PyObject** const items = PySequence_Fast_ITEMS(params.ptr());
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params.ptr()); ++i) {
        const auto param = [&]() -> const at::Tensor& { return THPVariable_Unpack(items[i]); };
        if (!take(static_cast<int64_t>(group), items[i], param)) return false;
      }
    }
    return true;
  }
};

// The states of a step in the dicts of a Python optimizer. keep() is the last Python code of a
// step: it stores the states, marks the scaler's context as used, and releases the GIL.
class StatesOfPython : public StateStore {
 public:
  StatesOfPython(const Operation& operation, py::handle step_plan, py::handle amp_context)
      : operation_(operation), plan_(step_plan), amp_context_(amp_context) {}

  std::vector<ParamState> make(const std::vector<int64_t>& indices) override {
    const py::tuple found = plan_.attr("make_states")(operation_.states, indices);
    made_ = found[0];
    return states_of_step(found[1], operation_.mine.state_keys);
  }

  void keep() override {
    PlanOfPython& mine = operation_.mine;
    if (made_) {
      put_states(operation_.states, made_);
      mine.states.keep(operation_.states, mine.state_keys);
    }
    set_is_used(Py_True);
    release_.emplace();
  }

  // Acquires the GIL after a failed step. If it updated no parameter, the context is unused again.
  void take_back() {
    if (!release_.has_value()) return;  // the step was refused before keep()
    release_.reset();
    if (operation_.mine.failure().empty()) set_is_used(Py_False);
  }

 private:
  void set_is_used(py::handle is_used) {
    py::setattr(amp_context_, operation_.mine.names.is_used, is_used);
  }

  const Operation& operation_;
  py::handle plan_, amp_context_;
  py::object made_;
  std::optional<py::gil_scoped_release> release_;
};

// Registers the parameters of an optimizer again.
void register_params(PlanOfPython& mine, const py::object& optimizer, const char* operation,
                     const std::vector<ParamRow>& rows) {
  Session session(mine, operation);
  mine.read_groups(session, optimizer);
  mine.states.clear();
  mine.state_keys = py::set();
  mine.register_params(std::move(session.specs), params_in(rows));
}

// Runs a scan without the GIL. Returns for each device and partition found_inf, first_nonfinite,
// the number of the partition, and sum_of_squares.
template <typename Scan>
py::object run_scan(Operation& operation, const Scan& scan) {
  if (!operation.is_current) return operation.mine.answer(PlanAnswer::kRegisterParams);
  std::vector<GradScanResult> results;
  {
    const py::gil_scoped_release release;
    results = scan(operation.plan, operation.clipping);
  }
  py::list found;
  for (const GradScanResult& result : results) {
    found.append(py::make_tuple(result.found_inf, result.first_nonfinite, result.partition,
                                if_defined(result.sum_of_squares)));
  }
  return found;
}

py::object scan(PlanOfPython& mine, const py::object& step_plan, const py::object& optimizer,
                const at::Tensor& found_inf, const OptionalTensor& grad_scale, bool sums_squares) {
  Operation operation(mine, step_plan, optimizer, "scan_gradients");
  return run_scan(operation, [&](Plan& plan, const optim::ClippingOptions& clipping) {
    return plan.scan(found_inf, grad_scale, clipping, sums_squares);
  });
}

py::object gradients_were_written(PlanOfPython& mine, const py::object& step_plan,
                                  const py::object& optimizer) {
  const Operation operation(mine, step_plan, optimizer, "step");
  if (!operation.is_current) return mine.answer(PlanAnswer::kRegisterParams);
  return py::bool_(mine.params().gradients_were_written());
}

// The chunks of a Python object with a list `ends` and the methods begin() and end().
class ChunksOfPython : public StepChunks {
 public:
  explicit ChunksOfPython(py::object chunks)
      : StepChunks(py::cast<std::vector<size_t>>(chunks.attr("ends"))),
        chunks_(std::move(chunks)) {}

  void begin(size_t chunk) override {
    const py::gil_scoped_acquire acquire;
    chunks_.attr("begin")(chunk);
  }
  void end(size_t chunk) override {
    const py::gil_scoped_acquire acquire;
    chunks_.attr("end")(chunk);
  }

 private:
  const py::object chunks_;
};

py::object step(PlanOfPython& mine, const py::object& step_plan, const py::object& optimizer,
                const py::object& amp_context, OptionalTensor grad_scale, OptionalTensor found_inf,
                OptionalTensor sum_of_squares, const OptionalTensor& max_norm, bool is_of_scaler,
                const py::object& chunks) {
  Operation operation(mine, step_plan, optimizer, "step");
  if (!operation.is_current) return mine.answer(PlanAnswer::kRegisterParams);
  const NormSource norm =
      mine.norm_source(operation.clipping.max_grad_norm, sum_of_squares.has_value());
  if (norm == NormSource::kAllRanks) return mine.answer(PlanAnswer::kNeedsGlobalNorm);
  GradientOptions options = operation.gradient_options(std::move(grad_scale), std::move(found_inf),
                                                       std::move(sum_of_squares));
  py::object done = mine.answer(PlanAnswer::kDone);  // here, because a step releases the GIL
  std::optional<ChunksOfPython> order;  // destroyed after the store, which acquires the GIL
  if (!chunks.is_none()) order.emplace(chunks);
  StatesOfPython store(operation, step_plan, amp_context);
  try {
    mine.step(operation.table, std::move(options), store, is_of_scaler, max_norm,
              order.has_value() ? &*order : nullptr);
  } catch (...) {
    store.take_back();
    throw;
  }
  return done;
}

// Returns (found_inf, sum_of_squares) for the step of another plan.
py::object prepare_copied_step(PlanOfPython& mine, const py::object& step_plan,
                               const py::object& optimizer, OptionalTensor grad_scale,
                               OptionalTensor found_inf, OptionalTensor sum_of_squares,
                               bool is_of_scaler) {
  Operation operation(mine, step_plan, optimizer, "step");
  if (!operation.is_current) return mine.answer(PlanAnswer::kRegisterParams);
  GradientOptions options = operation.gradient_options(std::move(grad_scale), std::move(found_inf),
                                                       std::move(sum_of_squares));
  Plan::CopiedStepInputs inputs;
  {
    const py::gil_scoped_release release;
    inputs = mine.prepare_copied_step(operation.table, std::move(options), is_of_scaler);
  }
  return py::make_tuple(inputs.found_inf, inputs.sum_of_squares);
}

py::object remember_copied_step(PlanOfPython& mine, const py::object& step_plan,
                                const py::object& optimizer, bool had_scale) {
  const Operation operation(mine, step_plan, optimizer, "step");
  if (!operation.is_current) return mine.answer(PlanAnswer::kRegisterParams);
  mine.remember_copied_step(had_scale);
  return mine.answer(PlanAnswer::kDone);
}

template <at::Tensor (StepOutputs::*output)() const>
OptionalTensor output_of(const PlanOfPython& plan) {
  return if_defined((plan.outputs().*output)());
}

}  // namespace

void define_plan(py::module_& module) {
  const std::vector<std::string> answers{"REGISTER_PARAMS", "NEEDS_GLOBAL_NORM", "DONE"};
  module.attr("PlanAnswer") = py::module_::import("enum").attr("Enum")("PlanAnswer", answers);
  module.def("put_states", &put_states, py::arg("states"), py::arg("made"));
  py::class_<PlanOfPython> plan(module, "Plan");
  plan.attr("_answers") = py::tuple(module.attr("PlanAnswer"));
  plan.def(py::init<std::string, std::shared_ptr<BoundDescription>, const PlanOfPython*,
                    std::string>(),
           py::arg("optimizer"), py::arg("description"), py::arg("before"), py::arg("failure"))
      .def("forget", &PlanOfPython::forget)
      .def("register_params", &register_params, py::arg("optimizer"), py::arg("operation"),
           py::arg("rows"))
      .def("scan", &scan, py::arg("step_plan"), py::arg("optimizer"), py::arg("found_inf"),
           py::arg("grad_scale"), py::arg("sums_squares"))
      .def("gradients_were_written", &gradients_were_written, py::arg("step_plan"),
           py::arg("optimizer"))
      .def("step", &step, py::arg("step_plan"), py::arg("optimizer"), py::arg("amp_context"),
           py::arg("grad_scale"), py::arg("found_inf"), py::arg("sum_of_squares"),
           py::arg("max_norm"), py::arg("is_of_scaler"), py::arg("chunks") = py::none())
      .def("prepare_copied_step", &prepare_copied_step, py::arg("step_plan"), py::arg("optimizer"),
           py::arg("grad_scale"), py::arg("found_inf"), py::arg("sum_of_squares"),
           py::arg("is_of_scaler"))
      .def("remember_copied_step", &remember_copied_step, py::arg("step_plan"),
           py::arg("optimizer"), py::arg("had_scale"))
      .def(
          "forget_writes",
          [](PlanOfPython& self, const std::unordered_map<uintptr_t, int64_t>& writes) {
            self.params().forget_writes(writes);
          },
          py::arg("writes"))
      .def("track_step_applied", [](PlanOfPython& self) { self.outputs().track_step_applied(); })
      .def_property_readonly("grad_norm", &output_of<&StepOutputs::grad_norm>)
      .def_property_readonly("step_applied", &output_of<&StepOutputs::step_applied>)
      .def_property_readonly("failure", &PlanOfPython::failure)
      .def_property_readonly("note_of_failure", &PlanOfPython::note_of_failure);
}

}  // namespace amp_ext::python
