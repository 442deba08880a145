// Operations of C++ optimizers on their plan: steps and scans.
#include <ATen/core/grad_mode.h>
#include <amp_ext/optim.h>

#include <algorithm>
#include <utility>

#include "libtorch/optimizer_impl.h"
#include "optimizer/session.h"

namespace amp_ext::optim {

void FusedOptimizer::rebuild() { checked("rebuild").plan->forget(); }

void FusedOptimizer::read_groups(GroupSettings& settings) {
  const std::vector<PlacedOptions> placed = checked_groups();
  std::vector<const GroupOptions*> groups;
  for (const PlacedOptions& group : placed) groups.push_back(&group);
  settings.read(impl_->optimizer_class.name, impl_->optimizer_class, groups);
}

std::vector<ParamTable::Param> params_in(const FusedOptimizer& optimizer, const char* name) {
  std::vector<ParamTable::Param> params;
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    const auto& in_group = optimizer.param_groups()[group].params();
    for (size_t i = 0; i < in_group.size(); ++i) {
      TORCH_CHECK(in_group[i].defined(), name, ": param of ", place(group, i),
                  " must be a tensor, got an undefined one");
      params.push_back({static_cast<int64_t>(group), static_cast<int64_t>(i),
                        in_group[i].unsafeGetTensorImpl()});
    }
  }
  return params;
}

// An operation of the plan. The constructor passes the present parameters to the plan, and
// registers them again if they, the options or the number of states have changed.
struct FusedOptimizer::Operation : Session {
  FusedOptimizer& optimizer;

  Operation(FusedOptimizer& optimizer, const char* operation)
      : Session(*optimizer.checked(operation).plan, operation), optimizer(optimizer) {
    optimizer.read_groups(*this);
    const auto for_each_param = [&](const auto& take) {
      for (size_t group = 0; group < optimizer.param_groups_.size(); ++group) {
        for (const at::Tensor& param : optimizer.param_groups_[group].params()) {
          const auto tensor = [&]() -> const at::Tensor& { return param; };
          if (!take(static_cast<int64_t>(group), param.unsafeGetTensorImpl(), tensor)) return false;
        }
      }
      return true;
    };
    const bool has_same_states = optimizer.impl_->state_count == optimizer.state_.size();
    if (has_same_states && take_params(for_each_param)) return;
    register_params();
    take_params(for_each_param);
  }

  void register_params() {
    plan.register_params(specs, params_in(optimizer, optimizer.impl_->optimizer_class.name));
    optimizer.impl_->state_count = optimizer.state_.size();
  }
};

// Creates missing states of the parameters in a table, and stores them in the optimizer.
class FusedOptimizer::Store : public StateStore {
 public:
  Store(FusedOptimizer& optimizer, const std::vector<StateSpec>& specs, const ParamTable& table)
      : optimizer_(optimizer), specs_(specs), table_(table) {}

  std::vector<ParamState> make(const std::vector<int64_t>& indices) override;
  void keep() override;
  void warn_of_write(size_t index);

 private:
  FusedOptimizer& optimizer_;
  const std::vector<StateSpec>& specs_;
  const ParamTable& table_;
  std::vector<ParamRef> params_;
  std::vector<StateMap> made_;
};

std::vector<ParamState> FusedOptimizer::Store::make(const std::vector<int64_t>& indices) {
  params_.clear();
  for (const int64_t number : indices) {
    const ParamSlot& slot = table_.slots()[number];
    params_.push_back({slot.param(), slot.param(), static_cast<size_t>(slot.group),
                       static_cast<size_t>(slot.index_in_group)});
  }
  made_ = optimizer_.init_states(specs_, params_);
  std::vector<ParamState> states;
  for (size_t i = 0; i < indices.size(); ++i) {
    states.push_back(state_of_step(specs_[params_[i].group], params_[i], made_[i]));
  }
  return states;
}

void FusedOptimizer::Store::keep() {
  optimizer_.keep_states(params_, std::move(made_));
  optimizer_.impl_->state_count = optimizer_.state_.size();
}

at::Tensor FusedOptimizer::step(LossClosure closure) {
  checked("step");
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  run_step({}, {});
  return loss;
}

at::Tensor FusedOptimizer::step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  run_step(grad_scale, found_inf);
  return {};
}

// Steps all parameters that have a gradient.
void FusedOptimizer::run_step(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  Operation operation(*this, "step");
  GradientOptions options =
      operation.gradient_options(if_defined(grad_scale), if_defined(found_inf));
  const ParamTable& params = operation.plan.params();
  Store store(*this, operation.specs, params);
  try {
    operation.plan.step(operation.table, std::move(options), store);
  } catch (c10::Error& error) {
    if (!operation.plan.failure().empty()) {
      error.add_context(
          c10::str(impl_->optimizer_class.name, ".step: ", operation.plan.note_of_failure()));
    }
    throw;
  }
}

std::optional<GradientScan> FusedOptimizer::scan_gradients(const at::Tensor& found_inf,
                                                           const at::Tensor& grad_scale) {
  Operation operation(*this, "scan_gradients");
  GradientScan scan;
  for (const GradScanResult& result :
       operation.plan.scan(found_inf, if_defined(grad_scale), operation.clipping)) {
    scan.found_infs.push_back(result.found_inf);
    scan.first_nonfinites.push_back(result.first_nonfinite);
  }
  return scan;
}

at::Tensor FusedOptimizer::grad_norm() const {
  return checked("grad_norm").plan->outputs().grad_norm();
}

}  // namespace amp_ext::optim
