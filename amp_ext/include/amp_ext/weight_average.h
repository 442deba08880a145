// An average of an optimizer's weights that is updated on the device after its steps.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/optim.h>
#include <amp_ext/options.h>

#include <memory>
#include <vector>

namespace amp_ext::optim {

// Averages the weights of an optimizer: the float32 master weights (joined if split), or the
// parameters themselves if there are no master weights. float64 parameters are averaged in float32.
// The first average is a copy of the weights. The optimizer must outlive its averages and must not
// be moved.
class AMP_EXT_API WeightAverage {
  struct Impl;

 public:
  // Starts the averages at the current weights.
  explicit WeightAverage(FusedOptimizer& optimizer, AverageOptions options = {});
  ~WeightAverage();
  WeightAverage(WeightAverage&&) noexcept;

  // Adds the current weights to the averages if the optimizer's last step was applied (not skipped)
  // and its weights are not averaged yet. Call it after each step. Does not wait for the device.
  void update();

  // Restarts the averages at the current weights. This also works after parameters changed dtype or
  // shape, which makes `update` throw.
  void restart();

  // Returns the averages in the order of the optimizer's parameters; later updates overwrite them.
  std::vector<at::Tensor> averages() const;
  // Returns how many averages were taken: one int64 on the device.
  at::Tensor n_averaged() const;

  // While a Swapped object lives, the parameters hold their averages, and the optimizer refuses to
  // step, save or load. Its destructor restores the bits of parameters and masters, and warns about
  // each parameter whose dtype or shape has changed since.
  class AMP_EXT_API Swapped {
   public:
    ~Swapped();
    Swapped(const Swapped&) = delete;
    Swapped& operator=(const Swapped&) = delete;

   private:
    friend class WeightAverage;
    explicit Swapped(WeightAverage& average);
    std::shared_ptr<Impl> impl_;
  };
  Swapped swap();

  // Return and load Python's state dict: {"averages": [...], "steps": ..., "n_averaged": ...}. The
  // returned tensors are not copied. A load that throws changes nothing.
  c10::IValue state_dict() const;
  void load_state_dict(const c10::IValue& state_dict);

 private:
  std::shared_ptr<Impl> impl_;  // null after a move
};

}  // namespace amp_ext::optim
