// Checks of what the C++ interface does itself.
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

// Options and groups.

AMP_EXT_CHECK(options_are_named_by_flags_dtypes_and_texts) {
  const std::string text = "split8";
  CHECK_THAT(AdamWOptions().master_weights() == true);
  CHECK_THAT(AdamWOptions().master_weights(0).master_weights() == false);
  CHECK_THAT(AdamWOptions().master_weights("").master_weights() != false);
  CHECK_THAT(LionOptions().master_weights(text).master_weights() == "split8");
  static_assert(!std::is_convertible_v<int*, MasterWeights>, "which would be a flag");
  CHECK_THAT(AdamWOptions().state_dtype() == at::kFloat);
  CHECK_THAT(AdamWOptions().state_dtype("bfloat16").state_dtype() == at::kBFloat16);
  CHECK_THAT(SGDOptions().state_dtype({}).state_dtype() == std::nullopt);
  CHECK_THAT(SGDOptions().state_dtype(std::optional(at::kFloat)).state_dtype() == at::kFloat);
  CHECK_THAT(!SGDOptions().state_dtype(std::optional<at::ScalarType>()).state_dtype().has_value());
  CHECK_THAT(LionOptions().state_dtype("8bit").dithers());
  CHECK_THAT(!LionOptions().state_dtype("8bit").rounding("nearest").dithers());
  static_assert(!std::is_convertible_v<bool, StateDType>, "which would be a dtype");
  static_assert(!std::is_convertible_v<std::nullptr_t, StateDType>, "which would be a text");
}

AMP_EXT_CHECK(groups_keep_their_options) {
  torch::Tensor a = parameter({1.0}), b = parameter({1.0}), c = parameter({1.0});
  Groups groups;
  groups.emplace_back(std::vector{a});
  // Set to what it is without being set, which is not what the optimizer has.
  groups.emplace_back(std::vector{b},
                      std::make_unique<AdamWOptions>(AdamWOptions().weight_decay(0.01)));
  AdamW optimizer(groups, AdamWOptions(0.5).weight_decay(0.25).clip_value(3.0));
  optimizer.add_param_group(
      {{c}, std::make_unique<AdamWOptions>(AdamWOptions(0.125).betas({0.5, 0.75}))});
  const auto options = [&](size_t group) { return options_in<AdamWOptions>(optimizer, group); };
  CHECK_THAT(options(0).lr() == 0.5 && options(0).weight_decay() == 0.25);
  CHECK_THAT(options(1).lr() == 0.5 && options(1).weight_decay() == 0.01);
  CHECK_THAT(options(2).lr() == 0.125 && options(2).weight_decay() == 0.25);
  CHECK_THAT(std::get<1>(options(2).betas()) == 0.75 && *options(2).clip_value() == 3.0);
  optimizer.load_state_dict(optimizer.state_dict());
  AdamW second(optimizer.param_groups(),
               AdamWOptions(7.0).amsgrad(true));  // which have all of theirs
  CHECK_THAT(options_in<AdamWOptions>(second, 1).weight_decay() == 0.01);
  CHECK_THAT(options_in<AdamWOptions>(second).lr() == 0.5);
  CHECK_THAT(!options_in<AdamWOptions>(second).amsgrad());
  theirs::StepLR schedule(optimizer, 1, 0.5);
  schedule.step();
  schedule.step();  // torch's decays one step late
  CHECK_THAT(options(0).get_lr() == 0.25 && options(2).get_lr() == 0.0625);
}

AMP_EXT_CHECK(options_of_others_are_refused) {
  SGD optimizer({parameter({1.0})}, SGDOptions(0.5));
  theirs::Optimizer& base = optimizer;
  base.add_param_group(theirs::OptimizerParamGroup({parameter({1.0})}));
  const torch::Tensor none = torch::zeros({});
  GradScaler scaler = cpu_scaler();
  scaler.scale(none);
  const auto refuses = [&](const std::string& words) {
    CHECK_REFUSED(step_with_ones(optimizer), words);
    CHECK_REFUSED(scaler.step(optimizer), words);
    CHECK_REFUSED(optimizer.init_state(), words);
    CHECK_REFUSED(optimizer.master_params(), words);
  };
  const std::string defaults =
      "SGD: group 1 has no options of its own, because add_param_group() of "
      "torch::optim::Optimizer drops them. Add the group with add_param_group() of "
      "amp_ext::optim::SGD.";
  refuses(defaults);
  CHECK_REFUSED(optimizer.state_dict(), defaults);
  optimizer.param_groups()[1].set_options(std::make_unique<theirs::SGDOptions>(0.5));
  const std::string of_another =
      "SGD: options of group 1 must be amp_ext::optim::SGDOptions, got those of another optimizer";
  refuses(of_another);
  optimizer.param_groups().pop_back();
  const theirs::OptimizerParamGroup group({parameter({1.0})}, std::make_unique<AdamOptions>());
  CHECK_REFUSED(optimizer.add_param_group(group), of_another);
  CHECK_REFUSED(optimizer.add_param_group({{torch::Tensor()}}), "got an undefined one");
  optimizer.add_param_group({{parameter({1.0})}});
  options_in<SGDOptions>(optimizer).skip_nonfinite(true);
  CHECK_REFUSED(optimizer.step(), "SGD: skip_nonfinite must be the same in all groups");
  optimizer.param_groups().clear();
  refuses("SGD: the optimizer has no parameter groups. Call add_param_group() first.");
  CHECK_REFUSED(SGD(std::vector<torch::Tensor>(), 0.5), "optimizer got an empty parameter list");
}

// States.

AMP_EXT_CHECK(states_stay_where_they_are) {
  torch::Tensor param = parameter({1.0}, torch::kHalf), frozen = torch::ones({1}, torch::kLong);
  AdamW optimizer({param, frozen}, AdamWOptions(0.5));
  param.mutable_grad() = torch::ones({1}, torch::kHalf);
  optimizer.step();
  void* const key = param.unsafeGetTensorImpl();
  const FusedParamState* const state = &state_of(optimizer, param);
  CHECK_THAT(optimizer.master_params().size() == 2 && optimizer.state().size() == 1);
  optimizer.rebuild();
  optimizer.step();
  CHECK_THAT(&state_of(optimizer, param) == state);
  for (const bool inits : {true, false}) {
    optimizer.state().erase(key);
    if (inits) optimizer.init_state();  // makes one that the next step takes
    optimizer.step();
    CHECK_THAT(state_of(optimizer, param).get("step").item<double>() == 1.0);
  }
  const c10::IValue saved = optimizer.state_dict();
  optimizer.load_state_dict(saved);
  optimizer.step();
  const Dict of_param = saved.toGenericDict().at("state").toGenericDict().at(0).toGenericDict();
  CHECK_THAT(of_param.at("step").toTensor().item<double>() == 1.0);
  optimizer.param_groups()[0].params().erase(optimizer.param_groups()[0].params().begin());
  CHECK_REFUSED(
      optimizer.state_dict(),
      "AdamW.state_dict: a parameter of shape [1] has a state but is in no group. Put the "
      "parameter back into a group, or delete its state");
}

AMP_EXT_CHECK(a_parameter_that_is_gone_leaves_no_state_to_another) {
  Adam optimizer({parameter({1.0, 1.0})}, AdamOptions(0.5));
  step_with_ones(optimizer);
  for (int i = 0; i < 50; ++i) {  // one of them may get the address of the last
    optimizer.param_groups()[0].params()[0] = torch::Tensor();
    optimizer.param_groups()[0].params()[0] = parameter({1.0, 1.0});
    step_with_ones(optimizer);
    const double value = optimizer.parameters()[0][0].item<double>();
    CHECK_THAT(std::abs(value - 0.5) < 1e-6);  // the first step of each
  }
}

AMP_EXT_CHECK(a_master_that_is_written_is_what_steps_go_on_from) {
  torch::Tensor param = parameter({1.0}, torch::kBFloat16);
  AdamW optimizer({param}, AdamWOptions(0.0));
  const auto is = [&](double value) {
    return param.item<double>() == value && optimizer.master_params()[0].item<double>() == value;
  };
  step_with_ones(optimizer);
  const torch::Tensor master = optimizer.master_params()[0];
  master.fill_(3.0);
  optimizer.rebuild();
  optimizer.add_param_group({{parameter({1.0})}});
  step_with_ones(optimizer);
  CHECK_THAT(is(3.0) && !master.requires_grad());
  master.fill_(9.0);
  param.detach().fill_(7.0);
  optimizer.load_state_dict(optimizer.state_dict());
  step_with_ones(optimizer);
  CHECK_THAT(is(7.0));
  param.data().fill_(5.0);  // which no version shows
  optimizer.refresh_masters();
  CHECK_THAT(is(5.0));
}

AMP_EXT_CHECK(training_goes_on_from_what_was_made_in_inference_mode) {
  torch::Tensor param = parameter({1.0, 2.0}, torch::kBFloat16);
  AdamW optimizer({param}, AdamWOptions(0.5).master_weights("split").max_grad_norm(1.0));
  GradScaler scaler = cpu_scaler();
  const auto is_inference = [&] {
    bool found = optimizer.master_params()[0].is_inference();
    for (const auto& [name, tensor] : state_of(optimizer, param).tensors()) {
      found |= tensor.is_inference();
    }
    return found;
  };
  {
    const c10::InferenceMode guard;
    scaler.scale(torch::ones({}));
    param.mutable_grad() = torch::ones_like(param);
    CHECK_THAT(!is_inference());
    optimizer.load_state_dict(optimizer.state_dict());
    scaler.step(optimizer);
    scaler.update();
  }
  CHECK_THAT(!is_inference() && !optimizer.grad_norm().is_inference());
  give_grad(param, scaler, INFINITY);
  scaler.step(optimizer);
  scaler.update();
  CHECK_THAT(scaler.stats().skips == 1);
}

// Who an optimizer is.

AMP_EXT_CHECK(optimizers_are_told_apart) {
  torch::Tensor param = parameter({1.0});
  GradScaler scaler = cpu_scaler();
  for (int i = 0; i < 10; ++i) {  // one of them may get the address of the last
    auto optimizer = std::make_unique<SGD>(std::vector{param}, SGDOptions(0.0));
    CHECK_THAT(!scaler.last_step_skipped(optimizer.get()).has_value());
    give_grad(param, scaler, 1.0);
    scaler.unscale_(*optimizer);
    scaler.step(*optimizer);
    if (i % 2 == 0) scaler.update();
  }
  scaler.update();
  SGD first({param}, SGDOptions(0.5));
  give_grad(param, scaler, 2.0);
  scaler.unscale_(first);
  SGD second = std::move(first);
  scaler.step(second);
  CHECK_THAT(param.item<double>() == 0.0);
}

using Calls = std::vector<std::function<void()>>;

AMP_EXT_CHECK(what_was_moved_from_says_so) {
  torch::Tensor param = parameter({1.0});
  AdamW optimizer({param}, AdamWOptions(0.5).state_dtype("bfloat16"));
  step_with_ones(optimizer);
  const torch::Tensor one = torch::ones({}), none = torch::zeros({});
  const c10::IValue state = optimizer.state_dict();
  AdamW second = std::move(optimizer);
  const auto closure = []() -> torch::Tensor { throw std::logic_error("which is not evaluated"); };
  std::stringstream stream;
  const std::string words = ": the optimizer was moved from. Use the object that it was moved to.";
  for (const auto& call : Calls{
           [&] { optimizer.add_param_group(std::vector{param}); }, [&] { optimizer.step(closure); },
           [&] { optimizer.step_scaled(one, none); }, [&] { optimizer.scan_gradients(none, one); },
           [&] { optimizer.grad_norm(); }, [&] { optimizer.init_state(); },
           [&] { optimizer.rebuild(); }, [&] { optimizer.master_params(); },
           [&] { optimizer.refresh_masters(); }, [&] { optimizer.state_dict(); },
           [&] { torch::save(optimizer, stream); }, [&] { optimizer.load_state_dict(state); }}) {
    CHECK_REFUSED(call(), words);
    CHECK_REFUSED(call(), "amp_ext::optim::AdamW.");
  }
  CHECK_THAT(optimizer.identity() == nullptr);
  GradScaler scaler = cpu_scaler();
  give_grad(param, scaler, 1.0);
  CHECK_REFUSED(scaler.step(optimizer), "GradScaler.step" + words);
  CHECK_REFUSED(scaler.unscale_(optimizer), "GradScaler.unscale_" + words);
  CHECK_REFUSED(scaler.last_step_skipped(&optimizer), "GradScaler.last_step_skipped" + words);
  optimizer = std::move(second);  // which has its parameters again
  AdamW& same_optimizer = optimizer;
  optimizer = std::move(same_optimizer);
  scaler.step(optimizer);
  CHECK_THAT(state_of(optimizer, param).get("step").item<double>() == 2.0);
  const c10::IValue of_scale = scaler.state_dict();
  GradScaler other = std::move(scaler);
  for (const auto& call :
       Calls{[&] { scaler.scale(one); }, [&] { scaler.unscale_(optimizer); },
             [&] { scaler.step(optimizer); }, [&] { scaler.update(); }, [&] { scaler.update(2.0); },
             [&] { scaler.update(one); }, [&] { scaler.get_scale(); }, [&] { scaler.is_enabled(); },
             [&] { scaler.get_growth_factor(); }, [&] { scaler.set_growth_factor(2.0); },
             [&] { scaler.get_backoff_factor(); }, [&] { scaler.set_backoff_factor(0.5); },
             [&] { scaler.get_growth_interval(); }, [&] { scaler.set_growth_interval(5); },
             [&] { scaler.last_step_skipped(); }, [&] { scaler.stats(/*wait=*/true); },
             [&] { scaler.state_dict(); }, [&] { scaler.load_state_dict(of_scale); }}) {
    CHECK_REFUSED(call(), ": the scaler was moved from. Use the object that it was moved to.");
  }
  scaler = std::move(other);
  GradScaler& same_scaler = scaler;
  scaler = std::move(same_scaler);
  scaler.update();
  CHECK_THAT(scaler.stats().steps == 1);
}

// Steps under a scaler.

// An optimizer of the user's that unscales in its step.
class Descent : public theirs::Optimizer, public amp_ext::ScaledStep {
 public:
  explicit Descent(std::vector<torch::Tensor> params)
      : Optimizer({theirs::OptimizerParamGroup(std::move(params))},
                  std::make_unique<theirs::SGDOptions>(0.5)) {}

  torch::Tensor step(LossClosure = nullptr) override { throw std::logic_error("not scaled"); }
  torch::Tensor step_scaled(const torch::Tensor& grad_scale,
                            const torch::Tensor& found_inf) override {
    const torch::NoGradGuard no_grad;
    if (found_inf.item<float>() != 0.0F) return {};
    for (torch::Tensor& param : parameters()) param.sub_(0.5 * param.grad() / grad_scale);
    TORCH_CHECK(!fails, "afterwards");
    return torch::tensor(7.0);
  }
  std::optional<amp_ext::GradientScan> scan_gradients(const torch::Tensor&,
                                                      const torch::Tensor&) override {
    return scan;
  }

  bool fails = false;
  std::optional<amp_ext::GradientScan> scan;
};

// An optimizer of somebody else that does more than step.
class Odd : public theirs::SGD {
 public:
  Odd(std::vector<torch::Tensor> params, std::function<void()> more)
      : SGD(std::move(params), theirs::SGDOptions(1.0).momentum(0.5)), more_(std::move(more)) {}
  torch::Tensor step(LossClosure closure = nullptr) override {
    torch::Tensor loss = SGD::step(std::move(closure));
    more_();
    return loss;
  }

 private:
  std::function<void()> more_;
};

// Steps of others are skipped whole, and spend the iteration if they fail behind a write.
inline void check_steps_of(theirs::Optimizer& optimizer, torch::Tensor& param, GradScaler& scaler,
                           bool& fails) {
  for (const double grad : std::vector<double>{INFINITY, 2.0, NAN}) {
    const torch::Tensor before = param.detach().clone();
    give_grad(param, scaler, grad);
    scaler.step(optimizer);
    CHECK_REFUSED(scaler.step(optimizer), "has already been called");
    scaler.update();
    CHECK_THAT(same(before, param.detach()) == (grad != 2.0));
  }
  CHECK_THAT(scaler.get_scale() == 256.0 && *scaler.last_step_skipped(&optimizer));
  fails = true;
  give_grad(param, scaler, 2.0);
  CHECK_REFUSED(scaler.step(optimizer), "afterwards");
  const std::string spent = ": an earlier unscale_() or step() of this optimizer was interrupted";
  CHECK_REFUSED(scaler.step(optimizer), "GradScaler.step" + spent);
  CHECK_REFUSED(scaler.unscale_(optimizer), "GradScaler.unscale_" + spent);
  scaler.update();
  fails = false;
  give_grad(param, scaler, 2.0);
  scaler.step(optimizer);
}

AMP_EXT_CHECK(steps_of_others_are_skipped_or_spend_the_iteration) {
  torch::Tensor param = parameter({1.0, 2.0}), inner = parameter({1.0});
  GradScaler scaler = cpu_scaler(), other = cpu_scaler();
  std::vector<std::unique_ptr<theirs::SGD>> others;
  bool fails = false;
  Odd odd({param}, [&] {
    for (int i = 0; i < 20; ++i) {  // steps of more optimizers
      others.push_back(std::make_unique<theirs::SGD>(std::vector{inner}, theirs::SGDOptions(0.0)));
      inner.mutable_grad() = torch::ones({1});
      scaler.step(*others.back());
    }
    CHECK_THAT(torch::GradMode::is_enabled());
    CHECK_REFUSED(scaler.update(), "update() was called inside step().");
    TORCH_CHECK(!fails, "afterwards");
  });
  check_steps_of(odd, param, scaler, fails);
  const auto& state =
      static_cast<theirs::SGDParamState&>(*odd.state().at(param.unsafeGetTensorImpl()));
  CHECK_THAT(state.momentum_buffer()[0].item<double>() == 3.5);  // of three gradients of 2
  Descent own({param});
  check_steps_of(own, param, other, own.fails);
  other.update();
  give_grad(param, other, 2.0);
  CHECK_THAT(other.step(own).item<double>() == 7.0);
  other.update();
  own.scan = amp_ext::GradientScan{{torch::zeros({})}, {}};
  CHECK_REFUSED(other.step(own), "must give a first_nonfinite for each found_inf, got 0 for 1");
}

// Has a step of its own, around that of its parent.
struct Counted : SGD {
  using SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override {
    ++steps;
    return SGD::step(closure);
  }
  int steps = 0;
};
// Whose step is only its parent's.
struct Renamed : SGD {
  using SGD::SGD;
  bool unscales_in_step() const override { return true; }
};

AMP_EXT_CHECK(a_step_of_a_derived_class_is_what_a_scaler_calls) {
  torch::Tensor param = parameter({1.0}), other = parameter({1.0});
  Counted optimizer({param}, SGDOptions(0.5));
  Renamed renamed({other}, SGDOptions(0.5));
  GradScaler scaler = cpu_scaler();
  for (const double value : std::vector<double>{1.0, INFINITY, 2.0}) {
    give_grad(param, scaler, value);
    give_grad(other, scaler, value);
    scaler.step(optimizer);
    scaler.step(renamed);
    CHECK_THAT(std::isinf(value) || param.grad().item<double>() == value);
    CHECK_THAT(other.grad().item<double>() == value * scaler.get_scale());
    scaler.update();
  }
  CHECK_THAT(optimizer.steps == 2);
  CHECK_THAT(param.item<double>() == -0.5 && other.item<double>() == -0.5);
}

AMP_EXT_CHECK(unscaling_in_part_spends_the_iteration) {
  torch::Tensor param = parameter({1.0});
  torch::Tensor elsewhere = torch::ones({1}, torch::kMeta).requires_grad_(true);
  SGD optimizer({param, elsewhere}, SGDOptions(1.0));
  GradScaler scaler = cpu_scaler();
  give_grad(param, scaler, 1.0);
  elsewhere.mutable_grad() = torch::ones({1}, torch::kMeta);
  CHECK_REFUSED(scaler.unscale_(optimizer), "");
  CHECK_REFUSED(
      scaler.unscale_(optimizer),
      "GradScaler.unscale_: an earlier unscale_() or step() of this optimizer was interr");
  CHECK_THAT(param.grad().item<double>() == 1.0);
  optimizer.zero_grad();
  scaler.update();  // without any look
  CHECK_THAT(scaler.get_scale() == 1024.0);
  give_grad(param, scaler, 1.0);
  scaler.unscale_(optimizer);
  options_in<SGDOptions>(optimizer).clip_value(-1.0);
  CHECK_REFUSED(scaler.step(optimizer), "clip_value");  // which spends nothing
  options_in<SGDOptions>(optimizer).clip_value(std::nullopt);
  scaler.step(optimizer);
  CHECK_THAT(param.item<double>() == 0.0);
}

AMP_EXT_CHECK(gradients_are_unscaled_once) {
  torch::Tensor param = parameter({0.0});
  SGD optimizer({param}, SGDOptions(1.0));
  theirs::SGD other({param}, theirs::SGDOptions(1.0));
  GradScaler scaler = cpu_scaler();
  const std::string twice =
      ": the gradient of group 0, param 0 was already unscaled with another optimizer, which has "
      "the same parameter. Give each parameter to one optimizer.";
  give_grad(param, scaler, 1.0);
  scaler.unscale_(optimizer);
  CHECK_REFUSED(scaler.step(other), "GradScaler.unscale_" + twice);
  scaler.update();
  give_grad(param, scaler, 1.0);
  scaler.step(other);
  CHECK_REFUSED(scaler.step(optimizer), "GradScaler.step" + twice);
  scaler.update();
  give_grad(param, scaler, 1.0);
  scaler.step(optimizer);
  optimizer.rebuild();
  optimizer.load_state_dict(optimizer.state_dict());
  CHECK_REFUSED(optimizer.step(), "SGD: grad of group 0, param 0 still carries the loss scale");
}

AMP_EXT_CHECK(bad_gradients_are_named) {
  torch::nn::Sequential model(torch::nn::Linear(2, 2), torch::nn::Linear(2, 1));
  SGD optimizer(model->parameters(), SGDOptions(0.1));
  step_with_ones(optimizer);
  model->parameters()[2].mutable_grad()[0][1] = NAN;
  GradScaler scaler = cpu_scaler();
  scaler.scale(torch::ones({}));
  scaler.step(optimizer);
  scaler.update();
  CHECK_THAT(scaler.stats().last_nonfinite == "group 0, param 2" && scaler.stats().skips == 1);
}

AMP_EXT_CHECK(closures_are_refused_or_handed_on) {
  torch::Tensor param = parameter({1.0});
  SGD optimizer({param}, SGDOptions(0.5));
  const auto closure = [&] {
    const torch::Tensor loss = (param * param).sum();
    loss.backward();
    return loss;
  };
  GradScaler scaler = cpu_scaler(), disabled = cpu_scaler(1024.0, /*enabled=*/false);
  CHECK_REFUSED(scaler.step(optimizer, closure),
                "Closure use is not currently supported if GradScaler is enabled.");
  const torch::NoGradGuard no_grad;  // the step enables them for the closure
  CHECK_THAT(disabled.step(optimizer, closure).item<double>() == 1.0);
  CHECK_THAT(param.item<double>() == 0.0 && disabled.get_scale() == 1.0);
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

AMP_EXT_CHECK(a_scaler_without_cuda_says_how_to_enable_it) {
  const LastWarning warning;
  const bool is_available = torch::cuda::is_available();
  CHECK_THAT(GradScaler().is_enabled() == is_available);
  CHECK_THAT(contains(warning.text(), "To train on the CPU, pass GradScalerOptions()") !=
             is_available);
  CHECK_REFUSED(GradScaler(GradScalerOptions().device(torch::kMeta)),
                "device must be cuda or cpu, got meta");
}

// Casts.

inline torch::ScalarType product_dtype() {
  return torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
}

AMP_EXT_CHECK(autocast_scopes_nest_and_end) {
  {
    const Autocast outer(torch::kCPU, torch::kBFloat16);
    {
      const Autocast inner(torch::kCPU, torch::kHalf);
      CHECK_THAT(product_dtype() == torch::kHalf);
      const Autocast off(torch::kCPU, torch::kHalf, /*enabled=*/false);
      CHECK_THAT(product_dtype() == torch::kFloat);
    }
    CHECK_THAT(product_dtype() == torch::kBFloat16);
  }
  CHECK_THAT(product_dtype() == torch::kFloat);
  CHECK_REFUSED(const Autocast scope(torch::kMeta), "must be cpu or cuda, got meta");
  CHECK_REFUSED(const Autocast scope(torch::kCPU, torch::kFloat), "Half or BFloat16, got Float");
}

AMP_EXT_CHECK(casts_of_weights_are_not_stale_after_a_step) {
  torch::Tensor weight = torch::ones({1, 1}).requires_grad_(true);
  SGD ours({weight}, SGDOptions(1.0));
  theirs::SGD foreign({weight}, theirs::SGDOptions(1.0));
  Descent own({weight});
  GradScaler scaler = cpu_scaler(0.5), disabled = cpu_scaler(1.0, /*enabled=*/false);
  scaler.scale(torch::ones({}));
  for (const auto& step : Calls{[&] { ours.step(); }, [&] { scaler.step(foreign); },
                                [&] { scaler.step(own); }, [&] { disabled.step(foreign); }}) {
    const Autocast autocast(torch::kCPU, torch::kBFloat16);
    const torch::Tensor one = torch::ones({1, 1});
    const double before = torch::mm(one, weight).item<double>();
    weight.mutable_grad() = -torch::ones({1, 1});
    step();
    CHECK_THAT(weight.item<double>() > before);
    CHECK_THAT(torch::mm(one, weight).item<double>() == weight.item<double>());
  }
}

AMP_EXT_CHECK(an_average_follows_the_steps_that_landed) {
  torch::Tensor a = parameter({1.0, 2.0}), b = parameter({4.0}, torch::kBFloat16);
  SGD optimizer({a, b}, SGDOptions(1.0).master_weights("split"));
  WeightAverage average(optimizer, {/*decay=*/0.5});
  GradScaler scaler = cpu_scaler();
  for (const double grad : {1.0, double{INFINITY}, 2.0}) {
    give_grad(a, scaler, grad);
    scaler.step(optimizer);
    average.update();
    average.update();  // takes no step twice
    scaler.update();
  }
  CHECK_THAT(average.n_averaged().item<int64_t>() == 2);
  CHECK_THAT(same(average.averages()[0], torch::tensor({-1.0f, 0.0f})));
  CHECK_THAT(same(average.averages()[1], torch::tensor({4.0f})));
  const torch::Tensor before = a.detach().clone();
  {
    const auto swapped = average.swap();
    CHECK_THAT(same(a.detach(), torch::tensor({-1.0f, 0.0f})));
    CHECK_REFUSED(optimizer.state_dict(), "SGD.state_dict: the parameters hold their averages");
    CHECK_REFUSED(average.state_dict(), "WeightAverage.state_dict: the parameters hold");
  }
  CHECK_THAT(same(a.detach(), before));
  WeightAverage other(optimizer, {/*decay=*/{}, /*every=*/2});
  auto state = average.state_dict().deepcopy().toGenericDict();
  CHECK_THAT(!state.contains("joined"));
  other.load_state_dict(state);
  CHECK_THAT(same(other.averages()[0], average.averages()[0]));
  CHECK_THAT(other.n_averaged().item<int64_t>() == 2);
  state.insert_or_assign("joined", c10::List<int64_t>({7}));
  CHECK_REFUSED(other.load_state_dict(state), "joined must be indices of the ");
  state.erase("joined");
  state.insert_or_assign("n_averaged", 2.5);
  CHECK_REFUSED(other.load_state_dict(state), "n_averaged must be a whole number, got 2.5");
  CHECK_REFUSED(other.load_state_dict(c10::Dict<std::string, torch::Tensor>()),
                "state_dict must have 'averages', got");
  CHECK_REFUSED(WeightAverage(optimizer, {2.0}), "WeightAverage: decay must be from 0 to 1, got 2");
  {
    const auto swapped = other.swap();
    const WeightAverage moved = std::move(other);
    CHECK_REFUSED(optimizer.refresh_masters(), "SGD.refresh_masters: the parameters hold");
    a.set_data(torch::ones({3}));  // the end warns, and gives the optimizer its parameters back
  }
  CHECK_THAT(a.numel() == 3 && same(b.detach(), torch::tensor({4.0f}).to(torch::kBFloat16)));
  CHECK_REFUSED(average.update(),
                "when its average began, and is now Float of sizes [3] on cpu. Call "
                "restart()");
  average.restart();
  optimizer.add_param_group({{parameter({5.0})}});
  CHECK_THAT(average.averages().size() == 3 && average.n_averaged().item<int64_t>() == 0);
}

AMP_EXT_CHECK(the_norm_of_each_gradient_is_kept_on_request) {
  torch::Tensor a = parameter({2.0, 2.0}), b = parameter({1.0});
  AdamW optimizer({a, b}, AdamWOptions(0.1));
  CHECK_THAT(!optimizer.track_grad_norms() && !optimizer.grad_norms().defined());
  optimizer.track_grad_norms(true);
  step_with_ones(optimizer);
  CHECK_THAT(std::abs(optimizer.grad_norms()[0].item<double>() - std::sqrt(2.0)) < 1e-6);
  CHECK_THAT(optimizer.grad_norms()[1].item<double>() == 1.0);
  optimizer.track_grad_norms(false);
  step_with_ones(optimizer);
  CHECK_THAT(!optimizer.grad_norms().defined() && !optimizer.grad_norm().defined());
}

AMP_EXT_CHECK(a_write_that_a_step_undoes_is_warned_of_once) {
  torch::Tensor param = parameter({1.0}).detach().to(torch::kBFloat16).requires_grad_();
  AdamW optimizer({param});
  int warnings = 0;
  for (int i = 0; i < 8; ++i) {
    const LastWarning warning;
    step_with_ones(optimizer);
    warnings += contains(warning.text(), "AdamW.step: parameter group 0, param 0 was written in a");
    CHECK_THAT(i != 0 || warnings == 0);
    param.data().fill_(3.0);
  }
  CHECK_THAT(warnings == 1);
}

AMP_EXT_CHECK(a_guard_behind_other_clipping_warns_once) {
  torch::Tensor param = parameter({1.0});
  AdamW optimizer({param});
  optimizer.norm_guard(std::make_shared<amp_ext::optim::NormGuard>());
  for (int i = 0; i < 80; ++i) {
    const LastWarning warning;
    step_with_ones(optimizer);
    CHECK_THAT(contains(warning.text(), "64 norms in a row") == (i == 64));
  }
}

AMP_EXT_CHECK(a_guard_belongs_to_one_optimizer_and_has_a_file) {
  torch::Tensor param = parameter({1.0});
  AdamW optimizer({param}), other({param});
  const auto guard = std::make_shared<amp_ext::optim::NormGuard>();
  optimizer.norm_guard(guard);
  CHECK_REFUSED(other.norm_guard(guard), "norm_guard already belongs to another optimizer. Make");
  step_with_ones(optimizer);
  CHECK_THAT(guard->stats().norms == 1 && guard->stats().mean == 1.0);
  std::stringstream file;
  torch::save(*guard, file);
  amp_ext::optim::NormGuard loaded;
  torch::load(loaded, file);
  CHECK_THAT(loaded.stats().mean == 1.0 && loaded.history().norms.empty());
  optimizer.norm_guard(nullptr);
  other.norm_guard(guard);
  CHECK_THAT(optimizer.norm_guard() == nullptr && other.norm_guard() == guard);
}

// Files and archives.

AMP_EXT_CHECK(values_survive_a_file) {
  const Dict dict = new_dict();
  dict.insert("tensor", torch::arange(6).view({2, 3}).t());
  dict.insert("view", torch::arange(100).slice(0, 7, 9));
  dict.insert("expanded", torch::arange(4.0)[2].expand({4}));  // of a storage of its own size
  dict.insert(3, c10::ivalue::Tuple::create(0.5, c10::IValue()));
  const auto read = amp_ext::state_from_bytes(amp_ext::state_to_bytes(dict)).toGenericDict();
  CHECK_THAT(same(read.at("tensor").toTensor(), torch::arange(6).view({2, 3}).t()));
  CHECK_THAT(same(read.at("view").toTensor(), torch::tensor({7, 8})));
  CHECK_THAT(read.at("view").toTensor().storage().nbytes() == 16);
  CHECK_THAT(same(read.at("expanded").toTensor(), torch::full({4}, 2.0F)));
  CHECK_THAT(read.at(3).toTupleRef().elements()[0].toDouble() == 0.5);
}

AMP_EXT_CHECK(what_python_can_not_read_is_refused) {
  const Dict dict = new_dict();
  const auto save = [&] { amp_ext::state_to_bytes(dict); };
  dict.insert("a", torch::ones({2}).to_sparse());
  CHECK_REFUSED(save(), "value['a'] must be a dense tensor, got Sparse");
  dict.insert_or_assign("a", torch::ones({2}, torch::kUInt16));
  CHECK_REFUSED(save(), "value['a'] must be of a dtype that torch.load reads");
  dict.insert_or_assign("a", torch::Device(torch::kCPU));
  CHECK_REFUSED(save(), "value['a'] must be a dict, list, tuple, string, number, bool, None or");
  dict.clear();
  dict.insert(0.5, 1);
  CHECK_REFUSED(save(), "keys of value must be strings or ints, got 0.5");
}

// Steps an optimizer of two groups. A second optimizer and its scaler load archives and go on.
AMP_EXT_CHECK(archives_of_ours_are_read) {
  Groups groups, others;
  torch::manual_seed(3);
  for (const int64_t size : {6, 2}) {
    groups.emplace_back(std::vector{torch::randn({size}).set_requires_grad(true)});
    others.emplace_back(std::vector{torch::zeros({size}).set_requires_grad(true)});
  }
  auto options = AdamWOptions(0.1).amsgrad(true), own = options;
  AdamW first(groups, options), second(others, own.lr(7.0));
  GradScaler scaler(GradScalerOptions().device(torch::kCPU).init_scale(4).growth_interval(4));
  GradScaler other = cpu_scaler(2.0);
  const auto step = [](AdamW& optimizer, GradScaler& its_scaler) {
    for (const auto& group : optimizer.param_groups()) {
      torch::Tensor param = group.params()[0];
      param.mutable_grad() = its_scaler.scale((param * param).detach() - 0.5);
    }
    its_scaler.step(optimizer);
    its_scaler.update();
  };
  const std::vector<torch::Tensor> saved = first.parameters(), loaded = second.parameters();
  for (int i = 0; i < 6; ++i) {
    step(first, scaler);
    if (i >= 3) step(second, other);
    if (i != 2) continue;
    std::stringstream archive, of_scaler;
    torch::save(first, archive);
    torch::save(scaler, of_scaler);
    for (size_t j = 0; j < saved.size(); ++j) loaded[j].set_data(saved[j].detach().clone());
    torch::load(second, archive);
    torch::load(other, of_scaler);
  }
  CHECK_THAT(scaler.get_scale() == 8.0 && other.get_scale() == 8.0);
  for (size_t i = 0; i < saved.size(); ++i) CHECK_THAT(same(loaded[i], saved[i]));
}

// Continues a run of torch::optim::AdamW as docs/cpp.md says.
AMP_EXT_CHECK(a_run_of_torch_is_continued) {
  const torch::Tensor param = parameter({1.0, -2.0}), copy = parameter({0.0, 0.0});
  theirs::AdamW old({param}, theirs::AdamWOptions(0.1));
  AdamW optimizer({copy}, AdamWOptions(0.1));
  const auto step = [](theirs::Optimizer& each, torch::Tensor its_param) {
    its_param.mutable_grad() = (its_param * its_param).detach() - 0.5;
    each.step();
  };
  for (int i = 0; i < 3; ++i) step(old, param);
  copy.set_data(param.detach().clone());
  const auto& moments =
      static_cast<const theirs::AdamWParamState&>(*old.state().at(param.unsafeGetTensorImpl()));
  Dict state = new_dict(), states = new_dict();
  state.insert("step", static_cast<double>(moments.step()));
  state.insert("exp_avg", moments.exp_avg());
  state.insert("exp_avg_sq", moments.exp_avg_sq());
  states.insert(0, state);
  Dict state_dict = optimizer.state_dict().toGenericDict();
  state_dict.insert_or_assign("state", states);
  optimizer.load_state_dict(state_dict);
  for (int i = 0; i < 3; ++i) {
    step(old, param);
    step(optimizer, copy);
  }
  CHECK_THAT(torch::allclose(copy, param, 1e-6, 1e-6));
  std::stringstream archive;
  torch::save(old, archive);
  CHECK_REFUSED(torch::load(optimizer, archive),
                "If it is of torch::optim, load it with torch's class");
}

}  // namespace checks
