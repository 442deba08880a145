// Releases the gradients of optimizers of the C++ interface.
#include <amp_ext/gradient_release.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <type_traits>
#include <variant>

#include "libtorch/released_optimizer.h"

namespace amp_ext::optim {

namespace {

using PostAccumulateGradHook = torch::autograd::PostAccumulateGradHook;
using Stage = amp_ext::GradientRelease::Stage;

std::unique_ptr<PostAccumulateGradHook>& hook_of(const at::Tensor& param) {
  return torch::autograd::impl::post_acc_grad_hooks(param);
}

// The hook of a parameter, which does nothing once its optimizer is destroyed.
template <typename Released>
struct Hook : PostAccumulateGradHook {
  explicit Hook(std::weak_ptr<Released> released) : released(std::move(released)) {}

  void operator()(const at::Tensor& param) override {
    const auto alive = released.lock();
    if (alive != nullptr && alive->pauses == 0) alive->on_gradient(param);
  }

  const std::weak_ptr<Released> released;
};

template <typename Released>
bool is_hooked(const at::Tensor& param, const Released* released) {
  if (!param.requires_grad()) return false;
  const auto* const hook = dynamic_cast<const Hook<Released>*>(hook_of(param).get());
  return hook != nullptr && hook->released.lock().get() == released;
}

bool are_equal(const OptionPlace& a, const OptionPlace& b) {
  return std::visit(
      [&](const auto& place) {
        using Place = std::decay_t<decltype(place)>;
        const Place& other = std::get<Place>(b);
        if constexpr (std::is_same_v<Place, std::vector<double*>>) {
          return std::equal(place.begin(), place.end(), other.begin(), other.end(),
                            [](const double* x, const double* y) { return *x == *y; });
        } else {
          return *place == *other;
        }
      },
      a);
}

}  // namespace

// The state of the parameter that a hook steps.
class FusedOptimizer::StatesOfHook : public HookStore {
 public:
  StatesOfHook(FusedOptimizer& optimizer, const amp_ext::GradientRelease& release, int64_t index,
               const at::Tensor& param, StateMap& seen)
      : optimizer_(optimizer), specs_(release.specs()), seen_(seen) {
    const ParamTable::Param& place = release.registered(index);
    params_.push_back({param, param, static_cast<size_t>(place.group),
                       static_cast<size_t>(place.index_in_group)});
  }

  std::vector<ParamState> make(const std::vector<int64_t>&) override {
    made_ = optimizer_.init_states(specs_, params_);
    return {state_of_step(specs_[params_[0].group], params_[0], made_[0])};
  }

  void keep() override {
    if (made_.empty()) return;
    seen_ = made_[0];
    optimizer_.keep_states(params_, std::move(made_));
  }

  void warn_of_write() override {
    const std::string name = c10::str("group ", params_[0].group, ", param ", params_[0].index);
    TORCH_WARN(warning_of_write(optimizer_.impl_->optimizer_class.name, name));
  }

 private:
  FusedOptimizer& optimizer_;
  const std::vector<StateSpec>& specs_;
  StateMap& seen_;
  std::vector<ParamRef> params_;
  std::vector<StateMap> made_;
};

void FusedOptimizer::Released::hook_params() {
  for (const ParamTable::Param& place : params_in(*optimizer, name)) {
    const at::Tensor& param = optimizer->param_groups_[place.group].params()[place.index_in_group];
    if (!param.requires_grad() || is_hooked(param, this)) continue;
    std::unique_ptr<PostAccumulateGradHook>& slot = hook_of(param);
    TORCH_CHECK(slot == nullptr, name, ": the gradient of group ", place.group, ", param ",
                place.index_in_group,
                " can't be released, because the parameter has another post-accumulate hook, and "
                "torch has room for one. Remove that hook first.");
    slot = std::make_unique<Hook<Released>>(weak_from_this());
  }
}

void FusedOptimizer::Released::unhook_params() const {
  for_each_param([&](const at::Tensor& param) {
    if (is_hooked(param, this)) hook_of(param).reset();
  });
}

void FusedOptimizer::Released::on_gradient(const at::Tensor& param) {
  if (optimizer == nullptr) return;
  Plan& plan = *optimizer->impl_->plan;
  const amp_ext::GradientRelease::Lock lock(release, plan);
  if (release.stage() != Stage::kOpen) begin();
  const void* const object = param.unsafeGetTensorImpl();
  const auto index = release.find(object);
  if (!index.has_value()) return;  // the parameter has left the groups
  StateMap& seen = seen_states_[object];
  const FusedParamState* const state = optimizer->state_of(param);
  if (state == nullptr || !have_same_tensors(state->tensors_, seen)) release.forget(*index);
  StatesOfHook store(*optimizer, release, *index, param, seen);
  release.step(*index, param, {}, plan, store);
}

// Begins an iteration, from a hook.
void FusedOptimizer::Released::begin() {
  const at::Tensor scale = scaler == nullptr ? at::Tensor() : scaler->scale;
  TORCH_CHECK(release.stage() == Stage::kClosed || !scale_->is(scale, version_of(scale)), name,
              ": a gradient arrived after step(), before the scaler's update(). Call "
              "scaler.update() after each scaler.step().");
  TORCH_CHECK(scaler == nullptr || scale.defined(), name,
              ": the gradients are not scaled. Call backward() on the result of scale() of the "
              "scaler that was passed when they were released.");
  options_.clear();
  for (const auto& group : optimizer->param_groups_) options_.push_back(group.options().clone());
  const Plan& plan = *optimizer->impl_->plan;
  amp_ext::GradientRelease::Inputs inputs;
  optimizer->read_groups(inputs.groups);
  release.check_options(inputs.groups, plan);
  inputs.grad_scale = scale;
  inputs.tracks_grad_norms = plan.outputs().tracks_grad_norms();
  release.register_params(params_in(*optimizer, name));
  release.begin(std::move(inputs));
  if (scaler != nullptr) SeenTensor::remember(scale_, scale, version_of(scale));
}

amp_ext::GradientRelease::Found FusedOptimizer::Released::collect() {
  // Otherwise the next gradient reads the options.
  if (release.stage() == Stage::kOpen) check_options();
  for (const auto& group : optimizer->param_groups_) {
    for (const at::Tensor& param : group.params()) {
      if (param.grad().defined()) on_gradient(param);
    }
  }
  if (release.stage() != Stage::kOpen) return {};
  hook_params();  // also those that were added since, or whose hook was replaced
  Plan& plan = *optimizer->impl_->plan;
  const amp_ext::GradientRelease::Lock lock(release, plan);
  return release.collect();
}

void FusedOptimizer::Released::check_options() const {
  for (size_t group = 0; group < options_.size(); ++group) {
    const auto before = static_cast<FusedOptions&>(*options_[group]).options();
    const auto now = optimizer->options_of(group).options();
    for (size_t i = 0; i < before.size(); ++i) {
      if (are_equal(before[i].place, now[i].place)) continue;
      release.throw_changed(before[i].name, static_cast<int64_t>(group));
    }
  }
}

amp_ext::GradientRelease::Found FusedOptimizer::Released::found_before_step(
    const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  const std::string operation = c10::str(name, ".step");
  if (scaler == nullptr) {
    if (grad_scale.defined() || found_inf.defined()) {
      amp_ext::GradientRelease::throw_wrong_scaler(operation);
    }
    return collect();
  }
  if (!grad_scale.defined()) amp_ext::GradientRelease::throw_without_scaler(operation);
  return std::exchange(found, {});
}

void FusedOptimizer::Released::complete() {
  Plan& plan = *optimizer->impl_->plan;
  const amp_ext::GradientRelease::Lock lock(release, plan);
  if (release.stage() == Stage::kCollected) release.set_step_applied(plan);
  if (scaler == nullptr) release.end();
}

void FusedOptimizer::Released::give_up() {
  std::string warning;
  {
    const amp_ext::GradientRelease::Lock lock(release, *optimizer->impl_->plan);
    warning = release.give_up();
  }
  if (!warning.empty()) TORCH_WARN(warning);
}

void FusedOptimizer::Released::forget() {
  const amp_ext::GradientRelease::Lock lock(release, *optimizer->impl_->plan);
  release.forget();
  seen_states_.clear();
}

void FusedOptimizer::Released::check_scaler(const LossScale* other,
                                            const std::string& operation) const {
  if (other != scaler.get()) {
    amp_ext::GradientRelease::throw_wrong_scaler("GradScaler." + operation);
  }
  if (operation == "unscale_")
    amp_ext::GradientRelease::throw_needs_gradients("GradScaler.unscale_");
}

GradientRelease::GradientRelease(FusedOptimizer& optimizer, GradScaler* scaler) {
  FusedOptimizer::Impl& impl = optimizer.checked("release_gradients");
  TORCH_CHECK(impl.released == nullptr, impl.optimizer_class.name,
              ": this optimizer releases its gradients already. Call remove() of the first release "
              "before.");
  std::shared_ptr<const LossScale> loss_scale;
  if (scaler != nullptr && scaler->is_enabled()) loss_scale = scaler->loss_scale();
  released_ = std::make_shared<FusedOptimizer::Released>(optimizer, std::move(loss_scale));
  GroupSettings groups;
  optimizer.read_groups(groups);
  released_->release.check_options(groups, *impl.plan);
  try {
    released_->hook_params();
  } catch (...) {
    released_->unhook_params();
    throw;
  }
  impl.released = released_;
}

GradientRelease::~GradientRelease() {
  try {
    remove();
  } catch (const c10::Error& error) {
    TORCH_WARN(error.what_without_backtrace());
  }
}
GradientRelease::GradientRelease(GradientRelease&&) noexcept = default;
GradientRelease& GradientRelease::operator=(GradientRelease&& other) noexcept {
  std::swap(released_, other.released_);
  return *this;
}

void GradientRelease::remove() {
  const auto released = std::exchange(released_, nullptr);
  if (released == nullptr || released->optimizer == nullptr) return;
  released->unhook_params();
  released->optimizer->impl_->released = nullptr;
  released->give_up();
}

std::shared_ptr<const void> GradientRelease::paused() {
  TORCH_CHECK(released_ != nullptr, "GradientRelease.paused: remove() was called before.");
  ++released_->pauses;
  const auto end = [released = released_](const void*) { --released->pauses; };
  return {released_.get(), end};
}

}  // namespace amp_ext::optim
