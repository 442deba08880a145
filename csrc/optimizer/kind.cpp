// The options of each optimizer.
#include "optimizer/kind.h"

#include <algorithm>
#include <iterator>

#include "kernels.h"

namespace amp_ext::optim {

namespace {

// The description of an optimizer with its own options. `missing` says what a file means that lacks
// an option that torch's other optimizers have; of `decoupled_weight_decay` it is another.
template <typename Hyperparameters>
Kind described(OnLoad missing, OnLoad decoupled_weight_decay,
               const std::vector<OptionDescription>& own) {
  Kind kind;
  kind.options = {{"lr", OptionKind::kLearningRate, OnLoad::kRequired},
                  {"weight_decay", OptionKind::kNumber, OnLoad::kRequired},
                  {"maximize", OptionKind::kFlag, missing},
                  {"decoupled_weight_decay", OptionKind::kFlag, decoupled_weight_decay},
                  {"master_weights", OptionKind::kMasters, OnLoad::kKept},
                  {"state_dtype", OptionKind::kStates, OnLoad::kKept},
                  {"rounding", OptionKind::kRounding, OnLoad::kKept},
                  {"max_grad_norm", OptionKind::kLimit, OnLoad::kKept},
                  {"clip_value", OptionKind::kLimit, OnLoad::kKept},
                  {"skip_nonfinite", OptionKind::kFlag, OnLoad::kKept},
                  {"write_back_grads", OptionKind::kFlag, OnLoad::kKept}};
  kind.options.insert(kind.options.end(), own.begin(), own.end());
  kind.options.insert(kind.options.end(), {{"foreach", OptionKind::kUnusedOrNone, missing},
                                           {"fused", OptionKind::kUnusedOrNone, missing},
                                           {"differentiable", OptionKind::kUnused, missing}});
  kind.buffers.assign(std::begin(Hyperparameters::kBuffers), std::end(Hyperparameters::kBuffers));
  return kind;
}

}  // namespace

template <>
const Kind& kind_of<AdamHyperparameters>() {
  static const Kind kind = described<AdamHyperparameters>(
      OnLoad::kOffIfMissing, OnLoad::kOffIfMissing,
      {{"betas", OptionKind::kNumbers, OnLoad::kRequired},
       {"eps", OptionKind::kNumber, OnLoad::kRequired},
       {"amsgrad", OptionKind::kFlag, OnLoad::kOffIfMissing},
       {"denominator_floor", OptionKind::kNumberFrom0, OnLoad::kKept},
       {"capturable", OptionKind::kUnused, OnLoad::kOffIfMissing}});
  return kind;
}

template <>
const Kind& kind_of<SgdHyperparameters>() {
  static const Kind kind =
      described<SgdHyperparameters>(OnLoad::kOffIfMissing, OnLoad::kKeptIfMissing,
                                    {{"momentum", OptionKind::kNumber, OnLoad::kRequired},
                                     {"dampening", OptionKind::kNumber, OnLoad::kRequired},
                                     {"nesterov", OptionKind::kFlag, OnLoad::kOffIfMissing}});
  return kind;
}

template <>
const Kind& kind_of<LionHyperparameters>() {
  static const Kind kind =
      described<LionHyperparameters>(OnLoad::kKeptIfMissing, OnLoad::kKeptIfMissing,
                                     {{"betas", OptionKind::kNumbers, OnLoad::kRequired}});
  return kind;
}

std::vector<std::string> configured_options() {
  std::vector<std::string> names;
  const auto add = [&](const Kind& kind) {
    for (const OptionDescription& option : kind.options) {
      if (option.on_load != OnLoad::kKept) continue;
      if (std::find(names.begin(), names.end(), option.name) == names.end()) {
        names.emplace_back(option.name);
      }
    }
  };
#define AMP_EXT_ADD(Functor) add(kind_of<Functor##Hyperparameters>());
  AMP_EXT_FOR_EACH_OPTIMIZER(AMP_EXT_ADD)
#undef AMP_EXT_ADD
  return names;
}

}  // namespace amp_ext::optim
