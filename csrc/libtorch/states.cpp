// The states of parameters: whole as the options want them, masters among them.
#include <ATen/ops/full.h>
#include <amp_ext/ops.h>
#include <amp_ext/optim.h>

#include <algorithm>
#include <utility>

#include "libtorch/optimizer_impl.h"
#include "optimizer/masters.h"
#include "optimizer/moments.h"
#include "tensors/tensor_memory.h"

namespace amp_ext::optim {

namespace {

bool have_same_tensors(const FusedParamState& a, const FusedParamState& b) {
  const auto are_same = [](const auto& one, const auto& other) {
    return one.first == other.first && one.second.is_same(other.second);
  };
  return std::equal(a.tensors().begin(), a.tensors().end(), b.tensors().begin(), b.tensors().end(),
                    are_same);
}

Masters masters_in(const FusedParamState& state) {
  Masters masters;
  for (const char* const key : kMasterKeys) {
    const at::Tensor master = state.get(key);
    if (master.defined()) masters[key] = master;
  }
  return masters;
}

bool has_moment(const FusedParamState& state, const std::string& name) {
  return optim::has_moment([&](const std::string& key) { return state.get(key).defined(); }, name);
}

Moments moments_in(const FusedParamState& state, const std::vector<std::string>& names) {
  Moments moments;
  for (const auto& [key, tensor] : state.tensors()) {
    if (tensor.defined() && is_key_of_moment(key, names)) moments[key] = tensor;
  }
  return moments;
}

}  // namespace

at::Tensor FusedParamState::get(const std::string& key) const {
  for (const auto& [name, tensor] : tensors_) {
    if (name == key) return tensor;
  }
  return {};
}

void FusedParamState::set(const std::string& key, at::Tensor value) {
  for (auto& [name, tensor] : tensors_) {
    if (name != key) continue;
    tensor = std::move(value);
    return;
  }
  tensors_.emplace_back(key, std::move(value));
}

void FusedParamState::erase(const std::string& key) {
  const auto is_it = [&](const auto& entry) { return entry.first == key; };
  tensors_.erase(std::remove_if(tensors_.begin(), tensors_.end(), is_it), tensors_.end());
}

FusedParamState* FusedOptimizer::state_of(const at::Tensor& param) const {
  const auto found = state_.find(param.unsafeGetTensorImpl());
  return found == state_.end() ? nullptr : dynamic_cast<FusedParamState*>(found->second.get());
}

// The state of a parameter as the options want it, its dtype and device being so. What it lacks is
// made, and what the parameter was converted under is converted; nothing is written.
std::unique_ptr<FusedParamState> FusedOptimizer::whole_state(const FusedOptions& options,
                                                             const at::Tensor& param) const {
  const OptimizerKind& kind = impl_->kind;
  const FusedParamState* const before = state_of(param);
  auto state = before != nullptr ? std::make_unique<FusedParamState>(*before)
                                 : std::make_unique<FusedParamState>(param);
  const auto want = [&](const std::string& key, at::ScalarType dtype, const auto& make) {
    const at::Tensor value = state->get(key);
    if (!value.defined()) {
      state->set(key, make());
    } else if (value.scalar_type() != dtype || value.device() != param.device()) {
      state->set(key, value.to(param.device(), dtype));
    }
  };
  const auto float32 = param.options().dtype(at::kFloat).requires_grad(false);
  if (kind.keeps_step(options)) {
    const bool counts = kind.counts_from_buffer && has_moment(*state, kind.buffers[0].name);
    if (kind.counts_from_buffer && !counts && kind.buffer_count(options) > 0) state->erase("step");
    want("step", at::kFloat, [&] { return at::full({}, counts ? 1.0 : 0.0, float32); });
  }
  const std::string master_key = key_of_master(options.master_weights_, param.scalar_type());
  if (!master_key.empty()) {
    const at::Tensor kept = state->get(master_key);
    // Whether a lower part has its dtype is the plan's to check.
    const bool is_whole = master_key == kWholeMaster || !kept.defined();
    want(master_key, is_whole ? at::kFloat : kept.scalar_type(),
         [&] { return made_master(param, masters_in(*state), master_key); });
  }
  for (const char* const other : kMasterKeys) {
    if (other != master_key) state->erase(other);
  }
  std::vector<MomentFormat> formats;
  for (const MomentFormat& format : formats_of(options.state_dtype_, kind.buffers, param)) {
    const bool is_used = formats.size() < static_cast<size_t>(kind.buffer_count(options));
    // Also buffers that the group keeps only with other options, to which a loop may change.
    if (is_used || has_moment(*state, format.name)) formats.push_back(format);
  }
  const Moments moments = moments_in(*state, kind.buffer_names(kind.buffers.size()));
  const Moments made = made_moments(moments, formats, param);
  for (const auto& [key, moment] : moments) {
    if (made.count(key) == 0) state->erase(key);
  }
  for (const MomentFormat& format : formats) {
    for (const std::string& key : format.keys()) state->set(key, made.at(key));
  }
  return state;
}

// All of them, or none if one can't be made. Returns whether a tensor is another one now.
bool FusedOptimizer::make_states(const std::vector<std::pair<size_t, at::Tensor>>& params) {
  const OutsideInferenceMode normal;
  std::vector<std::unique_ptr<FusedParamState>> states;
  for (const auto& [group, param] : params) {
    states.push_back(whole_state(options_of(group), param));
  }
  bool has_changed = false;
  for (size_t i = 0; i < params.size(); ++i) {
    auto& kept = state_[params[i].second.unsafeGetTensorImpl()];
    auto* const before = dynamic_cast<FusedParamState*>(kept.get());
    has_changed |= before == nullptr || !have_same_tensors(*before, *states[i]);
    if (before != nullptr) {
      *before = std::move(*states[i]);  // others may refer to it
    } else {
      kept = std::move(states[i]);
    }
  }
  return has_changed;
}

void FusedOptimizer::init_state() {
  checked("init_state");
  checked_groups();
  std::vector<std::pair<size_t, at::Tensor>> trainable;
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& params = param_groups_[group].params();
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& param = params[i];
      if (!param.requires_grad()) continue;
      const at::ScalarType dtype = param.scalar_type();
      TORCH_CHECK((is_16_bit(dtype) || dtype == at::kFloat || dtype == at::kDouble) &&
                      (param.is_cpu() || param.is_cuda()),
                  impl_->kind.name, ".init_state: param of ", place(group, i),
                  " must be float32, float64, float16 or bfloat16 on cpu or cuda, got ",
                  python_name(dtype), " on ", param.device());
      trainable.emplace_back(group, param);
    }
  }
  if (make_states(trainable)) rebuild();
}

std::vector<at::Tensor> FusedOptimizer::master_params() {
  checked("master_params");
  init_state();
  const OutsideInferenceMode normal;
  std::vector<at::Tensor> masters;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const FusedParamState* const state = state_of(param);
      const Masters kept = state != nullptr ? masters_in(*state) : Masters();
      masters.push_back(whole_master(param, kept).detach());
    }
  }
  return masters;
}

void FusedOptimizer::refresh_masters() {
  checked("refresh_masters");
  TensorList params, masters;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const FusedParamState* const state = state_of(param);
      const at::Tensor master = state != nullptr ? state->get(kWholeMaster) : at::Tensor();
      if (!master.defined()) continue;
      params.push_back(param);
      masters.push_back(master);
    }
  }
  refresh_masters_(params, masters);
}

}  // namespace amp_ext::optim
