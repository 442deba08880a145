// What a scaler of Python works with: the loss scale, its reports, and gradients that it unscaled.
#include <amp_ext/hyperparameters.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/module.h"
#include "python/options_by_name.h"
#include "scaler/loss_scale.h"
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

// The groups of an optimizer, each with its number of parameters and their names.
using Names = std::vector<std::string>;

std::vector<NamedGroup> named_groups(std::vector<std::pair<int64_t, Names>> groups) {
  std::vector<NamedGroup> named;
  for (auto& [size, names] : groups) named.push_back({size, std::move(names)});
  return named;
}

// The attributes of a scaler of Python that say what its loss scale is. Users and other libraries
// know those of torch's class and assign them, so they are read whenever they count.
class Attributes {
 public:
  Attributes() {
    add("_scale", &LossScale::scale);
    add("_growth_tracker", &LossScale::growth_tracker);
    add("_hysteresis_tracker", &LossScale::hysteresis_tracker);
    add("_init_scale", &LossScale::init_scale);
    add("_init_growth_tracker", &LossScale::init_growth_tracker);
    add("_init_hysteresis_tracker", &LossScale::init_hysteresis_tracker);
    add("_growth_factor", &LossScaleHyperparameters::growth_factor);
    add("_backoff_factor", &LossScaleHyperparameters::backoff_factor);
    add("_growth_interval", &LossScaleHyperparameters::growth_interval);
    add("_min_scale", &LossScaleHyperparameters::min_scale);
    add("_max_scale", &LossScaleHyperparameters::max_scale);
    add("_hysteresis", &LossScaleHyperparameters::hysteresis);
    add("_dynamic", &LossScaleHyperparameters::dynamic);
    add("_warn_after", &LossScale::warn_after);
  }

  void read(const py::dict& attributes, LossScale& to) const {
    for (const Field<LossScale>& field : fields_) {
      PyObject* const value = PyDict_GetItemWithError(attributes.ptr(), field.name);
      if (value != nullptr) field.set(to, value);
    }
  }

 private:
  template <typename Value>
  void add(const char* name, Value LossScale::* member) {
    add(name, [member](LossScale& to) -> Value& { return to.*member; });
  }
  template <typename Value>
  void add(const char* name, Value LossScaleHyperparameters::* member) {
    add(name, [member](LossScale& to) -> Value& { return to.hyperparameters.*member; });
  }
  template <typename Member>
  void add(const char* name, const Member& member) {
    fields_.push_back(
        {PyUnicode_InternFromString(name),
         [name, member](LossScale& to, py::handle value) { assign(name, value, member(to)); }});
  }

  template <typename Value>
  static void assign(const char* name, py::handle value, Value& to) {
    py::detail::make_caster<Value> caster;
    if (!caster.load(value, /*convert=*/true)) {
      throw py::type_error(c10::str(name, " can't be ", std::string(py::repr(value))));
    }
    to = py::detail::cast_op<Value&&>(std::move(caster));
  }
  static void assign(const char* name, py::handle value, at::Tensor& to) {
    std::optional<at::Tensor> tensor;
    assign(name, value, tensor);
    to = tensor.value_or(at::Tensor());
  }

  Fields<LossScale> fields_;
};

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

  const auto attributes = std::make_shared<const Attributes>();
  py::class_<LossScale>(module, "LossScale")
      .def(py::init<>())
      .def_readwrite("warned_of_scale", &LossScale::warned_of_scale)
      .def(
          "make",
          [attributes](LossScale& self, py::dict of_scaler, const at::Device& device) {
            attributes->read(of_scaler, self);
            self.make(device);
            of_scaler["_scale"] = self.scale;
            of_scaler["_growth_tracker"] = self.growth_tracker;
            of_scaler["_hysteresis_tracker"] = self.hysteresis_tracker;
          },
          py::arg("attributes"), py::arg("device"))
      .def(
          "load",
          [attributes](LossScale& self, py::dict of_scaler, double scale, double growth_factor,
                       double backoff_factor, int64_t growth_interval, int64_t growth_tracker,
                       std::optional<int64_t> hysteresis_tracker) {
            attributes->read(of_scaler, self);
            self.load({scale, growth_factor, backoff_factor, growth_interval, growth_tracker,
                       hysteresis_tracker});
            of_scaler["_init_scale"] = self.init_scale;
            of_scaler["_growth_factor"] = self.hyperparameters.growth_factor;
            of_scaler["_backoff_factor"] = self.hyperparameters.backoff_factor;
            of_scaler["_growth_interval"] = self.hyperparameters.growth_interval;
            of_scaler["_init_growth_tracker"] = self.init_growth_tracker;
            of_scaler["_init_hysteresis_tracker"] = self.init_hysteresis_tracker;
          },
          py::arg("attributes"), py::arg("scale"), py::arg("growth_factor"),
          py::arg("backoff_factor"), py::arg("growth_interval"), py::arg("growth_tracker"),
          py::arg("hysteresis_tracker") = py::none())
      .def(
          "add_optimizer",
          [](LossScale& self, std::function<std::vector<std::pair<int64_t, Names>>()> groups_of) {
            return self.add_optimizer([groups_of] { return named_groups(groups_of()); });
          },
          py::arg("groups_of"))
      .def(
          "begin_look",
          [](LossScale& self, int64_t slot, at::Tensor scale) {
            self.scale = std::move(scale);
            return self.begin_look(slot);
          },
          py::arg("slot"), py::arg("scale"))
      .def("first_nonfinite", &LossScale::first_nonfinite, py::arg("slot"), py::arg("device"))
      .def("keep_first_nonfinites", &LossScale::keep_first_nonfinites, py::arg("slot"),
           py::arg("first_nonfinites"))
      .def("note_different_scales", &LossScale::note_different_scales, py::arg("slot"),
           py::arg("device"), py::arg("differ"))
      .def(
          "update",
          [attributes](LossScale& self, const py::dict& of_scaler,
                       const std::vector<std::pair<int64_t, at::Tensor>>& found_infs,
                       bool follows) {
            attributes->read(of_scaler, self);
            self.make_room();  // other threads may read reports
            std::vector<LookFlag> flags;
            for (const auto& [slot, found_inf] : found_infs) flags.push_back({slot, found_inf});
            const py::gil_scoped_release release;
            self.update(flags, follows);
          },
          py::arg("attributes"), py::arg("found_infs"), py::arg("follows"))
      .def(
          "news",
          [](LossScale& self, at::Tensor scale) {
            self.scale = std::move(scale);
            ScalerNews news = self.news();
            return std::make_tuple(std::move(news.settled), std::move(news.skips),
                                   news.scale_is_too_small);
          },
          py::arg("scale"))
      .def("must_warn_of", &LossScale::must_warn_of, py::arg("value"))
      .def_static("warning_of", &LossScale::warning_of, py::arg("value"))
      .def("check_scales", &LossScale::check_scales)
      .def("step_skipped", &LossScale::step_skipped, py::arg("slot"))
      .def(
          "stats",
          [](const LossScale& self, double initial_scale) {
            ScalerStats stats = self.stats(initial_scale);
            py::object name = py::none();
            if (!stats.last_nonfinite.empty()) name = py::cast(stats.last_nonfinite);
            return std::make_tuple(stats.updates, stats.steps, stats.skips, stats.consecutive_skips,
                                   stats.scale, stats.smallest_scale, stats.largest_scale, name);
          },
          py::arg("initial_scale"))
      .def("history", &LossScale::history);

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

  module.def(
      "names_of_params",
      [](std::vector<std::pair<int64_t, Names>> groups) {
        return names_of_params(named_groups(std::move(groups)));
      },
      py::arg("groups"));
  module.def("wanted_of_scaler", &wanted_of_scaler, py::arg("name"), py::arg("value"));
  module.attr("NO_TENSOR") = kNoTensor;
}

}  // namespace amp_ext::python
