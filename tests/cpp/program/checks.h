// What the checks of the C++ interface share.
#pragma once

#include <amp_ext/amp_ext.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"

namespace checks {

using namespace amp_ext;
using namespace amp_ext::optim;
namespace theirs = torch::optim;
using Groups = std::vector<theirs::OptimizerParamGroup>;
using Calls = std::vector<std::function<void()>>;

inline GradScaler cpu_scaler(double scale = 1024.0, bool enabled = true) {
  return GradScaler(GradScalerOptions().device(torch::kCPU).init_scale(scale).enabled(enabled));
}

inline torch::Tensor parameter(std::vector<double> values, c10::ScalarType dtype = torch::kFloat) {
  return torch::tensor(values, torch::kDouble).to(dtype).requires_grad_(true);
}

// Gives a parameter a gradient, scaled.
inline void give_grad(torch::Tensor& param, GradScaler& scaler, double value) {
  param.mutable_grad() = torch::Tensor();
  scaler.scale((param.to(torch::kFloat) * value).sum()).backward();
}

// Steps with a gradient of ones.
inline void step_with_ones(theirs::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (torch::Tensor param : group.params()) param.mutable_grad() = torch::ones_like(param);
  }
  optimizer.step();
}

inline bool same(const torch::Tensor& a, const torch::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && torch::equal(a, b);
}

template <typename Options>
Options& options_in(FusedOptimizer& optimizer, size_t group = 0) {
  return static_cast<Options&>(optimizer.param_groups()[group].options());
}

inline const FusedParamState& state_of(const FusedOptimizer& optimizer,
                                       const torch::Tensor& param) {
  return static_cast<const FusedParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

// Keeps the last warning of this thread while it lives, instead of showing it.
class LastWarning {
 public:
  const std::string& text() const { return handler_.text; }

 private:
  struct Handler : c10::WarningHandler {
    void process(const c10::Warning& warning) override { text = warning.msg(); }
    std::string text;
  } handler_;
  c10::WarningUtils::WarningHandlerGuard guard_{&handler_};
};

}  // namespace checks
