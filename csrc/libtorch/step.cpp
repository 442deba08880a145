// Operations of C++ optimizers on their plan: steps, scans and weight averages.
#include <ATen/core/grad_mode.h>
#include <amp_ext/optim.h>

#include <algorithm>
#include <utility>

#include "libtorch/optimizer_impl.h"
#include "optimizer/session.h"
#include "optimizer/weight_average.h"

namespace amp_ext::optim {

void FusedOptimizer::rebuild() { checked("rebuild").plan->forget(); }

// An operation of the plan. The constructor passes the present parameters to the plan, and
// registers them again if they, the options or the number of states have changed.
struct FusedOptimizer::Operation : Session {
  FusedOptimizer& optimizer;

  Operation(FusedOptimizer& optimizer, const char* operation)
      : Session(*optimizer.checked(operation).plan, operation), optimizer(optimizer) {
    const std::vector<PlacedOptions> placed = optimizer.checked_groups();
    std::vector<const GroupOptions*> groups;
    for (const PlacedOptions& group : placed) groups.push_back(&group);
    read(optimizer.impl_->optimizer_class, groups);
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

  // Returns the existing masters of parameters whose states the plan does not have yet.
  MastersByParam masters() const {
    MastersByParam masters;
    for (const int64_t index : plan.params().params_without_state()) {
      const at::Tensor& param = plan.params().slots()[index].param();
      const FusedParamState* const state = optimizer.state_of(param);
      if (state != nullptr) masters[index] = existing_master(param, masters_in(state->tensors_));
    }
    return masters;
  }

  void register_params() {
    std::vector<ParamTable::Param> registered;
    for (size_t group = 0; group < optimizer.param_groups_.size(); ++group) {
      const auto& params = optimizer.param_groups_[group].params();
      for (size_t i = 0; i < params.size(); ++i) {
        TORCH_CHECK(params[i].defined(), optimizer.impl_->optimizer_class.name, ": param of ",
                    place(group, i), " must be a tensor, got an undefined one");
        registered.push_back({static_cast<int64_t>(group), static_cast<int64_t>(i),
                              params[i].unsafeGetTensorImpl()});
      }
    }
    plan.register_params(specs, registered);
    optimizer.impl_->state_count = optimizer.state_.size();
  }
};

// Creates missing states for a step, and stores them in the optimizer.
class FusedOptimizer::Store : public StateStore {
 public:
  Store(FusedOptimizer& optimizer, const std::vector<StateSpec>& specs)
      : optimizer_(optimizer), specs_(specs) {}

  std::vector<ParamState> make(const std::vector<int64_t>& indices) override {
    params_.clear();  // a trial step calls make() once for each parameter
    for (const int64_t number : indices) {
      const ParamSlot& slot = optimizer_.impl_->plan->params().slots()[number];
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

  void keep() override {
    optimizer_.keep_states(params_, std::move(made_));
    optimizer_.impl_->state_count = optimizer_.state_.size();
  }

 private:
  FusedOptimizer& optimizer_;
  const std::vector<StateSpec>& specs_;
  std::vector<ParamRef> params_;
  std::vector<StateMap> made_;
};

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

void FusedOptimizer::run_step(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  const std::shared_ptr<NormGuard>& guard = checked("step").norm_guard;
  // The warning is about earlier steps. It comes before this step, because a handler may throw.
  if (guard != nullptr && guard->statistics_->must_warn()) TORCH_WARN(NormStatistics::warning());
  Operation operation(*this, "step");
  GradientOptions options =
      operation.gradient_options(if_defined(grad_scale), if_defined(found_inf));
  const ParamTable& params = operation.plan.params();
  if (const auto index = operation.plan.last_step().find_uncounted_write(params)) {
    const ParamSlot& slot = params.slots()[*index];
    TORCH_WARN(warning_of_write(params.operation(), place(slot.group, slot.index_in_group)));
  }
  try {
    Store store(*this, operation.specs);
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

void FusedOptimizer::average(const char* name,
                             const std::function<void(Plan&, const MastersByParam&)>& call) {
  Operation operation(*this, name);
  call(operation.plan, operation.masters());
}

at::Tensor FusedOptimizer::grad_norm() const {
  return checked("grad_norm").plan->outputs().grad_norm();
}

at::Tensor FusedOptimizer::grad_norms() const {
  return checked("grad_norms").plan->outputs().grad_norms();
}

bool FusedOptimizer::track_grad_norms() const {
  return checked("track_grad_norms").plan->outputs().tracks_grad_norms();
}

void FusedOptimizer::track_grad_norms(bool track) {
  checked("track_grad_norms").plan->set_tracks_grad_norms(track);
}

}  // namespace amp_ext::optim
