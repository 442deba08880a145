// The operations over lists of tensors. Throws c10::Error on bad input, before anything is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "api.h"
#include "functors/adam.h"
#include "functors/loss_scale.h"
#include "functors/sgd.h"
#include "plan.h"
#include "scaler_monitor.h"

namespace amp_ext {

using TensorList = std::vector<at::Tensor>;
using OptionalTensorList = std::optional<std::vector<at::Tensor>>;

// Sets found_inf to 1 if an element of `tensors` is inf or NaN, or if grad_scale has no finite
// inverse; otherwise leaves it. Sets sum_of_squares, if given, and lowers first_nonfinite, if
// given, to the index of the first such tensor. Only reads the tensors.
AMP_EXT_API void check_finite_(const TensorList& tensors, const at::Tensor& found_inf,
                               const OptionalTensor& grad_scale,
                               const OptionalTensor& sum_of_squares,
                               const OptionalTensor& first_nonfinite);

// Multiplies gradients by inv_scale in place; found_inf and first_nonfinite as above, of the values
// before.
AMP_EXT_API void unscale_(const TensorList& grads, const at::Tensor& inv_scale,
                          const at::Tensor& found_inf, const OptionalTensor& first_nonfinite);

// Multiplies gradients of this norm by the coefficient that brings it down to max_norm. Writes
// nothing where it is small enough.
AMP_EXT_API void clip_grads_(const TensorList& grads, const at::Tensor& total_norm,
                             double max_norm);

// The number of infs and NaNs of each tensor, in one int64 tensor.
AMP_EXT_API at::Tensor count_nonfinite(const TensorList& tensors);

// The result of an optimizer's look on one device, for its report.
struct LookResult {
  at::Tensor found_inf;            // one float32
  OptionalTensor first_nonfinite;  // one int64, reset by the update
  int64_t slot = 0;                // of the optimizer in the monitor
};

// Backs the scale off if one of the looks found something, grows it after an interval of clean
// steps, and reports to the monitor, if there is one.
AMP_EXT_API void update_scale_(const at::Tensor& scale, const at::Tensor& growth_tracker,
                               const std::vector<LookResult>& looks,
                               const LossScaleHyperparameters& hyperparameters,
                               const OptionalTensor& hysteresis_tracker,
                               const ScalerMonitor* monitor);

// One step of Adam or AdamW; of AMSGrad if max_exp_avg_sqs is given. `lr`, if given, replaces the
// learning rate of the hyperparameters. Without `steps` their timestep is the number of this step.
AMP_EXT_API void adam_(const TensorList& params, const TensorList& grads,
                       const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
                       const OptionalTensorList& steps, const OptionalTensorList& max_exp_avg_sqs,
                       const OptionalTensorList& master_params,
                       const AdamHyperparameters& hyperparameters, const OptionalTensor& lr,
                       const GradientOptions& gradient_options,
                       const std::string& operation = "adam_");

// One step of SGD; with momentum if momentum_buffers is given, which hold zeros at first.
AMP_EXT_API void sgd_(const TensorList& params, const TensorList& grads,
                      const OptionalTensorList& momentum_buffers, const OptionalTensorList& steps,
                      const OptionalTensorList& master_params,
                      const SgdHyperparameters& hyperparameters, const OptionalTensor& lr,
                      const GradientOptions& gradient_options,
                      const std::string& operation = "sgd_",
                      const std::string& buffers_name = "momentum_buffers");

// Takes parameters that were changed behind their masters over into them. A master that rounds to
// its parameter is left as it is.
AMP_EXT_API void refresh_masters_(const TensorList& params, const TensorList& master_params);

}  // namespace amp_ext
