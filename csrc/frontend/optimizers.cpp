// The four optimizers: their options, and what tells them from each other.
#include <amp_ext/optim.h>
#include <c10/util/Exception.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "frontend/optimizer_kind.h"

namespace amp_ext::optim {

namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

Groups one_group(std::vector<at::Tensor> params) {
  Groups groups;
  groups.emplace_back(std::move(params));
  return groups;
}

template <typename Hyperparameters>
std::vector<std::string> buffer_names() {
  std::vector<std::string> names;
  for (const BufferDescription& buffer : Hyperparameters::kBuffers) names.push_back(buffer.name);
  return names;
}

// In torch's words.
template <typename Options>
void check_common(const Options& options) {
  TORCH_CHECK(options.lr() >= 0.0, "Invalid learning rate: ", options.lr());
  TORCH_CHECK(options.weight_decay() >= 0.0,
              "Invalid weight_decay value: ", options.weight_decay());
}

void check_betas(const std::tuple<double, double>& betas) {
  const double values[] = {std::get<0>(betas), std::get<1>(betas)};
  for (int i = 0; i < 2; ++i) {
    TORCH_CHECK(0.0 <= values[i] && values[i] < 1.0, "Invalid beta parameter at index ", i, ": ",
                values[i]);
  }
}

template <typename Options>
std::unique_ptr<FusedOptions> make_options() {
  return std::make_unique<Options>();
}

template <typename Options>
OptimizerKind adam_kind(const char* name, const char* fixed_option) {
  return {name,
          buffer_names<AdamHyperparameters>(),
          {"lr", "betas", "eps", "weight_decay"},
          {"denominator_floor"},
          {"capturable", "differentiable"},
          [](const FusedOptions& options) {
            return static_cast<const Options&>(options).amsgrad() ? 3 : 2;
          },
          [](const FusedOptions&) { return true; },
          /*counts_from_buffer=*/false,
          fixed_option,
          &make_options<Options>,
          [](const FusedOptions& options) {
            const auto& own = static_cast<const Options&>(options);
            check_common(own);
            TORCH_CHECK(own.eps() >= 0.0, "Invalid epsilon value: ", own.eps());
            check_betas(own.betas());
          },
          &step_plan<AdamHyperparameters>};
}

const OptimizerKind& sgd_kind() {
  static const OptimizerKind kind = {
      "SGD",
      buffer_names<SgdHyperparameters>(),
      {"lr", "momentum", "dampening", "weight_decay"},
      {},
      {"differentiable"},
      [](const FusedOptions& options) {
        return static_cast<const SGDOptions&>(options).momentum() != 0.0 ? 1 : 0;
      },
      [](const FusedOptions& options) {  // only dampening tells the first step from the others
        const auto& own = static_cast<const SGDOptions&>(options);
        return own.momentum() != 0.0 && own.dampening() != 0.0;
      },
      /*counts_from_buffer=*/true,
      /*fixed_option=*/nullptr,
      &make_options<SGDOptions>,
      [](const FusedOptions& options) {
        const auto& own = static_cast<const SGDOptions&>(options);
        check_common(own);
        TORCH_CHECK(own.momentum() >= 0.0, "Invalid momentum value: ", own.momentum());
        TORCH_CHECK(!own.nesterov() || (own.momentum() > 0.0 && own.dampening() == 0.0),
                    "Nesterov momentum requires a momentum and zero dampening");
      },
      &step_plan<SgdHyperparameters>};
  return kind;
}

const OptimizerKind& lion_kind() {
  static const OptimizerKind kind = {"Lion",
                                     buffer_names<LionHyperparameters>(),
                                     {"lr", "betas", "weight_decay"},
                                     {},
                                     {"differentiable"},
                                     [](const FusedOptions&) { return 1; },
                                     [](const FusedOptions&) { return false; },
                                     /*counts_from_buffer=*/false,
                                     /*fixed_option=*/nullptr,
                                     &make_options<LionOptions>,
                                     [](const FusedOptions& options) {
                                       const auto& own = static_cast<const LionOptions&>(options);
                                       check_common(own);
                                       check_betas(own.betas());
                                     },
                                     &step_plan<LionHyperparameters>};
  return kind;
}

const OptimizerKind& adam_kind() {
  static const OptimizerKind kind = adam_kind<AdamOptions>("Adam", nullptr);
  return kind;
}

const OptimizerKind& adamw_kind() {
  static const OptimizerKind kind = adam_kind<AdamWOptions>("AdamW", "decoupled_weight_decay");
  return kind;
}

}  // namespace

std::vector<FusedOptions::Option> SGDOptions::options() {
  auto all = FusedOptions::options();
  all.insert(all.end(),
             {{"momentum", &momentum_}, {"dampening", &dampening_}, {"nesterov", &nesterov_}});
  return all;
}

std::vector<FusedOptions::Option> LionOptions::options() {
  auto all = FusedOptions::options();
  all.push_back({"betas", &betas_});
  return all;
}

#define AMP_EXT_CONSTRUCTORS(Name, kind)                                        \
  Name::Name(const Groups& param_groups, Name##Options defaults)                \
      : FusedOptimizer(kind(), param_groups,                                    \
                       std::make_unique<Name##Options>(std::move(defaults))) {} \
  Name::Name(std::vector<at::Tensor> params, Name##Options defaults)            \
      : Name(one_group(std::move(params)), std::move(defaults)) {}
AMP_EXT_CONSTRUCTORS(Adam, adam_kind)
AMP_EXT_CONSTRUCTORS(AdamW, adamw_kind)
AMP_EXT_CONSTRUCTORS(SGD, sgd_kind)
AMP_EXT_CONSTRUCTORS(Lion, lion_kind)
#undef AMP_EXT_CONSTRUCTORS

}  // namespace amp_ext::optim
