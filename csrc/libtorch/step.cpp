// Operations of C++ optimizers on their plan: steps, scans and weight averages.
#include <ATen/core/grad_mode.h>
#include <amp_ext/optim.h>

#include <algorithm>
#include <utility>

#include "libtorch/optimizer_impl.h"
#include "libtorch/released_optimizer.h"
#include "optimizer/session.h"
#include "optimizer/weight_average.h"

namespace amp_ext::optim {

void FusedOptimizer::rebuild() {
  checked("rebuild").plan->forget();
  if (impl_->released != nullptr) impl_->released->forget();
}

void FusedOptimizer::check_scaler(const LossScale& scaler, const char* operation) {
  if (impl_ != nullptr && impl_->released != nullptr)
    impl_->released->check_scaler(&scaler, operation);
}

void FusedOptimizer::zero_grad(bool set_to_none) {
  Optimizer::zero_grad(set_to_none);
  if (impl_ != nullptr && impl_->released != nullptr) impl_->released->give_up();
}

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
    plan.register_params(specs, params_in(optimizer, optimizer.impl_->optimizer_class.name));
    optimizer.impl_->state_count = optimizer.state_.size();
  }
};

std::vector<ParamState> FusedOptimizer::Store::make(const std::vector<int64_t>& indices) {
  params_.clear();  // a trial step calls make() once for each parameter
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
  if (seen_ != nullptr && !made_.empty()) *seen_ = made_[0];
  optimizer_.keep_states(params_, std::move(made_));
  optimizer_.impl_->state_count = optimizer_.state_.size();
}

void FusedOptimizer::Store::warn_of_write(size_t index) {
  const ParamSlot& slot = table_.slots()[index];
  TORCH_WARN(warning_of_write(table_.operation(), place(slot.group, slot.index_in_group)));
}

at::Tensor FusedOptimizer::step(LossClosure closure) {
  checked("step");
  at::Tensor loss;
  if (closure != nullptr) {
    if (impl_->released != nullptr) {
      amp_ext::GradientRelease::throw_needs_gradients(
          c10::str(impl_->optimizer_class.name, ".step: a closure"));
    }
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
  const std::shared_ptr<Released> released = checked("step").released;
  if (released == nullptr) return run_step(grad_scale, found_inf, {}, {});
  released->check_caller_of_step(grad_scale.defined() || found_inf.defined(), grad_scale.defined());
  const auto found =
      released->scaler == nullptr ? released->scan() : std::exchange(released->found, {});
  run_step(grad_scale, found_inf, found.sum_of_squares, found.squares_of_params);
  released->complete(released->plan());
}

// Steps all parameters that have a gradient. The sums of squares are those that hooks have found.
void FusedOptimizer::run_step(const at::Tensor& grad_scale, const at::Tensor& found_inf,
                              const at::Tensor& sum_of_squares,
                              const at::Tensor& squares_of_params) {
  const std::shared_ptr<NormGuard>& guard = impl_->norm_guard;
  // The warning is about earlier steps. It comes before this step, because a handler may throw.
  if (guard != nullptr && guard->statistics_->must_warn()) TORCH_WARN(NormStatistics::warning());
  Operation operation(*this, "step");
  GradientOptions options = operation.gradient_options(
      if_defined(grad_scale), if_defined(found_inf), if_defined(sum_of_squares));
  const ParamTable& params = operation.plan.params();
  Store store(*this, operation.specs, params);
  if (const auto index = operation.plan.last_step().find_uncounted_write(params)) {
    store.warn_of_write(*index);
  }
  try {
    operation.plan.step(operation.table, std::move(options), store, squares_of_params);
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
  if (const auto released = checked("scan_gradients").released) {
    released->found = released->scan();
    GradientScan scan{released->found.skipped, released->found.first_nonfinites};
    scan.counts_tensors = true;
    return scan;
  }
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
