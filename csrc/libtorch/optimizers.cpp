// The optimizers: their options, and what tells them from each other.
#include <amp_ext/optim.h>
#include <c10/util/Exception.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "libtorch/optimizer_kind.h"

namespace amp_ext::optim {

namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

Groups one_group(std::vector<at::Tensor> params) {
  TORCH_CHECK(!params.empty(), "optimizer got an empty parameter list");
  Groups groups;
  groups.emplace_back(std::move(params));
  return groups;
}

// What follows from the types.
template <typename Class, typename Options, typename Hyperparameters>
OptimizerKind kind_named(const char* name) {
  OptimizerKind kind{kind_of<Hyperparameters>()};
  kind.type = &typeid(Class);
  kind.name = kind.base_class = name;
  kind.make_options = []() -> std::unique_ptr<FusedOptions> { return std::make_unique<Options>(); };
  const auto places = kind.make_options()->options();
  for (size_t i = 0; i < places.size(); ++i) {
    const std::string described = kind.options[i].name;
    TORCH_CHECK(places[i].name == described, name, ": options() of optim.h must have ", described,
                " at index ", i, ", as kind.cpp, got ", places[i].name);
  }
  return kind;
}

const OptimizerKind& adam_kind() {
  static const auto kind = kind_named<Adam, AdamOptions, AdamHyperparameters>("Adam");
  return kind;
}

const OptimizerKind& adamw_kind() {
  static const OptimizerKind kind = [] {
    auto adamw = kind_named<AdamW, AdamWOptions, AdamHyperparameters>("AdamW");
    adamw.base_class = "Adam";
    adamw.fixed_option = "decoupled_weight_decay";
    return adamw;
  }();
  return kind;
}

const OptimizerKind& sgd_kind() {
  static const auto kind = kind_named<SGD, SGDOptions, SgdHyperparameters>("SGD");
  return kind;
}

const OptimizerKind& lion_kind() {
  static const auto kind = kind_named<Lion, LionOptions, LionHyperparameters>("Lion");
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
  all.push_back({"betas", places_of(betas_)});
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
