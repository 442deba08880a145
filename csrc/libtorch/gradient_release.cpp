// Releases the gradients of optimizers of the C++ interface.
#include <amp_ext/gradient_release.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "libtorch/released_optimizer.h"

namespace amp_ext::optim {

namespace {

using PostAccumulateGradHook = torch::autograd::PostAccumulateGradHook;

std::unique_ptr<PostAccumulateGradHook>& hook_of(const at::Tensor& param) {
  return torch::autograd::impl::post_acc_grad_hooks(param);
}

}  // namespace

// The hook of a parameter, which does nothing once its optimizer is destroyed.
struct FusedOptimizer::Released::Hook : PostAccumulateGradHook {
  explicit Hook(std::weak_ptr<Released> released) : released(std::move(released)) {}

  void operator()(const at::Tensor& param) override {
    const auto alive = released.lock();
    if (alive != nullptr && alive->optimizer != nullptr && alive->pauses == 0)
      alive->on_gradient(param);
  }

  const std::weak_ptr<Released> released;
};

bool FusedOptimizer::Released::is_hooked(const at::Tensor& param) const {
  if (!param.requires_grad()) return false;
  const auto* const hook = dynamic_cast<const Hook*>(hook_of(param).get());
  return hook != nullptr && hook->released.lock().get() == this;
}

void FusedOptimizer::Released::hook_params() {
  const char* const name = optimizer->impl_->optimizer_class.name;
  for (const ParamTable::Param& at : params_in(*optimizer, name)) {
    const at::Tensor& param = optimizer->param_groups_[at.group].params()[at.index_in_group];
    if (!param.requires_grad() || is_hooked(param)) continue;
    std::unique_ptr<PostAccumulateGradHook>& hook = hook_of(param);
    TORCH_CHECK(hook == nullptr, name, ": the gradient of ", place(at.group, at.index_in_group),
                " can't be released, because the parameter has another post-accumulate hook, and "
                "torch has room for one. Remove that hook first.");
    hook = std::make_unique<Hook>(weak_from_this());
  }
}

void FusedOptimizer::Released::unhook_params() const {
  for (const auto& group : optimizer->param_groups_) {
    for (const at::Tensor& param : group.params()) {
      if (is_hooked(param)) hook_of(param).reset();
    }
  }
}

void FusedOptimizer::Released::check_options() const {
  ReleaseOptions options;
  optimizer->read_groups(options);
  amp_ext::GradientRelease::check_options(options, plan());
}

void FusedOptimizer::Released::on_gradient(const at::Tensor& param) {
  const Lock lock(*this, plan());
  if (!is_open()) {
    register_params(params_in(*optimizer, optimizer->impl_->optimizer_class.name));
    ReleaseOptions options;
    optimizer->read_groups(options);
    if (scaler != nullptr) options.scale = options.grad_scale = if_defined(scaler->scale);
    begin(std::move(options), plan());
  }
  const void* const object = param.unsafeGetTensorImpl();
  const auto index = find(object);
  if (!index.has_value()) return;  // the parameter has left the groups
  StateMap& seen = seen_states_[object];
  const FusedParamState* const state = optimizer->state_of(param);
  if (state == nullptr || !have_same_tensors(state->tensors_, seen))
    amp_ext::GradientRelease::forget(*index);
  Store store(*optimizer, specs(), table(*index), &seen);
  step(*index, param, {}, plan(), store);
}

amp_ext::GradientRelease::HookResults FusedOptimizer::Released::scan() {
  check_options();
  for (const auto& group : optimizer->param_groups_) {
    for (const at::Tensor& param : group.params()) {
      if (param.grad().defined()) on_gradient(param);
    }
  }
  if (is_open()) hook_params();  // also those that were added since, or whose hook was replaced
  return collect(plan());
}

void FusedOptimizer::Released::give_up() {
  const std::string warning = amp_ext::GradientRelease::give_up(plan());
  if (!warning.empty()) TORCH_WARN(warning);
}

void FusedOptimizer::Released::forget() {
  seen_states_.clear();
  amp_ext::GradientRelease::forget(plan());
}

GradientRelease::GradientRelease(FusedOptimizer& optimizer, GradScaler* scaler) {
  FusedOptimizer::Impl& impl = optimizer.checked("release_gradients");
  TORCH_CHECK(impl.released == nullptr, impl.optimizer_class.name,
              ": this optimizer releases its gradients already. Call remove() of the first release "
              "before.");
  std::shared_ptr<const LossScale> loss_scale;
  if (scaler != nullptr && scaler->is_enabled()) loss_scale = scaler->loss_scale();
  released_ = std::make_shared<FusedOptimizer::Released>(optimizer, std::move(loss_scale));
  released_->check_options();
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
