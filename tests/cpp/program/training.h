// Trains a small network as a file of Python says, and writes what came of each step.
#pragma once

#include <amp_ext/amp_ext.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

inline c10::ScalarType dtype_named(const std::string& name) {
  if (name == "float16") return torch::kHalf;
  if (name == "bfloat16") return torch::kBFloat16;
  if (name == "complex64") return torch::kComplexFloat;
  return name == "float64" ? torch::kDouble : torch::kFloat;
}

inline bool is_one_of(const c10::IValue& list, int64_t number) {
  for (const c10::IValue& element : list.toListRef()) {
    if (element.toInt() == number) return true;
  }
  return false;
}

// Has what setters of options write down and places of options do not.
struct GivenOptions : amp_ext::optim::FusedOptions {
  using FusedOptions::given_;
};

// Sets options by their names in Python; dtypes have a "torch." before theirs.
inline void set_options(amp_ext::optim::FusedOptions& options, const c10::IValue& values) {
  const auto all = options.options();
  for (const auto& entry : values.toGenericDict()) {
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
            if (value.isBool()) {
              *option = value.toBool();
            } else {
              *option = value.toStringRef();
            }
          } else if constexpr (std::is_same_v<Type, std::vector<double*>>) {
            const auto& numbers = value.toTupleRef().elements();
            for (size_t i = 0; i < option.size(); ++i) *option[i] = numbers[i].toDouble();
          } else if constexpr (std::is_same_v<Type, amp_ext::optim::StateDType>) {
            const std::string text = value.isNone() ? std::string() : value.toStringRef();
            if (text.rfind("torch.", 0) == 0) {
              *option = dtype_named(text.substr(6));
            } else {
              *option = value.isNone() ? Type() : Type(text);
            }
          } else if constexpr (std::is_same_v<Type, std::optional<std::string>>) {
            *option = value.isNone() ? std::nullopt : std::optional(value.toStringRef());
          } else {
            *option = value.toScalar().toDouble();
          }
        },
        found->place);
    (options.*&GivenOptions::given_).insert(name);
  }
}

template <typename Options>
Options options_from(const c10::IValue& values) {
  Options options;
  set_options(options, values);
  return options;
}

using ParamsAndOptions = std::pair<std::vector<torch::Tensor>, c10::IValue>;

inline std::unique_ptr<amp_ext::optim::FusedOptimizer> make_optimizer(
    const std::string& name, const std::vector<ParamsAndOptions>& groups,
    const c10::IValue& values) {
#define AMP_EXT_MAKE(Name)                                                                  \
  if (name == #Name) {                                                                      \
    using namespace amp_ext::optim;                                                         \
    std::vector<torch::optim::OptimizerParamGroup> made;                                    \
    for (const auto& [params, own] : groups) {                                              \
      made.emplace_back(params,                                                             \
                        std::make_unique<Name##Options>(options_from<Name##Options>(own))); \
    }                                                                                       \
    return std::make_unique<Name>(made, options_from<Name##Options>(values));               \
  }
  AMP_EXT_MAKE(Adam)
  AMP_EXT_MAKE(AdamW)
  AMP_EXT_MAKE(SGD)
  AMP_EXT_MAKE(Lion)
#undef AMP_EXT_MAKE
  TORCH_CHECK(false, "make_optimizer of training.h must have ", name);
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
  }
  return options;
}

// All parameters and states in one float64 tensor, by parameter and by key.
inline torch::Tensor snapshot(const amp_ext::optim::FusedOptimizer& optimizer) {
  std::vector<torch::Tensor> parts;
  for (const auto& group : optimizer.param_groups()) {
    for (const torch::Tensor& param : group.params()) {
      parts.push_back(param.detach());
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      std::map<std::string, torch::Tensor> sorted;
      const auto& state = static_cast<const amp_ext::optim::FusedParamState&>(*found->second);
      for (const auto& [key, tensor] : state.tensors()) sorted[key] = tensor;
      for (const auto& [key, tensor] : sorted) parts.push_back(tensor);
    }
  }
  for (torch::Tensor& part : parts) part = part.reshape({-1}).to(torch::kDouble);
  return torch::cat(parts);
}

// Reads `plan.pt` in a folder and writes `cpp.pt`; with `checkpoint` in the plan goes on from there
// and leaves one behind.
inline void train(const std::string& folder) {
  const Dict plan = amp_ext::load_state(folder + "/plan.pt").toGenericDict();
  const auto weights = plan.at("weights").toListRef();
  auto dtype = dtype_named(plan.at("param_dtype").toStringRef());
  torch::nn::Sequential model(
      torch::nn::Linear(weights[0].toTensor().size(1), weights[0].toTensor().size(0)),
      torch::nn::ReLU(),
      torch::nn::Linear(weights[2].toTensor().size(1), weights[2].toTensor().size(0)));
  model->to(dtype);
  {
    const torch::NoGradGuard no_grad;
    const auto params = model->parameters();
    for (size_t i = 0; i < params.size(); ++i) params[i].copy_(weights[i].toTensor());
  }
  auto optimizer = make_optimizer(plan.at("optimizer").toStringRef(),
                                  {{model->parameters(), new_dict()}}, plan.at("options"));
  amp_ext::GradScaler scaler(scaler_options_from(plan.at("scaler").toGenericDict()));
  int64_t first = 0;
  if (!plan.at("resume").isNone()) {
    const Dict file = amp_ext::load_state(plan.at("resume").toStringRef()).toGenericDict();
    const torch::NoGradGuard no_grad;
    const auto params = model->parameters();
    const auto saved = file.at("model").toListRef();
    for (size_t i = 0; i < params.size(); ++i) params[i].copy_(saved[i].toTensor());
    optimizer->load_state_dict(file.at("optimizer"));
    scaler.load_state_dict(file.at("scaler"));
    first = file.at("step").toInt();
  }

  const torch::Tensor inputs = plan.at("inputs").toTensor(),
                      targets = plan.at("targets").toTensor();
  const bool casts = !plan.at("autocast").isNone();
  const auto cast_to = casts ? dtype_named(plan.at("autocast").toStringRef()) : torch::kBFloat16;
  std::vector<torch::Tensor> losses, states;
  std::vector<double> scales, skips;
  const Dict dtypes = plan.at("dtypes_from").toGenericDict(),
             options = plan.at("options_from").toGenericDict();
  for (int64_t step = first; step < plan.at("steps").toInt(); ++step) {
    optimizer->zero_grad();
    if (dtypes.contains(step)) {
      dtype = dtype_named(dtypes.at(step).toStringRef());
      model->to(dtype);
    }
    if (options.contains(step)) {
      for (auto& group : optimizer->param_groups()) {
        set_options(static_cast<amp_ext::optim::FusedOptions&>(group.options()), options.at(step));
      }
    }
    torch::Tensor loss;
    {
      const amp_ext::Autocast autocast(torch::kCPU, cast_to, casts);
      const torch::Tensor input = casts ? inputs[step] : inputs[step].to(dtype);
      loss = torch::mse_loss(model->forward(input).to(torch::kFloat), targets[step]);
    }
    scaler.scale(loss).backward();
    if (is_one_of(plan.at("bad_steps"), step)) {
      model->parameters()[0].mutable_grad().view({-1})[0] = INFINITY;
    }
    if (is_one_of(plan.at("unscale_steps"), step)) {
      scaler.unscale_(*optimizer);
      amp_ext::clip_grad_norm_(model->parameters(), 0.5);
    }
    scaler.step(*optimizer);
    scaler.update();
    losses.push_back(loss.detach());
    states.push_back(snapshot(*optimizer));
    scales.push_back(scaler.get_scale());
    skips.push_back(*scaler.last_step_skipped() ? 1.0 : 0.0);
  }

  auto written = new_dict();
  written.insert("losses", losses.empty() ? torch::empty({0}) : torch::stack(losses));
  c10::impl::GenericList all(c10::AnyType::get());
  for (const torch::Tensor& state : states) all.push_back(state);
  written.insert("states", all);
  written.insert("scales", torch::tensor(scales, torch::kDouble));
  written.insert("skips", torch::tensor(skips, torch::kDouble));
  amp_ext::save_state(folder + "/cpp.pt", written);

  auto checkpoint = new_dict();
  c10::impl::GenericList params(c10::AnyType::get());
  for (const torch::Tensor& param : model->parameters()) params.push_back(param);
  checkpoint.insert("model", params);
  checkpoint.insert("optimizer", optimizer->state_dict());
  c10::impl::GenericList masters(c10::AnyType::get());
  for (const torch::Tensor& master : optimizer->master_params()) masters.push_back(master);
  checkpoint.insert("masters", masters);
  checkpoint.insert("scaler", scaler.state_dict());
  checkpoint.insert("step", plan.at("steps").toInt());
  amp_ext::save_state(folder + "/checkpoint.pt", checkpoint);
}

// Steps as `plan.pt` in a folder says, from a file or from the beginning, with gradients that it
// has; writes `cpp.pt`, and the same states as `archive.pt`.
inline void resume(const std::string& folder) {
  const Dict plan = amp_ext::load_state(folder + "/plan.pt").toGenericDict();
  const bool begins = plan.at("file").isNone();
  const Dict from =
      begins ? plan : amp_ext::load_state(plan.at("file").toStringRef()).toGenericDict();
  const auto dtype = dtype_named(plan.at("param_dtype").toStringRef());
  std::vector<torch::Tensor> params;
  for (const auto& param : from.at("params").toListRef()) {
    params.push_back(param.toTensor().to(dtype).set_requires_grad(true));
  }
  auto optimizer = make_optimizer(plan.at("optimizer").toStringRef(), {{params, new_dict()}},
                                  plan.at("options"));
  if (!plan.at("archive").isNone()) {
    torch::load(*optimizer, plan.at("archive").toStringRef());
  } else if (!begins) {
    optimizer->load_state_dict(from.at("optimizer"));
  }
  for (const auto& grads : plan.at("grads").toListRef()) {
    for (size_t i = 0; i < params.size(); ++i) {
      params[i].mutable_grad() = grads.toListRef()[i].toTensor().clone();
    }
    optimizer->step();
  }
  auto written = new_dict();
  c10::impl::GenericList values(c10::AnyType::get());
  for (const torch::Tensor& param : params) values.push_back(param.detach());
  written.insert("params", values);
  written.insert("optimizer", optimizer->state_dict());
  amp_ext::save_state(folder + "/cpp.pt", written);
  torch::save(*optimizer, folder + "/archive.pt");
}
