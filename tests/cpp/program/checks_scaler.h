// Checks of the scaler and of autocast of the C++ interface.
#pragma once

#include "checks.h"

namespace checks {

// Who an optimizer is.

AMP_EXT_CHECK(optimizers_are_told_apart) {
  torch::Tensor param = parameter({1.0});
  GradScaler scaler = cpu_scaler();
  for (int i = 0; i < 10; ++i) {  // one of them may get the address of the last
    auto optimizer = std::make_unique<SGD>(std::vector{param}, SGDOptions(0.0));
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
             [&] { scaler.state_dict(); }, [&] { scaler.load_state_dict(of_scale); }}) {
    CHECK_REFUSED(call(), ": the scaler was moved from. Use the object that it was moved to.");
  }
  scaler = std::move(other);
  GradScaler& same_scaler = scaler;
  scaler = std::move(same_scaler);
  scaler.update();
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
  CHECK_THAT(scaler.get_scale() == 256.0);
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

}  // namespace checks
