// The results of a step besides the parameters and states: the norm of all gradients, and whether
// the step was applied.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>

#include <optional>
#include <vector>

#include "optimizer/grad_scan.h"
#include "optimizer/step.h"

namespace amp_ext {

// Tensors are reused by later steps, because a captured CUDA graph may write to them for as long as
// the optimizer's plan lives.
class AMP_EXT_API StepOutputs {
 public:
  // Copies the settings, but no results.
  void take_over(const StepOutputs& before) { tracks_step_applied_ = before.tracks_step_applied_; }

  // Makes every step from now on set step_applied().
  void track_step_applied() { tracks_step_applied_ = true; }

  // Returns the tensor for the norm of all gradients, or nullopt if the step does not read it.
  OptionalTensor allocate_norm(const ParamTable& params, bool reads_norm);

  // Writes the norm if no launch writes it, and lets the launches write the other results. Returns
  // the step_applied that they write if that is on another device, for finish() after the launches.
  at::Tensor prepare(const ParamTable& params, const StepInputs& inputs,
                     std::vector<StepBatch>& batches);
  void finish(const at::Tensor& step_applied);

  // Returns the norm of all unscaled gradients at the last step; undefined if it needed no norm.
  at::Tensor grad_norm() const { return has_grad_norm_ ? grad_norm_ : at::Tensor(); }
  // Returns one float32 on the device of the first parameter: 1 if the last step was applied, 0 if
  // it was skipped or found no gradient. Undefined before the first step that is tracked.
  at::Tensor step_applied() const { return step_applied_; }

 private:
  at::Tensor prepare_step_applied(const at::Device& device, std::vector<StepBatch>& batches);
  void write_norm(const GradientOptions& options);

  at::Tensor grad_norm_;
  at::Tensor step_applied_;
  bool has_grad_norm_ = false;  // whether grad_norm_ is of the last step
  bool tracks_step_applied_ = false;
};

}  // namespace amp_ext
