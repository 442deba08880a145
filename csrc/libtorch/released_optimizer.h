// The hooks that step the parameters of a C++ optimizer during the backward pass, and the states
// that hooks and steps create.
#pragma once

#include <amp_ext/optim.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "libtorch/optimizer_impl.h"
#include "optimizer/gradient_release.h"
#include "scaler/loss_scale.h"

namespace amp_ext::optim {

// Creates missing states of the parameters in a table, and stores them in the optimizer.
class FusedOptimizer::Store : public HookStore {
 public:
  // `seen` receives the state of the parameter that a hook steps. It is null for other steps.
  Store(FusedOptimizer& optimizer, const std::vector<StateSpec>& specs, const ParamTable& table,
        StateMap* seen = nullptr)
      : optimizer_(optimizer), specs_(specs), table_(table), seen_(seen) {}

  std::vector<ParamState> make(const std::vector<int64_t>& indices) override;
  void keep() override;
  void warn_of_write(size_t index) override;

 private:
  FusedOptimizer& optimizer_;
  const std::vector<StateSpec>& specs_;
  const ParamTable& table_;
  StateMap* const seen_;
  std::vector<ParamRef> params_;
  std::vector<StateMap> made_;
};

// The operations of a release that need the parameters and states of its optimizer.
struct FusedOptimizer::Released : amp_ext::GradientRelease,
                                  std::enable_shared_from_this<FusedOptimizer::Released> {
  Released(FusedOptimizer& optimizer, std::shared_ptr<const LossScale> scaler)
      : amp_ext::GradientRelease(optimizer.impl_->optimizer_class.name, scaler.get()),
        optimizer(&optimizer),
        scaler(std::move(scaler)) {}

  FusedOptimizer* optimizer;  // follows moves; null once the optimizer is destroyed
  const std::shared_ptr<const LossScale> scaler;  // null without a scaler
  int pauses = 0;
  HookResults found;  // by the scan of a scaler

  Plan& plan() const { return *optimizer->impl_->plan; }
  void hook_params();
  void unhook_params() const;
  void check_options() const;
  // Steps a parameter and frees its gradient.
  void on_gradient(const at::Tensor& param);
  // Steps parameters that still have gradients, and returns what all hooks have found.
  HookResults scan();
  void give_up();
  void forget();

 private:
  struct Hook;

  bool is_hooked(const at::Tensor& param) const;

  std::unordered_map<const void*, StateMap> seen_states_;  // by parameter, as its last hook left it
};

}  // namespace amp_ext::optim
