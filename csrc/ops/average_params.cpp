// Moves averages towards parameters, by a weight that only the device needs to know.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <amp_ext/ops.h>

#include <string>
#include <utility>
#include <vector>

#include "devices/dispatch.h"
#include "launches.h"
#include "ops/scalars.h"

namespace amp_ext {

void average_params_(const TensorList& averages, const TensorList& params, const at::Tensor& weight,
                     const at::Tensor& number, const OptionalTensorList& residuals,
                     const std::optional<std::vector<int64_t>>& global_offsets) {
  const char* const operation = "average_params_";
  const at::NoGradGuard no_grad;
  const at::Device device = device_of(operation, "weight", weight);
  check_number(operation, "weight", weight, at::kDouble, device);
  check_number(operation, "number", number, at::kDouble, device);
  check_length(operation, "averages", averages, params);
  if (residuals.has_value()) check_length(operation, "residuals", *residuals, params);
  TORCH_CHECK(!global_offsets.has_value() || global_offsets->size() == params.size(), operation,
              ": global_offsets must have ", params.size(), " elements, as params, got ",
              global_offsets->size());
  TensorList copies;
  std::vector<KernelTensorArgs> all_args(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor &average = averages[i], &param = params[i];
    const auto name = [&](const char* list) { return c10::str(list, "[", i, "]"); };
    const at::ScalarType dtype = average.scalar_type();
    TORCH_CHECK(is_plain(average) && has_all_elements(average) &&
                    average.is_non_overlapping_and_dense() &&
                    (dtype == at::kFloat || dtype == at::kBFloat16) && average.device() == device,
                operation, ": ", name("averages"), " must be dense, Float or BFloat16, and on ",
                device, ", got ", dtype, " on ", average.device());
    TORCH_CHECK(is_plain(param) && has_all_elements(param) && dtype_of(param).has_value(),
                operation, ": ", name("params"), " must be Float, Double, Half or BFloat16, got ",
                param.scalar_type(), ", ", param.layout());
    TORCH_CHECK(param.sizes().equals(average.sizes()) && param.device() == device, operation, ": ",
                name("params"), " must be of sizes ", average.sizes(), " on ", device, ", got ",
                param.sizes(), " on ", param.device());
    // Returns the memory of a tensor, or of a copy if its dtype or its order is another one.
    const auto memory = [&](const at::Tensor& tensor, at::ScalarType read) {
      if (tensor.scalar_type() == read && have_same_dense_layout(tensor, average)) {
        return const_cast<void*>(tensor.const_data_ptr());
      }
      const auto options = tensor.options().dtype(read).requires_grad(false);
      copies.push_back(at::empty_strided(average.sizes(), average.strides(), options));
      return copies.back().copy_(tensor).mutable_data_ptr();
    };
    KernelTensorArgs& args = all_args[i];
    const bool is_wide = param.scalar_type() == at::kDouble;
    args.param = memory(param, is_wide ? at::kFloat : param.scalar_type());
    args.param_dtype = is_wide ? DType::kFloat32 : *dtype_of(param);
    if (residuals.has_value() && (*residuals)[i].numel() > 0) {
      const at::Tensor& residual = (*residuals)[i];
      TORCH_CHECK(is_16_bit(param.scalar_type()) && residual.device() == device, operation, ": ",
                  name("residuals"), " must be on ", device, " beside Half or BFloat16, got ",
                  residual.device(), " beside ", param.scalar_type());
      check_is_residual(operation, name("residuals"), residual, param);
      args.master = residual.scalar_type() == at::kByte ? Master::kResidual16 : Master::kResidual8;
      if (residual.is_contiguous() && average.is_contiguous()) {
        args.master_param = const_cast<void*>(residual.const_data_ptr());
      } else {
        const at::Tensor elements = residual_elements(residual);
        args.master_param = memory(elements, elements.scalar_type());
      }
    }
    args.buffers[0] = average.mutable_data_ptr();
    args.buffer_formats[0] = format_of(*dtype_of(average));
    args.dithered = dtype == at::kBFloat16 ? kDithersParam : 0;
    args.numel = average.numel();
    args.global_offset = global_offsets.has_value() ? (*global_offsets)[i] : 0;
  }
  const AverageLaunch launch{all_args.data(), static_cast<int64_t>(all_args.size()),
                             weight.const_data_ptr<double>(), number.const_data_ptr<double>()};
  backend_of(device).average(device, launch);
  for (const at::Tensor& average : averages) bump_version(average);
}

}  // namespace amp_ext
