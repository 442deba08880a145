// The hooks that step the parameters of a C++ optimizer during the backward pass.
#pragma once

#include <amp_ext/optim.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "libtorch/optimizer_impl.h"
#include "optimizer/gradient_release.h"
#include "scaler/loss_scale.h"
#include "tensors/tensor_memory.h"

namespace amp_ext::optim {

struct FusedOptimizer::Released : std::enable_shared_from_this<FusedOptimizer::Released> {
  Released(FusedOptimizer& of_optimizer, std::shared_ptr<const LossScale> scaler)
      : optimizer(&of_optimizer),
        scaler(std::move(scaler)),
        name(of_optimizer.impl_->optimizer_class.name),
        release(name) {}

  FusedOptimizer* optimizer;  // follows moves; null once the optimizer is destroyed
  const std::shared_ptr<const LossScale> scaler;  // null without a scaler
  const char* const name;
  amp_ext::GradientRelease release;
  int pauses = 0;
  amp_ext::GradientRelease::Found found;  // by the scan of a scaler

  void hook_params();
  void unhook_params() const;
  // Steps a parameter and frees its gradient.
  void on_gradient(const at::Tensor& param);
  // Steps parameters that still have gradients, and returns what all hooks have found.
  amp_ext::GradientRelease::Found collect();
  // Returns what the hooks have found to a step without a scaler, or after the scaler's scan.
  amp_ext::GradientRelease::Found found_before_step(const at::Tensor& grad_scale,
                                                    const at::Tensor& found_inf);
  void complete();
  void give_up();
  void forget();
  void check_scaler(const LossScale* other, const std::string& operation) const;

 private:
  void begin();
  void check_options() const;
  template <typename Visit>
  void for_each_param(const Visit& visit) const {
    for (const auto& group : optimizer->param_groups_) {
      for (const at::Tensor& param : group.params()) visit(param);
    }
  }

  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>>
      options_;                                            // options of the groups at the begin
  std::unordered_map<const void*, StateMap> seen_states_;  // by parameter, as its last hook left it
  std::optional<SeenTensor> scale_;  // scaler's scale at the begin; each update writes it
};

}  // namespace amp_ext::optim
