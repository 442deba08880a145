// Binds what GradScaler calls: the update of the scale, and the scan of gradients for unscale_()
// and for optimizers of other packages. CompiledStepper scans those of amp_ext's optimizers.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/ops.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "ops/update_scale.h"
#include "python/module.h"
#include "python/options_by_name.h"
#include "tensors/tensor_memory.h"

namespace amp_ext::python {

namespace {

// Scans gradients for inf and NaN, and multiplies them by `inv_scale` if it is given. Returns
// (found_inf, first_nonfinite) for each device, where the first is a copy of `found_inf`. Returns
// None if a gradient is none that our kernels read. A sparse float16 gradient is coalesced first,
// because a sum of finite entries may overflow.
py::object scan_grads(const TensorList& params, const std::vector<py::object>& grads,
                      const at::Tensor& found_inf, const OptionalTensor& scale,
                      const OptionalTensor& inv_scale, bool allow_fp16) {
  TensorList present;
  std::vector<at::Device> devices;
  for (size_t i = 0; i < grads.size(); ++i) {
    present.emplace_back();
    if (grads[i].is_none()) continue;
    at::Tensor& grad = present.back() = THPVariable_Unpack(grads[i].ptr());
    const bool is_half = grad.scalar_type() == at::kHalf;
    TORCH_CHECK_VALUE(!is_half || allow_fp16,
                      "Attempting to unscale FP16 gradients. They would vanish in float16. Call "
                      "scaler.step() without unscale_(), with an optimizer of amp_ext.optim, which "
                      "unscales in float32 inside its step. To clip, construct it with "
                      "max_grad_norm=.");
    if (!THPVariable_CheckExact(grads[i].ptr()) || !(grad.is_cpu() || grad.is_cuda())) {
      return py::none();
    }
    if (grad.is_sparse() && is_half) params[i].mutable_grad() = grad = grad.coalesce();
    if (grad.is_sparse()) grad = grad._values();
    if (std::find(devices.begin(), devices.end(), grad.device()) == devices.end()) {
      devices.push_back(grad.device());
    }
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> found;
  {
    const py::gil_scoped_release release;
    for (const at::Device& device : devices) {
      const auto options = at::TensorOptions(device);
      const at::Tensor nothing = at::empty({0}, options.dtype(at::kFloat));
      TensorList on_device;  // an empty tensor in place of each other gradient keeps the indices
      for (const at::Tensor& grad : present) {
        on_device.push_back(grad.defined() && grad.device() == device ? grad : nothing);
      }
      const at::Tensor flag = to_device(found_inf.clone(), device);
      const at::Tensor first = at::full({}, kNoTensor, options.dtype(at::kLong));
      if (inv_scale.has_value()) {
        unscale_(on_device, to_device(*inv_scale, device), flag, first);
      } else {
        check_finite_(on_device, flag, to_device(scale.value(), device), {}, first);
      }
      found.emplace_back(flag, first);
    }
  }
  return py::cast(found);
}

// A first_nonfinite or None, the key of the optimizer, and whether its flag counts tensors.
using Scanned = std::tuple<OptionalTensor, int64_t, bool>;

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
  // With `counts`, also copies them to `seen` in host memory, without a wait. Returns the number of
  // skips in a row up to the last update whose counts have arrived there.
  module.def(
      "update_scale_",
      [fields](const at::Tensor& scale, const at::Tensor& growth_tracker,
               const TensorList& found_infs, const OptionalTensor& hysteresis_tracker,
               const std::vector<Scanned>& scanned, const OptionalTensor& counts,
               const OptionalTensor& seen, const py::kwargs& values) -> int64_t {
        Rules rules;
        set_fields(fields, rules, values);
        const py::gil_scoped_release release;
        if (!counts.has_value()) {
          update_scale_(scale, growth_tracker, found_infs, rules, hysteresis_tracker);
          return 0;
        }
        const at::Device device = scale.device();
        std::vector<ReportedFlag> flags;
        TensorList elsewhere;
        for (size_t i = 0; i < found_infs.size(); ++i) {
          const auto& [first, key, counts_tensors] = scanned.at(i);
          flags.push_back({to_device(found_infs[i], device), {}, static_cast<double>(key)});
          flags.back().counts_tensors = counts_tensors;
          if (!first.has_value()) continue;
          flags.back().first_nonfinite = to_device(*first, device);
          if (first->device() != device) elsewhere.push_back(*first);
        }
        update_scale(scale, growth_tracker, hysteresis_tracker, rules, flags, counts);
        for (const at::Tensor& first : elsewhere)
          first.fill_(kNoTensor);  // the update reset a copy
        const at::Tensor& arrived = seen.value_or(*counts);
        if (!arrived.is_same(*counts)) arrived.copy_(*counts, /*non_blocking=*/true);
        return static_cast<int64_t>(
            static_cast<const volatile ScaleCounts*>(arrived.const_data_ptr())->consecutive_skips);
      },
      py::arg("scale"), py::arg("growth_tracker"), py::arg("found_infs"),
      py::arg("hysteresis_tracker"), py::arg("scanned") = std::vector<Scanned>(),
      py::arg("counts") = OptionalTensor(), py::arg("seen") = OptionalTensor());
  module.def("scan_grads", &scan_grads, py::arg("params"), py::arg("grads"), py::arg("found_inf"),
             py::arg("scale"), py::arg("inv_scale"), py::arg("allow_fp16"));
}

}  // namespace amp_ext::python
