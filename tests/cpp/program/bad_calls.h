// Bad calls, which a test compares with those of Python by their names.
#pragma once

#include <amp_ext/amp_ext.h>
#include <torch/torch.h>

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace bad_calls {

using amp_ext::GradScaler;
using amp_ext::GradScalerOptions;
using namespace amp_ext::optim;

inline Dict dict_of(std::vector<std::pair<c10::IValue, c10::IValue>> entries) {
  Dict dict = new_dict();
  for (auto& [key, value] : entries) dict.insert(key, value);
  return dict;
}

inline torch::Tensor parameter(c10::ScalarType dtype = torch::kFloat) {
  torch::Tensor param = torch::ones({2}, dtype).requires_grad_(true);
  param.mutable_grad() = torch::ones({2}, dtype);
  return param;
}

inline GradScaler scaler_with(const GradScalerOptions& options) {
  return GradScaler(GradScalerOptions(options).device(torch::kCPU));
}

// An optimizer of two parameters in two groups, one of which has stepped, and its state dict, of
// which an entry can be replaced.
struct Saved {
  torch::Tensor first = parameter(), second = parameter();
  AdamW optimizer;
  Dict dict;

  Saved() : optimizer(groups(first, second), AdamWOptions(0.1)), dict(new_dict()) {
    second.mutable_grad() = torch::Tensor();
    optimizer.step();
    dict = optimizer.state_dict().toGenericDict();
  }

  static std::vector<torch::optim::OptimizerParamGroup> groups(const torch::Tensor& first,
                                                               const torch::Tensor& second) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector{first});
    groups.emplace_back(std::vector{second});
    return groups;
  }
  Dict state() const { return dict.at("state").toGenericDict().at(0).toGenericDict(); }
  Dict group(size_t index) const {
    return dict.at("param_groups").toListRef()[index].toGenericDict();
  }
  void load() { optimizer.load_state_dict(dict); }
};

inline std::string error_of_load(const std::string& path) {
  Saved saved;
  return error_of([&] { saved.optimizer.load_state_dict(amp_ext::load_state(path)); });
}

template <typename Optimizer, typename Options>
std::function<void()> construct(Options options) {
  return [options] { Optimizer({parameter()}, options); };
}

inline Checks all() {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  return {
      {"negative lr", construct<Adam>(AdamOptions(-1.0))},
      {"lr of nan", construct<SGD>(SGDOptions(nan))},
      {"negative eps", construct<AdamW>(AdamWOptions().eps(-0.5))},
      {"beta of 1", construct<Adam>(AdamOptions().betas({0.9, 1.0}))},
      {"negative beta", construct<Lion>(LionOptions().betas({-0.5, 0.9}))},
      {"negative weight decay", construct<Lion>(LionOptions().weight_decay(-0.25))},
      {"negative momentum", construct<SGD>(SGDOptions().momentum(-0.5))},
      {"nesterov without momentum", construct<SGD>(SGDOptions().nesterov(true))},
      {"negative norm", construct<AdamW>(AdamWOptions().max_grad_norm(-1.0))},
      {"negative clip value", construct<SGD>(SGDOptions().clip_value(-2.0))},
      {"negative floor", construct<AdamW>(AdamWOptions().denominator_floor(-2.0))},
      {"state dtype", construct<AdamW>(AdamWOptions().state_dtype(torch::kHalf))},
      {"state dtype of float64", construct<Lion>(LionOptions().state_dtype(torch::kDouble))},
      {"state dtype of no sense", construct<SGD>(SGDOptions().state_dtype("nonsense"))},
      {"state dtype float16 by its name", construct<Adam>(AdamOptions().state_dtype("float16"))},
      {"empty state dtype", construct<Lion>(LionOptions().state_dtype(std::string()))},
      {"codes with amsgrad", construct<Adam>(AdamOptions().amsgrad(true).state_dtype("8bit"))},
      {"rounding", construct<SGD>(SGDOptions().rounding("up"))},
      {"master weights", construct<AdamW>(AdamWOptions().master_weights("splat"))},
      {"empty master weights", construct<SGD>(SGDOptions().master_weights(""))},
      {"dampening of nan", construct<SGD>(SGDOptions().dampening(nan))},
      {"no parameters",
       [] { AdamW(std::vector<torch::optim::OptimizerParamGroup>(), AdamWOptions()); }},
      {"empty list of parameters", [] { AdamW(std::vector<torch::Tensor>(), AdamWOptions()); }},
      {"parameter twice in a group",
       [] {
         const torch::Tensor param = parameter();
         AdamW({parameter(), param, param}, AdamWOptions());
       }},
      {"parameter in two groups",
       [] {
         const torch::Tensor param = parameter();
         AdamW(Saved::groups(param, param), AdamWOptions());
       }},
      {"norms differ",
       [] {
         std::vector<torch::optim::OptimizerParamGroup> groups =
             Saved::groups(parameter(), parameter());
         groups[1].set_options(std::make_unique<AdamWOptions>(AdamWOptions().max_grad_norm(2.0)));
         AdamW(groups, AdamWOptions().max_grad_norm(1.0)).step();
       }},
      {"group option",
       [] {
         std::vector<torch::optim::OptimizerParamGroup> groups =
             Saved::groups(parameter(), parameter());
         groups[1].set_options(std::make_unique<AdamWOptions>(AdamWOptions().clip_value(-1.0)));
         AdamW(groups, AdamWOptions());
       }},
      {"master weights of a group",
       [] {
         std::vector<torch::optim::OptimizerParamGroup> groups =
             Saved::groups(parameter(), parameter());
         groups[1].set_options(
             std::make_unique<AdamWOptions>(AdamWOptions().master_weights("Split")));
         AdamW(groups, AdamWOptions());
       }},
      {"state dtype of a group",
       [] {
         std::vector<torch::optim::OptimizerParamGroup> groups =
             Saved::groups(parameter(), parameter());
         groups[1].set_options(std::make_unique<AdamWOptions>(AdamWOptions().state_dtype("8Bit")));
         AdamW(groups, AdamWOptions());
       }},
      {"amsgrad of a group with codes",
       [] {
         std::vector<torch::optim::OptimizerParamGroup> groups =
             Saved::groups(parameter(), parameter());
         groups[1].set_options(std::make_unique<AdamWOptions>(AdamWOptions().amsgrad(true)));
         AdamW(groups, AdamWOptions().state_dtype("8bit-bf16"));
       }},
      {"option written in a loop",
       [] {
         AdamW optimizer({parameter()}, AdamWOptions());
         static_cast<AdamWOptions&>(optimizer.param_groups()[0].options()).clip_value(-1.0);
         optimizer.step();
       }},
      {"master weights written in a loop",
       [] {
         Lion optimizer({parameter()}, LionOptions());
         static_cast<LionOptions&>(optimizer.param_groups()[0].options()).master_weights("low");
         optimizer.step();
       }},
      {"master weights written before any step",
       [] {
         Lion optimizer({parameter()}, LionOptions());
         static_cast<LionOptions&>(optimizer.param_groups()[0].options()).master_weights("low");
         optimizer.init_state();
       }},
      {"state dtype written in a loop",
       [] {
         Lion optimizer({parameter()}, LionOptions());
         static_cast<LionOptions&>(optimizer.param_groups()[0].options()).state_dtype("4bit");
         optimizer.step();
       }},
      {"amsgrad written in a loop",
       [] {
         Adam optimizer({parameter()}, AdamOptions().state_dtype("8bit"));
         static_cast<AdamOptions&>(optimizer.param_groups()[0].options()).amsgrad(true);
         optimizer.init_state();
       }},
      {"clip value written before any step",
       [] {
         Lion optimizer({parameter()}, LionOptions());
         static_cast<LionOptions&>(optimizer.param_groups()[0].options()).clip_value(-1.0);
         optimizer.master_params();
       }},
      {"float16 states beside a split master",
       [] {
         AdamW({parameter(torch::kHalf)},
               AdamWOptions().master_weights("split").state_dtype(std::nullopt))
             .step();
       }},
      {"sparse gradient",
       [] {
         torch::Tensor param = parameter();
         param.mutable_grad() = torch::ones({2}).to_sparse();
         SGD({param}, SGDOptions(0.1)).step();
       }},
      {"gradient over its parameter",
       [] {
         torch::Tensor param = parameter();
         param.mutable_grad() = param.detach();
         SGD({param}, SGDOptions(0.1).write_back_grads(true)).step();
       }},
      {"late gradient",
       [] {
         torch::Tensor early = parameter(), late = torch::ones({2}).requires_grad_(true);
         SGD optimizer({early, late}, SGDOptions());
         GradScaler scaler = scaler_with({});
         scaler.scale(torch::ones({}));
         scaler.unscale_(optimizer);
         late.mutable_grad() = torch::ones({2});
         scaler.step(optimizer);
       }},
      {"state dict without groups",
       [] {
         AdamW({parameter()}, AdamWOptions()).load_state_dict(dict_of({{"state", dict_of({})}}));
       }},
      {"state dict of other groups",
       [] { AdamW({parameter()}, AdamWOptions()).load_state_dict(Saved().dict); }},
      {"state dict of a longer group",
       [] {
         AdamW optimizer({parameter(), parameter()}, AdamWOptions());
         AdamW({parameter()}, AdamWOptions()).load_state_dict(optimizer.state_dict());
       }},
      {"state dict without betas",
       [] {
         Saved saved;
         saved.group(1).erase("betas");
         const std::string error = error_of([&] { saved.load(); });
         TORCH_CHECK(false, error.substr(0, error.find(", got")));
       }},
      {"state dict of another optimizer",
       [] {
         SGD source({parameter()}, SGDOptions().momentum(0.5));
         AdamW({parameter()}, AdamWOptions()).load_state_dict(source.state_dict());
       }},
      {"state dict of NAdam",
       [] {
         Saved saved;
         saved.group(0).insert("momentum_decay", 0.5);
         saved.load();
       }},
      {"lr in a state dict",
       [] {
         Saved saved;
         saved.group(0).insert_or_assign("lr", std::numeric_limits<double>::quiet_NaN());
         const std::string error = error_of([&] { saved.load(); });
         TORCH_CHECK(false, error.substr(0, error.find(" must")));
       }},
      {"amsgrad in a state dict for codes",
       [] {
         AdamW source({parameter()}, AdamWOptions().amsgrad(true));
         AdamW({parameter()}, AdamWOptions().state_dtype("8bit"))
             .load_state_dict(source.state_dict());
       }},
      {"missing moment",
       [] {
         Saved saved;
         saved.state().erase("exp_avg_sq");
         const std::string error = error_of([&] { saved.load(); });
         TORCH_CHECK(false, error.substr(0, error.find(", got")));
       }},
      {"moment of another shape",
       [] {
         Saved saved;
         saved.state().insert_or_assign("exp_avg", torch::ones({3}));
         const std::string error = error_of([&] { saved.load(); });
         TORCH_CHECK(false, error.substr(0, error.find(" must")));
       }},
      {"moment that is a number",
       [] {
         Saved saved;
         saved.state().insert_or_assign("exp_avg", 0.5);
         saved.load();
       }},
      {"negative step",
       [] {
         Saved saved;
         saved.state().insert_or_assign("step", -1.0);
         saved.load();
       }},
      {"step that is a text",
       [] {
         Saved saved;
         saved.state().insert_or_assign("step", "three");
         saved.load();
       }},
      {"differentiable in a state dict",
       [] {
         Saved saved;
         saved.group(0).insert_or_assign("differentiable", true);
         saved.load();
       }},
      {"norm of nan",
       [] {
         torch::Tensor param = parameter();
         param.mutable_grad().fill_(INFINITY);
         amp_ext::clip_grad_norm_({param}, 1.0, /*error_if_nonfinite=*/true);
       }},
  };
}

}  // namespace bad_calls
