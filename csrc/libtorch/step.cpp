// A step of all groups and a look at their gradients, by a plan of what they are now.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <amp_ext/optim.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "libtorch/optimizer_impl.h"
#include "tensors/tensor_memory.h"

namespace amp_ext::optim {

namespace {

constexpr const char* kHowToGoOn =
    "load a checkpoint into the model, and into the optimizer with load_state_dict()";

}  // namespace

void FusedOptimizer::rebuild() {
  Impl& impl = checked("rebuild");
  if (impl.plan == nullptr) return;
  impl.rounded_params = impl.plan->rounded_params();
  impl.scaled_grads = impl.plan->scaled_grads();
  impl.plan.reset();
}

// The time in which this thread has the plan, which is that of the groups and states as they are.
class FusedOptimizer::InPlan {
 public:
  InPlan(FusedOptimizer& optimizer, const char* operation) : optimizer_(optimizer) {
    Impl& impl = optimizer.checked(operation);
    const auto thread = std::this_thread::get_id();
    {
      const std::lock_guard<std::mutex> lock(impl.mutex);
      TORCH_CHECK(!impl.user.has_value(), impl.kind.name, ".", operation,
                  ": must be called by one thread at a time, got a call by thread ", thread,
                  " while thread ", *impl.user, " is in one");
      impl.user = thread;
    }
    try {
      TORCH_CHECK(impl.progress == nullptr || !impl.progress->has_failed, impl.kind.name, ".",
                  operation,
                  ": parameters must be as a whole step leaves them, got a step that "
                  "failed: ",
                  impl.progress->text(), "; ", kHowToGoOn);
      groups_ = optimizer.checked_groups();
      optimizer.check_shared_options();
      optimizer.take_plan(groups_);
    } catch (...) {
      let_go();
      throw;
    }
  }
  ~InPlan() {
    // Of a step that has failed, the plan may remember a look that no step has used.
    if (std::uncaught_exceptions() > exceptions_) optimizer_.rebuild();
    let_go();
  }
  InPlan(const InPlan&) = delete;
  InPlan& operator=(const InPlan&) = delete;

  Plan& plan() { return *optimizer_.impl_->plan; }
  const std::vector<PlacedOptions>& groups() const { return groups_; }

 private:
  void let_go() {
    Impl& impl = *optimizer_.impl_;
    if (impl.plan != nullptr) impl.plan->let_go();
    const std::lock_guard<std::mutex> lock(impl.mutex);
    impl.user.reset();
  }

  FusedOptimizer& optimizer_;
  std::vector<PlacedOptions> groups_;
  const int exceptions_ = std::uncaught_exceptions();
};

void FusedOptimizer::take_plan(const std::vector<PlacedOptions>& groups) {
  std::vector<Kept> kept = kept_in(groups);
  const bool is_current = impl_->plan != nullptr && impl_->state_count == state_.size() &&
                          impl_->kept == kept && take_params();
  if (is_current) return;
  make_plan(std::move(kept));
  take_params();
}

// Hands over the parameters if they are those that the plan was made of.
bool FusedOptimizer::take_params() {
  Plan& plan = *impl_->plan;
  int64_t number = 0, group_index = 0;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const void* const object = param.defined() ? param.unsafeGetTensorImpl() : nullptr;
      if (!plan.is_param(number, group_index, object)) return false;
      const auto was = impl_->were_contiguous.find(number);
      const bool is_coded = was != impl_->were_contiguous.end();
      if (is_coded && was->second != param.is_contiguous()) return false;
      plan.take_param(number, param);
      ++number;
    }
    ++group_index;
  }
  return number == plan.number_of_params();
}

void FusedOptimizer::make_plan(std::vector<Kept> kept) {
  rebuild();
  const OptimizerKind& kind = impl_->kind;
  const auto keeps_more = [](const Kept& a, const Kept& b) {
    return a.buffer_count < b.buffer_count;
  };
  const auto most = std::max_element(kept.begin(), kept.end(), keeps_more);
  auto plan = std::make_unique<Plan>(kind.name, most->names());
  impl_->places.clear();
  impl_->were_contiguous.clear();
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& params = param_groups_[group].params();
    for (size_t i = 0; i < params.size(); ++i) {
      TORCH_CHECK(params[i].defined(), kind.name, ": param of ", place(group, i),
                  " must be a tensor, got an undefined one");
      plan->add_param(static_cast<int64_t>(group), static_cast<int64_t>(i),
                      params[i].unsafeGetTensorImpl());
      impl_->places.emplace_back(group, i);
    }
  }
  plan->set_rounded_params(impl_->rounded_params);
  plan->set_scaled_grads(impl_->scaled_grads);
  impl_->progress = plan->progress();
  impl_->plan = std::move(plan);
  impl_->kept = std::move(kept);
  impl_->state_count = state_.size();
}

// The states of the optimizer, for a step of its plan.
class FusedOptimizer::Store : public StateStore {
 public:
  explicit Store(FusedOptimizer& optimizer) : optimizer_(optimizer) {}

  std::vector<ParamState> make(const std::vector<int64_t>& indices) override {
    Impl& impl = *optimizer_.impl_;
    for (const int64_t number : indices) {
      const auto [group, index] = impl.places[number];
      const at::Tensor& param = optimizer_.param_groups_[group].params()[index];
      params_.push_back({param, param, group, index});
    }
    made_ = optimizer_.made_states(impl.kept, params_);
    std::vector<ParamState> states;
    for (size_t i = 0; i < indices.size(); ++i) {
      const Kept& kept = impl.kept[params_[i].group];
      const bool is_coded = kept.state_dtype.is_coded();
      if (is_coded) impl.were_contiguous[indices[i]] = params_[i].local.is_contiguous();
      states.push_back(state_of_step(kept, params_[i], made_[i]));
    }
    return states;
  }

  void keep() override {
    optimizer_.keep_states(params_, std::move(made_));
    optimizer_.impl_->state_count = optimizer_.state_.size();
  }

 private:
  FusedOptimizer& optimizer_;
  std::vector<ListedParam> params_;
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
  InPlan use(*this, "step");
  const FusedOptions& first = options_of(0);
  GradientOptions options;
  if (grad_scale.defined()) options.grad_scale = grad_scale;
  if (found_inf.defined()) options.found_inf = found_inf;
  options.max_grad_norm = first.max_grad_norm_;
  options.skip_nonfinite = first.skip_nonfinite_;
  if (!first.max_grad_norm_.has_value()) {
    impl_->grad_norm.reset();
  } else if (!impl_->grad_norm.defined() && !impl_->places.empty()) {
    const OutsideInferenceMode normal;
    const auto [group, index] = impl_->places[0];
    const at::Tensor& param = param_groups_[group].params()[index];
    impl_->grad_norm = at::zeros({}, at::TensorOptions(param.device()).dtype(at::kFloat));
  }
  if (impl_->grad_norm.defined()) options.grad_norm = impl_->grad_norm;
  try {
    Store store(*this);
    impl_->kind.step(use.plan(), use.groups(), options, store);
  } catch (c10::Error& error) {
    if (impl_->progress->has_failed) {
      error.add_context(c10::str(impl_->kind.name, ".step: ", impl_->progress->text(), "; ",
                                 kHowToGoOn, ": until then it refuses to step"));
    }
    throw;
  }
}

std::optional<GradientLook> FusedOptimizer::look_at_gradients(const at::Tensor& found_inf,
                                                              const at::Tensor& grad_scale) {
  InPlan use(*this, "look_at_gradients");
  use.plan().read_grads();
  OptionalTensor scale;
  if (grad_scale.defined()) scale = grad_scale;
  const FusedOptions& first = options_of(0);
  GradientLook look;
  for (const LookResult& result : use.plan().check_finite(
           found_inf, scale, first.max_grad_norm_.has_value(), first.skip_nonfinite_)) {
    look.found_infs.push_back(result.found_inf);
    look.first_nonfinites.push_back(result.first_nonfinite);
  }
  return look;
}

const at::Tensor& FusedOptimizer::grad_norm() const { return checked("grad_norm").grad_norm; }

}  // namespace amp_ext::optim
