// The plan of an optimizer, and what tells whether its states are still those of Python.
#include "optimizer/plan.h"

#include <amp_ext/options.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels.h"
#include "python/kept_states.h"
#include "python/module.h"

namespace amp_ext::python {

namespace {

// Hands over the parameters, listed by group, if they are those that the plan was made of. What a
// list can be made of again is a list of parameters: no iterator, and no set.
bool take_params(Plan& plan, const std::vector<py::object>& groups) {
  int64_t index = 0, group_index = 0;
  for (const py::object& group : groups) {
    if (PyIter_Check(group.ptr()) || PyAnySet_Check(group.ptr())) return false;
    const auto params = py::reinterpret_steal<py::object>(
        PySequence_Fast(group.ptr(), "params must be an iterable of tensors"));
    if (!params) throw py::error_already_set();
    PyObject** const items = PySequence_Fast_ITEMS(params.ptr());
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params.ptr()); ++i, ++index) {
      if (!plan.is_param(index, group_index, items[i])) return false;
      plan.take_param(index, THPVariable_Unpack(items[i]));
    }
    ++group_index;
  }
  return index == plan.number_of_params();
}

std::vector<LookResult> check_finite(Plan& plan, const at::Tensor& found_inf,
                                     const OptionalTensor& grad_scale, bool sum_squares,
                                     bool skip_nonfinite) {
  plan.read_grads();
  const py::gil_scoped_release release;
  return plan.check_finite(found_inf, grad_scale, sum_squares, skip_nonfinite);
}

// The states in the dicts of an optimizer, through its `StepPlan` of Python. Keeping them is the
// last that a step does of Python: it says in the hand-over of a scaler that it writes, and lets
// other threads run.
class StatesOfPython : public StateStore {
 public:
  StatesOfPython(py::object plan, py::object states, py::object hand_over)
      : plan_(std::move(plan)), states_(std::move(states)), hand_over_(std::move(hand_over)) {}

  std::vector<ParamState> make(const std::vector<int64_t>& indices) override {
    const py::tuple found = plan_.attr("make_states")(states_, indices);
    made_ = found[0];
    std::vector<ParamState> states;
    for (const py::handle each : found[1]) {
      const auto parts = py::cast<std::tuple<optim::Kept*, optim::ListedParam*, py::dict>>(each);
      states.push_back(optim::state_of_step(*std::get<0>(parts), *std::get<1>(parts),
                                            state_of(std::get<2>(parts))));
    }
    return states;
  }

  void keep() override {
    if (!made_.is_none()) plan_.attr("keep_states")(states_, made_);
    hand_over_.attr("is_spent") = true;
    release_.emplace();
  }

  // Takes Python back after a step that failed.
  void take_back(bool has_written) {
    if (!release_.has_value()) return;  // it was refused
    release_.reset();
    hand_over_.attr("is_spent") = has_written;
  }

 private:
  py::object plan_, states_, hand_over_;
  py::object made_ = py::none();
  std::optional<py::gil_scoped_release> release_;
};

// Defines the step of an optimizer.
template <typename Hyperparameters>
void define_step(py::class_<Plan>& plan_class) {
  plan_class.def(
      "step",
      [](Plan& plan, const std::vector<Group<Hyperparameters>>& groups, OptionalTensor grad_scale,
         OptionalTensor found_inf, std::optional<double> max_grad_norm,
         OptionalTensor sum_of_squares, OptionalTensor grad_norm, bool skip_nonfinite,
         py::object step_plan, py::object states, py::object hand_over) {
        const GradientOptions options{std::move(grad_scale), std::move(found_inf),
                                      max_grad_norm,         std::move(sum_of_squares),
                                      std::move(grad_norm),  skip_nonfinite};
        StatesOfPython store(std::move(step_plan), std::move(states), std::move(hand_over));
        try {
          plan.step(groups, options, &store);
        } catch (...) {
          store.take_back(/*has_written=*/plan.progress()->has_failed);
          throw;
        }
      },
      py::arg("groups"), py::arg("grad_scale"), py::arg("found_inf"), py::arg("max_grad_norm"),
      py::arg("sum_of_squares"), py::arg("grad_norm"), py::arg("skip_nonfinite"),
      py::arg("step_plan"), py::arg("states"), py::arg("hand_over"));
}

}  // namespace

void define_plan(py::module_& module) {
  py::class_<LookResult>(module, "LookResult")
      .def_readonly("found_inf", &LookResult::found_inf)
      .def_readonly("first_nonfinite", &LookResult::first_nonfinite)
      .def_readonly("sum_of_squares", &LookResult::sum_of_squares)
      .def_readonly("partition", &LookResult::partition);

  py::class_<StepProgress, std::shared_ptr<StepProgress>>(module, "StepProgress")
      .def("__bool__", [](const StepProgress& progress) { return progress.has_failed; })
      .def("__str__", &StepProgress::text);

  py::class_<KeptStates>(module, "KeptStates")
      .def(py::init<>())
      .def("keep", &KeptStates::keep, py::arg("states"), py::arg("keys"))
      .def("are_in", &KeptStates::are_in, py::arg("states"));

  py::class_<RoundedParams> rounded_params(module, "RoundedParams");
  py::class_<ScaledGrads> scaled_grads(module, "ScaledGrads");

  auto plan = py::class_<Plan>(module, "Plan");
  plan.def(py::init<std::string, std::vector<std::string>>(), py::arg("operation"),
           py::arg("buffer_names"))
      .def(
          "add_param",
          [](Plan& plan, int64_t group, int64_t index_in_group, py::handle param) {
            return plan.add_param(group, index_in_group, param.ptr());
          },
          py::arg("group"), py::arg("index_in_group"), py::arg("param"))
      .def(
          "add_sharded_param",
          [](Plan& plan, int64_t group, int64_t index_in_group, py::handle param,
             int64_t partition) {
            return plan.add_sharded_param(group, index_in_group, param.ptr(), partition);
          },
          py::arg("group"), py::arg("index_in_group"), py::arg("param"), py::arg("partition"))
      .def(
          "set_shard",
          [](Plan& plan, int64_t index, at::Tensor param, const OptionalTensor& grad) {
            plan.set_shard(index, std::move(param), grad.value_or(at::Tensor()));
          },
          py::arg("index"), py::arg("param"), py::arg("grad"))
      .def("set_first_element", &Plan::set_first_element, py::arg("index"),
           py::arg("first_element"))
      .def("take_params", &take_params, py::arg("groups"))
      .def("set_rounded_params", &Plan::set_rounded_params, py::arg("rounded"))
      .def("rounded_params", &Plan::rounded_params)
      .def("set_scaled_grads", &Plan::set_scaled_grads, py::arg("scaled"))
      .def("scaled_grads", &Plan::scaled_grads)
      .def_property_readonly("progress", &Plan::progress)
      .def("let_go", &Plan::let_go)
      .def("gradients_were_written", &Plan::gradients_were_written)
      .def("check_finite", &check_finite, py::arg("found_inf"), py::arg("grad_scale"),
           py::arg("sum_squares"), py::arg("skip_nonfinite"));

#define AMP_EXT_DEFINE(Functor) define_step<Functor##Hyperparameters>(plan);
  AMP_EXT_FOR_EACH_OPTIMIZER(AMP_EXT_DEFINE)
#undef AMP_EXT_DEFINE
}

}  // namespace amp_ext::python
