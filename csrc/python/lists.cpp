// Binds the operations over lists of tensors and the descriptions of optimizers.
#include <amp_ext/ops.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels.h"
#include "ops/step.h"
#include "python/module.h"
#include "python/option_values.h"
#include "python/options_by_name.h"
#include "tensors/tensor_memory.h"

namespace amp_ext::python {

// Names of an optimizer: of its operation over lists, its hyperparameters and its buffers.
struct FormulaNames {
  std::string operation;
  py::tuple fields, buffers;
};

namespace {

// Pops the argument `name`, or None if it is missing. Throws if the argument is not a `List`.
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

// Pops the names that errors use. A Python function that wraps the operation passes its own name as
// "operation", and the names of its lists of buffers as "buffers".
template <typename Hyperparameters>
StepNames take_names(py::kwargs& arguments) {
  StepNames names = names_of<Hyperparameters>();
  if (arguments.contains("operation")) {
    names.operation = py::cast<std::string>(arguments.attr("pop")("operation"));
    names.buffers = py::cast<std::vector<std::string>>(arguments.attr("pop")("buffers"));
  }
  return names;
}

// Pops the lists of tensors of a step from `arguments`.
StepLists take_lists(py::kwargs& arguments, const StepNames& names) {
  const std::string& operation = names.operation;
  StepLists lists{take<TensorList>(arguments, operation, "params"),
                  take<TensorList>(arguments, operation, "grads"),
                  {},
                  take<OptionalTensorList>(arguments, operation, "steps"),
                  take<OptionalTensorList>(arguments, operation, "master_params"),
                  take<std::optional<std::vector<int64_t>>>(arguments, operation, "global_offsets",
                                                            "a list of numbers"),
                  take<OptionalTensorList>(arguments, operation, "exponents")};
  for (const std::string& name : names.buffers) {
    lists.buffers.push_back(take<OptionalTensorList>(arguments, operation, name));
  }
  return lists;
}

// Pops the arguments about unscaling, clipping and skipping from `arguments`.
GradientOptions take_gradient_options(const Fields<GradientOptions>& fields,
                                      py::kwargs& arguments) {
  GradientOptions options;
  for (const Field<GradientOptions>& field : fields) {
    const py::handle name = field.name;
    if (arguments.contains(name)) field.set(options, arguments.attr("pop")(name));
  }
  return options;
}

const char* name_of(BufferRole role) {
  switch (role) {
    case BufferRole::kFirstMoment:
      return "first moment";
    case BufferRole::kSecondMoment:
      return "second moment";
    case BufferRole::kMaximum:
      return "maximum";
    case BufferRole::kOther:
      return "other";
  }
  return nullptr;
}

// Returns the suffix of a quantized format in keys; "" for kNone.
const char* name_of(BufferCode code) {
  switch (code) {
    case BufferCode::kNone:
      return "";
    case BufferCode::kRatio:
      return "q8h";
    case BufferCode::kRoot:
      return "q8s";
    case BufferCode::kMagnitude:
      return "q8m";
  }
  return nullptr;
}

// Defines the names of an optimizer, and its operation over lists, for example adam_. The operation
// takes keyword arguments only.
template <typename Hyperparameters>
void define_optimizer(py::module_& module, const Fields<GradientOptions>& gradient_fields) {
  const auto fields = fields_of<Hyperparameters>();
  py::list names, buffers;
  for (const auto& field : fields) names.append(py::handle(field.name));
  for (const BufferDescription& buffer : Hyperparameters::kBuffers) buffers.append(buffer);
  module.attr(Hyperparameters::kName) = FormulaNames{Hyperparameters::kOperation, names, buffers};
  module.def(Hyperparameters::kOperation, [fields, gradient_fields](py::kwargs arguments) {
    const StepNames names = take_names<Hyperparameters>(arguments);
    const StepLists lists = take_lists(arguments, names);
    const GradientOptions gradient_options = take_gradient_options(gradient_fields, arguments);
    constexpr bool kIsMuon = std::is_same_v<Hyperparameters, MuonHyperparameters>;
    [[maybe_unused]] MuonOptions of_matrices;
    [[maybe_unused]] OptionalTensor skipped_matrices;
    if constexpr (kIsMuon) {
      const py::dict matrix_options = arguments.attr("pop")("matrix_options");
      if (!read_muon_options(matrix_options.ptr(), of_matrices)) {
        throw py::value_error(
            py::str("muon_: there is a wrong value in {}").format(matrix_options));
      }
      skipped_matrices = arguments.attr("pop")("skipped_matrices").cast<OptionalTensor>();
    }
    Group<Hyperparameters> options;
    set_fields(fields, options, arguments);
    check_numbers(names.operation, options);
    const py::gil_scoped_release release;
    if constexpr (kIsMuon) {
      muon_(lists, options, of_matrices, gradient_options, skipped_matrices, names);
    } else {
      step_(lists, options, gradient_options, names);
    }
  });
}

void define_descriptions(py::module_& module) {
  py::class_<BufferDescription>(module, "BufferDescription")
      .def_readonly("name", &BufferDescription::name)
      .def_property_readonly("role",
                             [](const BufferDescription& self) { return name_of(self.role); })
      .def_readonly("dither_stride", &BufferDescription::dither_stride)
      .def_property_readonly("code",
                             [](const BufferDescription& self) { return name_of(self.code); })
      .def_readonly("option", &BufferDescription::option);
  py::class_<FormulaNames>(module, "FormulaNames")
      .def_readonly("operation", &FormulaNames::operation)
      .def_readonly("fields", &FormulaNames::fields)
      .def_readonly("buffers", &FormulaNames::buffers);
}

// Judges the norm of a step. `judgement` has the doubles of a NormJudgement.
void judge_norm(const at::Tensor& judgement, const at::Tensor& skips,
                const OptionalTensor& grad_scale, const OptionalTensor& found_inf,
                const OptionalTensor& sum_of_squares, bool skip_nonfinite) {
  const at::Device device = judgement.device();
  const GradientOptions options{grad_scale, found_inf, {}, sum_of_squares, {}, skip_nonfinite};
  const DeviceInputs inputs(device, options);
  auto* const numbers = reinterpret_cast<NormJudgement*>(judgement.mutable_data_ptr<double>());
  backend_of(device).judge_norm(device, inputs.pointers, numbers, skips.mutable_data_ptr<float>());
}

}  // namespace

void define_lists(py::module_& module) {
  define_descriptions(module);
  using release_gil = py::call_guard<py::gil_scoped_release>;
  Fields<GradientOptions> gradients;
  define_field(gradients, "grad_scale", &GradientOptions::grad_scale);
  define_field(gradients, "found_inf", &GradientOptions::found_inf);
  define_field(gradients, "max_grad_norm", &GradientOptions::max_grad_norm);
  define_field(gradients, "sum_of_squares", &GradientOptions::sum_of_squares);
  define_field(gradients, "grad_norm", &GradientOptions::grad_norm);
  define_field(gradients, "skip_nonfinite", &GradientOptions::skip_nonfinite);

#define AMP_EXT_DEFINE(Functor) define_optimizer<Functor##Hyperparameters>(module, gradients);
  AMP_EXT_FOR_EACH_OPTIMIZER(AMP_EXT_DEFINE)
  AMP_EXT_DEFINE(Muon)
#undef AMP_EXT_DEFINE

  module.def("check_finite_", &check_finite_, release_gil(), py::arg("tensors"),
             py::arg("found_inf"), py::arg("grad_scale"), py::arg("sum_of_squares"),
             py::arg("first_nonfinite"));
  module.def("count_nonfinite", &count_nonfinite, release_gil(), py::arg("tensors"));
  // Holds the GIL, so that no thread reads numbers in host memory that are half written.
  module.def("judge_norm_", &judge_norm, py::arg("judgement"), py::arg("skips"),
             py::arg("grad_scale"), py::arg("found_inf"), py::arg("sum_of_squares"),
             py::arg("skip_nonfinite"));
  module.def("count_division_errors", &count_division_errors, release_gil(), py::arg("device"),
             py::arg("stride"));
  module.def("clip_grads_", &clip_grads_, release_gil(), py::arg("grads"), py::arg("total_norm"),
             py::arg("max_norm"));
  module.def("unscale_", &unscale_, release_gil(), py::arg("grads"), py::arg("inv_scale"),
             py::arg("found_inf"), py::arg("first_nonfinite"));
  module.def("refresh_masters_", &refresh_masters_, release_gil(), py::arg("params"),
             py::arg("master_params"));
  module.def("average_params_", &average_params_, release_gil(), py::arg("averages"),
             py::arg("params"), py::arg("weight"), py::arg("number"), py::arg("residuals"),
             py::arg("global_offsets"));
  module.def(
      "version_counter_of",
      [](const at::Tensor& tensor) {
        return reinterpret_cast<uintptr_t>(version_counter_of(*tensor.unsafeGetTensorImpl()));
      },
      py::arg("tensor"));
  module.def("split_fp32", &split_fp32, release_gil(), py::arg("param"), py::arg("master"),
             py::arg("low_bits"));
  module.def("join_fp32", &join_fp32, release_gil(), py::arg("param"), py::arg("residual"));
  module.def("quantize_ratios", &quantize_ratios, release_gil(), py::arg("moment"),
             py::arg("second_moment"));
  module.def("dequantize_ratios", &dequantize_ratios, release_gil(), py::arg("codes"),
             py::arg("second_moment"));
  module.def("quantize_blockwise", &quantize_blockwise, release_gil(), py::arg("moment"),
             py::arg("code"));
  module.def("dequantize_blockwise", &dequantize_blockwise, release_gil(), py::arg("codes"),
             py::arg("exponents"), py::arg("code"));
}

}  // namespace amp_ext::python
