// The results of a step besides the parameters and states: gradient norms, whether it was applied,
// and the norms that a guard counts.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>

#include <memory>
#include <optional>
#include <vector>

#include "optimizer/grad_scan.h"
#include "optimizer/norm_statistics.h"
#include "optimizer/step.h"

namespace amp_ext {

// Tensors are reused by later steps, because a captured CUDA graph may write to them for as long as
// the optimizer's plan lives.
class AMP_EXT_API StepOutputs {
 public:
  // Copies the guard and the settings, but no results.
  void take_over(const StepOutputs& before);

  // Sets the guard that compares the gradient norm of each step with earlier norms; null: no guard.
  void set_guard(std::shared_ptr<NormStatistics> guard);
  NormStatistics* guard() const { return guard_.get(); }
  // Sets whether each step computes the norm of every single gradient.
  void set_tracks_grad_norms(bool tracks) { tracks_grad_norms_ = tracks; }
  bool tracks_grad_norms() const { return tracks_grad_norms_; }
  // Makes every step from now on set step_applied().
  void track_step_applied() { tracks_step_applied_ = true; }

  // Allocates the norms that a step wants. Returns the tensor for the norm of all gradients.
  OptionalTensor allocate_norms(const ParamTable& params, const StepNorms& norms);

  // What finish() writes, after the launches of a step.
  struct Unfinished {
    at::Tensor step_applied;                   // a copy on another device than step_applied()
    std::optional<DeviceInputs> guard_inputs;  // set if no launch lets the guard count the norm
  };
  // Writes the norms that no launch writes, and lets the launches write the other results. The
  // norms are those of the gradients in `scans` and of the parameters in `squares_of_params`.
  Unfinished prepare(const ParamTable& params, const StepNorms& norms, const StepInputs& inputs,
                     const std::vector<GradScan>& scans, const at::Tensor& squares_of_params,
                     std::vector<StepBatch>& batches);
  void finish(const Unfinished& unfinished);

  // Returns the norm of all unscaled gradients at the last step; undefined if it needed no norm.
  at::Tensor grad_norm() const { return has_grad_norm_ ? grad_norm_ : at::Tensor(); }
  // Returns the norm of each unscaled gradient, [params] float32; undefined if not tracked.
  at::Tensor grad_norms() const { return has_grad_norms_ ? grad_norms_ : at::Tensor(); }
  // Returns one float32 on the device of the first parameter: 1 if the last step was applied, 0 if
  // it was skipped or found no gradient. Undefined before the first step that is tracked.
  at::Tensor step_applied() const { return step_applied_; }

 private:
  at::Tensor prepare_step_applied(const at::Device& device, std::vector<StepBatch>& batches);
  void write_norms(const StepInputs& inputs, const std::vector<GradScan>& scans,
                   const at::Tensor& squares_of_params, bool is_written);

  at::Tensor grad_norm_;
  at::Tensor grad_norms_;
  at::Tensor step_applied_;
  bool has_grad_norm_ = false;   // whether grad_norm_ is of the last step
  bool has_grad_norms_ = false;  // whether grad_norms_ is of the last step
  bool tracks_grad_norms_ = false;
  bool tracks_step_applied_ = false;
  std::shared_ptr<NormStatistics> guard_;
  // Earlier guards on a GPU, kept alive because a captured CUDA graph may still write to them.
  std::vector<std::shared_ptr<NormStatistics>> retired_guards_;
};

}  // namespace amp_ext
