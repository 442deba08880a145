// Calls that a table of Python says, each of which is to be refused.
#pragma once

#include <amp_ext/amp_ext.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "training.h"

namespace refused_calls {

using amp_ext::GradScaler;

inline torch::Tensor gradient_named(const std::string& name, const torch::Tensor& param) {
  if (name == "none") return {};
  if (name == "parameter") return param.detach();
  const torch::Tensor grad = torch::full_like(param, name == "inf" ? INFINITY : 1.0);
  return name == "sparse" ? grad.to_sparse() : grad;
}

// Calls a method or a function by its name in Python.
inline void call(const std::string& name, const c10::IValue& argument,
                 const std::vector<torch::Tensor>& params, torch::optim::Optimizer& optimizer,
                 GradScaler& scaler) {
  auto* const fused = dynamic_cast<amp_ext::optim::FusedOptimizer*>(&optimizer);
  const std::map<std::string, std::function<void()>> methods = {
      {"scaler.scale", [&] { scaler.scale(torch::ones({})); }},
      {"scaler.unscale_", [&] { scaler.unscale_(optimizer); }},
      {"scaler.step", [&] { scaler.step(optimizer); }},
      {"scaler.update",
       [&] {
         if (argument.isNone()) {
           scaler.update();
         } else if (argument.isTensor()) {
           scaler.update(argument.toTensor());
         } else {
           scaler.update(argument.toScalar().toDouble());
         }
       }},
      {"scaler.set_growth_factor", [&] { scaler.set_growth_factor(argument.toDouble()); }},
      {"scaler.set_backoff_factor", [&] { scaler.set_backoff_factor(argument.toDouble()); }},
      {"scaler.set_growth_interval", [&] { scaler.set_growth_interval(argument.toInt()); }},
      {"scaler.load_state_dict", [&] { scaler.load_state_dict(argument); }},
      {"optimizer.step", [&] { optimizer.step(); }},
      {"optimizer.init_state", [&] { fused->init_state(); }},
      {"optimizer.master_params", [&] { fused->master_params(); }},
      {"gradient",
       [&] { params[0].mutable_grad() = gradient_named(argument.toStringRef(), params[0]); }},
      {"clip_grad_norm_",
       [&] { amp_ext::clip_grad_norm_(params, argument.toDouble(), /*error_if_nonfinite=*/true); }},
      {"optimizer.load_state_dict", [&] { fused->load_state_dict(argument); }},
      {"options", [&] {  // of the first group
         auto& options = optimizer.param_groups()[0].options();
         set_options(static_cast<amp_ext::optim::FusedOptions&>(options), argument);
       }}};
  methods.at(name)();
}

// The error of the last call of a row, whose objects are made as it says; a refused call has to
// leave optimizer and scaler as they were.
inline std::string error_of_row(const Dict& row) {
  return error_of([&] {
    const torch::Dtype dtype = dtype_named(row.at("dtype").toStringRef());
    std::vector<torch::Tensor> params;
    for (int i = 0; i < 2; ++i) {
      params.push_back(torch::ones({2}, dtype).requires_grad_(true));
      params[i].mutable_grad() = torch::ones({2}, dtype);
    }
    const std::string& name = row.at("optimizer").toStringRef();
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (name == "torch.optim.SGD") {
      const torch::optim::SGDOptions options(0.1);
      optimizer = std::make_unique<torch::optim::SGD>(std::vector{params[0]}, options);
    } else {
      std::vector<ParamsAndOptions> groups;
      for (const c10::IValue& group : row.at("groups").toListRef()) {
        const Dict options = group.toGenericDict().copy();
        std::vector<torch::Tensor> own;
        for (const c10::IValue& number : options.at("params").toListRef()) {
          own.push_back(params[number.toInt()]);
        }
        options.erase("params");
        groups.emplace_back(own, options);
      }
      optimizer = make_optimizer(name, groups, row.at("options"));
    }
    const auto* const fused = dynamic_cast<amp_ext::optim::FusedOptimizer*>(optimizer.get());
    GradScaler scaler(scaler_options_from(row.at("scaler").toGenericDict()));
    const auto state = [&] {
      const torch::Tensor bits = fused == nullptr ? params[0].detach() : snapshot(*fused);
      return std::pair(amp_ext::state_to_bytes(scaler.state_dict()), bits.clone());
    };
    auto before = state();
    try {
      for (const c10::IValue& each : row.at("calls").toListRef()) {
        before = state();
        const auto& words = each.toTupleRef().elements();
        const c10::IValue argument = words.size() > 1 ? words[1] : c10::IValue();
        call(words[0].toStringRef(), argument, params, *optimizer, scaler);
      }
    } catch (const c10::Error&) {
      const auto after = state();
      CHECK_THAT(after.first == before.first && after.second.equal(before.second));
      throw;
    }
  });
}

// Prints the error of each row of a file.
inline void print_errors(const std::string& path) {
  const c10::IValue rows = amp_ext::load_state(path);
  for (const c10::IValue& row : rows.toListRef()) {
    std::printf("%s\n", error_of_row(row.toGenericDict()).c_str());
  }
}

}  // namespace refused_calls
