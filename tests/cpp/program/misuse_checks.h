// Checks of programs that misuse the C++ interface, or use it in ways that few do.
#pragma once

#include <amp_ext/amp_ext.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "checks.h"

namespace checks {

inline void gradients_of_a_loss_that_is_scaled_after_unscale_are_refused() {
  torch::Tensor param = parameter({0.0});
  SGD optimizer({param}, SGDOptions(1.0));
  GradScaler scaler = cpu_scaler();
  const auto step = [&] { return error_of([&] { scaler.step(optimizer); }); };
  for (const int change : {0, 1, 2}) {  // replaced, zeroed, none
    give_grad(param, scaler, 1.0);
    scaler.unscale_(optimizer);
    if (change < 2) optimizer.zero_grad(/*set_to_none=*/change == 0);
    scaler.scale(param.sum()).backward();
    CHECK_THAT(contains(step(),
                        "GradScaler: the gradient of group 0, param 0 must be as unscale_() left "
                        "it when the next loss is scaled, got one that was written or replaced"));
    scaler.update();
  }
  give_grad(param, scaler, 1.0);
  scaler.unscale_(optimizer);
  param.mutable_grad().mul_(0.5);
  scaler.scale(param.sum());  // of another loss
  CHECK_THAT(step().empty() && param.item<double>() == -0.5);
}

inline void gradients_that_another_optimizer_has_unscaled_are_refused() {
  torch::Tensor param = parameter({0.0});
  torch::optim::SGD first({param}, torch::optim::SGDOptions(1.0));
  SGD second({param}, SGDOptions(1.0));
  GradScaler scaler = cpu_scaler();
  give_grad(param, scaler, 1.0);
  scaler.step(first);
  const std::string wanted =
      ": the gradient of group 0, param 0 must carry the scale, got one that was unscaled with "
      "another optimizer";
  CHECK_THAT(contains(error_of([&] { scaler.step(second); }), "GradScaler.step" + wanted));
  CHECK_THAT(contains(error_of([&] { scaler.unscale_(second); }), "GradScaler.unscale_" + wanted));
  give_grad(param, scaler, 1.0);  // new, and scaled
  scaler.step(second);
  scaler.update();
  CHECK_THAT(param.item<double>() == -2.0);
}

inline void groups_follow_parameters_that_move() {
  std::vector<torch::Tensor> params = {parameter({0.0}), parameter({0.0}), parameter({0.0})};
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{params[0], params[1]}, std::make_unique<SGDOptions>(1.0));
  groups.emplace_back(std::vector{params[2]}, std::make_unique<SGDOptions>(0.25));
  SGD optimizer(groups, SGDOptions(1.0));
  const auto step = [&] {
    for (torch::Tensor& param : params) param.mutable_grad() = torch::ones({1});
    optimizer.step();
  };
  step();
  auto& changed = optimizer.param_groups();
  changed[0].params().pop_back();
  changed[1].params().insert(changed[1].params().begin(), params[1]);
  step();
  CHECK_THAT(params[0].item<double>() == -2.0 && params[1].item<double>() == -1.25);
  // One that is taken out, and added again with its state.
  changed[1].params().erase(changed[1].params().begin());
  step();
  CHECK_THAT(params[1].item<double>() == -1.25);
  optimizer.add_param_group({{params[1]}, std::make_unique<SGDOptions>(0.5)});
  step();
  CHECK_THAT(params[1].item<double>() == -1.75);
}

inline void gradients_that_carry_a_scale_are_refused() {
  torch::Tensor param = parameter({0.0});
  SGD optimizer({param}, SGDOptions(1.0));
  GradScaler scaler = cpu_scaler();
  const auto refusal = [&] { return error_of([&] { optimizer.step(); }); };
  const std::string wanted =
      "SGD: grad of group 0, param 0 must be new or unscaled in a step without a scale, got the "
      "one of a step with a scale, which it still carries";
  give_grad(param, scaler, 1.0);
  scaler.step(optimizer);
  CHECK_THAT(contains(refusal(), wanted));
  optimizer.rebuild();
  optimizer.load_state_dict(optimizer.state_dict());
  CHECK_THAT(contains(refusal(), wanted) && param.item<double>() == -1.0);
  param.mutable_grad().div_(1024.0);
  CHECK_THAT(refusal().empty() && param.item<double>() == -2.0);
}

inline void groups_of_another_optimizer_keep_their_options() {
  SGD first({parameter({0.0})}, SGDOptions(0.5).momentum(0.25));
  SGD second(first.param_groups(), SGDOptions(0.125));
  const auto& options = static_cast<SGDOptions&>(second.param_groups()[0].options());
  CHECK_THAT(options.lr() == 0.5 && options.momentum() == 0.25);
}

inline void states_stay_where_they_are() {
  torch::Tensor param = parameter({1.0}, torch::kHalf);
  AdamW optimizer({param}, AdamWOptions(0.5));
  param.mutable_grad() = torch::ones({1}, torch::kHalf);
  optimizer.step();
  void* const key = param.unsafeGetTensorImpl();
  const auto* const state = optimizer.state().at(key).get();
  optimizer.master_params();
  optimizer.rebuild();
  optimizer.step();
  CHECK_THAT(optimizer.state().at(key).get() == state);
  optimizer.state().erase(key);
  optimizer.init_state();  // a new one, which the next step takes
  optimizer.step();
  const auto& made = static_cast<FusedParamState&>(*optimizer.state().at(key));
  CHECK_THAT(made.get("step").item<double>() == 1.0);
}

inline void options_of_another_optimizer_are_refused() {
  AdamW optimizer({parameter({1.0})}, AdamWOptions());
  optimizer.param_groups()[0].set_options(std::make_unique<torch::optim::AdamWOptions>());
  const std::string wanted =
      "AdamW: options of group 0 must be amp_ext::optim::AdamWOptions, got those of another "
      "optimizer";
  CHECK_THAT(contains(error_of([&] { optimizer.step(); }), wanted));
  CHECK_THAT(contains(error_of([&] { optimizer.state_dict(); }), wanted));
  CHECK_THAT(contains(error_of([&] { optimizer.master_params(); }), wanted));
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{parameter({1.0})}, std::make_unique<SGDOptions>());
  CHECK_THAT(contains(error_of([&] { AdamW(groups, AdamWOptions()); }), wanted));
  groups[0].params()[0] = torch::Tensor();
  groups[0].set_options(std::make_unique<AdamWOptions>());
  CHECK_THAT(contains(error_of([&] { AdamW(groups, AdamWOptions()); }), "got an undefined one"));
  const auto complex = [] {
    torch::Tensor number = torch::ones({1}, torch::kComplexFloat).requires_grad_(true);
    AdamW({number}, AdamWOptions()).init_state();
  };
  CHECK_THAT(contains(error_of(complex), "AdamW.init_state: param of group 0, param 0 must be"));
}

inline void groups_that_the_class_of_torch_added_are_refused() {
  torch::Tensor param = parameter({1.0});
  SGD optimizer({parameter({1.0})}, SGDOptions(0.5));
  torch::optim::Optimizer& base = optimizer;
  base.add_param_group(torch::optim::OptimizerParamGroup(std::vector{param}));
  param.mutable_grad() = torch::ones({1});
  const std::string wanted =
      "SGD: options of group 1 must be its own, got the defaults: add groups by add_param_group of "
      "amp_ext::optim::SGD, since that of torch::optim::Optimizer drops their options";
  const torch::Tensor none = torch::zeros({});
  for (const std::function<void()>& use : std::vector<std::function<void()>>{
           [&] { optimizer.step(); }, [&] { optimizer.look_at_gradients(none, none); },
           [&] { optimizer.init_state(); }, [&] { optimizer.state_dict(); }}) {
    CHECK_THAT(contains(error_of(use), wanted));
  }
  CHECK_THAT(param.item<double>() == 1.0);
  optimizer.param_groups().pop_back();
  optimizer.add_param_group({{param}, std::make_unique<SGDOptions>(0.25)});
  optimizer.step();
  CHECK_THAT(param.item<double>() == 0.75);
  optimizer.param_groups()[1].set_options(std::make_unique<SGDOptions>(0.5));
  optimizer.step();
  CHECK_THAT(param.item<double>() == 0.25);
}

inline void a_state_whose_parameter_left_the_groups_is_not_saved() {
  torch::Tensor param = torch::ones({3, 2}).requires_grad_(true);
  AdamW optimizer({param, parameter({1.0})}, AdamWOptions());
  optimizer.init_state();
  auto& params = optimizer.param_groups()[0].params();
  params.erase(params.begin());
  CHECK_THAT(contains(error_of([&] { optimizer.state_dict(); }),
                      "AdamW.state_dict: state must be of parameters in param_groups, got one of "
                      "shape [3, 2] that is in no group: put it back, or drop its state, "
                      "optimizer.state().erase(param.unsafeGetTensorImpl())"));
  optimizer.state().erase(param.unsafeGetTensorImpl());
  CHECK_THAT(optimizer.state_dict().toGenericDict().at("state").toGenericDict().size() == 1);
}

inline void a_load_keeps_what_torch_does_not_know() {
  SGD optimizer({parameter({1.0})}, SGDOptions(0.5).decoupled_weight_decay(true).clip_value(3.0));
  const Dict dict = optimizer.state_dict().toGenericDict();
  const c10::IValue groups = dict.at("param_groups");
  const Dict group = groups.toListRef()[0].toGenericDict();
  for (const char* name : {"decoupled_weight_decay", "clip_value"}) group.erase(name);
  group.insert("initial_lr", 0.75);  // of a scheduler of Python
  group.insert_or_assign("lr", torch::tensor(0.25));
  optimizer.load_state_dict(dict);
  const auto& options = static_cast<SGDOptions&>(optimizer.param_groups()[0].options());
  CHECK_THAT(options.decoupled_weight_decay() && *options.clip_value() == 3.0);
  CHECK_THAT(options.lr() == 0.25);
  const c10::IValue again = optimizer.state_dict().toGenericDict().at("param_groups");
  CHECK_THAT(again.toListRef()[0].toGenericDict().at("initial_lr").toDouble() == 0.75);
}

// An optimizer of somebody else that does more than step.
class Odd : public torch::optim::SGD {
 public:
  Odd(std::vector<torch::Tensor> params, std::function<void()> more)
      : SGD(std::move(params), torch::optim::SGDOptions(1.0)), more_(std::move(more)) {}
  torch::Tensor step(LossClosure closure = nullptr) override {
    torch::Tensor loss = SGD::step(std::move(closure));
    more_();
    return loss;
  }

 private:
  std::function<void()> more_;
};

inline bool is_spent(const std::string& operation, const std::string& error) {
  return contains(error, "GradScaler." + operation + ": the iteration must not be spent");
}

inline void a_step_that_fails_behind_its_writes_spends_the_iteration() {
  torch::Tensor param = parameter({1.0});
  Odd optimizer({param}, [] { TORCH_CHECK(false, "afterwards"); });
  GradScaler scaler = cpu_scaler();
  give_grad(param, scaler, 2.0);
  CHECK_THAT(contains(error_of([&] { scaler.step(optimizer); }), "afterwards"));
  CHECK_THAT(is_spent("step", error_of([&] { scaler.step(optimizer); })));
  CHECK_THAT(is_spent("unscale_", error_of([&] { scaler.unscale_(optimizer); })));
  CHECK_THAT(param.item<double>() == -1.0);
  scaler.update();
  CHECK_THAT(error_of([&] { scaler.unscale_(optimizer); }).empty());
}

inline void a_step_may_step_others_and_compute_gradients() {
  torch::Tensor outer = parameter({1.0}), inner = parameter({1.0});
  GradScaler scaler = cpu_scaler();
  std::vector<std::unique_ptr<torch::optim::SGD>> others;
  Odd optimizer({outer}, [&] {
    for (int i = 0; i < 20; ++i) {
      const torch::optim::SGDOptions still(0.0);
      others.push_back(std::make_unique<torch::optim::SGD>(std::vector{inner}, still));
      inner.mutable_grad() = torch::ones({1});
      scaler.step(*others.back());
    }
    CHECK_THAT(torch::GradMode::is_enabled());
    CHECK_THAT(contains(error_of([&] { scaler.update(); }), "got a call inside of one"));
  });
  give_grad(outer, scaler, 2.0);
  scaler.step(optimizer);
  CHECK_THAT(contains(error_of([&] { scaler.step(optimizer); }), "has already been called"));
  scaler.update();
}

inline void a_look_of_the_user_must_be_whole() {
  struct Half : Descent {
    using Descent::Descent;
    std::optional<amp_ext::GradientLook> look_at_gradients(const torch::Tensor& found_inf,
                                                           const torch::Tensor&) override {
      return amp_ext::GradientLook{{found_inf.clone()}, {}};
    }
  };
  torch::Tensor param = parameter({1.0});
  Half optimizer({param});
  GradScaler scaler = cpu_scaler();
  give_grad(param, scaler, 1.0);
  CHECK_THAT(
      contains(error_of([&] { scaler.step(optimizer); }),
               "look_at_gradients must give a first_nonfinite for each found_inf, got 0 for 1"));
}

inline void every_step_of_a_scaler_ends_the_casts() {
  torch::Tensor weight = torch::ones({1, 1}).requires_grad_(true);
  Descent own({weight});
  GradScaler scaler = cpu_scaler(0.5);  // so that its step is 1
  scaler.scale(torch::ones({}));
  CHECK_THAT(product_after_a_step(weight, [&] { scaler.step(own); }) == 2.0);
  weight = torch::ones({1, 1}).requires_grad_(true);
  torch::optim::SGD foreign({weight}, torch::optim::SGDOptions(1.0));
  GradScaler disabled(GradScalerOptions().device(torch::kCPU).enabled(false));
  CHECK_THAT(product_after_a_step(weight, [&] { disabled.step(foreign); }) == 2.0);
}

inline void unscaling_in_part_spends_the_iteration() {
  torch::Tensor param = parameter({1.0});
  torch::Tensor elsewhere = torch::ones({1}, torch::kMeta).requires_grad_(true);
  SGD optimizer({param, elsewhere}, SGDOptions(1.0));
  GradScaler scaler = cpu_scaler(4.0);
  scaler.scale(torch::ones({}));
  param.mutable_grad() = torch::full({1}, 4.0);
  elsewhere.mutable_grad() = torch::ones({1}, torch::kMeta);
  CHECK_THAT(!error_of([&] { scaler.unscale_(optimizer); }).empty());
  CHECK_THAT(is_spent("unscale_", error_of([&] { scaler.unscale_(optimizer); })));
  CHECK_THAT(param.grad().item<double>() == 1.0);
  optimizer.zero_grad();
  scaler.update();  // without any look
  CHECK_THAT(scaler.get_scale() == 4.0);
  give_grad(param, scaler, 2.0);
  scaler.step(optimizer);
  CHECK_THAT(param.item<double>() == -1.0);
}

inline void entries_of_others_go_through_a_load_and_a_file() {
  torch::Tensor param = parameter({1.0});
  SGD optimizer({param}, SGDOptions(0.5).momentum(0.5));
  const auto step = [&] {
    param.mutable_grad() = torch::ones({1});
    optimizer.step();
  };
  step();
  const Dict dict = optimizer.state_dict().toGenericDict();
  const Dict states = dict.at("state").toGenericDict();
  const Dict state = states.at(0).toGenericDict(), counts = new_dict();
  counts.insert("epoch", 3);
  counts.insert("mean", torch::full({1}, 0.5));
  state.insert("counts", counts);
  state.insert("note", "warm");
  state.insert("decay", 0.25);
  state.insert("nothing", c10::IValue());
  state.insert(7, true);
  state.insert("average", torch::ones({1}));
  states.insert("buckets", c10::ivalue::Tuple::create(1, 2));  // of no parameter
  optimizer.load_state_dict(dict);
  counts.insert_or_assign("epoch", 4);  // the optimizer has its own
  counts.at("mean").toTensor().zero_();
  step();
  optimizer.init_state();
  SGD moved = std::move(optimizer);
  const auto file = amp_ext::state_to_bytes(moved.state_dict());
  SGD other({parameter({1.0})}, SGDOptions());
  other.load_state_dict(amp_ext::state_from_bytes(file));
  for (const SGD* const each : {&moved, &other}) {
    const Dict again = each->state_dict().toGenericDict().at("state").toGenericDict();
    CHECK_THAT(again.size() == 2 && again.at("buckets").toTupleRef().elements()[1].toInt() == 2);
    const Dict kept = again.at(0).toGenericDict();
    CHECK_THAT(kept.size() == 7 && kept.at("momentum_buffer").toTensor().item<double>() == 1.5);
    CHECK_THAT(kept.at("note").toStringRef() == "warm" && kept.at("decay").toDouble() == 0.25);
    CHECK_THAT(kept.at("nothing").isNone() && kept.at(7).toBool());
    CHECK_THAT(kept.at("average").toTensor().item<double>() == 1.0);
    const Dict counted = kept.at("counts").toGenericDict();
    CHECK_THAT(counted.at("epoch").toInt() == 3);
    CHECK_THAT(counted.at("mean").toTensor().item<double>() == 0.5);
  }
}

inline void a_step_that_was_refused_may_be_tried_again() {
  torch::Tensor param = parameter({1.0});
  SGD optimizer({param}, SGDOptions(1.0));
  GradScaler scaler = cpu_scaler();
  auto& options = static_cast<SGDOptions&>(optimizer.param_groups()[0].options());
  give_grad(param, scaler, 1.0);
  scaler.unscale_(optimizer);
  options.clip_value(-1.0);
  CHECK_THAT(!error_of([&] { scaler.step(optimizer); }).empty());
  options.clip_value(std::nullopt);
  scaler.step(optimizer);
  scaler.update();
  CHECK_THAT(param.item<double>() == 0.0);
}

// Looks at what a step refuses.
struct Refusing : SGD {
  using SGD::SGD;
  torch::Tensor step_scaled(const torch::Tensor& scale, const torch::Tensor& found_inf) override {
    TORCH_CHECK(!refuses, "refused");
    return SGD::step_scaled(scale, found_inf);
  }
  bool refuses = true;
};

inline void a_dropped_look_names_nothing() {
  torch::Tensor a = parameter({1.0}), b = parameter({1.0});
  Refusing optimizer({a, b}, SGDOptions(1.0));
  GradScaler scaler = cpu_scaler();
  give_grad(a, scaler, NAN);
  CHECK_THAT(contains(error_of([&] { scaler.step(optimizer); }), "refused"));
  optimizer.refuses = false;
  optimizer.zero_grad();
  give_grad(b, scaler, NAN);
  scaler.step(optimizer);
  scaler.update();
  CHECK_THAT(scaler.stats().last_nonfinite == "group 0, param 1");
}

inline void optimizers_are_told_apart() {
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

inline void what_was_moved_from_says_so() {
  torch::Tensor param = parameter({1.0});
  AdamW optimizer({param}, AdamWOptions(0.5));
  const torch::Tensor one = torch::ones({}), none = torch::zeros({});
  const Dict state = optimizer.state_dict().toGenericDict();
  AdamW second = std::move(optimizer);
  bool was_evaluated = false;
  const auto closure = [&] {
    was_evaluated = true;
    return torch::ones({});
  };
  std::stringstream stream;
  const std::vector<std::pair<std::string, std::function<void()>>> of_optimizer = {
      {"add_param_group", [&] { optimizer.add_param_group(std::vector{param}); }},
      {"step", [&] { optimizer.step(closure); }},
      {"step", [&] { optimizer.step_scaled(one, none); }},
      {"look_at_gradients", [&] { optimizer.look_at_gradients(none, one); }},
      {"grad_norm", [&] { optimizer.grad_norm(); }},
      {"init_state", [&] { optimizer.init_state(); }},
      {"rebuild", [&] { optimizer.rebuild(); }},
      {"master_params", [&] { optimizer.master_params(); }},
      {"refresh_masters", [&] { optimizer.refresh_masters(); }},
      {"state_dict", [&] { optimizer.state_dict(); }},
      {"state_dict", [&] { torch::save(optimizer, stream); }},
      {"load_state_dict", [&] { optimizer.load_state_dict(state); }},
      {"defaults", [&] { optimizer.defaults(); }},
      {"param_groups", [&] { optimizer.param_groups().clear(); }},
      {"state", [&] { optimizer.state(); }},
      {"parameters", [&] { optimizer.parameters(); }},
      {"size", [&] { optimizer.size(); }},
      {"zero_grad", [&] { optimizer.zero_grad(); }}};
  const std::string of_optimizer_text =
      ": the optimizer must have its parameters, got one that was moved from";
  for (const auto& [name, call] : of_optimizer) {
    CHECK_THAT(error_of(call) == "amp_ext::optim::AdamW." + name + of_optimizer_text);
  }
  CHECK_THAT(!was_evaluated && optimizer.identity() == nullptr);

  GradScaler scaler = cpu_scaler();
  give_grad(param, scaler, 1.0);
  const std::vector<std::pair<std::string, std::function<void()>>> under_scaler = {
      {"step", [&] { scaler.step(optimizer); }},
      {"unscale_", [&] { scaler.unscale_(optimizer); }},
      {"last_step_skipped", [&] { scaler.last_step_skipped(&optimizer); }}};
  for (const auto& [name, call] : under_scaler) {
    CHECK_THAT(error_of(call) == "GradScaler." + name + of_optimizer_text);
  }
  CHECK_THAT(contains(error_of([&] { amp_ext::find_nonfinite(optimizer); }),
                      "find_nonfinite: the optimizer must have a group of parameters, got none"));
  optimizer = std::move(second);  // which has its parameters again
  scaler.step(optimizer);
  CHECK_THAT(param.item<double>() != 1.0);

  const Dict of_scale = scaler.state_dict().toGenericDict();
  GradScaler other = std::move(scaler);
  const std::vector<std::pair<std::string, std::function<void()>>> of_scaler = {
      {"scale", [&] { scaler.scale(one); }},
      {"unscale_", [&] { scaler.unscale_(optimizer); }},
      {"step", [&] { scaler.step(optimizer); }},
      {"update", [&] { scaler.update(); }},
      {"update", [&] { scaler.update(2.0); }},
      {"update", [&] { scaler.update(one); }},
      {"get_scale", [&] { scaler.get_scale(); }},
      {"is_enabled", [&] { scaler.is_enabled(); }},
      {"get_growth_factor", [&] { scaler.get_growth_factor(); }},
      {"set_growth_factor", [&] { scaler.set_growth_factor(2.0); }},
      {"get_backoff_factor", [&] { scaler.get_backoff_factor(); }},
      {"set_backoff_factor", [&] { scaler.set_backoff_factor(0.5); }},
      {"get_growth_interval", [&] { scaler.get_growth_interval(); }},
      {"set_growth_interval", [&] { scaler.set_growth_interval(5); }},
      {"last_step_skipped", [&] { scaler.last_step_skipped(); }},
      {"stats", [&] { scaler.stats(/*wait=*/true); }},
      {"state_dict", [&] { scaler.state_dict(); }},
      {"load_state_dict", [&] { scaler.load_state_dict(of_scale); }}};
  for (const auto& [name, call] : of_scaler) {
    CHECK_THAT(error_of(call) ==
               "GradScaler." + name +
                   ": the scaler must have its state, got one that was moved from");
  }
  scaler = std::move(other);
  scaler.update();
  CHECK_THAT(scaler.stats().steps == 1);
}

inline void a_refused_new_scale_leaves_the_iteration() {
  torch::Tensor param = parameter({1.0});
  SGD optimizer({param}, SGDOptions(1.0));
  GradScaler scaler = cpu_scaler(4.0);
  give_grad(param, scaler, INFINITY);
  scaler.step(optimizer);
  for (const double scale : {-1.0, 1e39}) {
    CHECK_THAT(contains(error_of([&] { scaler.update(scale); }), "new_scale must be a number"));
  }
  scaler.update();
  CHECK_THAT(scaler.get_scale() == 2.0 && scaler.stats().skips == 1);
}

inline void what_is_moved_to_itself_stays() {
  torch::Tensor param = parameter({1.0});
  AdamW optimizer({param}, AdamWOptions(0.5));
  GradScaler scaler = cpu_scaler(), &same_scaler = scaler;
  AdamW& same_optimizer = optimizer;
  give_grad(param, scaler, 1.0);
  optimizer = std::move(same_optimizer);
  scaler = std::move(same_scaler);
  scaler.step(optimizer);
  scaler.update();
  CHECK_THAT(param.item<double>() != 1.0 && scaler.stats().steps == 1);
}

inline void an_optimizer_without_groups_says_so() {
  CHECK_THAT(error_of([] { AdamW(std::vector<torch::Tensor>(), AdamWOptions()); }) ==
             "optimizer got an empty parameter list");
  AdamW optimizer({parameter({1.0})}, AdamWOptions());
  optimizer.param_groups().clear();
  GradScaler scaler = cpu_scaler();
  scaler.scale(torch::ones({}));
  const std::vector<std::function<void()>> calls = {
      [&] { optimizer.step(); }, [&] { scaler.step(optimizer); }, [&] { optimizer.init_state(); },
      [&] { optimizer.master_params(); }};
  for (const auto& call : calls) {
    CHECK_THAT(error_of(call) == "AdamW: param_groups must have a group, got none");
  }
}

inline void a_scaler_without_cuda_says_how_to_enable_it() {
  struct Handler : c10::WarningHandler {
    void process(const c10::Warning& warning) override { text = warning.msg(); }
    std::string text;
  } handler;
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&handler);
    CHECK_THAT(GradScaler().is_enabled() == torch::cuda::is_available());
  }
  const bool warned =
      contains(handler.text, "Disabling. Where the CPU trains: GradScalerOptions()");
  CHECK_THAT(warned != torch::cuda::is_available());
}

inline void what_is_out_of_range_is_refused() {
  CHECK_THAT(contains(error_of([] { const Autocast autocast(torch::kMeta); }),
                      "must be cpu or cuda, got meta"));
  CHECK_THAT(contains(error_of([] { const Autocast autocast(torch::kCPU, torch::kFloat); }),
                      "dtype must be Half or BFloat16, got Float"));
  CHECK_THAT(contains(error_of([] { GradScaler(GradScalerOptions().device(torch::kMeta)); }),
                      "device must be cuda or cpu, got meta"));
  CHECK_THAT(contains(error_of([] { amp_ext::clip_grad_norm_({}, NAN); }), "must be a number"));
  CHECK_THAT(contains(error_of([] { amp_ext::clip_grad_norm_({torch::Tensor()}, 1.0); }),
                      "parameters[0] must be a tensor, got an undefined one"));
}

inline void what_python_can_not_read_is_refused() {
  const auto saved = [](const c10::IValue& value) {
    return error_of([&] { amp_ext::state_to_bytes(value); });
  };
  const Dict dict = new_dict();
  dict.insert("a", torch::ones({2}).to_sparse());
  CHECK_THAT(contains(saved(dict), "value['a'] must be a dense tensor, got Sparse"));
  dict.insert_or_assign("a", torch::ones({2}, torch::kUInt16));
  CHECK_THAT(contains(saved(dict), "value['a'] must be of a dtype that torch.load reads"));
  CHECK_THAT(contains(saved(torch::Device(torch::kCPU)), "value must be a dict, list"));
  dict.clear();
  dict.insert(0.5, 1);
  CHECK_THAT(contains(saved(dict), "keys of value must be strings or ints, got 0.5"));
  const auto list = c10::impl::GenericList(c10::AnyType::get());
  list.push_back(dict);
  dict.clear();
  dict.insert("a", c10::ivalue::Tuple::create(list));
  const std::string in_itself =
      "value['a'][0][0] must not be one of those in which it lies, got a GenericDict that contains "
      "itself";
  CHECK_THAT(saved(dict) == "state_to_bytes: " + in_itself);
  CHECK_THAT(error_of([&] { amp_ext::save_state("run.pt", dict); }) ==
             "save_state of run.pt: " + in_itself);
  dict.clear();
  c10::IValue deep = 1;
  for (int i = 0; i < 500; ++i) deep = c10::ivalue::Tuple::create(std::vector{deep});
  CHECK_THAT(saved(deep).empty());
  deep = c10::ivalue::Tuple::create(std::vector{deep});
  CHECK_THAT(contains(saved(deep), "must lie in at most 500 others, got one that lies in more"));
  CHECK_THAT(contains(error_of([] { amp_ext::save_state("/nowhere/file.pt", 1); }),
                      "path must be of a file that can be written"));
  CHECK_THAT(contains(error_of([] { amp_ext::load_state("/"); }),
                      "path must be of a file that can be read"));
  std::stringstream archive;
  torch::save(torch::ones({2}), archive);
  SGD optimizer({parameter({1.0})}, SGDOptions());
  Dict state = optimizer.state_dict().toGenericDict();
  state.insert("mine", state);
  CHECK_THAT(contains(error_of([&] { optimizer.load_state_dict(state); }),
                      "SGD.load_state_dict: state_dict['mine'] must not be one of those in which"));
  state.erase("mine");
  auto betas = c10::impl::GenericList(c10::AnyType::get());
  betas.push_back(betas);
  state = cpu_scaler().state_dict().toGenericDict();
  state.insert_or_assign("scale", betas);
  CHECK_THAT(contains(error_of([&] { cpu_scaler().load_state_dict(state); }), "got [GenericList]"));
  betas.clear();
  CHECK_THAT(contains(error_of([&] { torch::load(optimizer, archive); }),
                      "the archive must be one that torch::save wrote"));
}

inline void a_damaged_file_is_refused_or_right() {
  const Dict dict = new_dict();
  dict.insert("weights", torch::arange(100.0));
  dict.insert("nothing", torch::empty({0}));
  const std::vector<char> file = amp_ext::state_to_bytes(dict);
  int refused = 0;
  for (size_t i = 0; i < file.size(); i += 7) {
    std::vector<char> damaged = file;
    damaged[i] ^= 1 << i % 8;
    amp_ext::state_from_bytes(file);  // leaves the right bytes in memory that is free again
    std::optional<c10::IValue> read;
    const std::string error = error_of([&] { read = amp_ext::state_from_bytes(damaged); });
    refused += contains(error, "state_from_bytes: the file must be one that torch.save wrote, of ");
    CHECK_THAT(error.empty() == read.has_value());
    if (read.has_value()) CHECK_THAT(amp_ext::state_to_bytes(*read) == file);
  }
  CHECK_THAT(refused > 100);
}

template <typename Theirs, typename Ours, typename TheirOptions>
void check_that_archives_are_read(const TheirOptions& options) {
  const auto make_params = [] {
    torch::manual_seed(3);
    return std::vector{torch::randn({3, 2}).requires_grad_(), torch::randn({2}).requires_grad_()};
  };
  std::vector<torch::Tensor> theirs = make_params(), ours = make_params();
  const auto groups_of = [](const std::vector<torch::Tensor>& params) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (const torch::Tensor& param : params) groups.emplace_back(std::vector{param});
    return groups;
  };
  Theirs first(groups_of(theirs), options);
  Ours second(groups_of(ours));
  const auto step = [](torch::optim::Optimizer& optimizer) {
    for (const auto& group : optimizer.param_groups()) {
      torch::Tensor param = group.params()[0];
      param.mutable_grad() = (param * param).detach() - 0.5;
    }
    optimizer.step();
  };
  for (int i = 0; i < 3; ++i) step(first);
  std::stringstream archive;
  torch::save(first, archive);
  torch::load(second, archive);
  for (size_t i = 0; i < ours.size(); ++i) ours[i].set_data(theirs[i].detach().clone());
  for (int i = 0; i < 3; ++i) {
    step(first);
    step(second);
  }
  for (size_t i = 0; i < ours.size(); ++i) {
    CHECK_THAT(torch::allclose(ours[i], theirs[i], 1e-6, 1e-7));
  }
}

inline void archives_of_torch_are_read() {
  namespace theirs = torch::optim;
  check_that_archives_are_read<theirs::Adam, Adam>(
      theirs::AdamOptions(0.1).betas({0.5, 0.75}).eps(0.25).weight_decay(0.5).amsgrad(true));
  check_that_archives_are_read<theirs::AdamW, AdamW>(theirs::AdamWOptions(0.1).weight_decay(0.25));
  check_that_archives_are_read<theirs::SGD, SGD>(
      theirs::SGDOptions(0.1).momentum(0.5).nesterov(true));
  check_that_archives_are_read<theirs::SGD, SGD>(
      theirs::SGDOptions(0.1).momentum(0.5).dampening(0.25).weight_decay(0.5));
  std::stringstream archive;
  torch::save(theirs::SGD({parameter({1.0})}, 0.1), archive);
  Lion lion({parameter({1.0})}, LionOptions());
  CHECK_THAT(contains(error_of([&] { torch::load(lion, archive); }),
                      "the archive must be one that torch::save wrote of it, got another"));
  std::stringstream of_two;
  torch::save(theirs::SGD({parameter({1.0}), parameter({1.0})}, 0.1), of_two);
  SGD of_one({parameter({1.0})}, SGDOptions());
  const std::string error = error_of([&] { torch::load(of_one, of_two); });
  CHECK_THAT(contains(error, "different size") && contains(error, "torch::load of an optimizer"));
}

inline void a_schedule_goes_on_with_a_new_scheduler() {
  torch::Tensor param = parameter({1.0});
  const auto run = [](SGD& optimizer, int64_t done, int64_t end) {
    torch::optim::StepLR scheduler(optimizer, /*step_size=*/2, /*gamma=*/0.5);
    const c10::IValue saved = optimizer.state_dict();
    for (int64_t epoch = 0; epoch < done; ++epoch) scheduler.step();
    optimizer.load_state_dict(saved);
    for (int64_t epoch = done; epoch < end; ++epoch) scheduler.step();
    return optimizer.param_groups()[0].options().get_lr();
  };
  SGD straight({param}, SGDOptions(1.0)), resumed({param}, SGDOptions(1.0));
  run(resumed, 0, 3);
  CHECK_THAT(run(resumed, 3, 7) == run(straight, 0, 7));
}

inline void two_threads_write_one_file() {
  const std::string name = "amp_ext_two_threads_" + std::to_string(std::random_device()()) + ".pt";
  const std::string path = std::filesystem::temp_directory_path() / name;
  const auto write = [&](int64_t size) {
    for (int i = 0; i < 20; ++i) amp_ext::save_state(path, torch::full({size}, 1.0));
  };
  write(10);
  auto first = std::async(std::launch::async, write, 20000);
  auto second = std::async(std::launch::async, write, 200000);
  for (int i = 0; i < 100; ++i)
    CHECK_THAT(amp_ext::load_state(path).toTensor().min().item<float>() == 1.0F);
  first.get();
  second.get();
  CHECK_THAT(std::remove(path.c_str()) == 0);
}

inline void a_view_is_saved_as_its_elements() {
  const torch::Tensor view = torch::arange(4.0)[2].expand({4});  // of a storage of its own size
  const auto read = amp_ext::state_from_bytes(amp_ext::state_to_bytes(view)).toTensor();
  CHECK_THAT(same(read, torch::full({4}, 2.0F)));
}

}  // namespace checks
