// Everything that Python can call.
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "dispatch.h"
#include "ops.h"
#include "plan.h"
#include "scaler_monitor.h"

namespace py = pybind11;
using namespace amp_ext;
using release_gil = py::call_guard<py::gil_scoped_release>;

namespace {

// Whether the plan was made of just these parameters, listed by group.
bool has_params(const Plan& plan, const std::vector<py::list>& groups) {
  int64_t number = 0;
  for (const py::list& params : groups) {
    for (const py::handle param : params) {
      if (!THPVariable_Check(param.ptr()) ||
          !plan.is_param(number++, THPVariable_Unpack(param.ptr()))) {
        return false;
      }
    }
  }
  return number == plan.number_of_params();
}

// Gradients are read while Python stands still; the step itself lets other threads run.
template <typename Hyperparameters>
void step(Plan& plan, std::vector<Hyperparameters> groups, const std::vector<OptionalTensor>& lrs,
          const GradientOptions& options) {
  const py::gil_scoped_release release;
  plan.step(std::move(groups), lrs, options);
}

std::vector<Finding> check_finite(Plan& plan, const at::Tensor& found_inf,
                                  const OptionalTensor& grad_scale, bool sum_squares,
                                  bool skip_nonfinite) {
  plan.read_grads();
  const py::gil_scoped_release release;
  return plan.check_finite(found_inf, grad_scale, sum_squares, skip_nonfinite);
}

// A struct of options, whose fields Python gives by name.
template <typename Options>
py::class_<Options> options_class(py::module_& module, const char* name) {
  return py::class_<Options>(module, name).def(py::init([](const py::kwargs& fields) {
    Options options;
    const py::object self = py::cast(&options, py::return_value_policy::reference);
    for (const auto& [field, value] : fields) self.attr(field) = value;
    return options;
  }));
}

template <typename Hyperparameters>
py::class_<Hyperparameters> hyperparameters_class(py::module_& module, const char* name) {
  return options_class<Hyperparameters>(module, name)
      .def_readwrite("lr", &Hyperparameters::lr)
      .def_readwrite("weight_decay", &Hyperparameters::weight_decay)
      .def_readwrite("decoupled_weight_decay", &Hyperparameters::decoupled_weight_decay)
      .def_readwrite("maximize", &Hyperparameters::maximize)
      .def_readwrite("clip_value", &Hyperparameters::clip_value)
      .def_readwrite("timestep", &Hyperparameters::timestep)
      .def_readwrite("write_back_grads", &Hyperparameters::write_back_grads);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Kernels of amp_ext; documented in amp_ext.ops.";

  hyperparameters_class<AdamHyperparameters>(module, "AdamHyperparameters")
      .def_readwrite("beta1", &AdamHyperparameters::beta1)
      .def_readwrite("beta2", &AdamHyperparameters::beta2)
      .def_readwrite("eps", &AdamHyperparameters::eps)
      .def_readwrite("denominator_floor", &AdamHyperparameters::denominator_floor);

  hyperparameters_class<SgdHyperparameters>(module, "SgdHyperparameters")
      .def_readwrite("momentum", &SgdHyperparameters::momentum)
      .def_readwrite("dampening", &SgdHyperparameters::dampening)
      .def_readwrite("nesterov", &SgdHyperparameters::nesterov);

  options_class<LossScaleHyperparameters>(module, "LossScaleHyperparameters")
      .def_readwrite("growth_factor", &LossScaleHyperparameters::growth_factor)
      .def_readwrite("backoff_factor", &LossScaleHyperparameters::backoff_factor)
      .def_readwrite("growth_interval", &LossScaleHyperparameters::growth_interval)
      .def_readwrite("min_scale", &LossScaleHyperparameters::min_scale)
      .def_readwrite("max_scale", &LossScaleHyperparameters::max_scale)
      .def_readwrite("hysteresis", &LossScaleHyperparameters::hysteresis)
      .def_readwrite("dynamic", &LossScaleHyperparameters::dynamic);

  options_class<GradientOptions>(module, "GradientOptions")
      .def_readwrite("grad_scale", &GradientOptions::grad_scale)
      .def_readwrite("found_inf", &GradientOptions::found_inf)
      .def_readwrite("max_grad_norm", &GradientOptions::max_grad_norm)
      .def_readwrite("sum_of_squares", &GradientOptions::sum_of_squares)
      .def_readwrite("grad_norm", &GradientOptions::grad_norm)
      .def_readwrite("skip_nonfinite", &GradientOptions::skip_nonfinite)
      .def_readwrite("scratch", &GradientOptions::scratch);

  py::class_<StepScratch, std::shared_ptr<StepScratch>>(module, "StepScratch").def(py::init<>());

  py::class_<Finding>(module, "Finding")
      .def_readonly("found_inf", &Finding::found_inf)
      .def_readonly("first_nonfinite", &Finding::first_nonfinite)
      .def_readonly("sum_of_squares", &Finding::sum_of_squares)
      .def_readonly("partition", &Finding::partition);

  options_class<LookResult>(module, "LookResult")
      .def_readwrite("found_inf", &LookResult::found_inf)
      .def_readwrite("first_nonfinite", &LookResult::first_nonfinite)
      .def_readwrite("slot", &LookResult::slot);

  py::class_<ScalerReport>(module, "ScalerReport")
      .def_readonly("updates", &ScalerReport::updates)
      .def_readonly("skips", &ScalerReport::skips)
      .def_readonly("consecutive_skips", &ScalerReport::consecutive_skips)
      .def_readonly("settled_after", &ScalerReport::settled_after)
      .def_readonly("nonfinite_slot", &ScalerReport::nonfinite_slot)
      .def_readonly("nonfinite_number", &ScalerReport::nonfinite_number)
      .def_readonly("nonfinite_update", &ScalerReport::nonfinite_update)
      .def_readonly("scale", &ScalerReport::scale)
      .def_readonly("smallest_scale", &ScalerReport::smallest_scale)
      .def_readonly("largest_scale", &ScalerReport::largest_scale)
      .def_readonly("settled_scale", &ScalerReport::settled_scale);

  py::class_<OptimizerReport>(module, "OptimizerReport")
      .def_readonly("update", &OptimizerReport::update)
      .def_readonly("skips", &OptimizerReport::skips)
      .def_property_readonly("last_was_skipped", [](const OptimizerReport& report) {
        return report.last_was_skipped != 0;
      });

  py::class_<ScaleHistory>(module, "ScaleHistory")
      .def_readonly("first_update", &ScaleHistory::first_update)
      .def_readonly("scales", &ScaleHistory::scales)
      .def_readonly("skipped", &ScaleHistory::skipped);

  py::class_<ScalerMonitor>(module, "ScalerMonitor")
      .def(py::init([](const at::Tensor& scale) { return ScalerMonitor(scale.device()); }),
           py::arg("scale"))
      .def("add_optimizer", &ScalerMonitor::add_optimizer)
      .def("read", &ScalerMonitor::read)
      .def("read_optimizer", &ScalerMonitor::read_optimizer, py::arg("slot"))
      .def("history", &ScalerMonitor::history);

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
          "add_sharded_param",
          [](Plan& plan, int64_t group, int64_t index_in_group, at::Tensor param,
             int64_t partition) {
            return plan.add_sharded_param(group, index_in_group, {std::move(param), partition});
          },
          py::arg("group"), py::arg("index_in_group"), py::arg("param"), py::arg("partition"))
      .def(
          "set_shard",
          [](Plan& plan, int64_t number, at::Tensor param, const OptionalTensor& grad) {
            plan.set_shard(number, std::move(param), grad.value_or(at::Tensor()));
          },
          py::arg("number"), py::arg("param"), py::arg("grad"))
      .def(
          "set_state",
          [](Plan& plan, int64_t number, std::vector<at::Tensor> buffers,
             const OptionalTensor& master_param, const OptionalTensor& step) {
            plan.set_state(number, {std::move(buffers), master_param.value_or(at::Tensor()),
                                    step.value_or(at::Tensor())});
          },
          py::arg("number"), py::arg("buffers"), py::arg("master_param"), py::arg("step"))
      .def("has_params", &has_params, py::arg("groups"))
      .def("read_grads", &Plan::read_grads)
      .def("check_finite", &check_finite, py::arg("found_inf"), py::arg("grad_scale"),
           py::arg("sum_squares"), py::arg("skip_nonfinite"))
      .def("step", &step<AdamHyperparameters>, py::arg("groups"), py::arg("lrs"),
           py::arg("options"))
      .def("step", &step<SgdHyperparameters>, py::arg("groups"), py::arg("lrs"),
           py::arg("options"));

  module.def("check_finite_", &check_finite_, release_gil(), py::arg("tensors"),
             py::arg("found_inf"), py::arg("grad_scale"), py::arg("sum_of_squares"),
             py::arg("first_nonfinite"));
  module.def("count_nonfinite", &count_nonfinite, release_gil(), py::arg("tensors"));
  module.def("clip_grads_", &clip_grads_, release_gil(), py::arg("grads"), py::arg("total_norm"),
             py::arg("max_norm"));
  module.def("unscale_", &unscale_, release_gil(), py::arg("grads"), py::arg("inv_scale"),
             py::arg("found_inf"), py::arg("first_nonfinite"));
  module.def("update_scale_", &update_scale_, release_gil(), py::arg("scale"),
             py::arg("growth_tracker"), py::arg("looks"), py::arg("hyperparameters"),
             py::arg("hysteresis_tracker"), py::arg("monitor"));
  module.attr("NO_TENSOR") = kNoTensor;
  module.def("adam_", &adam_, release_gil(), py::arg("params"), py::arg("grads"),
             py::arg("exp_avgs"), py::arg("exp_avg_sqs"), py::arg("steps"),
             py::arg("max_exp_avg_sqs"), py::arg("master_params"), py::arg("hyperparameters"),
             py::arg("lr"), py::arg("options"), py::arg("operation") = "adam_");
  module.def("sgd_", &sgd_, release_gil(), py::arg("params"), py::arg("grads"),
             py::arg("momentum_buffers"), py::arg("steps"), py::arg("master_params"),
             py::arg("hyperparameters"), py::arg("lr"), py::arg("options"),
             py::arg("operation") = "sgd_", py::arg("buffers_name") = "momentum_buffers");
  module.def("refresh_masters_", &refresh_masters_, release_gil(), py::arg("params"),
             py::arg("master_params"));
  module.def("cpu_isa", &cpu_isa);
}
