// What a scaler of Python works with: options of the scale, reports, and gradients that it
// unscaled.
#include <amp_ext/hyperparameters.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "python/module.h"
#include "python/options_by_name.h"
#include "scaler/scaler_monitor.h"
#include "scaler/scaler_ranges.h"
#include "scaler/unscaled_grads.h"

namespace amp_ext::python {

namespace {

// The gradients of parameters, each as the tensor that holds its numbers here.
std::vector<ParamGrad> grads_of(const std::vector<py::handle>& params) {
  std::vector<ParamGrad> grads;
  for (const py::handle param : params) {
    at::Tensor grad = THPVariable_Unpack(param.ptr()).unsafeGetTensorImpl()->grad();
    int64_t version = grad.defined() ? version_of(grad) : 0;
    if (grad.defined() && grad.key_set().has(c10::DispatchKey::Python)) {
      const auto wrapper = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
      const py::object local = py::getattr(wrapper, "_local_tensor", py::none());
      if (!local.is_none()) grad = THPVariable_Unpack(local.ptr());
      version += version_of(grad);
    }
    if (grad.defined() && grad.is_sparse()) grad = grad._values();
    grads.push_back({param.ptr(), std::move(grad), version});
  }
  return grads;
}

}  // namespace

void define_scaler(py::module_& module) {
  auto loss_scale = options_class<LossScaleHyperparameters>(module, "LossScaleHyperparameters");
  define_field(loss_scale, "growth_factor", &LossScaleHyperparameters::growth_factor);
  define_field(loss_scale, "backoff_factor", &LossScaleHyperparameters::backoff_factor);
  define_field(loss_scale, "growth_interval", &LossScaleHyperparameters::growth_interval);
  define_field(loss_scale, "min_scale", &LossScaleHyperparameters::min_scale);
  define_field(loss_scale, "max_scale", &LossScaleHyperparameters::max_scale);
  define_field(loss_scale, "hysteresis", &LossScaleHyperparameters::hysteresis);
  define_field(loss_scale, "dynamic", &LossScaleHyperparameters::dynamic);

  py::class_<ScalerSummary>(module, "ScalerSummary")
      .def_readonly("updates", &ScalerSummary::updates)
      .def_readonly("skips", &ScalerSummary::skips)
      .def_readonly("consecutive_skips", &ScalerSummary::consecutive_skips)
      .def_readonly("settled_after", &ScalerSummary::settled_after)
      .def_readonly("nonfinite_slot", &ScalerSummary::nonfinite_slot)
      .def_readonly("nonfinite_index", &ScalerSummary::nonfinite_index)
      .def_readonly("nonfinite_update", &ScalerSummary::nonfinite_update)
      .def_readonly("scale", &ScalerSummary::scale)
      .def_readonly("smallest_scale", &ScalerSummary::smallest_scale)
      .def_readonly("largest_scale", &ScalerSummary::largest_scale)
      .def_readonly("settled_scale", &ScalerSummary::settled_scale);

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

  py::class_<UnscaledGrads>(module, "UnscaledGrads")
      .def(py::init([](const std::vector<py::handle>& params) {
             return UnscaledGrads(grads_of(params));
           }),
           py::arg("params"))
      .def(
          "note_scale",
          [](UnscaledGrads& unscaled, const std::vector<py::handle>& params, bool has_stepped) {
            unscaled.note_scale(grads_of(params), has_stepped);
          },
          py::arg("params"), py::arg("has_stepped"))
      .def(
          "first_late",
          [](const UnscaledGrads& unscaled, const std::vector<py::handle>& params) {
            return unscaled.first_late(grads_of(params));
          },
          py::arg("params"))
      .def(
          "first_written",
          [](const UnscaledGrads& unscaled, const std::vector<py::handle>& params) {
            return unscaled.first_written(grads_of(params));
          },
          py::arg("params"))
      .def(
          "first_unscaled",
          [](const UnscaledGrads& unscaled, const std::vector<py::handle>& params) {
            return unscaled.first_unscaled(grads_of(params));
          },
          py::arg("params"));

  module.def("wanted_of_scaler", &wanted_of_scaler, py::arg("name"), py::arg("value"));
  module.attr("NO_TENSOR") = kNoTensor;
}

}  // namespace amp_ext::python
