// Binds the hooks that step the parameters of a Python optimizer during the backward pass.
#include "optimizer/gradient_release.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/module.h"
#include "python/plan_of_python.h"

namespace amp_ext::python {

struct ReleaseOfPython : GradientRelease {
  ReleaseOfPython(std::string optimizer, py::handle scaler)
      : GradientRelease(std::move(optimizer), identity_of(scaler)) {}

  static const void* identity_of(py::handle scaler) {
    return scaler.is_none() ? nullptr : scaler.ptr();
  }

  std::vector<StateSnapshot> states;  // [params], as the last hook of each parameter left them
  std::mutex offloading;              // held by the hook that copies its gradient to the host
};

namespace {

// The states of the parameter that a hook steps. keep() is the last Python code before the step.
class StatesOfHook : public StateStore {
 public:
  StatesOfHook(ReleaseOfPython& mine, int64_t index, const py::object& owner,
               const py::object& optimizer, const py::object& states, py::handle param)
      : mine_(mine), index_(index), owner_(owner), states_(states), param_(param) {}

  std::vector<ParamState> make(const std::vector<int64_t>&) override {
    const py::tuple found = owner_.attr("_init_state")(index_);
    made_ = found[0];
    return states_of_step(found[1], keys_);
  }

  void keep() override {
    if (made_) {
      put_states(states_, made_);
      mine_.states[index_].keep(states_, keys_, param_);
    }
    without_gil_.emplace();
  }

 private:
  ReleaseOfPython& mine_;
  const int64_t index_;
  const py::object &owner_, &states_;
  const py::handle param_;
  py::set keys_;
  py::object made_;
  std::optional<py::gil_scoped_release> without_gil_;
};

// Calls `work` while no other hook does. An interrupt can't leave the mutex locked, as it can leave
// a lock of Python.
void in_turn(ReleaseOfPython& mine, const py::object& work) {
  std::unique_lock<std::mutex> lock(mine.offloading, std::defer_lock);
  {
    const py::gil_scoped_release release;
    lock.lock();
  }
  work();
}

// Takes the lock without the GIL, which the thread that holds the lock may need. Begins an
// iteration unless hooks have begun it. `owner` is the GradientRelease of Python.
void open(std::optional<GradientRelease::Lock>& lock, ReleaseOfPython& mine, PlanOfPython& plan,
          const py::object& owner) {
  {
    const py::gil_scoped_release release;
    lock.emplace(mine, plan);
  }
  if (!mine.is_open()) owner.attr("_begin")();
}

// The hook of one parameter.
void on_gradient(ReleaseOfPython& mine, PlanOfPython& plan, const py::object& owner,
                 const py::object& optimizer, const py::object& param) {
  std::optional<GradientRelease::Lock> lock;
  open(lock, mine, plan, owner);
  const std::optional<int64_t> index = mine.find(param.ptr());
  if (!index.has_value()) return;  // the parameter has left the groups
  const py::object states = py::getattr(optimizer, plan.names.state);
  if (!mine.states[*index].unchanged_in(states, param)) mine.forget(*index);
  std::optional<GradientRelease::Shard> shard;
  if (mine.registered(*index).partition.has_value()) {
    auto [local, grad] =
        py::cast<std::pair<at::Tensor, OptionalTensor>>(owner.attr("_shard")(param));
    shard = {std::move(local), std::move(grad).value_or(at::Tensor())};
  }
  StatesOfHook store(mine, *index, owner, optimizer, states, param);
  mine.step(*index, THPVariable_Unpack(param.ptr()), shard, plan, store);
}

ReleaseOptions options_of(const PlanOfPython& plan, const py::object& optimizer) {
  ReleaseOptions options;
  try {
    plan.read_groups(options, optimizer);
  } catch (const std::exception&) {
    optimizer.attr("_check_groups")();  // names the wrong option, and replaces a torch.dtype
    options = {};
    plan.read_groups(options, optimizer);
  }
  return options;
}

// Begins an iteration, from open(). Hooks step the parameters of `stepped`, which are those of
// `optimizer` or copies of them. `grad_scale` is `scale` on their device.
void begin(ReleaseOfPython& mine, const PlanOfPython& plan, const py::object& optimizer,
           const py::object& stepped, OptionalTensor scale, OptionalTensor grad_scale) {
  ReleaseOptions options = options_of(plan, optimizer);
  if (!stepped.is(optimizer)) static_cast<GroupSettings&>(options) = options_of(plan, stepped);
  options.scale = std::move(scale);
  options.grad_scale = std::move(grad_scale);
  mine.begin(std::move(options), plan);
}

template <auto method>
auto with_plan(ReleaseOfPython& self, PlanOfPython& plan) {
  return (self.*method)(plan);
}

}  // namespace

void define_gradient_release(py::module_& module) {
  // Operations that take the lock run without the GIL, which the thread that holds the lock may
  // need.
  using release_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<ReleaseOfPython>(module, "GradientRelease")
      .def(py::init<std::string, py::handle>(), py::arg("optimizer"), py::arg("scaler"))
      .def("on_gradient", &on_gradient, py::arg("plan"), py::arg("owner"), py::arg("optimizer"),
           py::arg("param"))
      .def(
          "register_params",
          [](ReleaseOfPython& self, const std::vector<ParamRow>& rows) {
            self.register_params(params_in(rows));
            self.states.assign(rows.size(), {});
          },
          py::arg("rows"))
      .def("in_turn", &in_turn, py::arg("work"))
      .def(
          "open",
          [](ReleaseOfPython& self, PlanOfPython& plan, const py::object& owner) {
            std::optional<GradientRelease::Lock> lock;
            open(lock, self, plan, owner);
          },
          py::arg("plan"), py::arg("owner"))
      .def("begin", &begin, py::arg("plan"), py::arg("optimizer"), py::arg("stepped"),
           py::arg("scale"), py::arg("grad_scale"))
      .def(
          "check_options",
          [](const ReleaseOfPython& self, const PlanOfPython& plan, const py::object& optimizer) {
            self.check_options(options_of(plan, optimizer), plan);
          },
          py::arg("plan"), py::arg("optimizer"))
      .def(
          "collect",
          [](ReleaseOfPython& self, PlanOfPython& plan) {
            const GradientRelease::HookResults found = self.collect(plan);
            return std::make_tuple(found.skipped, found.first_nonfinites);
          },
          release_gil(), py::arg("plan"))
      .def("complete", &with_plan<&GradientRelease::complete>, release_gil(), py::arg("plan"))
      .def("give_up", &with_plan<&GradientRelease::give_up>, release_gil(), py::arg("plan"))
      .def(
          "forget",
          [](ReleaseOfPython& self, PlanOfPython& plan) {
            for (StateSnapshot& state : self.states) state.clear();
            const py::gil_scoped_release release;
            self.forget(plan);
          },
          py::arg("plan"))
      .def(
          "check_scaler",
          [](const ReleaseOfPython& self, py::handle scaler, const std::string& method) {
            self.check_scaler(ReleaseOfPython::identity_of(scaler), method);
          },
          py::arg("scaler"), py::arg("method"))
      .def("check_caller_of_step", &ReleaseOfPython::check_caller_of_step, py::arg("has_scale"),
           py::arg("has_scan"))
      .def_static("throw_needs_gradients", &GradientRelease::throw_needs_gradients,
                  py::arg("operation"));
}

}  // namespace amp_ext::python
