// Updates a loss scale on its device.
#include "ops/update_scale.h"

#include <amp_ext/ops.h>

#include "devices/dispatch.h"
#include "ops/scalars.h"

namespace amp_ext {

void update_scale(const at::Tensor& scale, const at::Tensor& growth_tracker,
                  const OptionalTensor& hysteresis_tracker,
                  const LossScaleHyperparameters& hyperparameters,
                  const std::vector<ReportedFlag>& flags, const OptionalTensor& counts) {
  const char* const operation = "update_scale_";
  const at::Device device = device_of(operation, "scale", scale);
  check_number(operation, "scale", scale, at::kFloat, device);
  check_number(operation, "growth_tracker", growth_tracker, at::kInt, device);
  TORCH_CHECK(hysteresis_tracker.has_value() || hyperparameters.hysteresis == 1, operation,
              ": hysteresis_tracker must be given with a hysteresis of ",
              hyperparameters.hysteresis, ", got None");
  auto* const hysteresis =
      number_data<int32_t>(operation, "hysteresis_tracker", hysteresis_tracker, at::kInt, device);
  std::vector<OverflowFlag> on_engine;
  for (size_t i = 0; i < flags.size(); ++i) {
    const auto& [found_inf, first, key, counts_tensors] = flags[i];
    check_number(operation, c10::str("found_infs[", i, "]"), found_inf, at::kFloat, device);
    if (first.defined()) {
      check_number(operation, c10::str("first_nonfinites[", i, "]"), first, at::kLong, device);
    }
    on_engine.push_back({found_inf.const_data_ptr<float>(),
                         first.defined() ? first.mutable_data_ptr<int64_t>() : nullptr, key,
                         counts_tensors});
  }
  const ScaleUpdate update{
      hyperparameters,
      {scale.mutable_data_ptr<float>(), growth_tracker.mutable_data_ptr<int32_t>(), hysteresis},
      counts.has_value() ? static_cast<ScaleCounts*>(counts->mutable_data_ptr()) : nullptr};
  backend_of(device).update_scale(device, update, on_engine);
  bump_version(scale);
  bump_version(growth_tracker);
  if (hysteresis_tracker.has_value()) bump_version(*hysteresis_tracker);
}

void update_scale_(const at::Tensor& scale, const at::Tensor& growth_tracker,
                   const TensorList& found_infs, const LossScaleHyperparameters& hyperparameters,
                   const OptionalTensor& hysteresis_tracker) {
  std::vector<ReportedFlag> flags;
  for (const at::Tensor& found_inf : found_infs) flags.push_back({found_inf, {}});
  update_scale(scale, growth_tracker, hysteresis_tracker, hyperparameters, flags);
}

}  // namespace amp_ext
