// Does what tests/harness/call_scenarios.py says, a list of calls as plain values, and writes what
// came of it.
#pragma once

#include <amp_ext/amp_ext.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace call_scenarios {

using amp_ext::GradScaler;
using amp_ext::optim::FusedOptimizer;
using amp_ext::optim::FusedOptions;

inline c10::ScalarType dtype_named(const std::string& name) {
  if (name == "float16") return torch::kHalf;
  if (name == "bfloat16") return torch::kBFloat16;
  return name == "float64" ? torch::kDouble : torch::kFloat;
}

// Has what setters of options write down and places of options do not.
struct GivenOptions : FusedOptions {
  using FusedOptions::given_;
};

// Sets options by their names in Python; dtypes have a "torch." before theirs.
inline void set_options(FusedOptions& options, const Dict& values) {
  const auto all = options.options();
  for (const auto& entry : values) {
    const std::string& name = entry.key().toStringRef();
    const c10::IValue value = entry.value();
    const auto found = std::find_if(all.begin(), all.end(),
                                    [&](const auto& option) { return option.name == name; });
    TORCH_CHECK(found != all.end(), "the options in optim.h must have ", name);
    std::visit(
        [&](auto option) {
          using Type = std::remove_pointer_t<decltype(option)>;
          if constexpr (std::is_same_v<Type, bool>) {
            *option = value.toBool();
          } else if constexpr (std::is_same_v<Type, amp_ext::optim::MasterWeights>) {
            *option = value.isBool() ? Type(value.toBool()) : Type(value.toStringRef());
          } else if constexpr (std::is_same_v<Type, std::vector<double*>>) {
            const auto& numbers = value.toTupleRef().elements();
            for (size_t i = 0; i < option.size(); ++i) *option[i] = numbers[i].toDouble();
          } else if constexpr (std::is_same_v<Type, amp_ext::optim::StateDType>) {
            const std::string text = value.isNone() ? std::string() : value.toStringRef();
            *option = value.isNone() ? Type() : Type(text);
            if (text.rfind("torch.", 0) == 0) *option = dtype_named(text.substr(6));
          } else if constexpr (std::is_same_v<Type, std::optional<std::string>>) {
            *option = value.isNone() ? std::nullopt : std::optional(value.toStringRef());
          } else if constexpr (std::is_same_v<Type, std::optional<double>>) {
            *option = value.isNone() ? std::nullopt : std::optional(value.toScalar().toDouble());
          } else {
            *option = value.toScalar().toDouble();
          }
        },
        found->place);
    (options.*&GivenOptions::given_).insert(name);
  }
}

template <typename Options>
Options options_from(const Dict& values) {
  Options options;
  set_options(options, values);
  return options;
}

using Params = std::vector<torch::Tensor>;

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Dict& scenario,
                                                               const Params& params) {
  const std::string& name = scenario.at("optimizer").toStringRef();
  if (name == "torch.optim.SGD") return std::make_unique<torch::optim::SGD>(Params{params[0]}, 0.1);
  std::vector<std::pair<Params, Dict>> groups;
  for (const c10::IValue& group : scenario.at("groups").toListRef()) {
    const Dict options = group.toGenericDict().copy();
    Params own;
    for (const c10::IValue& i : options.at("params").toListRef()) own.push_back(params[i.toInt()]);
    options.erase("params");
    groups.emplace_back(own, options);
  }
#define AMP_EXT_MAKE(Name, Formula)                                                           \
  if (name == #Name) {                                                                        \
    using namespace amp_ext::optim;                                                           \
    std::vector<torch::optim::OptimizerParamGroup> made;                                      \
    for (const auto& [params, own] : groups) {                                                \
      made.emplace_back(params,                                                               \
                        std::make_unique<Name##Options>(options_from<Name##Options>(own)));   \
    }                                                                                         \
    const auto options = options_from<Name##Options>(scenario.at("options").toGenericDict()); \
    return std::make_unique<Name>(made, options);                                             \
  }
  AMP_EXT_FOR_EACH_OPTIMIZER_CLASS(AMP_EXT_MAKE)
#undef AMP_EXT_MAKE
  TORCH_CHECK(false, "optim.h must have ", name);
}

// For a scaler on the CPU, by their names in Python.
inline amp_ext::GradScalerOptions scaler_options_from(const Dict& values) {
  amp_ext::GradScalerOptions options;
  options.device(torch::kCPU);
  for (const auto& entry : values) {
    const std::string& name = entry.key().toStringRef();
    const torch::Scalar value = entry.value().toScalar();
    if (name == "init_scale") options.init_scale(value.toDouble());
    if (name == "growth_factor") options.growth_factor(value.toDouble());
    if (name == "backoff_factor") options.backoff_factor(value.toDouble());
    if (name == "growth_interval") options.growth_interval(value.toLong());
    if (name == "min_scale") options.min_scale(value.toDouble());
    if (name == "max_scale") options.max_scale(value.toDouble());
    if (name == "hysteresis") options.hysteresis(value.toLong());
    if (name == "warn_after") options.warn_after(value.toLong());
    if (name == "dynamic") options.dynamic(value.toBool());
    if (name == "enabled") options.enabled(value.toBool());
  }
  return options;
}

// All parameters and states in one float64 tensor, by parameter and by key.
inline torch::Tensor bits_of(const FusedOptimizer& optimizer) {
  std::vector<torch::Tensor> parts;
  for (const auto& group : optimizer.param_groups()) {
    for (const torch::Tensor& param : group.params()) {
      parts.push_back(param.detach());
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      const auto& state = static_cast<const amp_ext::optim::FusedParamState&>(*found->second);
      const std::map<std::string, torch::Tensor> sorted(state.tensors().begin(),
                                                        state.tensors().end());
      for (const auto& [key, tensor] : sorted) parts.push_back(tensor);
    }
  }
  for (torch::Tensor& part : parts) part = part.reshape({-1}).to(torch::kDouble);
  return torch::cat(parts);
}

class Scenario {
 public:
  explicit Scenario(const Dict& scenario)
      : params_(params_of(scenario)),
        optimizer_(make_optimizer(scenario, params_)),
        fused_(dynamic_cast<FusedOptimizer*>(optimizer_.get())),
        scaler_(scaler_options_from(scenario.at("scaler").toGenericDict())) {}

  // A refused call has to leave optimizer and scaler as they were.
  void call_all(const c10::IValue& calls) {
    for (const c10::IValue& each : calls.toListRef()) {
      const auto& words = each.toTupleRef().elements();
      const auto before = state();
      try {
        call(words[0].toStringRef(), words.size() > 1 ? words[1] : c10::IValue());
      } catch (const c10::Error&) {
        const auto after = state();
        CHECK_THAT(after.first == before.first && after.second.equal(before.second));
        throw;
      }
    }
  }

  // Writes it, and the states as an archive of torch.
  void write(const std::string& folder) {
    auto written = new_dict();
    auto params = new_list(), masters = new_list();
    for (const torch::Tensor& param : params_) params.push_back(param.detach());
    written.insert("params", params);
    written.insert("optimizer", fused_->state_dict());
    written.insert("scaler", scaler_.state_dict());
    written.insert("notes", notes_);
    for (const torch::Tensor& master : fused_->master_params()) masters.push_back(master);
    written.insert("masters", masters);
    amp_ext::save_state(folder + "/cpp.pt", written);
    torch::save(*fused_, folder + "/archive.pt");
  }

 private:
  static Params params_of(const Dict& scenario) {
    Params params;
    for (const c10::IValue& value : scenario.at("params").toListRef()) {
      params.push_back(value.toTensor().clone().set_requires_grad(true));
      params.back().mutable_grad() = torch::ones_like(params.back());
    }
    return params;
  }

  std::pair<std::vector<char>, torch::Tensor> state() const {
    const torch::Tensor bits = fused_ == nullptr ? params_[0].detach() : bits_of(*fused_);
    return {amp_ext::state_to_bytes(scaler_.state_dict()), bits.clone()};
  }

  void set_grads(const c10::IValue& grads, bool scaled) {
    for (size_t i = 0; i < params_.size(); ++i) {
      const torch::Tensor grad = grads.toListRef()[i].toTensor();
      params_[i].mutable_grad() = (scaled ? scaler_.scale(grad) : grad.clone());
    }
  }

  torch::Tensor gradient_named(const std::string& name) const {
    if (name == "none") return {};
    if (name == "parameter") return params_[0].detach();
    const torch::Tensor grad = torch::full_like(params_[0], name == "inf" ? INFINITY : 1.0);
    return name == "sparse" ? grad.to_sparse() : grad;
  }

  // Converts parameters as a module does.
  void convert(const std::string& to) {
    for (torch::Tensor& param : params_) {
      const torch::Tensor data = param.detach();
      const auto format =
          to == "channels_last" ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
      const bool is_format = to == "channels_last" || to == "contiguous";
      param.mutable_grad() = torch::Tensor();
      param.set_data(is_format ? data.contiguous(format) : data.to(dtype_named(to)));
    }
  }

  void note() {
    auto note = new_dict();
    const torch::Tensor norm = fused_->grad_norm();
    note.insert("bits", bits_of(*fused_));
    note.insert("scale", scaler_.get_scale());
    note.insert("norm", norm.defined() ? c10::IValue(norm.item<double>()) : c10::IValue());
    notes_.push_back(note);
  }

  // Calls a method or a function by its name in Python.
  void call(const std::string& name, const c10::IValue& argument) {
    const auto file = [&] { return amp_ext::load_state(argument.toStringRef()).toGenericDict(); };
    const std::map<std::string, std::function<void()>> methods = {
        {"note", [&] { note(); }},
        {"grads", [&] { set_grads(argument, /*scaled=*/false); }},
        {"scaled_grads", [&] { set_grads(argument, /*scaled=*/true); }},
        {"gradient", [&] { params_[0].mutable_grad() = gradient_named(argument.toStringRef()); }},
        {"convert", [&] { convert(argument.toStringRef()); }},
        {"params.load",
         [&] {
           const c10::IValue saved = file().at("params");
           const torch::NoGradGuard no_grad;
           for (size_t i = 0; i < params_.size(); ++i) {
             params_[i].copy_(saved.toListRef()[i].toTensor());
           }
         }},
        {"options",  // of the first group
         [&] {
           auto& options = optimizer_->param_groups()[0].options();
           set_options(static_cast<FusedOptions&>(options), argument.toGenericDict());
         }},
        {"optimizer.step", [&] { optimizer_->step(); }},
        {"optimizer.init_state", [&] { fused_->init_state(); }},
        {"optimizer.master_params", [&] { fused_->master_params(); }},
        {"optimizer.load_state_dict", [&] { fused_->load_state_dict(argument); }},
        {"optimizer.load", [&] { fused_->load_state_dict(file().at("optimizer")); }},
        {"optimizer.load_archive", [&] { torch::load(*fused_, argument.toStringRef()); }},
        {"scaler.scale", [&] { scaler_.scale(torch::ones({})); }},
        {"scaler.unscale_", [&] { scaler_.unscale_(*optimizer_); }},
        {"scaler.step", [&] { scaler_.step(*optimizer_); }},
        {"scaler.update",
         [&] {
           if (argument.isTensor()) return scaler_.update(argument.toTensor());
           argument.isNone() ? scaler_.update() : scaler_.update(argument.toScalar().toDouble());
         }},
        {"scaler.set_growth_factor", [&] { scaler_.set_growth_factor(argument.toDouble()); }},
        {"scaler.set_backoff_factor", [&] { scaler_.set_backoff_factor(argument.toDouble()); }},
        {"scaler.set_growth_interval", [&] { scaler_.set_growth_interval(argument.toInt()); }},
        {"scaler.load_state_dict", [&] { scaler_.load_state_dict(argument); }},
        {"scaler.load", [&] { scaler_.load_state_dict(file().at("scaler")); }}};
    methods.at(name)();
  }

  Params params_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  FusedOptimizer* fused_;
  GradScaler scaler_;
  c10::impl::GenericList notes_ = new_list();
};

// Does the scenario in `scenario.pt` of a folder.
inline void do_in(const std::string& folder) {
  const Dict dict = amp_ext::load_state(folder + "/scenario.pt").toGenericDict();
  Scenario scenario(dict);
  scenario.call_all(dict.at("calls"));
  scenario.write(folder);
}

}  // namespace call_scenarios
