// An average of the weights of an optimizer, which follows its steps on the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/optim.h>
#include <amp_ext/options.h>

#include <memory>
#include <vector>

namespace amp_ext::optim {

// Averages the float32 masters of an optimizer's parameters, decoded where they are split, and
// parameters that have none themselves; float64 ones in float32. The first average is a copy of the
// weights. The optimizer has to live as long as its averages, and stay where it is.
class AMP_EXT_API WeightAverage {
  struct Impl;

 public:
  // Begins averages at the present weights.
  explicit WeightAverage(FusedOptimizer& optimizer, AverageOptions options = {});
  ~WeightAverage();
  WeightAverage(WeightAverage&&) noexcept;

  // Takes the last step of the optimizer into account, if it has landed and has not been taken yet:
  // to be called after each. Does not wait for the device.
  void update();

  // Begins anew at the present weights: also where parameters have got other dtypes or shapes,
  // which an update refuses.
  void restart();

  // In the order of the optimizer's parameters; later updates write them anew.
  std::vector<at::Tensor> averages() const;
  // How many were taken: one int64 on the device.
  at::Tensor n_averaged() const;

  // While it lives, the parameters hold their averages. At its end parameters and masters have
  // their bits again; of one that has another dtype or shape by then, a warning tells. Meanwhile
  // the optimizer neither steps nor saves nor loads.
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

  // Python's state dict: {"averages": [...], "steps": ..., "n_averaged": ...}. Its tensors are
  // those in use. A load takes over all of it or nothing.
  c10::IValue state_dict() const;
  void load_state_dict(const c10::IValue& state_dict);

 private:
  std::shared_ptr<Impl> impl_;  // null after a move
};

}  // namespace amp_ext::optim
