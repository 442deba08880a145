// Checks of optimizers whose parameters are stepped during backward().
#pragma once

#include <amp_ext/gradient_release.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <thread>

#include "checks.h"

namespace checks {

// A small network with its optimizer, in 16 bits if `dtype` says so.
template <typename Optimizer, typename Options>
struct Released {
  Released(const Options& options, c10::ScalarType dtype)
      : optimizer(make_params(dtype), options) {}

  std::vector<torch::Tensor> make_params(c10::ScalarType dtype) {
    torch::manual_seed(3);
    for (int i = 0; i < 4; ++i) {
      params.push_back((torch::randn({33, 33}) / 6).to(dtype).requires_grad_(true));
    }
    return params;
  }

  torch::Tensor loss(int step) {
    torch::manual_seed(100 + step);
    torch::Tensor x = torch::randn({4, 33});
    for (const torch::Tensor& param : params) x = torch::tanh(x.matmul(param.to(torch::kFloat)));
    return x.square().sum();
  }

  std::vector<torch::Tensor> params;
  Optimizer optimizer;
};

// Trains with and without the release of gradients, and compares all bits.
template <typename Optimizer, typename Options>
void compare_with_released(const Options& options, c10::ScalarType dtype, bool has_scaler,
                           int micro_batches) {
  std::vector<std::vector<torch::Tensor>> results;
  for (const bool is_released : {false, true}) {
    Released<Optimizer, Options> model(options, dtype);
    GradScaler scaler = cpu_scaler(1024.0, has_scaler);
    std::optional<GradientRelease> release;
    if (is_released) release.emplace(model.optimizer, &scaler);
    for (int step = 0; step < 200; ++step) {
      for (int i = 0; i < micro_batches; ++i) {
        std::shared_ptr<const void> pause;
        if (is_released && i < micro_batches - 1) pause = release->paused();
        scaler.scale(model.loss(10 * step + i)).backward();
      }
      for (const torch::Tensor& param : model.params) {
        CHECK_THAT(param.grad().defined() != is_released);
      }
      scaler.step(model.optimizer);
      scaler.update();
      model.optimizer.zero_grad();
    }
    std::vector<torch::Tensor>& result = results.emplace_back();
    for (const torch::Tensor& param : model.params) {
      result.push_back(param.detach().clone());
      for (const auto& [key, tensor] : state_of(model.optimizer, param).tensors()) {
        result.push_back(tensor);
      }
    }
  }
  CHECK_THAT(results[0].size() == results[1].size());
  for (size_t i = 0; i < results[0].size(); ++i) CHECK_THAT(same(results[0][i], results[1][i]));
}

AMP_EXT_CHECK(released_gradients_give_the_same_bits) {
  for (const bool has_scaler : {false, true}) {
    for (const int micro_batches : {1, 3}) {
      compare_with_released<AdamW>(AdamWOptions(0.01), torch::kFloat, has_scaler, micro_batches);
      compare_with_released<AdamW>(AdamWOptions(0.01).master_weights("split8").state_dtype("8bit"),
                                   torch::kBFloat16, has_scaler, micro_batches);
      compare_with_released<Adam>(AdamOptions(0.01).amsgrad(true), torch::kHalf, has_scaler,
                                  micro_batches);
      compare_with_released<SGD>(SGDOptions(0.01).momentum(0.9), torch::kHalf, has_scaler,
                                 micro_batches);
      compare_with_released<Lion>(LionOptions(0.01).master_weights("split"), torch::kBFloat16,
                                  has_scaler, micro_batches);
    }
  }
}

AMP_EXT_CHECK(released_parameters_are_skipped_one_by_one) {
  torch::Tensor a = parameter({1.0, 2.0}), b = parameter({3.0});
  AdamW optimizer({a, b}, AdamWOptions(0.1));
  GradScaler scaler = cpu_scaler();
  optimizer.init_state();
  WeightAverage average(optimizer);
  GradientRelease release(optimizer, &scaler);
  optimizer.track_grad_norms(true);
  scaler.scale(a.sum() * 2 + (b * std::numeric_limits<float>::infinity()).sum()).backward();
  scaler.step(optimizer);
  scaler.update();
  average.update();
  CHECK_THAT(a[0].item<double>() != 1.0 && b[0].item<double>() == 3.0);
  CHECK_THAT(state_of(optimizer, a).get("step").item<double>() == 1.0);
  CHECK_THAT(state_of(optimizer, b).get("step").item<double>() == 0.0);
  CHECK_THAT(scaler.last_step_skipped(&optimizer) == true);
  const ScalerStats stats = scaler.stats();
  CHECK_THAT(stats.skips == 1 && stats.skipped_tensors == 1);
  CHECK_THAT(stats.last_nonfinite == "group 0, param 1");
  CHECK_THAT(scaler.get_scale() == 512.0);
  CHECK_THAT(optimizer.grad_norms()[0].item<double>() == std::sqrt(8.0f));
  CHECK_THAT(std::isinf(optimizer.grad_norms()[1].item<double>()));
}

AMP_EXT_CHECK(released_gradients_follow_moves_and_end_with_their_owner) {
  torch::Tensor param = parameter({1.0, 2.0});
  GradScaler first_scaler = cpu_scaler();
  auto first = std::make_unique<AdamW>(std::vector<torch::Tensor>{param}, AdamWOptions(0.1));
  GradientRelease first_release(*first, &first_scaler);
  AdamW optimizer(std::move(*first));
  first.reset();
  GradScaler scaler(std::move(first_scaler));
  GradientRelease release(std::move(first_release));
  scaler.scale(param.sum()).backward();
  CHECK_THAT(!param.grad().defined() && param[0].item<double>() != 1.0);
  scaler.step(optimizer);
  scaler.update();
  release.remove();
  CHECK_THAT(torch::autograd::impl::post_acc_grad_hooks(param) == nullptr);
  scaler.scale(param.sum()).backward();
  CHECK_THAT(param.grad().defined());
  {
    AdamW other({param}, AdamWOptions(0.1));
    new GradientRelease(other);  // never removed
  }
  param.mutable_grad().reset();
  param.sum().backward();
  CHECK_THAT(param.grad().defined());
}

struct OtherHook : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::Tensor&) override {}
};

AMP_EXT_CHECK(what_released_gradients_do_not_allow_is_refused) {
  torch::Tensor a = parameter({1.0}), b = parameter({2.0});
  AdamW optimizer({a, b}, AdamWOptions(0.1));
  GradScaler scaler = cpu_scaler(), other = cpu_scaler();
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(b);
  hook = std::make_unique<OtherHook>();
  CHECK_REFUSED(GradientRelease refused(optimizer, &scaler),
                "the gradient of group 0, param 1 can't be released, because the parameter has "
                "another post-accumulate hook");
  CHECK_THAT(torch::autograd::impl::post_acc_grad_hooks(a) == nullptr);
  hook.reset();
  options_in<AdamWOptions>(optimizer).max_grad_norm(1.0);
  CHECK_REFUSED(GradientRelease refused(optimizer),
                "gradients can't be released with max_grad_norm");
  options_in<AdamWOptions>(optimizer).max_grad_norm({});
  GradientRelease release(optimizer, &scaler);
  CHECK_REFUSED(GradientRelease refused(optimizer, &scaler), "releases its gradients already");
  CHECK_REFUSED(optimizer.step([] { return torch::Tensor(); }), "a closure needs all gradients");
  CHECK_REFUSED(a.sum().backward(), "the gradients are not scaled");
  optimizer.zero_grad();

  scaler.scale(a.sum()).backward();
  other.scale(a.sum());
  CHECK_REFUSED(other.step(optimizer), "released with another scaler");
  CHECK_REFUSED(scaler.unscale_(optimizer), "GradScaler.unscale_ needs all gradients at once");
  CHECK_REFUSED(optimizer.step(), "released with a scaler, which did not call this step");
  CHECK_REFUSED(scaler.scale(a.sum()).backward(), "got another gradient after 1 of 2 parameters");
  CHECK_REFUSED(scaler.step(optimizer), "an earlier hook of this iteration failed");
  optimizer.zero_grad();  // warns

  scaler.scale(b.sum()).backward();
  options_in<AdamWOptions>(optimizer).lr(0.2);
  CHECK_REFUSED(scaler.step(optimizer), "lr of group 0 changed after 1 of 2 parameters");
  options_in<AdamWOptions>(optimizer).lr(0.1);
  scaler.step(optimizer);
  CHECK_REFUSED(scaler.scale(a.sum()).backward(), "before the scaler's update()");
  scaler.update();
  torch::autograd::impl::post_acc_grad_hooks(a) = std::make_unique<OtherHook>();
  scaler.scale(a.sum()).backward();
  CHECK_REFUSED(scaler.step(optimizer), "has another post-accumulate hook");
  release.remove();
  CHECK_THAT(dynamic_cast<OtherHook*>(torch::autograd::impl::post_acc_grad_hooks(a).get()));
}

AMP_EXT_CHECK(hooks_of_two_threads_take_turns) {
  std::vector<std::vector<torch::Tensor>> results;
  for (const bool is_parallel : {false, true}) {
    std::vector<torch::Tensor> params;
    for (int i = 0; i < 40; ++i) params.push_back(parameter({1.0 + i, 2.0}));
    AdamW optimizer(params, AdamWOptions(0.1));
    GradScaler scaler = cpu_scaler();
    GradientRelease release(optimizer, &scaler);
    for (int step = 0; step < 20; ++step) {
      torch::Tensor losses[2];
      for (int half = 0; half < 2; ++half) {
        losses[half] = torch::zeros({});
        for (int i = half; i < 40; i += 2) losses[half] = losses[half] + params[i].square().sum();
        losses[half] = scaler.scale(losses[half]);
      }
      std::thread other;
      if (is_parallel) {
        other = std::thread([&] { losses[1].backward(); });
        losses[0].backward();
        other.join();
      } else {
        losses[0].backward();
        losses[1].backward();
      }
      scaler.step(optimizer);
      scaler.update();
    }
    results.push_back(params);
  }
  for (size_t i = 0; i < 40; ++i) CHECK_THAT(same(results[0][i], results[1][i]));
}

}  // namespace checks
