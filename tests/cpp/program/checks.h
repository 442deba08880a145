// Checks of what a program sees of the C++ interface.
#pragma once

#include <amp_ext/amp_ext.h>
#include <torch/torch.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "check.h"

namespace checks {

using amp_ext::Autocast;
using amp_ext::GradScaler;
using amp_ext::GradScalerOptions;
using namespace amp_ext::optim;

inline GradScaler cpu_scaler(double scale = 1024.0) {
  return GradScaler(GradScalerOptions().device(torch::kCPU).init_scale(scale));
}

inline torch::Tensor parameter(std::vector<double> values, c10::ScalarType dtype = torch::kFloat) {
  return torch::tensor(values, torch::kDouble).to(dtype).requires_grad_(true);
}

// Gives a parameter a gradient, scaled.
inline void give_grad(torch::Tensor& param, GradScaler& scaler, double value) {
  param.mutable_grad() = torch::Tensor();
  scaler.scale((param.to(torch::kFloat) * value).sum()).backward();
}

inline bool same(const torch::Tensor& a, const torch::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && torch::equal(a, b);
}

// An optimizer of the user's that unscales in its step.
class Descent : public torch::optim::Optimizer, public amp_ext::ScaledStep {
 public:
  explicit Descent(std::vector<torch::Tensor> params)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(params))},
                  std::make_unique<torch::optim::SGDOptions>(0.5)) {}

  torch::Tensor step(LossClosure = nullptr) override { throw std::logic_error("not scaled"); }
  torch::Tensor step_scaled(const torch::Tensor& grad_scale,
                            const torch::Tensor& found_inf) override {
    const torch::NoGradGuard no_grad;
    ++calls;
    if (found_inf.item<float>() != 0.0F) return {};
    for (torch::Tensor& param : parameters()) param.sub_(0.5 * param.grad() / grad_scale);
    return torch::tensor(7.0);
  }

  int calls = 0;
};

inline void own_scaled_steps_are_found() {
  torch::Tensor param = parameter({1.0, 2.0});
  Descent optimizer({param});
  GradScaler scaler = cpu_scaler();
  give_grad(param, scaler, 2.0);
  CHECK_THAT(scaler.step(optimizer).item<double>() == 7.0);
  scaler.update();
  CHECK_THAT(same(param.detach(), torch::tensor({0.0F, 1.0F})));
  give_grad(param, scaler, INFINITY);
  scaler.step(optimizer);
  scaler.update();
  CHECK_THAT(optimizer.calls == 2 && same(param.detach(), torch::tensor({0.0F, 1.0F})));
  CHECK_THAT(scaler.get_scale() == 512.0 && *scaler.last_step_skipped(&optimizer));
}

inline void casts_work_across_the_library() {
  torch::Tensor param = parameter({1.0});
  const std::unique_ptr<torch::optim::Optimizer> ours =
      std::make_unique<AdamW>(std::vector<torch::Tensor>{param}, AdamWOptions(0.1));
  CHECK_THAT(dynamic_cast<amp_ext::ScaledStep*>(ours.get()) != nullptr);
  CHECK_THAT(dynamic_cast<AdamW*>(ours.get()) != nullptr);
  CHECK_THAT(dynamic_cast<SGD*>(ours.get()) == nullptr);
  CHECK_THAT(dynamic_cast<AdamWOptions*>(&ours->param_groups()[0].options()) != nullptr);
  bool was_caught = false;
  try {
    Adam optimizer({param}, AdamOptions(-1.0));
  } catch (const c10::Error& error) {
    was_caught = true;
  }
  CHECK_THAT(was_caught);
}

inline void foreign_optimizers_are_skipped_whole() {
  torch::Tensor param = parameter({1.0, 2.0});
  torch::optim::SGD optimizer({param}, torch::optim::SGDOptions(0.5).momentum(0.9));
  GradScaler scaler = cpu_scaler();
  give_grad(param, scaler, 2.0);
  scaler.step(optimizer);
  scaler.update();
  CHECK_THAT(same(param.detach(), torch::tensor({0.0F, 1.0F})));
  const auto& state =
      static_cast<torch::optim::SGDParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
  const torch::Tensor before = state.momentum_buffer().clone();
  give_grad(param, scaler, NAN);
  scaler.step(optimizer);
  scaler.update();
  CHECK_THAT(same(param.detach(), torch::tensor({0.0F, 1.0F})));
  CHECK_THAT(same(state.momentum_buffer(), before));
  CHECK_THAT(scaler.get_scale() == 512.0);
}

inline void groups_keep_their_options() {
  torch::Tensor a = parameter({1.0}), b = parameter({1.0}), c = parameter({1.0});
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{a});
  // Set to what it is without being set, which is not what the optimizer has.
  groups.emplace_back(std::vector{b},
                      std::make_unique<AdamWOptions>(AdamWOptions().weight_decay(0.01)));
  AdamW optimizer(groups, AdamWOptions(0.5).weight_decay(0.25).clip_value(3.0));
  optimizer.add_param_group({{c}, std::make_unique<AdamWOptions>(AdamWOptions(0.125).eps(0.5))});
  const auto options = [&](size_t group) {
    return static_cast<const AdamWOptions&>(optimizer.param_groups()[group].options());
  };
  CHECK_THAT(options(0).lr() == 0.5 && options(0).weight_decay() == 0.25);
  CHECK_THAT(options(1).lr() == 0.5 && options(1).weight_decay() == 0.01);
  CHECK_THAT(options(2).lr() == 0.125 && options(2).weight_decay() == 0.25);
  CHECK_THAT(options(2).eps() == 0.5 && *options(2).clip_value() == 3.0);
  torch::optim::StepLR schedule(optimizer, 1, 0.5);
  schedule.step();
  schedule.step();  // torch's decays one step late
  CHECK_THAT(options(0).get_lr() == 0.25 && options(2).get_lr() == 0.0625);
}

// Ten steps of a network, with an archive in between.
inline std::vector<torch::Tensor> trained(const AdamWOptions& own_options, bool with_archive) {
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(64, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 3));
  model->to(torch::kBFloat16);
  const torch::Tensor inputs = torch::randn({10, 4, 64}).to(torch::kBFloat16);
  auto options = own_options;
  auto optimizer = std::make_unique<AdamW>(model->parameters(), options.lr(0.01));
  auto scaler = std::make_unique<GradScaler>(cpu_scaler());
  for (int step = 0; step < 10; ++step) {
    if (step == 5 && with_archive) {
      std::stringstream of_optimizer, of_scaler;
      torch::save(*optimizer, of_optimizer);
      torch::save(*scaler, of_scaler);
      optimizer = std::make_unique<AdamW>(model->parameters(), options.lr(7.0).amsgrad(false));
      scaler = std::make_unique<GradScaler>(cpu_scaler(2.0));
      torch::load(*optimizer, of_optimizer);
      torch::load(*scaler, of_scaler);
    }
    optimizer->zero_grad();
    scaler->scale(model->forward(inputs[step]).to(torch::kFloat).square().mean()).backward();
    scaler->step(*optimizer);
    scaler->update();
  }
  std::vector<torch::Tensor> result = optimizer->master_params();
  result.push_back(torch::tensor(scaler->get_scale()));
  return result;
}

inline void archives_resume_with_the_same_bits() {
  for (const MasterWeights masters : {true, false}) {
    const auto options = AdamWOptions().amsgrad(true).master_weights(masters);
    const auto whole = trained(options, false), resumed = trained(options, true);
    for (size_t i = 0; i < whole.size(); ++i) CHECK_THAT(same(whole[i], resumed[i]));
  }
}

inline void archives_resume_split_masters_with_the_same_bits() {
  for (const char* const form : {"split", "split8"}) {
    const auto options = AdamWOptions().amsgrad(true).master_weights(form);
    const auto whole = trained(options, false), resumed = trained(options, true);
    for (size_t i = 0; i < whole.size(); ++i) CHECK_THAT(same(whole[i], resumed[i]));
  }
}

inline void archives_resume_moments_in_8_bits_with_the_same_bits() {
  for (const char* const form : {"8bit-bf16", "8bit"}) {
    const auto options = AdamWOptions().state_dtype(form);
    const auto whole = trained(options, false), resumed = trained(options, true);
    for (size_t i = 0; i < whole.size(); ++i) CHECK_THAT(same(whole[i], resumed[i]));
  }
}

inline torch::ScalarType product_dtype() {
  return torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
}

inline void autocast_scopes_nest_and_end() {
  CHECK_THAT(product_dtype() == torch::kFloat);
  {
    const Autocast outer(torch::kCPU, torch::kBFloat16);
    CHECK_THAT(product_dtype() == torch::kBFloat16);
    {
      const Autocast inner(torch::kCPU, torch::kHalf);
      CHECK_THAT(product_dtype() == torch::kHalf);
      const Autocast off(torch::kCPU, torch::kHalf, /*enabled=*/false);
      CHECK_THAT(product_dtype() == torch::kFloat);
    }
    CHECK_THAT(product_dtype() == torch::kBFloat16);
    // Each thread opens its own.
    CHECK_THAT(std::async(std::launch::async, product_dtype).get() == torch::kFloat);
    try {
      const Autocast inner(torch::kCPU, torch::kHalf);
      throw std::runtime_error("");
    } catch (const std::runtime_error&) {
    }
    CHECK_THAT(product_dtype() == torch::kBFloat16);
  }
  CHECK_THAT(product_dtype() == torch::kFloat);
}

// Steps inside one scope; returns what a layer of weight 1 computes after its weight became 2.
inline double product_after_a_step(torch::Tensor& weight, const std::function<void()>& step) {
  const Autocast autocast(torch::kCPU, torch::kBFloat16);
  const torch::Tensor one = torch::ones({1, 1});
  CHECK_THAT(torch::mm(one, weight).item<double>() == 1.0);
  weight.mutable_grad() = -torch::ones({1, 1});
  step();
  return torch::mm(one, weight).item<double>();
}

inline void casts_of_weights_are_not_stale_after_a_step() {
  torch::Tensor weight = torch::ones({1, 1}).requires_grad_(true);
  SGD ours({weight}, SGDOptions(1.0));
  CHECK_THAT(product_after_a_step(weight, [&] { ours.step(); }) == 2.0);
  weight = torch::ones({1, 1}).requires_grad_(true);
  torch::optim::SGD foreign({weight}, torch::optim::SGDOptions(1.0));
  GradScaler scaler = cpu_scaler(1.0);
  scaler.scale(torch::ones({}));
  CHECK_THAT(product_after_a_step(weight, [&] { scaler.step(foreign); }) == 2.0);
}

inline void closures_are_refused_or_handed_on() {
  torch::Tensor param = parameter({1.0});
  SGD optimizer({param}, SGDOptions(0.5));
  const auto closure = [&] {
    const torch::Tensor loss = (param * param).sum();
    loss.backward();
    return loss;
  };
  GradScaler scaler = cpu_scaler();
  CHECK_THAT(contains(error_of([&] { scaler.step(optimizer, closure); }),
                      "Closure use is not currently supported if GradScaler is enabled."));
  GradScaler disabled(GradScalerOptions().device(torch::kCPU).enabled(false));
  const torch::NoGradGuard no_grad;  // the step enables them for the closure
  CHECK_THAT(disabled.step(optimizer, closure).item<double>() == 1.0);
  CHECK_THAT(param.item<double>() == 0.0 && disabled.get_scale() == 1.0);
}

inline void conversions_and_new_gradients_are_followed() {
  torch::nn::Linear model(3, 2);
  Adam optimizer(model->parameters(), AdamOptions(0.01));
  GradScaler scaler = cpu_scaler();
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    model->to(dtype);
    for (int i = 0; i < 2; ++i) {
      optimizer.zero_grad();
      scaler.scale(model->forward(torch::ones({4, 3}, dtype)).to(torch::kFloat).sum()).backward();
      const torch::Tensor before = model->weight.detach().clone();
      scaler.step(optimizer);
      scaler.update();
      CHECK_THAT(!same(model->weight.detach(), before));
    }
  }
  const auto& state =
      static_cast<FusedParamState&>(*optimizer.state().at(model->weight.unsafeGetTensorImpl()));
  CHECK_THAT(state.get("step").item<double>() == 8.0);
  CHECK_THAT(state.get("exp_avg").scalar_type() == torch::kDouble);
  CHECK_THAT(!state.get("master_param").defined());
}

inline void masters_keep_what_16_bits_lose() {
  torch::Tensor param = parameter({1.0}, torch::kBFloat16);
  AdamW optimizer({param}, AdamWOptions(1e-4).weight_decay(0.0));
  for (int i = 0; i < 100; ++i) {
    param.mutable_grad() = torch::ones({1}, torch::kBFloat16);
    optimizer.step();
  }
  CHECK_THAT(param.item<double>() < 0.995);
  param.detach().fill_(3.0);  // a write that the version shows
  optimizer.step();
  CHECK_THAT(std::abs(optimizer.master_params()[0].item<double>() - 3.0) < 1e-3);
}

inline const FusedParamState& state_of(const FusedOptimizer& optimizer,
                                       const torch::Tensor& param) {
  return static_cast<const FusedParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

inline void a_first_step_with_momentum_is_not_dampened() {
  torch::Tensor param = parameter({0.0}, torch::kFloat);
  SGD optimizer({param}, SGDOptions(1.0).dampening(0.5).state_dtype(at::kBFloat16));
  for (const double momentum : {0.0, 0.0, 0.5, 0.5}) {  // the first two count for the dither
    static_cast<SGDOptions&>(optimizer.param_groups()[0].options()).momentum(momentum);
    const double before = param.item<double>();
    param.mutable_grad() = torch::ones({1});
    optimizer.step();
    CHECK_THAT(param.item<double>() == before - 1.0);
  }
}

inline void a_master_that_is_written_is_what_steps_go_on_from() {
  torch::Tensor param = parameter({1.0}, torch::kBFloat16);
  AdamW optimizer({param}, AdamWOptions(0.0));
  const auto step = [&] {
    param.mutable_grad() = torch::ones({1}, torch::kBFloat16);
    optimizer.step();
  };
  step();
  const torch::Tensor master = optimizer.master_params()[0];
  master.fill_(3.0);
  optimizer.rebuild();
  optimizer.add_param_group({{parameter({1.0}, torch::kFloat)}});
  step();
  CHECK_THAT(param.item<double>() == 3.0 && master.item<double>() == 3.0);
  master.fill_(5.0);
  param.detach().fill_(7.0);
  optimizer.rebuild();
  step();
  CHECK_THAT(param.item<double>() == 7.0 && master.item<double>() == 7.0);
  master.fill_(9.0);
  optimizer.load_state_dict(optimizer.state_dict());
  step();
  CHECK_THAT(param.item<double>() == 7.0 && optimizer.master_params()[0].item<double>() == 7.0);
}

inline void masters_are_named_by_flags_and_texts() {
  const std::string split = "split";
  CHECK_THAT(AdamWOptions().master_weights() == true);
  CHECK_THAT(AdamWOptions().master_weights(false).master_weights() == false);
  CHECK_THAT(AdamWOptions().master_weights(0).master_weights() == false);
  CHECK_THAT(AdamWOptions().master_weights("split").master_weights() == split);
  CHECK_THAT(AdamWOptions().master_weights(split).master_weights() != "split8");
  CHECK_THAT(AdamWOptions().master_weights("").master_weights() != false);
  CHECK_THAT(LionOptions().master_weights("split8").master_weights());
  CHECK_THAT(!LionOptions().master_weights(false).master_weights());
  static_assert(!std::is_convertible_v<int*, MasterWeights>, "which would be a flag");
}

inline void split_masters_lie_below_their_parameters() {
  torch::Tensor param = parameter({1.0, -2.0, 0.5}, torch::kBFloat16);
  AdamW optimizer({param}, AdamWOptions(1e-4).weight_decay(0.0).master_weights("split"));
  for (int i = 0; i < 100; ++i) {
    param.mutable_grad() = torch::ones({3}, torch::kBFloat16);
    optimizer.step();
  }
  CHECK_THAT(param[0].item<double>() < 0.995);
  const FusedParamState& state = state_of(optimizer, param);
  CHECK_THAT(!state.get("master_param").defined());
  CHECK_THAT(state.get("master_low_bf16").scalar_type() == torch::kByte);
  CHECK_THAT((state.get("master_low_bf16").sizes() == std::vector<int64_t>{3, 2}));
  const torch::Tensor master = optimizer.master_params()[0];
  CHECK_THAT(same(master, amp_ext::join_master(param, state.get("master_low_bf16"))));
  CHECK_THAT(std::abs(master[0].item<double>() - 0.99) < 1e-5);
  optimizer.master_params()[0].zero_();  // a copy
  optimizer.refresh_masters();
  CHECK_THAT(same(optimizer.master_params()[0], master));
  param.data().zero_();  // which no version shows, and which is followed all the same
  static_cast<AdamWOptions&>(optimizer.param_groups()[0].options()).lr(0.0);
  optimizer.step();
  CHECK_THAT(param.abs().max().item<double>() == 0.0);
}

inline void a_lower_part_that_does_not_fit_changes_nothing() {
  torch::Tensor param = parameter({1.0, 2.0}, torch::kHalf);
  Lion optimizer({param}, LionOptions(0.5).master_weights("split8"));
  param.mutable_grad() = torch::ones({2}, torch::kHalf);
  optimizer.step();
  const torch::Tensor master = optimizer.master_params()[0];
  const Dict dict = optimizer.state_dict().toGenericDict();
  const Dict state = dict.at("state").toGenericDict().at(0).toGenericDict();
  const torch::Tensor low = state.at("master_low8_fp16").toTensor().clone();
  const auto refused = [&](const c10::IValue& wrong) {
    state.insert_or_assign("master_low8_fp16", wrong);
    const std::string error = error_of([&] { optimizer.load_state_dict(dict); });
    CHECK_THAT(same(optimizer.master_params()[0], master));
    return error;
  };
  const std::string where = "Lion.load_state_dict: master_low8_fp16 of group 0, param 0 must be ";
  CHECK_THAT(contains(refused(low.to(torch::kByte)),
                      where + "torch.int8 of shape (2,), got torch.uint8 of (2,)"));
  CHECK_THAT(contains(refused(low.to_sparse()), where + "dense and hold its elements, got"));
  CHECK_THAT(contains(refused(low.to(torch::kMeta)),
                      where + "dense and hold its elements, got torch.strided"));
  CHECK_THAT(refused(low).empty());
}

inline void states_of_a_split_master_keep_the_layout() {
  torch::Tensor weight = torch::randn({4, 3, 2, 2}).to(torch::kBFloat16);
  const torch::Tensor plain = weight.clone().requires_grad_(true);
  weight = weight.contiguous(at::MemoryFormat::ChannelsLast).requires_grad_(true);
  for (const std::string form : {"split", "split8"}) {
    std::vector<torch::Tensor> masters;
    for (const torch::Tensor& param : {plain, weight}) {
      SGD optimizer({param}, SGDOptions(0.125).momentum(0.5).master_weights(form));
      for (int i = 0; i < 3; ++i) {
        param.mutable_grad() = torch::full_like(param, 0.25).detach();
        optimizer.step();
      }
      SGD other({param}, SGDOptions(0.125).momentum(0.5).master_weights(form));
      other.load_state_dict(
          amp_ext::state_from_bytes(amp_ext::state_to_bytes(optimizer.state_dict())));
      CHECK_THAT(same(other.master_params()[0], optimizer.master_params()[0]));
      const std::string key = form == "split" ? "master_low_bf16" : "master_low8_bf16";
      const torch::Tensor low = state_of(other, param).get(key);
      CHECK_THAT(low.strides() == state_of(optimizer, param).get(key).strides());
      CHECK_THAT((low.stride(1) < low.stride(3)) == (param.stride(1) < param.stride(3)));
      CHECK_THAT(other.master_params()[0].strides() == param.strides());
      masters.push_back(other.master_params()[0]);
    }
    CHECK_THAT(same(masters[0], masters[1]));
  }
}

inline void state_dtypes_are_named_by_dtypes_and_texts() {
  const std::string text = "8bit-bf16";
  CHECK_THAT(AdamWOptions().state_dtype() == at::kFloat);
  CHECK_THAT(AdamWOptions().state_dtype(torch::kBFloat16).state_dtype() == at::kBFloat16);
  CHECK_THAT(AdamWOptions().state_dtype("bfloat16").state_dtype() == at::kBFloat16);
  CHECK_THAT(AdamWOptions().state_dtype("float32").state_dtype() == at::kFloat);
  CHECK_THAT(SGDOptions().state_dtype(std::nullopt).state_dtype() == std::nullopt);
  CHECK_THAT(SGDOptions().state_dtype({}).state_dtype() == std::nullopt);
  CHECK_THAT(SGDOptions().state_dtype(std::optional(at::kFloat)).state_dtype() == at::kFloat);
  CHECK_THAT(!SGDOptions().state_dtype(std::optional<at::ScalarType>()).state_dtype().has_value());
  CHECK_THAT(LionOptions().state_dtype("8bit").state_dtype() == "8bit");
  CHECK_THAT(LionOptions().state_dtype(text).state_dtype() == "8bit-bf16");
  CHECK_THAT(LionOptions().state_dtype("").state_dtype() != std::nullopt);
  CHECK_THAT(LionOptions().state_dtype("8bit").dithers());
  CHECK_THAT(!LionOptions().state_dtype("8bit").rounding("nearest").dithers());
  static_assert(!std::is_convertible_v<int, StateDType>, "which would be a dtype");
  static_assert(!std::is_convertible_v<bool, StateDType>, "which would be a dtype");
  static_assert(!std::is_convertible_v<std::nullptr_t, StateDType>, "which would be a text");
}

inline void moments_in_8_bits_have_keys_of_their_own() {
  const torch::Tensor param = torch::zeros({64, 64}).requires_grad_(true);
  AdamW optimizer({param}, AdamWOptions(0.5).weight_decay(0.0).state_dtype("8bit"));
  param.mutable_grad() = torch::full({64, 64}, 2.0);
  optimizer.step();
  CHECK_THAT(std::abs(param[0][0].item<double>() + 0.5) < 1e-2);
  const FusedParamState& state = state_of(optimizer, param);
  CHECK_THAT(!state.get("exp_avg").defined() && !state.get("exp_avg_sq").defined());
  CHECK_THAT(state.get("exp_avg_q8h").scalar_type() == torch::kChar);
  CHECK_THAT(state.get("exp_avg_sq_q8s").scalar_type() == torch::kByte);
  CHECK_THAT((state.get("exp_avg_sq_exp").sizes() == std::vector<int64_t>{64, 2}));
  CHECK_THAT(state.get("step").item<double>() == 1.0);
}

inline void a_code_that_does_not_fit_changes_nothing() {
  const torch::Tensor param = torch::zeros({64, 64}).requires_grad_(true);
  Lion optimizer({param}, LionOptions(0.5).state_dtype("8bit"));
  param.mutable_grad() = torch::ones({64, 64});
  optimizer.step();
  const Dict dict = optimizer.state_dict().toGenericDict();
  const Dict state = dict.at("state").toGenericDict().at(0).toGenericDict();
  for (const std::string key : {"exp_avg_q8m", "exp_avg_exp"}) {
    const torch::Tensor kept = state_of(optimizer, param).get(key);
    const torch::Tensor good = kept.clone();
    const auto refused = [&](const c10::IValue& wrong) {
      state.insert_or_assign(key, wrong);
      const std::string error = error_of([&] { optimizer.load_state_dict(dict); });
      CHECK_THAT(state_of(optimizer, param).get(key).is_same(kept) && same(kept, good));
      return error;
    };
    const std::string where = "Lion.load_state_dict: " + key + " of group 0, param 0 must be ";
    CHECK_THAT(contains(refused(good.to(torch::kChar)), where + "torch.uint8 of shape (64, "));
    CHECK_THAT(contains(refused(good.to_sparse()), where + "dense and hold its elements, got"));
    CHECK_THAT(contains(refused(good.to(torch::kMeta)),
                        where + "dense and hold its elements, got torch.strided"));
    CHECK_THAT(contains(refused(3), where + "a tensor, got 3"));
    state.insert_or_assign(key, good);
  }
  optimizer.load_state_dict(dict);
  Lion of_scalar({torch::zeros({}).requires_grad_(true)}, LionOptions(0.5));
  state.insert_or_assign("exp_avg_q8m", torch::zeros({}, torch::kByte));
  CHECK_THAT(contains(error_of([&] { of_scalar.load_state_dict(dict); }),
                      "exp_avg_exp of group 0, param 0 must be torch.uint8 of shape (0,), got"));
}

inline void codes_in_groups_are_of_contiguous_parameters() {
  torch::Tensor weight = torch::randn({32, 32, 2, 2});
  const torch::Tensor plain = weight.clone().requires_grad_(true);
  weight = weight.contiguous(at::MemoryFormat::ChannelsLast).requires_grad_(true);
  const torch::Tensor transposed = torch::randn({64, 128}).t().requires_grad_(true);
  for (const torch::Tensor& param : {plain, weight, transposed}) {
    SGD optimizer({param}, SGDOptions(0.125).momentum(0.5).state_dtype("8bit"));
    for (int i = 0; i < 3; ++i) {
      param.mutable_grad() = torch::full_like(param, 0.25).detach();
      optimizer.step();
    }
    SGD other({param}, SGDOptions(0.125).momentum(0.5).state_dtype("8bit"));
    other.load_state_dict(
        amp_ext::state_from_bytes(amp_ext::state_to_bytes(optimizer.state_dict())));
    const std::string key = param.is_contiguous() ? "momentum_buffer_q8m" : "momentum_buffer";
    const torch::Tensor before = state_of(optimizer, param).get(key);
    const torch::Tensor loaded = state_of(other, param).get(key);
    CHECK_THAT(same(before, loaded) && loaded.strides() == param.strides());
    CHECK_THAT(before.strides() == param.strides());
  }
}

inline void codes_follow_a_parameter_that_changes_its_layout() {
  torch::Tensor weight = torch::randn({32, 32, 2, 2}).requires_grad_(true);
  const torch::Tensor plain = weight.detach().clone().requires_grad_(true);
  const torch::Tensor grad = torch::randn({32, 32, 2, 2});
  SGD coded({weight}, SGDOptions(0.125).momentum(0.5).state_dtype("8bit"));
  SGD wide({plain}, SGDOptions(0.125).momentum(0.5));
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast,
                            at::MemoryFormat::Contiguous}) {
    weight.set_data(weight.detach().contiguous(format));
    for (int i = 0; i < 2; ++i) {
      weight.mutable_grad() = grad.contiguous(format);
      plain.mutable_grad() = grad.clone();
      coded.step();
      wide.step();
    }
    const bool has_groups = format == at::MemoryFormat::Contiguous;
    const FusedParamState& state = state_of(coded, weight);
    CHECK_THAT(state.get("momentum_buffer_q8m").defined() == has_groups);
    CHECK_THAT(state.get("momentum_buffer").defined() != has_groups);
    CHECK_THAT((weight - plain).abs().max().item<double>() < 0.1);
  }
}

inline void a_parameter_that_is_gone_leaves_no_state_to_another() {
  torch::Tensor param = parameter({1.0, 1.0});
  Adam optimizer({param}, AdamOptions(0.5));
  param.mutable_grad() = torch::ones({2});
  optimizer.step();
  for (int i = 0; i < 50; ++i) {  // one of them may get its address
    param = torch::Tensor();
    optimizer.param_groups()[0].params()[0] = parameter({1.0, 1.0});
    param = optimizer.param_groups()[0].params()[0];
    param.mutable_grad() = torch::ones({2});
    optimizer.step();
    CHECK_THAT(std::abs(param[0].item<double>() - 0.5) < 1e-6);  // the first step of each
  }
}

// Two threads step one optimizer, each in its way; one of both waits for none.
inline void check_that_one_thread_steps(const std::function<void(AdamW&)>& second_step) {
  torch::Tensor param = torch::zeros({1 << 22}).requires_grad_(true);
  param.mutable_grad() = torch::ones({1 << 22});
  AdamW optimizer({param}, AdamWOptions(0.1));
  std::atomic<int> refused{0}, stepped{0};
  const auto work = [&](const std::function<void(AdamW&)>& step) {
    for (int i = 0; i < 40; ++i) {
      const std::string error = error_of([&] { step(optimizer); });
      if (error.empty()) {
        ++stepped;
      } else {
        CHECK_THAT(contains(error, "AdamW.step: must be called by one thread at a time"));
        ++refused;
      }
    }
  };
  auto other = std::async(std::launch::async, work, second_step);
  work([](AdamW& one) { one.step(); });
  other.get();
  CHECK_THAT(stepped + refused == 80 && stepped >= 1);
  const auto& state =
      static_cast<FusedParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
  CHECK_THAT(state.get("step").item<double>() == stepped);
}

inline void one_thread_steps_at_a_time() {
  check_that_one_thread_steps([](AdamW& optimizer) { optimizer.step(); });
}

inline void one_thread_steps_at_a_time_also_under_a_scaler() {
  const torch::Tensor one = torch::ones({}), none = torch::zeros({});
  check_that_one_thread_steps([&](AdamW& optimizer) { optimizer.step_scaled(one, none); });
}

inline void gradients_after_a_failed_step_with_unscaled_ones_come_after_an_update() {
  torch::Tensor param = parameter({1.0, 1.0});
  SGD optimizer({param}, SGDOptions(0.5).momentum(0.9));
  GradScaler scaler = cpu_scaler();
  give_grad(param, scaler, 2.0);
  scaler.unscale_(optimizer);
  auto& options = static_cast<SGDOptions&>(optimizer.param_groups()[0].options());
  options.clip_value(-1.0);
  CHECK_THAT(!error_of([&] { scaler.step(optimizer); }).empty());
  options.clip_value(std::nullopt);
  give_grad(param, scaler, 2.0);  // new, and scaled
  CHECK_THAT(contains(error_of([&] { scaler.step(optimizer); }),
                      "call optimizer.zero_grad() and update(), and backward anew"));
  scaler.update();
  give_grad(param, scaler, 2.0);
  scaler.step(optimizer);
  scaler.update();
  CHECK_THAT(same(param.detach(), torch::tensor({0.0F, 0.0F})));
}

inline void norms_are_clipped_without_a_step() {
  torch::Tensor a = parameter({1.0, 1.0}), b = parameter({1.0}, torch::kBFloat16);
  a.mutable_grad() = torch::tensor({3.0F, 0.0F});
  b.mutable_grad() = torch::tensor({4.0F}).to(torch::kBFloat16);
  const torch::Tensor norm = amp_ext::clip_grad_norm_({a, b, a}, 1.0);
  CHECK_THAT(norm.scalar_type() == torch::kFloat && norm.item<double>() == 5.0);
  CHECK_THAT(std::abs(a.grad()[0].item<double>() - 0.6) < 1e-6);
  CHECK_THAT(b.grad().item<double>() == 0.80078125);
  CHECK_THAT(amp_ext::clip_grad_norm_({}, 1.0).item<double>() == 0.0);
}

inline void float64_gradients_are_clipped_with_the_bits_of_python() {
  torch::Tensor wide = parameter({1.0}, torch::kDouble), narrow = parameter({1.0});
  wide.mutable_grad() = torch::full({1}, 7.0, torch::kDouble);
  narrow.mutable_grad() = torch::zeros({1});
  CHECK_THAT(amp_ext::clip_grad_norm_({wide, narrow}, 3.0).item<double>() == 7.0);
  const double coefficient = 1.0 / (7.0 + 1e-6) * 3.0;  // 3.0 / (7.0 + 1e-6) has other bits
  CHECK_THAT(wide.grad().item<double>() == 7.0 * coefficient);
}

inline void norms_are_clipped_inside_a_step() {
  torch::Tensor a = parameter({1.0, 1.0}), b = parameter({1.0});
  SGD optimizer({a, b}, SGDOptions(1.0).max_grad_norm(1.0).write_back_grads(true));
  GradScaler scaler = cpu_scaler();
  scaler.scale(3.0 * a[0] + 4.0 * b[0]).backward();
  scaler.step(optimizer);
  CHECK_THAT(optimizer.grad_norm().item<double>() == 5.0);
  CHECK_THAT(std::abs(a.grad()[0].item<double>() - 0.6) < 1e-6);
  CHECK_THAT(std::abs(b.item<double>() - 0.2) < 1e-6);
}

inline void bad_gradients_are_named() {
  torch::nn::Sequential model(torch::nn::Linear(2, 2), torch::nn::Linear(2, 1));
  for (torch::Tensor& param : model->parameters()) param.mutable_grad() = torch::ones_like(param);
  CHECK_THAT(amp_ext::find_nonfinite(*model).empty());
  model->parameters()[2].mutable_grad()[0][1] = NAN;
  const auto counts = amp_ext::find_nonfinite(*model);
  CHECK_THAT(counts.size() == 1 && counts[0].first == "1.weight" && counts[0].second == 1);
  SGD optimizer(model->parameters(), SGDOptions(0.1));
  CHECK_THAT(amp_ext::find_nonfinite(optimizer)[0].first == "group 0, param 2");
  GradScaler scaler = cpu_scaler();
  scaler.scale(torch::ones({}));
  scaler.step(optimizer);
  scaler.update();
  CHECK_THAT(scaler.stats().last_nonfinite == "group 0, param 2" && scaler.stats().skips == 1);
}

inline void the_scale_keeps_its_limits() {
  torch::Tensor param = parameter({1.0});
  SGD optimizer({param}, SGDOptions(0.0));
  const auto run = [&](GradScaler& scaler, std::vector<double> grads) {
    std::vector<double> scales;
    for (const double grad : grads) {
      give_grad(param, scaler, grad);
      scaler.step(optimizer);
      scaler.update();
      scales.push_back(scaler.get_scale());
    }
    return scales;
  };
  GradScaler limited(GradScalerOptions()
                         .device(torch::kCPU)
                         .init_scale(4)
                         .growth_interval(1)
                         .min_scale(2)
                         .max_scale(8));
  CHECK_THAT((run(limited, {1, 1, NAN, NAN, NAN}) == std::vector<double>{8, 8, 4, 2, 2}));
  GradScaler still(GradScalerOptions().device(torch::kCPU).init_scale(4).dynamic(false));
  CHECK_THAT((run(still, {NAN, 1}) == std::vector<double>{4, 4}));
  CHECK_THAT(still.stats().skips == 1);
  GradScaler patient(GradScalerOptions().device(torch::kCPU).init_scale(4).hysteresis(2));
  CHECK_THAT((run(patient, {NAN, 1, NAN, NAN}) == std::vector<double>{4, 4, 2, 1}));
}

inline void optimizers_can_be_moved() {
  torch::Tensor param = parameter({1.0});
  Adam first({param}, AdamOptions(0.5));
  param.mutable_grad() = torch::ones({1});
  first.step();
  Adam second = std::move(first);
  second.step();
  const auto& state =
      static_cast<FusedParamState&>(*second.state().at(param.unsafeGetTensorImpl()));
  CHECK_THAT(state.get("step").item<double>() == 2.0);
}

inline void training_goes_on_from_what_was_made_in_inference_mode() {
  for (const bool loads : {false, true}) {
    for (const MasterWeights& masters : {MasterWeights(true), MasterWeights("split")}) {
      torch::Tensor param = parameter({1.0, 2.0}, torch::kBFloat16);
      AdamW optimizer(
          {param},
          AdamWOptions(0.5).master_weights(masters).state_dtype("8bit-bf16").max_grad_norm(1.0));
      GradScaler scaler(GradScalerOptions().device(torch::kCPU).init_scale(4.0).hysteresis(2));
      {
        const c10::InferenceMode guard;
        scaler.scale(torch::ones({}));
        param.mutable_grad() = torch::ones_like(param);
        optimizer.init_state();
        if (loads) optimizer.load_state_dict(optimizer.state_dict());
        for (const torch::Tensor& master : optimizer.master_params()) {
          CHECK_THAT(!master.is_inference());
        }
        scaler.step(optimizer);
        scaler.update();
      }
      const auto* const state =
          static_cast<FusedParamState*>(optimizer.state().at(param.unsafeGetTensorImpl()).get());
      for (const auto& [name, tensor] : state->tensors()) CHECK_THAT(!tensor.is_inference());
      CHECK_THAT(!optimizer.grad_norm().is_inference());
      for (const double value : std::vector<double>{INFINITY, 1.0}) {
        give_grad(param, scaler, value);
        scaler.step(optimizer);
        scaler.update();
      }
      {
        const torch::NoGradGuard no_grad;
        param.mul_(0.5);
      }
      optimizer.refresh_masters();
      param.mutable_grad() = torch::ones_like(param);
      optimizer.step();
      scaler.load_state_dict(scaler.state_dict());
      CHECK_THAT(scaler.stats().skips == 1);
    }
  }
}

inline void values_survive_a_file() {
  Dict dict = new_dict();
  dict.insert("tensor", torch::arange(6).view({2, 3}).t());
  dict.insert("view", torch::arange(100).slice(0, 7, 9));
  dict.insert(3, c10::ivalue::Tuple::create(0.5, c10::IValue()));
  const auto read = amp_ext::state_from_bytes(amp_ext::state_to_bytes(dict)).toGenericDict();
  CHECK_THAT(same(read.at("tensor").toTensor(), torch::arange(6).view({2, 3}).t()));
  CHECK_THAT(same(read.at("view").toTensor(), torch::tensor({7, 8})));
  CHECK_THAT(read.at("view").toTensor().storage().nbytes() == 16);
  CHECK_THAT(read.at(3).toTupleRef().elements()[0].toDouble() == 0.5);
}

inline void list_operations_are_there() {
  torch::Tensor param = torch::ones({3}), grad = torch::ones({3});
  amp_ext::Group<amp_ext::SgdHyperparameters> options;
  options.lr = 0.5;
  amp_ext::step_(amp_ext::StepLists{{param}, {grad}, {{}}, {}, {}}, options, {});
  CHECK_THAT(same(param, torch::full({3}, 0.5)));
  CHECK_THAT(contains(
      error_of([&] { amp_ext::step_(amp_ext::StepLists{{param}, {}, {{}}, {}, {}}, options, {}); }),
      "sgd_: grads must"));
}

}  // namespace checks
