// Everything that Python can call.
#include <ATen/record_function.h>
#include <amp_ext/ops.h>
#include <amp_ext/options.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "devices/dispatch.h"
#include "files/file_beside.h"
#include "kept_states.h"
#include "optimizer/param_names.h"
#include "optimizer/plan.h"
#include "optimizer/writers.h"
#include "scaler/scaler_monitor.h"
#include "scaler/scaler_ranges.h"
#include "scaler/unscaled_grads.h"

namespace py = pybind11;
using namespace amp_ext;
using release_gil = py::call_guard<py::gil_scoped_release>;

namespace {

// Hands over the parameters, listed by group, if they are those that the plan was made of. What a
// list can be made of again is a list of parameters: no iterator, and no set.
bool take_params(Plan& plan, const std::vector<py::object>& groups) {
  int64_t number = 0, group_index = 0;
  for (const py::object& group : groups) {
    if (PyIter_Check(group.ptr()) || PyAnySet_Check(group.ptr())) return false;
    const auto params = py::reinterpret_steal<py::object>(
        PySequence_Fast(group.ptr(), "params must be an iterable of tensors"));
    if (!params) throw py::error_already_set();
    PyObject** const items = PySequence_Fast_ITEMS(params.ptr());
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params.ptr()); ++i, ++number) {
      if (!plan.is_param(number, group_index, items[i])) return false;
      plan.take_param(number, THPVariable_Unpack(items[i]));
    }
    ++group_index;
  }
  return number == plan.number_of_params();
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

std::vector<LookResult> check_finite(Plan& plan, const at::Tensor& found_inf,
                                     const OptionalTensor& grad_scale, bool sum_squares,
                                     bool skip_nonfinite) {
  plan.read_grads();
  const py::gil_scoped_release release;
  return plan.check_finite(found_inf, grad_scale, sum_squares, skip_nonfinite);
}

// A field of a struct of options that Python sets by name. Straight from the value: an attribute of
// an object of Python takes ten times as long.
template <typename Options>
struct Field {
  PyObject* name;  // interned, for good
  std::function<void(Options&, py::handle)> set;
  bool is_option = true;  // of a group of an optimizer
};

template <typename Options>
using Fields = std::vector<Field<Options>>;

// A class of options for Python. The functions that set fields share the list of them: this module
// has no state of its own.
template <typename Options>
struct OptionsClass {
  py::class_<Options> type;
  std::shared_ptr<Fields<Options>> fields = std::make_shared<Fields<Options>>();
};

// Defines a field, which `set` writes from a value of the given type.
template <typename Value, typename Options, typename Get, typename Set>
void define_field(OptionsClass<Options>& options, const char* name, const Get& get,
                  const Set& set) {
  options.type.def_property(name, get, set);
  options.fields->push_back(
      {PyUnicode_InternFromString(name), [name, set](Options& self, py::handle value) {
         py::detail::make_caster<Value> caster;
         if (!caster.load(value, /*convert=*/true)) {
           throw py::type_error(c10::str(name, " can't be ", std::string(py::repr(value))));
         }
         set(self, py::detail::cast_op<Value&&>(std::move(caster)));
       }});
}

template <typename Options, typename Struct, typename Value>
void define_field(OptionsClass<Options>& options, const char* name, Value Struct::* member) {
  define_field<Value>(
      options, name, [member](const Options& self) { return self.*member; },
      [member](Options& self, Value value) { self.*member = std::move(value); });
}

// Null if there is none of that name.
template <typename Options>
const Field<Options>* find_field(const Fields<Options>& fields, py::handle name) {
  for (const Field<Options>& field : fields) {
    if (field.name == name.ptr() || PyUnicode_Compare(field.name, name.ptr()) == 0) return &field;
  }
  return nullptr;
}

template <typename Options>
void set_fields(const Fields<Options>& fields, Options& options, const py::kwargs& values) {
  for (const auto& [name, value] : values) {
    const Field<Options>* const field = find_field(fields, name);
    if (field == nullptr) {
      const auto type = py::type::of<Options>().attr("__name__");
      throw py::attribute_error(py::str("{!r} object has no attribute {!r}").format(type, name));
    }
    field->set(options, value);
  }
}

// A struct of options, whose fields Python gives by name.
template <typename Options>
OptionsClass<Options> options_class(py::module_& module, const char* name) {
  OptionsClass<Options> made{py::class_<Options>(module, name)};
  made.type.def(py::init([fields = made.fields](const py::kwargs& values) {
    Options options;
    set_fields(*fields, options, values);
    return options;
  }));
  return made;
}

// A learning rate is a number or a tensor to Python, and travels apart here.
template <typename Options>
void define_lr(OptionsClass<Options>& options) {
  using Lr = std::variant<at::Tensor, double>;
  define_field<Lr>(
      options, "lr",
      [](const Options& self) -> Lr {
        if (self.lr_tensor.has_value()) return *self.lr_tensor;
        return self.lr;
      },
      [](Options& self, const Lr& lr) {
        const double* const number = std::get_if<double>(&lr);
        self.lr = number != nullptr ? *number : 0.0;
        self.lr_tensor = number != nullptr ? OptionalTensor() : std::get<at::Tensor>(lr);
      });
}

const char* name_of(BufferRole role) {
  switch (role) {
    case BufferRole::kFirstMoment:
      return "first moment";
    case BufferRole::kSecondMoment:
      return "second moment";
    case BufferRole::kMaximum:
      return "maximum";
  }
  return nullptr;
}

// Throws if a number is NaN, which would leave nothing but NaN, or the limit is none.
template <typename Hyperparameters>
void check_numbers(const std::string& operation, const Group<Hyperparameters>& options) {
  const auto check = [&](const char* name, double value) {
    TORCH_CHECK(!std::isnan(value), operation, ": ", name, " must be a number, got nan");
  };
  check("lr", options.lr);
  Hyperparameters::for_each_field([&](const char* name, auto member) {
    if constexpr (std::is_floating_point_v<std::decay_t<decltype(options.*member)>>) {
      check(name, options.*member);
    }
  });
  TORCH_CHECK(options.clip_value >= 0.0, operation, ": clip_value must be at least 0, got ",
              options.clip_value);
}

// The hyperparameters of an optimizer, taken from a dict that has all options and may have other
// entries too, and what describes it: `operation`, `fields` and `buffers`.
template <typename Hyperparameters>
OptionsClass<Group<Hyperparameters>> hyperparameters_class(py::module_& module) {
  using Options = Group<Hyperparameters>;
  OptionsClass<Options> options{py::class_<Options>(module, Hyperparameters::kName)};
  options.type.def(py::init([fields = options.fields](const py::dict& group) {
    Options options;
    for (const Field<Options>& field : *fields) {
      if (!field.is_option) continue;
      PyObject* const value = PyDict_GetItemWithError(group.ptr(), field.name);
      if (value == nullptr) {
        const std::string name = py::str(field.name);
        throw py::value_error(c10::str(Hyperparameters::kName, ": ", name, " must be there"));
      }
      field.set(options, value);
    }
    check_numbers(Hyperparameters::kName, options);
    TORCH_CHECK(!options.lr_tensor.has_value() || options.lr_tensor->numel() == 1,
                Hyperparameters::kName, ": lr must be one element");
    return options;
  }));
  define_lr(options);
  define_field<std::optional<double>>(
      options, "clip_value", [](const Options& self) { return self.clip_value; },
      [](Options& self, const std::optional<double>& limit) {
        self.clip_value = limit.value_or(CommonHyperparameters().clip_value);
      });
  Hyperparameters::for_each_field([&](const char* name, auto member) {
    define_field(options, name, member);
    options.fields->back().is_option = Hyperparameters::is_option(name);
  });
  py::list fields;
  for (const Field<Options>& field : *options.fields) fields.append(py::handle(field.name));
  py::list buffers;
  for (const BufferDescription& buffer : Hyperparameters::kBuffers) {
    buffers.append(py::make_tuple(buffer.name, name_of(buffer.role)));
  }
  options.type.attr("operation") = Hyperparameters::kOperation;
  options.type.attr("fields") = py::tuple(fields);
  options.type.attr("buffers") = py::tuple(buffers);
  return options;
}

// Takes a list out of `arguments`; None where it is not there.
template <typename List>
List take(py::kwargs& arguments, const std::string& operation, const std::string& name,
          const char* wanted = "a list of tensors") {
  const py::object list = arguments.attr("pop")(name, py::none());
  try {
    return py::cast<List>(list);
  } catch (const py::cast_error&) {
    const std::string type = py::str(py::type::of(list).attr("__name__"));
    throw py::type_error(operation + ": " + name + " must be " + wanted + ", got " + type);
  }
}

// Takes what a call of another name calls itself and the lists of buffers that it gives.
template <typename Hyperparameters>
StepNames take_names(py::kwargs& arguments) {
  StepNames names = names_of<Hyperparameters>();
  if (arguments.contains("operation")) {
    names.operation = py::cast<std::string>(arguments.attr("pop")("operation"));
    names.buffers = py::cast<std::vector<std::string>>(arguments.attr("pop")("buffers"));
  }
  return names;
}

// Takes the lists of a step out of `arguments`.
StepLists take_lists(py::kwargs& arguments, const StepNames& names) {
  const std::string& operation = names.operation;
  StepLists lists{take<TensorList>(arguments, operation, "params"),
                  take<TensorList>(arguments, operation, "grads"),
                  {},
                  take<OptionalTensorList>(arguments, operation, "steps"),
                  take<OptionalTensorList>(arguments, operation, "master_params"),
                  take<std::optional<std::vector<int64_t>>>(arguments, operation, "first_elements",
                                                            "a list of numbers"),
                  take<OptionalTensorList>(arguments, operation, "exponents")};
  for (const std::string& name : names.buffers) {
    lists.buffers.push_back(take<OptionalTensorList>(arguments, operation, name));
  }
  return lists;
}

// Takes the arguments that say what a step makes of the gradients.
GradientOptions take_gradient_options(const Fields<GradientOptions>& fields,
                                      py::kwargs& arguments) {
  GradientOptions options;
  for (const Field<GradientOptions>& field : fields) {
    const py::handle name = field.name;
    if (arguments.contains(name)) field.set(options, arguments.attr("pop")(name));
  }
  return options;
}

// Defines what Python calls of an optimizer: its hyperparameters, its step of a plan, and its list
// operation, all of whose arguments are given by name.
template <typename Hyperparameters>
void define_optimizer(py::module_& module, py::class_<Plan>& plan_class,
                      const OptionsClass<GradientOptions>& gradient_options_class) {
  const auto hyperparameters = hyperparameters_class<Hyperparameters>(module);
  // Gradients are read while Python stands still; the step itself lets other threads run.
  plan_class.def(
      "step",
      [](Plan& plan, const std::vector<Group<Hyperparameters>>& groups, OptionalTensor grad_scale,
         OptionalTensor found_inf, std::optional<double> max_grad_norm,
         OptionalTensor sum_of_squares, OptionalTensor grad_norm, bool skip_nonfinite) {
        const GradientOptions options{std::move(grad_scale), std::move(found_inf),
                                      max_grad_norm,         std::move(sum_of_squares),
                                      std::move(grad_norm),  skip_nonfinite};
        const py::gil_scoped_release release;
        plan.step(groups, options);
      },
      py::arg("groups"), py::arg("grad_scale"), py::arg("found_inf"), py::arg("max_grad_norm"),
      py::arg("sum_of_squares"), py::arg("grad_norm"), py::arg("skip_nonfinite"));
  module.def(Hyperparameters::kOperation,
             [fields = hyperparameters.fields,
              gradient_fields = gradient_options_class.fields](py::kwargs arguments) {
               const StepNames names = take_names<Hyperparameters>(arguments);
               const StepLists lists = take_lists(arguments, names);
               const GradientOptions gradient_options =
                   take_gradient_options(*gradient_fields, arguments);
               Group<Hyperparameters> options;
               set_fields(*fields, options, arguments);
               check_numbers(names.operation, options);
               const py::gil_scoped_release release;
               step_(lists, options, gradient_options, names);
             });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Kernels of amp_ext; documented in amp_ext.ops.";

  auto loss_scale = options_class<LossScaleHyperparameters>(module, "LossScaleHyperparameters");
  define_field(loss_scale, "growth_factor", &LossScaleHyperparameters::growth_factor);
  define_field(loss_scale, "backoff_factor", &LossScaleHyperparameters::backoff_factor);
  define_field(loss_scale, "growth_interval", &LossScaleHyperparameters::growth_interval);
  define_field(loss_scale, "min_scale", &LossScaleHyperparameters::min_scale);
  define_field(loss_scale, "max_scale", &LossScaleHyperparameters::max_scale);
  define_field(loss_scale, "hysteresis", &LossScaleHyperparameters::hysteresis);
  define_field(loss_scale, "dynamic", &LossScaleHyperparameters::dynamic);

  auto gradients = options_class<GradientOptions>(module, "GradientOptions");
  define_field(gradients, "grad_scale", &GradientOptions::grad_scale);
  define_field(gradients, "found_inf", &GradientOptions::found_inf);
  define_field(gradients, "max_grad_norm", &GradientOptions::max_grad_norm);
  define_field(gradients, "sum_of_squares", &GradientOptions::sum_of_squares);
  define_field(gradients, "grad_norm", &GradientOptions::grad_norm);
  define_field(gradients, "skip_nonfinite", &GradientOptions::skip_nonfinite);

  py::class_<LookResult>(module, "LookResult")
      .def_readonly("found_inf", &LookResult::found_inf)
      .def_readonly("first_nonfinite", &LookResult::first_nonfinite)
      .def_readonly("sum_of_squares", &LookResult::sum_of_squares)
      .def_readonly("partition", &LookResult::partition);

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

  py::class_<StepProgress, std::shared_ptr<StepProgress>>(module, "StepProgress")
      .def("__bool__", [](const StepProgress& progress) { return progress.has_failed; })
      .def("__str__", &StepProgress::text);

  py::class_<KeptStates>(module, "KeptStates")
      .def(py::init<>())
      .def("keep", &KeptStates::keep, py::arg("states"), py::arg("keys"))
      .def("are_in", &KeptStates::are_in, py::arg("states"));

  py::class_<RoundedParams> rounded_params(module, "RoundedParams");
  py::class_<ScaledGrads> scaled_grads(module, "ScaledGrads");

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
          [](Plan& plan, int64_t number, at::Tensor param, const OptionalTensor& grad) {
            plan.set_shard(number, std::move(param), grad.value_or(at::Tensor()));
          },
          py::arg("number"), py::arg("param"), py::arg("grad"))
      .def(
          "set_state",
          [](Plan& plan, int64_t number, std::vector<at::Tensor> buffers,
             const OptionalTensor& master_param, const OptionalTensor& step,
             const OptionalTensor& exponents) {
            plan.set_state(number, {std::move(buffers), master_param.value_or(at::Tensor()),
                                    step.value_or(at::Tensor()), exponents.value_or(at::Tensor())});
          },
          py::arg("number"), py::arg("buffers"), py::arg("master_param"), py::arg("step"),
          py::arg("exponents") = std::nullopt)
      .def("set_first_element", &Plan::set_first_element, py::arg("number"),
           py::arg("first_element"))
      .def("take_params", &take_params, py::arg("groups"))
      .def("set_rounded_params", &Plan::set_rounded_params, py::arg("rounded"))
      .def("rounded_params", &Plan::rounded_params)
      .def("set_scaled_grads", &Plan::set_scaled_grads, py::arg("scaled"))
      .def("scaled_grads", &Plan::scaled_grads)
      .def_property_readonly("progress", &Plan::progress)
      .def("read_grads", &Plan::read_grads)
      .def("let_go", &Plan::let_go)
      .def("gradients_were_written", &Plan::gradients_were_written)
      .def("check_finite", &check_finite, py::arg("found_inf"), py::arg("grad_scale"),
           py::arg("sum_squares"), py::arg("skip_nonfinite"));

#define AMP_EXT_DEFINE(Functor) define_optimizer<Functor##Hyperparameters>(module, plan, gradients);
  AMP_EXT_FOR_EACH_OPTIMIZER(AMP_EXT_DEFINE)
#undef AMP_EXT_DEFINE

  module.def("check_finite_", &check_finite_, release_gil(), py::arg("tensors"),
             py::arg("found_inf"), py::arg("grad_scale"), py::arg("sum_of_squares"),
             py::arg("first_nonfinite"));
  module.def("count_nonfinite", &count_nonfinite, release_gil(), py::arg("tensors"));
  module.def("clip_grads_", &clip_grads_, release_gil(), py::arg("grads"), py::arg("total_norm"),
             py::arg("max_norm"));
  module.def("unscale_", &unscale_, release_gil(), py::arg("grads"), py::arg("inv_scale"),
             py::arg("found_inf"), py::arg("first_nonfinite"));
  module.def("update_scale_", &update_scale_, release_gil(), py::arg("scale"),
             py::arg("growth_tracker"), py::arg("found_infs"), py::arg("first_nonfinites"),
             py::arg("slots"), py::arg("hyperparameters"), py::arg("hysteresis_tracker"),
             py::arg("monitor"));
  module.attr("NO_TENSOR") = kNoTensor;
  module.def("refresh_masters_", &refresh_masters_, release_gil(), py::arg("params"),
             py::arg("master_params"));
  module.def("split_master", &split_master, release_gil(), py::arg("param"), py::arg("master"),
             py::arg("low_bits"));
  module.def("join_master", &join_master, release_gil(), py::arg("param"), py::arg("low"));
  module.def("encode_ratios", &encode_ratios, release_gil(), py::arg("moment"),
             py::arg("second_moment"));
  module.def("decode_ratios", &decode_ratios, release_gil(), py::arg("codes"),
             py::arg("second_moment"));
  module.def("encode_groups", &encode_groups, release_gil(), py::arg("moment"), py::arg("code"));
  module.def("decode_groups", &decode_groups, release_gil(), py::arg("codes"), py::arg("exponents"),
             py::arg("code"));
  module.def("cpu_isa", &cpu_isa);
  module.def("configured_options", &configured_options);
  module.def("other_writer", &other_writer, py::arg("classes"), py::arg("own_keys"),
             py::arg("groups"), py::arg("states"));
  module.def("wanted_of_scaler", &wanted_of_scaler, py::arg("name"), py::arg("value"));
  module.def("places_by_name", &places_by_name, py::arg("own"), py::arg("saved"));
  module.def("name_of_another_group", &name_of_another_group, py::arg("own"), py::arg("saved"));
  module.def(
      "open_beside",
      [](const std::string& path) {
        FileBeside file;
        {
          const py::gil_scoped_release release;
          file = open_beside(path);
        }
        // A path need not be text.
        return std::make_tuple(py::bytes(file.refusal), file.error, file.descriptor,
                               py::bytes(file.temporary), py::bytes(file.target));
      },
      py::arg("path"));
  module.def("is_profiled", &at::hasCallbacks);
  module.def(
      "complement_of_power",
      [](double base, double exponent) { return complement_of_power(base, exponent); },
      py::arg("base"), py::arg("exponent"));
}
