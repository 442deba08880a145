// What a scaler of Python works with: the loss scale, and its gradients.
#include <amp_ext/hyperparameters.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/module.h"
#include "python/options_by_name.h"
#include "scaler/grads_by_device.h"
#include "scaler/loss_scale.h"
#include "scaler/scaler_monitor.h"
#include "scaler/scaler_ranges.h"
#include "scaler/unscaled_grads.h"

namespace amp_ext::python {

namespace {

// Reads the attributes of a scaler of Python that say what its loss scale is. Users and other
// libraries know those of torch's class and assign them, so they are read whenever they count.
void read_attributes(const py::dict& attributes, LossScale& to) {
  const auto read = [&](const char* name, auto& member) {
    const py::handle value = PyDict_GetItemString(attributes.ptr(), name);
    if (!value || value.is_none()) return;
    py::detail::make_caster<std::decay_t<decltype(member)>> caster;
    if (!caster.load(value, /*convert=*/true)) {
      throw py::type_error(c10::str(name, " can't be ", std::string(py::repr(value))));
    }
    member = py::detail::cast_op<std::decay_t<decltype(member)>>(caster);
  };
  read("_scale", to.scale);
  read("_growth_tracker", to.growth_tracker);
  read("_hysteresis_tracker", to.hysteresis_tracker);
  read("_init_scale", to.init_scale);
  read("_init_growth_tracker", to.init_growth_tracker);
  read("_init_hysteresis_tracker", to.init_hysteresis_tracker);
  read("_warn_after", to.warn_after);
  read("_growth_factor", to.hyperparameters.growth_factor);
  read("_backoff_factor", to.hyperparameters.backoff_factor);
  read("_growth_interval", to.hyperparameters.growth_interval);
  read("_min_scale", to.hyperparameters.min_scale);
  read("_max_scale", to.hyperparameters.max_scale);
  read("_hysteresis", to.hyperparameters.hysteresis);
  read("_dynamic", to.hyperparameters.dynamic);
}

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

void define_loss_scale(py::module_& module) {
  py::class_<LossScale>(module, "LossScale")
      .def(py::init<>())
      .def_readwrite("warned_of_scale", &LossScale::warned_of_scale)
      .def(
          "make",
          [](LossScale& self, py::dict attributes, const at::Device& device) {
            read_attributes(attributes, self);
            self.make(device);
            attributes["_scale"] = self.scale;
            attributes["_growth_tracker"] = self.growth_tracker;
            attributes["_hysteresis_tracker"] = self.hysteresis_tracker;
          },
          py::arg("attributes"), py::arg("device"))
      .def(
          "load",
          [](LossScale& self, py::dict attributes, const py::dict& changes) {
            read_attributes(attributes, self);
            read_attributes(changes, self);
            self.restart();
            PyDict_Update(attributes.ptr(), changes.ptr());
            attributes["_init_hysteresis_tracker"] = self.init_hysteresis_tracker;
          },
          py::arg("attributes"), py::arg("changes"))
      .def("add_optimizer", &LossScale::add_optimizer, py::arg("name_of"))
      .def(
          "begin_look",
          [](LossScale& self, int64_t slot, const at::Tensor& scale) {
            self.scale = scale;
            return self.begin_look(slot);
          },
          py::arg("slot"), py::arg("scale"))
      .def("look", &LossScale::look, py::call_guard<py::gil_scoped_release>(), py::arg("slot"),
           py::arg("grads"), py::arg("found_inf"), py::arg("inv_scale") = py::none())
      .def("first_nonfinite", &LossScale::first_nonfinite, py::arg("slot"), py::arg("device"))
      .def("keep_first_nonfinites", &LossScale::keep_first_nonfinites, py::arg("slot"),
           py::arg("first_nonfinites"))
      .def("note_different_scales", &LossScale::note_different_scales, py::arg("slot"),
           py::arg("device"), py::arg("differ"))
      .def(
          "update",
          [](LossScale& self, py::dict attributes,
             const std::vector<std::pair<int64_t, at::Tensor>>& flags, bool follows,
             const py::object& next_states) {
            read_attributes(attributes, self);
            self.make_room();  // other threads may read reports
            {
              const py::gil_scoped_release release;
              self.update(flags, follows);
            }
            // Within this call: an interrupt between the two would let the scale follow twice.
            attributes["_per_optimizer_states"] = next_states;
          },
          py::arg("attributes"), py::arg("flags"), py::arg("follows"), py::arg("next_states"))
      .def(
          "news",
          [](LossScale& self, const at::Tensor& scale) {
            self.scale = scale;
            const ScalerNews news = self.news();
            return std::make_tuple(news.settled, news.skips, news.scale_is_too_small);
          },
          py::arg("scale"))
      .def("must_warn_of", &LossScale::must_warn_of, py::arg("value"))
      .def_static("warning_of", &LossScale::warning_of, py::arg("value"))
      .def("check_scales", &LossScale::check_scales)
      .def("step_skipped", &LossScale::step_skipped, py::arg("slot"))
      .def(
          "stats",
          [](const LossScale& self, double initial_scale) {
            const ScalerStats stats = self.stats(initial_scale);
            const std::string& name = stats.last_nonfinite;
            return std::make_tuple(stats.updates, stats.steps, stats.skips, stats.consecutive_skips,
                                   stats.scale, stats.smallest_scale, stats.largest_scale,
                                   name.empty() ? std::nullopt : std::optional(name));
          },
          py::arg("initial_scale"))
      .def("history", [](const LossScale& self) {
        const ScaleHistory history = self.history();
        return std::make_tuple(history.first_update, history.scales, history.skipped);
      });
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
      .def_readonly("nonfinite_slot", &ScalerSummary::nonfinite_slot)
      .def_readonly("nonfinite_index", &ScalerSummary::nonfinite_index);

  py::class_<OptimizerReport>(module, "OptimizerReport")
      .def_readonly("update", &OptimizerReport::update)
      .def_readonly("skips", &OptimizerReport::skips)
      .def_property_readonly("last_was_skipped", [](const OptimizerReport& report) {
        return report.last_was_skipped != 0;
      });

  py::class_<ScalerMonitor>(module, "ScalerMonitor")
      .def(py::init([](const at::Tensor& scale) { return ScalerMonitor(scale.device()); }),
           py::arg("scale"))
      .def("add_optimizer", &ScalerMonitor::add_optimizer)
      .def("read", &ScalerMonitor::read)
      .def("read_optimizer", &ScalerMonitor::read_optimizer, py::arg("slot"));

  define_loss_scale(module);

  using Params = std::vector<py::handle>;
  py::class_<UnscaledGrads>(module, "UnscaledGrads")
      .def(py::init([](const Params& params) { return UnscaledGrads(grads_of(params)); }),
           py::arg("params"))
      .def(
          "note_scale",
          [](UnscaledGrads& unscaled, const Params& params, bool has_stepped) {
            unscaled.note_scale(grads_of(params), has_stepped);
          },
          py::arg("params"), py::arg("has_stepped"))
      .def(
          "check_unscaled",
          [](const UnscaledGrads& unscaled, const Params& params, const NameOf& name_of) {
            unscaled.check_unscaled(grads_of(params), name_of);
          },
          py::arg("params"), py::arg("name_of"))
      .def(
          "check_still_scaled",
          [](const UnscaledGrads& unscaled, const std::string& operation, const Params& params,
             const NameOf& name_of) {
            unscaled.check_still_scaled(operation, grads_of(params), name_of);
          },
          py::arg("operation"), py::arg("params"), py::arg("name_of"));

  module.def(
      "grads_by_device",
      [](const TensorList& params, const std::vector<OptionalTensor>& grads, bool allow_fp16,
         const NameOf& name_of) {
        TensorList present;
        for (const OptionalTensor& grad : grads) present.push_back(grad.value_or(at::Tensor()));
        return grads_by_device(params, std::move(present), allow_fp16, name_of);
      },
      py::arg("params"), py::arg("grads"), py::arg("allow_fp16"), py::arg("name_of"));
  module.def("wanted_of_scaler", &wanted_of_scaler, py::arg("name"), py::arg("value"));
  module.attr("NO_TENSOR") = kNoTensor;
}

}  // namespace amp_ext::python
