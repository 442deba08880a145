// Calls that a table of Python says, each of which is to be refused.
#pragma once

#include <amp_ext/amp_ext.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "training.h"

namespace refused_calls {

using amp_ext::GradScaler;

// Calls a method by its name in Python.
inline void call(const std::string& name, const c10::IValue& argument,
                 torch::optim::Optimizer& optimizer, GradScaler& scaler) {
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
      {"optimizer.load_state_dict", [&] { fused->load_state_dict(argument); }},
      {"options", [&] {  // of the only group
         auto& options = optimizer.param_groups()[0].options();
         set_options(static_cast<amp_ext::optim::FusedOptions&>(options), argument);
       }}};
  methods.at(name)();
}

// The error of the last call of a row, whose objects are made as it says; a refused call has to
// leave the state of the scaler as it was.
inline std::string error_of_row(const Dict& row) {
  return error_of([&] {
    const torch::Dtype dtype = dtype_named(row.at("dtype").toStringRef());
    const torch::Tensor param = torch::ones({2}, dtype).requires_grad_(true);
    param.mutable_grad() = torch::ones({2}, dtype);
    const std::string& name = row.at("optimizer").toStringRef();
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (name == "torch.optim.SGD") {
      const torch::optim::SGDOptions options(0.1);
      optimizer = std::make_unique<torch::optim::SGD>(std::vector{param}, options);
    } else {
      optimizer = make_optimizer(name, {param}, row.at("options"));
    }
    GradScaler scaler(scaler_options_from(row.at("scaler").toGenericDict()));
    std::vector<char> before;
    try {
      for (const c10::IValue& each : row.at("calls").toListRef()) {
        before = amp_ext::state_to_bytes(scaler.state_dict());
        const auto& words = each.toTupleRef().elements();
        const c10::IValue argument = words.size() > 1 ? words[1] : c10::IValue();
        call(words[0].toStringRef(), argument, *optimizer, scaler);
      }
    } catch (const c10::Error&) {
      CHECK_THAT(amp_ext::state_to_bytes(scaler.state_dict()) == before);
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
