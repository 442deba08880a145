// Binds the hooks that step the parameters of a Python optimizer during the backward pass.
#include "optimizer/gradient_release.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/module.h"
#include "python/plan_of_python.h"

namespace amp_ext::python {

// The state of one parameter as its last hook left it, to detect tensors that a user has replaced.
struct SeenState {
  py::object dict;
  std::vector<std::pair<py::object, py::object>> tensors;  // by key

  void see(const py::object& states, py::handle param, const py::set& keys) {
    dict = states.attr("get")(param);
    tensors.clear();
    if (!PyDict_Check(dict.ptr())) return;
    for (const auto& [key, tensor] : py::reinterpret_borrow<py::dict>(dict)) {
      if (!keys.contains(key)) continue;
      tensors.emplace_back(py::reinterpret_borrow<py::object>(key),
                           py::reinterpret_borrow<py::object>(tensor));
    }
  }

  bool is_unchanged_in(const py::object& states, py::handle param) const {
    if (!PyDict_Check(states.ptr()) || !dict) return false;
    if (PyDict_GetItem(states.ptr(), param.ptr()) != dict.ptr()) return false;
    for (const auto& [key, tensor] : tensors) {
      if (PyDict_GetItem(dict.ptr(), key.ptr()) != tensor.ptr()) return false;
    }
    return true;
  }
};

struct ReleaseOfPython {
  explicit ReleaseOfPython(std::string optimizer) : release(std::move(optimizer)) {}

  GradientRelease release;
  std::vector<SeenState> states;  // [params]
  Names names;
};

namespace {

using Stage = GradientRelease::Stage;

// Takes the lock without the GIL, which the thread that holds the lock may need.
std::unique_ptr<GradientRelease::Lock> lock_of(ReleaseOfPython& mine, PlanOfPython& plan) {
  const py::gil_scoped_release release;
  return std::make_unique<GradientRelease::Lock>(mine.release, plan);
}

// The states of the parameter that a hook steps. keep() is the last Python code before the step.
class StatesOfHook : public HookStore {
 public:
  StatesOfHook(ReleaseOfPython& mine, int64_t index, const py::object& owner,
               const py::object& states, py::handle param)
      : mine_(mine), index_(index), owner_(owner), states_(states), param_(param) {}

  std::vector<ParamState> make(const std::vector<int64_t>&) override {
    const py::tuple found = owner_.attr("_init_state")(index_);
    made_ = found[0];
    return states_of_step(found[1], keys_);
  }

  void keep() override {
    if (made_) {
      put_states(states_, made_);
      mine_.states[index_].see(states_, param_, keys_);
    }
    without_gil_.emplace();
  }

  void warn_of_write() override { owner_.attr("_warn_of_write")(index_); }

 private:
  ReleaseOfPython& mine_;
  const int64_t index_;
  const py::object& owner_;
  const py::object& states_;
  const py::handle param_;
  py::set keys_;
  py::dict made_{py::reinterpret_steal<py::dict>(py::handle())};
  std::optional<py::gil_scoped_release> without_gil_;
};

// Begins an iteration unless hooks have begun it, for a hook whose step runs in another thread.
void open(ReleaseOfPython& mine, PlanOfPython& plan, const py::object& owner) {
  const auto lock = lock_of(mine, plan);
  if (mine.release.stage() != Stage::kOpen) owner.attr("_begin")();
}

// The hook of one parameter. `owner` is the GradientRelease of Python.
void on_gradient(ReleaseOfPython& mine, PlanOfPython& plan, const py::object& owner,
                 const py::object& optimizer, const py::object& param) {
  const auto lock = lock_of(mine, plan);
  if (mine.release.stage() != Stage::kOpen) owner.attr("_begin")();
  const std::optional<int64_t> index = mine.release.find(param.ptr());
  if (!index.has_value()) return;  // the parameter has left the groups
  const py::object states = py::getattr(optimizer, mine.names.state);
  if (!mine.states[*index].is_unchanged_in(states, param)) mine.release.forget(*index);
  std::optional<GradientRelease::Shard> shard;
  if (mine.release.registered(*index).partition.has_value()) {
    auto [local, grad] =
        py::cast<std::pair<at::Tensor, OptionalTensor>>(owner.attr("_shard")(param));
    shard = {std::move(local), std::move(grad).value_or(at::Tensor())};
  }
  StatesOfHook store(mine, *index, owner, states, param);
  mine.release.step(*index, THPVariable_Unpack(param.ptr()), shard, plan, store);
}

// Begins an iteration, from a hook.
void begin(ReleaseOfPython& mine, PlanOfPython& plan, const py::object& optimizer,
           const OptionalTensor& grad_scale) {
  GradientRelease::Inputs inputs;
  plan.read_groups(inputs.groups, optimizer);
  mine.release.check_options(inputs.groups, plan);
  inputs.grad_scale = grad_scale.value_or(at::Tensor());
  inputs.tracks_grad_norms = plan.outputs().tracks_grad_norms();
  mine.release.begin(std::move(inputs));
}

// Returns the flags and the first_nonfinite of each device, and the sums of squares.
py::tuple collect(ReleaseOfPython& mine, PlanOfPython& plan) {
  const auto lock = lock_of(mine, plan);
  const GradientRelease::Found found = mine.release.collect();
  return py::make_tuple(found.skipped, found.first_nonfinites, if_defined(found.sum_of_squares),
                        if_defined(found.squares_of_params));
}

}  // namespace

void define_gradient_release(py::module_& module) {
  py::class_<ReleaseOfPython>(module, "GradientRelease")
      .def(py::init<std::string>(), py::arg("optimizer"))
      .def("on_gradient", &on_gradient, py::arg("plan"), py::arg("owner"), py::arg("optimizer"),
           py::arg("param"))
      .def(
          "register_params",
          [](ReleaseOfPython& self, const std::vector<ParamRow>& rows) {
            self.release.register_params(params_in(rows));
            self.states.assign(rows.size(), {});
          },
          py::arg("rows"))
      .def("open", &open, py::arg("plan"), py::arg("owner"))
      .def("begin", &begin, py::arg("plan"), py::arg("optimizer"), py::arg("grad_scale"))
      .def("collect", &collect, py::arg("plan"))
      .def(
          "set_step_applied",
          [](ReleaseOfPython& self, PlanOfPython& plan) { self.release.set_step_applied(plan); },
          py::arg("plan"))
      .def(
          "end",
          [](ReleaseOfPython& self, PlanOfPython& plan) {
            const auto lock = lock_of(self, plan);
            self.release.end();
          },
          py::arg("plan"))
      .def(
          "forget",
          [](ReleaseOfPython& self, PlanOfPython& plan) {
            const auto lock = lock_of(self, plan);
            self.release.forget();
            for (SeenState& state : self.states) state = {};
          },
          py::arg("plan"))
      .def_property_readonly(
          "is_open",
          [](const ReleaseOfPython& self) { return self.release.stage() == Stage::kOpen; })
      .def_property_readonly(
          "is_collected",
          [](const ReleaseOfPython& self) { return self.release.stage() == Stage::kCollected; })
      .def(
          "give_up",
          [](ReleaseOfPython& self, PlanOfPython& plan) {
            const auto lock = lock_of(self, plan);
            return self.release.give_up();
          },
          py::arg("plan"))
      .def(
          "check_options",
          [](const ReleaseOfPython& self, const PlanOfPython& plan, const py::object& optimizer) {
            GroupSettings groups;
            plan.read_groups(groups, optimizer);
            self.release.check_options(groups, plan);
          },
          py::arg("plan"), py::arg("optimizer"))
      .def_static(
          "warning_of_write",
          [](const std::string& optimizer, const std::string& param) {
            return warning_of_write(optimizer, param);
          },
          py::arg("optimizer"), py::arg("param"))
      .def(
          "throw_changed",
          [](const ReleaseOfPython& self, const std::string& option, int64_t group) {
            self.release.throw_changed(option, group);
          },
          py::arg("option"), py::arg("group"))
      .def_static("throw_wrong_scaler", &GradientRelease::throw_wrong_scaler, py::arg("operation"))
      .def_static("throw_without_scaler", &GradientRelease::throw_without_scaler,
                  py::arg("operation"))
      .def_static("throw_needs_gradients", &GradientRelease::throw_needs_gradients,
                  py::arg("operation"));
}

}  // namespace amp_ext::python
