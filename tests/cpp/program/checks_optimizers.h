// Checks of the optimizers of the C++ interface.
#pragma once

#include "checks.h"

namespace checks {

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
  CHECK_THAT(scaler.get_scale() == 512.0);
}

}  // namespace checks
