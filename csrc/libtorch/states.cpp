// Creates, completes and returns the states of parameters and their master weights.
#include "optimizer/states.h"

#include <amp_ext/ops.h>
#include <amp_ext/optim.h>

#include <algorithm>
#include <utility>

#include "libtorch/optimizer_impl.h"
#include "tensors/tensor_memory.h"

namespace amp_ext::optim {

bool have_same_tensors(const StateMap& a, const StateMap& b) {
  const auto are_same = [](const auto& one, const auto& other) {
    return one.first == other.first && one.second.is_same(other.second);
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), are_same);
}

at::Tensor FusedParamState::get(const std::string& key) const {
  return tensor_under(tensors_, key);
}

FusedParamState* FusedOptimizer::state_of(const at::Tensor& param) const {
  const auto found = state_.find(param.unsafeGetTensorImpl());
  return found == state_.end() ? nullptr : dynamic_cast<FusedParamState*>(found->second.get());
}

// Returns for each group which states its parameters have, and in which formats.
std::vector<StateSpec> FusedOptimizer::state_specs(const std::vector<PlacedOptions>& groups) const {
  std::vector<StateSpec> specs;
  for (const PlacedOptions& group : groups)
    specs.push_back(state_spec_of(impl_->optimizer_class.name, group));
  return specs;
}

// Returns the complete state of each parameter; missing tensors are created. The optimizer does not
// change until keep_states() stores the returned states.
std::vector<StateMap> FusedOptimizer::init_states(const std::vector<StateSpec>& groups,
                                                  const std::vector<ParamRef>& params) const {
  const OutsideInferenceMode normal;
  std::vector<StateMap> made;
  for (const ParamRef& param : params) {
    const FusedParamState* const before = state_of(param.local);
    made.push_back(complete_state(groups[param.group], param,
                                  before != nullptr ? before->tensors_ : StateMap()));
  }
  return made;
}

// Stores the states that init_states() made. Returns true if any tensor of a state was replaced.
bool FusedOptimizer::keep_states(const std::vector<ParamRef>& params, std::vector<StateMap> made) {
  bool has_changed = false;
  for (size_t i = 0; i < params.size(); ++i) {
    auto& specs = state_[params[i].local.unsafeGetTensorImpl()];
    auto* state = dynamic_cast<FusedParamState*>(specs.get());
    has_changed |= state == nullptr || !have_same_tensors(state->tensors_, made[i]);
    if (state == nullptr) {
      specs = std::make_unique<FusedParamState>(params[i].local);
      state = static_cast<FusedParamState*>(specs.get());
    }
    state->tensors_ = std::move(made[i]);  // only the tensors, because users may hold *state
  }
  return has_changed;
}

void FusedOptimizer::init_state() {
  checked("init_state");
  const std::vector<StateSpec> specs = state_specs(checked_groups());
  std::vector<ParamRef> trainable;
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& params = param_groups_[group].params();
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& param = params[i];
      if (!param.requires_grad()) continue;
      trainable.push_back({param, param, group, i});
      check_is_stepped(specs[group], trainable.back(), "init_state");
    }
  }
  if (keep_states(trainable, init_states(specs, trainable))) rebuild();
}

std::vector<at::Tensor> FusedOptimizer::master_params() {
  checked("master_params");
  init_state();
  const OutsideInferenceMode normal;
  std::vector<at::Tensor> masters;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const FusedParamState* const state = state_of(param);
      const Masters specs = state != nullptr ? masters_in(state->tensors_) : Masters();
      masters.push_back(fp32_master(param, specs).detach());
    }
  }
  return masters;
}

void FusedOptimizer::refresh_masters() {
  checked("refresh_masters").plan->check_not_swapped_in("refresh_masters");
  TensorList params, masters;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const FusedParamState* const state = state_of(param);
      const at::Tensor master = state != nullptr ? state->get(kFp32Master) : at::Tensor();
      if (!master.defined()) continue;
      params.push_back(param);
      masters.push_back(master);
    }
  }
  refresh_masters_(params, masters);
}

}  // namespace amp_ext::optim
