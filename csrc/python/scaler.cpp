// Binds the loss scale and the iterations of optimizers for the Python class GradScaler.
#include <ATen/core/grad_mode.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/ops.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "python/module.h"
#include "python/options_by_name.h"
#include "scaler/loss_scale.h"
#include "scaler/scaled_iteration.h"
#include "scaler/scaler_ranges.h"

namespace amp_ext::python {

// The iteration of one optimizer. Python stores it as "iteration" in the dict that torch's
// GradScaler has for each optimizer, `_per_optimizer_states[id(optimizer)]`.
struct IterationOfPython : ScaledIteration {
  IterationOfPython(int64_t slot, NameOf name_of, py::object reference)
      : ScaledIteration(slot, std::move(name_of)), optimizer(std::move(reference)) {}

  py::object optimizer;  // weak reference: a call returns the optimizer, or None if it was deleted
};

struct LossScaleOfPython : LossScale {
  explicit LossScaleOfPython(py::function its_name_of_param)
      : name_of_param(std::move(its_name_of_param)) {}

  py::function name_of_param;  // name_of_param(optimizer or None, index) returns a str
  // Dicts of `_per_optimizer_states`, by slot, for the optimizers scanned since the last update.
  std::unordered_map<int64_t, py::dict> states;

  // Stores the first_nonfinite tensors in state["scan"], which exists if the optimizer scanned its
  // gradients itself.
  void keep_scan(int64_t slot, const py::dict& state) {
    if (!state.contains("scan")) return;
    std::vector<at::Tensor> first_nonfinites;
    for (const py::handle each : state["scan"].attr("first_nonfinites").attr("values")()) {
      first_nonfinites.push_back(py::cast<at::Tensor>(each));
    }
    keep_first_nonfinites(slot, first_nonfinites,
                          py::cast<bool>(state["scan"].attr("counts_tensors")));
  }
};

namespace {

// Reads the attributes of a Python GradScaler that define its loss scale. Users and other libraries
// may assign such attributes, for example `_scale`, so the attributes are read at each use.
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

// Calls visit(param) for the parameters of all groups of an optimizer.
template <typename Visit>
void for_each_param(const py::object& optimizer, const Visit& visit) {
  for (const py::handle group : optimizer.attr("param_groups")) {
    for (const py::handle param : group["params"]) {
      if (!THPVariable_Check(param.ptr())) {
        const std::string type = py::str(py::type::of(param).attr("__name__"));
        throw py::type_error("GradScaler: params of the optimizer must be tensors, got " + type);
      }
      visit(param);
    }
  }
}

// Returns the gradients of an optimizer: the local shard of a DTensor, the values of a sparse
// gradient, and any other gradient unchanged.
std::vector<ParamGrad> grads_of(const py::object& optimizer) {
  std::vector<ParamGrad> grads;
  if (optimizer.is_none()) return grads;
  for_each_param(optimizer, [&](py::handle param) {
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
  });
  return grads;
}

// Returns a callable that returns the optimizer: a weak reference, if the class supports it.
py::object reference_to(const py::object& optimizer) {
  if (PyObject* const weak = PyWeakref_NewRef(optimizer.ptr(), nullptr)) {
    return py::reinterpret_steal<py::object>(weak);
  }
  PyErr_Clear();  // some wrappers of optimizers support no weak references
  return py::cpp_function([optimizer] { return optimizer; });
}

int64_t number_of(LossScaleOfPython& self, const py::object& optimizer) {
  if (const auto known = self.find_optimizer(optimizer.ptr())) return *known;
  const py::object reference = reference_to(optimizer);
  return self.add_optimizer(
      optimizer.ptr(), [reference] { return !reference().is_none(); },
      [reference, name_of = self.name_of_param](int64_t index) {
        const py::gil_scoped_acquire acquire;
        return py::cast<std::string>(name_of(reference(), index));
      },
      [reference] {
        const py::object withheld = py::getattr(reference(), "_withheld_last_step", py::none());
        return !withheld.is_none() && py::cast<bool>(withheld());
      });
}

// Returns the slot of the optimizer whose id() is `id`, a key of `_per_optimizer_states`. All
// unknown optimizers share one slot.
int64_t number_behind(LossScaleOfPython& self, py::handle id) {
  const auto known = self.find_optimizer(PyLong_AsVoidPtr(id.ptr()));
  PyErr_Clear();  // PyLong_AsVoidPtr fails if the key is no address
  if (known.has_value()) return *known;
  return self.add_optimizer(
      nullptr, [] { return true; }, [](int64_t) { return std::string(); }, [] { return false; });
}

// Starts an iteration of an optimizer for the scaler method `operation`. `state` is the optimizer's
// dict in torch's `_per_optimizer_states`. Returns a found_inf of 0, or nullopt without a scale.
OptionalTensor start_iteration(LossScaleOfPython& self, const std::string& operation,
                               const py::dict& attributes, const py::dict& state,
                               const py::object& optimizer) {
  if (const py::object scale = attributes["_scale"]; !scale.is_none()) {
    self.scale = py::cast<at::Tensor>(scale);
  }
  const int64_t slot = number_of(self, optimizer);
  if (!state.contains("iteration")) {
    state["iteration"] = py::cast(
        std::make_shared<IterationOfPython>(slot, self.names_of(slot), reference_to(optimizer)));
  }
  const auto& iteration = py::cast<const IterationOfPython&>(state["iteration"]);
  iteration.check_needs_no_reset(operation);
  for (const auto& [key, other] : py::dict(attributes["_per_optimizer_states"])) {
    if (other.is(state) || !other.contains("iteration")) continue;
    const auto& of_other = py::cast<const IterationOfPython&>(other["iteration"]);
    if (!of_other.is_unscaled()) continue;
    iteration.check_still_scaled(operation, of_other, grads_of(optimizer));
  }
  const auto last = self.states.find(slot);
  if (last != self.states.end()) self.keep_scan(slot, last->second);
  self.states[slot] = state;
  if (!self.scale.defined()) return {};
  return self.start_iteration(slot);
}

// Scans the gradients of an optimizer, and multiplies them by `inv_scale` if it is given. Returns a
// dict with a found_inf for each device. Returns None if our kernels do not support a gradient, so
// that torch's code must scan the gradients.
py::object scan_grads(LossScaleOfPython& self, IterationOfPython& iteration,
                      const std::vector<py::object>& given, const at::Tensor& found_inf,
                      const OptionalTensor& inv_scale, bool allow_fp16) {
  const py::object optimizer = iteration.optimizer();
  TensorList params, present;
  for_each_param(optimizer,
                 [&](py::handle param) { params.push_back(THPVariable_Unpack(param.ptr())); });
  bool are_ours = true;
  for (const py::object& each : given) {
    present.emplace_back();
    if (each.is_none()) continue;
    const at::Tensor& grad = present.back() = THPVariable_Unpack(each.ptr());
    are_ours &= THPVariable_CheckExact(each.ptr()) && (grad.is_cpu() || grad.is_cuda());
  }
  const GradsByDevice grads =
      grads_by_device(params, std::move(present), allow_fp16, iteration.name_of);
  if (inv_scale.has_value()) iteration.begin_unscaling(grads_of(optimizer));
  if (!are_ours) return py::none();
  std::vector<at::Tensor> flags;
  {
    const py::gil_scoped_release release;
    flags = iteration.scan(self, grads, found_inf, inv_scale);
  }
  py::dict by_device;
  for (const at::Tensor& flag : flags) by_device[py::cast(flag.device())] = flag;
  return by_device;
}

// Updates the scale from the found_inf flags of all optimizers, or sets it to `new_scale`. Replaces
// the dicts of the optimizers by `next_states`. Returns the log messages, or None without a change
// if there is no flag, no new scale and no iteration to reset.
py::object update(LossScaleOfPython& self, py::dict attributes, const py::object& new_scale,
                  const py::object& next_states) {
  std::vector<std::pair<int64_t, at::Tensor>> flags;
  bool had_reset = false;
  std::unordered_set<const void*> seen;  // a wrapper and the optimizer inside it share one dict
  for (const auto& [key, state] : py::dict(attributes["_per_optimizer_states"])) {
    if (!seen.insert(state.ptr()).second) continue;
    std::optional<int64_t> slot;
    if (state.contains("iteration")) {
      const auto& iteration = py::cast<const IterationOfPython&>(state["iteration"]);
      had_reset |= iteration.needs_reset;
      slot = iteration.slot;
      self.keep_scan(*slot, py::reinterpret_borrow<py::dict>(state));
      self.states.erase(*slot);
    }
    for (const auto& [device, flag] : py::dict(state["found_inf_per_device"])) {
      if (!slot.has_value()) slot = number_behind(self, key);  // a user's code has set the flags
      flags.emplace_back(*slot, py::cast<at::Tensor>(flag));
    }
  }
  if (flags.empty() && new_scale.is_none() && !had_reset) return py::none();
  read_attributes(attributes, self);
  std::function<void()> set;
  if (THPVariable_Check(new_scale.ptr())) {
    set = [&, tensor = THPVariable_Unpack(new_scale.ptr())] { self.scale.copy_(tensor); };
  } else if (!new_scale.is_none()) {
    set = [&, number = py::cast<double>(new_scale)] { self.scale.fill_(number); };
  }
  if (!flags.empty()) self.make_room();  // needs the GIL, because other threads may read reports
  LogMessages messages;
  {
    const py::gil_scoped_release release;
    const at::NoGradGuard no_grad;
    messages = self.update(flags, set);
  }
  // Replaces the dicts here and not in Python: after an interrupt between the update and the
  // replacement, the next update would count the same flags again.
  attributes["_per_optimizer_states"] = next_states;
  return py::make_tuple(messages.skips, messages.scale_is_too_small);
}

void define_loss_scale(py::module_& module) {
  py::class_<IterationOfPython, std::shared_ptr<IterationOfPython>>(module, "ScaledIteration")
      .def_readwrite("needs_reset", &IterationOfPython::needs_reset)
      .def(
          "is_of",
          [](const IterationOfPython& self, py::handle optimizer) {
            return self.optimizer().is(optimizer);
          },
          py::arg("optimizer"))
      .def("check_needs_no_reset", &IterationOfPython::check_needs_no_reset, py::arg("operation"))
      .def("check_unscaled",
           [](const IterationOfPython& self) { self.check_unscaled(grads_of(self.optimizer())); })
      .def(
          "on_loss_scaled",
          [](IterationOfPython& self, bool has_stepped) {
            const py::object optimizer = self.optimizer();
            if (!self.is_unscaled() || optimizer.is_none()) return;
            self.on_loss_scaled(grads_of(optimizer), has_stepped);
          },
          py::arg("has_stepped"))
      .def("forget_unscaling", &IterationOfPython::forget_unscaling);

  py::class_<LossScaleOfPython>(module, "LossScale")
      .def(py::init<py::function>(), py::arg("name_of_param"))
      .def_readwrite("warned_of_scale", &LossScaleOfPython::warned_of_scale)
      .def(
          "make",
          [](LossScaleOfPython& self, py::dict attributes, const at::Device& device) {
            read_attributes(attributes, self);
            self.make(device);
            attributes["_scale"] = self.scale;
            attributes["_growth_tracker"] = self.growth_tracker;
            attributes["_hysteresis_tracker"] = self.hysteresis_tracker;
          },
          py::arg("attributes"), py::arg("device"))
      .def(
          "load",
          [](LossScaleOfPython& self, const py::dict& attributes, const py::dict& state_dict,
             const py::function& checked) {
            read_attributes(attributes, self);
            self.load([&](const char* name, bool is_required) -> std::optional<at::Scalar> {
              if (!is_required && !state_dict.contains(name)) return {};
              if (!state_dict.contains(name)) throw py::key_error(name);
              const py::object number = checked(name, state_dict[name]);
              if (PyLong_Check(number.ptr())) return at::Scalar(py::cast<int64_t>(number));
              return at::Scalar(py::cast<double>(number));
            });
            py::dict changes;
            changes["_init_scale"] = self.init_scale;
            changes["_growth_factor"] = self.hyperparameters.growth_factor;
            changes["_backoff_factor"] = self.hyperparameters.backoff_factor;
            changes["_growth_interval"] = self.hyperparameters.growth_interval;
            changes["_init_growth_tracker"] = self.init_growth_tracker;
            changes["_init_hysteresis_tracker"] = self.init_hysteresis_tracker;
            PyDict_Update(attributes.ptr(), changes.ptr());
          },
          py::arg("attributes"), py::arg("state_dict"), py::arg("checked"))
      .def("start_iteration", &start_iteration, py::arg("operation"), py::arg("attributes"),
           py::arg("state"), py::arg("optimizer"))
      .def("scan", &scan_grads, py::arg("iteration"), py::arg("grads"), py::arg("found_inf"),
           py::arg("inv_scale"), py::arg("allow_fp16"))
      .def(
          "note_different_scales",
          [](LossScaleOfPython& self, const py::dict& state, const py::dict& flags,
             const at::Tensor& differ) {
            const int64_t slot = py::cast<IterationOfPython&>(state["iteration"]).slot;
            self.keep_scan(slot, state);
            for (const auto& [device, flag] : flags) {
              self.note_different_scales(slot, py::cast<at::Device>(device), differ);
            }
          },
          py::arg("state"), py::arg("flags"), py::arg("differ"))
      .def("update", &update, py::arg("attributes"), py::arg("new_scale"), py::arg("next_states"))
      .def("must_warn_of", &LossScaleOfPython::must_warn_of, py::arg("value"))
      .def_static("warning_of", &LossScale::warning_of, py::arg("value"))
      .def("check_scales", &LossScaleOfPython::check_scales)
      .def(
          "step_skipped",
          [](const LossScaleOfPython& self, const py::object& optimizer) -> std::optional<bool> {
            if (optimizer.is_none()) return self.step_skipped({});
            const auto slot = self.find_optimizer(optimizer.ptr());
            return slot.has_value() ? self.step_skipped(slot) : std::nullopt;
          },
          py::arg("optimizer"))
      .def(
          "stats",
          [](const LossScaleOfPython& self, double initial_scale) {
            const ScalerStats stats = self.stats(initial_scale);
            const std::string& name = stats.last_nonfinite;
            return std::make_tuple(stats.updates, stats.steps, stats.skips, stats.consecutive_skips,
                                   stats.scale, stats.smallest_scale, stats.largest_scale,
                                   name.empty() ? std::nullopt : std::optional(name),
                                   stats.skipped_tensors);
          },
          py::arg("initial_scale"));
}

}  // namespace

void define_scaler(py::module_& module) {
  using Rules = LossScaleHyperparameters;
  Fields<Rules> fields;
  define_field(fields, "growth_factor", &Rules::growth_factor);
  define_field(fields, "backoff_factor", &Rules::backoff_factor);
  define_field(fields, "growth_interval", &Rules::growth_interval);
  define_field(fields, "min_scale", &Rules::min_scale);
  define_field(fields, "max_scale", &Rules::max_scale);
  define_field(fields, "hysteresis", &Rules::hysteresis);
  define_field(fields, "dynamic", &Rules::dynamic);
  module.def(
      "update_scale_",
      [fields](const at::Tensor& scale, const at::Tensor& growth_tracker,
               const TensorList& found_infs, const OptionalTensor& hysteresis_tracker,
               const py::kwargs& values) {
        Rules rules;
        set_fields(fields, rules, values);
        const py::gil_scoped_release release;
        update_scale_(scale, growth_tracker, found_infs, rules, hysteresis_tracker);
      },
      py::arg("scale"), py::arg("growth_tracker"), py::arg("found_infs"),
      py::arg("hysteresis_tracker"));
  define_loss_scale(module);

  module.def("wanted_of_scaler", &wanted_of_scaler, py::arg("name"), py::arg("value"));
}

}  // namespace amp_ext::python
