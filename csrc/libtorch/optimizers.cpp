// The optimizer classes of the C++ interface: their descriptions and constructors.
#include <amp_ext/optim.h>
#include <c10/util/Exception.h>

#include <memory>
#include <type_traits>
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
const OptimizerClass& class_named(const char* name) {
  static const OptimizerClass optimizer_class = [&] {
    OptimizerClass made{description_of<Hyperparameters>()};
    made.type = &typeid(Class);
    made.name = made.base_class = name;
    if (std::is_same_v<Class, AdamW>) {
      made.base_class = "Adam";
      made.fixed_option = "decoupled_weight_decay";
    }
    made.make_options = []() -> std::unique_ptr<FusedOptions> {
      return std::make_unique<Options>();
    };
    const auto places = made.make_options()->options();
    for (size_t i = 0; i < places.size(); ++i) {
      const std::string described = made.options[i].name;
      TORCH_CHECK(places[i].name == described, name, ": options() of optim.h must have ", described,
                  " at index ", i, ", as optimizer_description.cpp, got ", places[i].name);
    }
    return made;
  }();
  return optimizer_class;
}

}  // namespace

#define AMP_EXT_CONSTRUCTORS(Name, Formula)                                                   \
  Name::Name(const Groups& param_groups, Name##Options defaults)                              \
      : FusedOptimizer(class_named<Name, Name##Options, Formula##Hyperparameters>(#Name),     \
                       param_groups, std::make_unique<Name##Options>(std::move(defaults))) {} \
  Name::Name(std::vector<at::Tensor> params, Name##Options defaults)                          \
      : Name(one_group(std::move(params)), std::move(defaults)) {}
AMP_EXT_FOR_EACH_OPTIMIZER_CLASS(AMP_EXT_CONSTRUCTORS)
#undef AMP_EXT_CONSTRUCTORS

}  // namespace amp_ext::optim
