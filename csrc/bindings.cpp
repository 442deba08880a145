// Everything that Python can call.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "dispatch.h"
#include "ops.h"
#include "plan.h"

namespace py = pybind11;
using namespace amp_ext;
using release_gil = py::call_guard<py::gil_scoped_release>;

namespace {

// Gradients are read while Python stands still; the step itself lets other threads run.
template <typename Hyperparameters>
void step(Plan& plan, std::vector<Hyperparameters> groups, const std::vector<OptionalTensor>& lrs,
          const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  plan.read_grads();
  const py::gil_scoped_release release;
  plan.step(std::move(groups), lrs, grad_scale, found_inf);
}

std::vector<at::Tensor> check_finite(Plan& plan, const at::Tensor& found_inf,
                                     const OptionalTensor& grad_scale) {
  plan.read_grads();
  const py::gil_scoped_release release;
  return plan.check_finite(found_inf, grad_scale);
}

template <typename Hyperparameters>
void set_common(Hyperparameters& hyperparameters, double lr, double weight_decay,
                bool decoupled_weight_decay, bool maximize) {
  hyperparameters.lr = lr;
  hyperparameters.weight_decay = weight_decay;
  hyperparameters.decoupled_weight_decay = decoupled_weight_decay;
  hyperparameters.maximize = maximize;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Kernels of amp_ext; documented in amp_ext.ops.";

  py::class_<AdamHyperparameters>(module, "AdamHyperparameters")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay,
                       bool decoupled_weight_decay, bool maximize) {
             AdamHyperparameters hyperparameters;
             set_common(hyperparameters, lr, weight_decay, decoupled_weight_decay, maximize);
             hyperparameters.beta1 = beta1;
             hyperparameters.beta2 = beta2;
             hyperparameters.eps = eps;
             return hyperparameters;
           }),
           py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("decoupled_weight_decay"), py::arg("maximize"));

  py::class_<SgdHyperparameters>(module, "SgdHyperparameters")
      .def(py::init([](double lr, double momentum, double dampening, double weight_decay,
                       bool nesterov, bool decoupled_weight_decay, bool maximize) {
             SgdHyperparameters hyperparameters;
             set_common(hyperparameters, lr, weight_decay, decoupled_weight_decay, maximize);
             hyperparameters.momentum = momentum;
             hyperparameters.dampening = dampening;
             hyperparameters.nesterov = nesterov;
             return hyperparameters;
           }),
           py::arg("lr"), py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"),
           py::arg("nesterov"), py::arg("decoupled_weight_decay"), py::arg("maximize"));

  py::class_<LossScaleHyperparameters>(module, "LossScaleHyperparameters")
      .def(py::init([](double growth_factor, double backoff_factor, int64_t growth_interval) {
             return LossScaleHyperparameters{growth_factor, backoff_factor, growth_interval};
           }),
           py::arg("growth_factor"), py::arg("backoff_factor"), py::arg("growth_interval"));

  py::class_<Plan>(module, "Plan")
      .def(py::init<std::string, std::vector<std::string>>(), py::arg("operation"),
           py::arg("buffer_names"))
      .def(
          "add_param",
          [](Plan& plan, int64_t group, int64_t index_in_group, at::Tensor param) {
            return plan.add_param(group, index_in_group, std::move(param));
          },
          py::arg("group"), py::arg("index_in_group"), py::arg("param"))
      .def(
          "set_state",
          [](Plan& plan, int64_t number, std::vector<at::Tensor> buffers,
             const OptionalTensor& master_param, const OptionalTensor& step) {
            plan.set_state(number, {std::move(buffers), master_param.value_or(at::Tensor()),
                                    step.value_or(at::Tensor())});
          },
          py::arg("number"), py::arg("buffers"), py::arg("master_param"), py::arg("step"))
      .def("params_without_state",
           [](Plan& plan) {
             plan.read_grads();
             return plan.params_without_state();
           })
      .def("check_finite", &check_finite, py::arg("found_inf"), py::arg("grad_scale"))
      .def("step", &step<AdamHyperparameters>, py::arg("groups"), py::arg("lrs"),
           py::arg("grad_scale"), py::arg("found_inf"))
      .def("step", &step<SgdHyperparameters>, py::arg("groups"), py::arg("lrs"),
           py::arg("grad_scale"), py::arg("found_inf"));

  module.def("check_finite_", &check_finite_, release_gil(), py::arg("tensors"),
             py::arg("found_inf"), py::arg("grad_scale"));
  module.def("unscale_", &unscale_, release_gil(), py::arg("grads"), py::arg("inv_scale"),
             py::arg("found_inf"));
  module.def("update_scale_", &update_scale_, release_gil(), py::arg("scale"),
             py::arg("growth_tracker"), py::arg("found_infs"), py::arg("hyperparameters"));
  module.def("adam_", &adam_, release_gil(), py::arg("params"), py::arg("grads"),
             py::arg("exp_avgs"), py::arg("exp_avg_sqs"), py::arg("steps"),
             py::arg("max_exp_avg_sqs"), py::arg("master_params"), py::arg("hyperparameters"),
             py::arg("lr"), py::arg("grad_scale"), py::arg("found_inf"));
  module.def("sgd_", &sgd_, release_gil(), py::arg("params"), py::arg("grads"),
             py::arg("momentum_buffers"), py::arg("steps"), py::arg("master_params"),
             py::arg("hyperparameters"), py::arg("lr"), py::arg("grad_scale"),
             py::arg("found_inf"));
  module.def("refresh_masters_", &refresh_masters_, release_gil(), py::arg("params"),
             py::arg("master_params"));
  module.def("cpu_isa", &cpu_isa);
}
