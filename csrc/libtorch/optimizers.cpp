// The optimizer classes of the C++ interface: their descriptions, options and constructors.
#include <amp_ext/optim.h>
#include <c10/util/Exception.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "libtorch/optimizer_impl.h"

namespace amp_ext::optim {

namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

Groups one_group(std::vector<at::Tensor> params) {
  TORCH_CHECK(!params.empty(), "optimizer got an empty parameter list");
  Groups groups;
  groups.emplace_back(std::move(params));
  return groups;
}

// Describes the optimizer `Class`, whose name in Python is `name`.
template <typename Class, typename Options, typename Hyperparameters>
OptimizerClass class_named(const char* name) {
  OptimizerClass optimizer_class{description_of<Hyperparameters>()};
  optimizer_class.type = &typeid(Class);
  optimizer_class.name = optimizer_class.base_class = name;
  optimizer_class.make_options = []() -> std::unique_ptr<FusedOptions> {
    return std::make_unique<Options>();
  };
  const auto places = optimizer_class.make_options()->options();
  for (size_t i = 0; i < places.size(); ++i) {
    const std::string described = optimizer_class.options[i].name;
    TORCH_CHECK(places[i].name == described, name, ": options() of optim.h must have ", described,
                " at index ", i, ", as optimizer_description.cpp, got ", places[i].name);
  }
  return optimizer_class;
}

const OptimizerClass& adam_class() {
  static const auto optimizer_class = class_named<Adam, AdamOptions, AdamHyperparameters>("Adam");
  return optimizer_class;
}

const OptimizerClass& adamw_class() {
  static const OptimizerClass optimizer_class = [] {
    auto adamw = class_named<AdamW, AdamWOptions, AdamHyperparameters>("AdamW");
    adamw.base_class = "Adam";
    adamw.fixed_option = "decoupled_weight_decay";
    return adamw;
  }();
  return optimizer_class;
}

const OptimizerClass& sgd_class() {
  static const auto optimizer_class = class_named<SGD, SGDOptions, SgdHyperparameters>("SGD");
  return optimizer_class;
}

const OptimizerClass& lion_class() {
  static const auto optimizer_class = class_named<Lion, LionOptions, LionHyperparameters>("Lion");
  return optimizer_class;
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

#define AMP_EXT_CONSTRUCTORS(Name, optimizer_class)                             \
  Name::Name(const Groups& param_groups, Name##Options defaults)                \
      : FusedOptimizer(optimizer_class(), param_groups,                         \
                       std::make_unique<Name##Options>(std::move(defaults))) {} \
  Name::Name(std::vector<at::Tensor> params, Name##Options defaults)            \
      : Name(one_group(std::move(params)), std::move(defaults)) {}
AMP_EXT_CONSTRUCTORS(Adam, adam_class)
AMP_EXT_CONSTRUCTORS(AdamW, adamw_class)
AMP_EXT_CONSTRUCTORS(SGD, sgd_class)
AMP_EXT_CONSTRUCTORS(Lion, lion_class)
#undef AMP_EXT_CONSTRUCTORS

}  // namespace amp_ext::optim
