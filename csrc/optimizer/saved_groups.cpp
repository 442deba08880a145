// The groups of state dicts, and the keys that some optimizers have and others have not.
#include "optimizer/saved_groups.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "tensors/python_names.h"

namespace amp_ext::optim {

namespace {

struct Telling {
  const char* key;
  const char* name;  // of the optimizer
};

// These codes of 8 bits meant other numbers.
constexpr const char* kOfOtherCodes =
    "an earlier amp_ext, which can write float32_state_dict(optimizer) to be loaded here";

// The first that a file has names its writer.
constexpr Telling kToldBy[] = {{"acc_delta", "torch.optim.Adadelta"},
                               {"beta2_decay", "torch.optim.Adafactor"},
                               {"initial_accumulator_value", "torch.optim.Adagrad"},
                               {"exp_inf", "torch.optim.Adamax"},
                               {"lambd", "torch.optim.ASGD"},
                               {"tolerance_grad", "torch.optim.LBFGS"},
                               {"ns_steps", "torch.optim.Muon"},
                               {"momentum_decay", "torch.optim.NAdam"},
                               {"mu_product", "torch.optim.NAdam"},
                               {"centered", "torch.optim.RMSprop"},
                               {"etas", "torch.optim.Rprop"},
                               {"exp_avg_q8r", kOfOtherCodes},
                               {"exp_avg_sq_q8v", kOfOtherCodes},
                               {"init_zero", "apex.optimizers.FusedNovoGrad"},
                               {"grad_averaging", "apex.optimizers.FusedLAMB"}};

// Those that some of the others have as well, and the next ones: looked at last.
constexpr Telling kToldLastBy[] = {
    {"amsgrad", "Adam"}, {"exp_avg_sq", "Adam"}, {"dampening", "SGD"}, {"momentum_buffer", "SGD"}};

bool has(const Keys& keys, const std::string& key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

// RAdam, Adamax and SparseAdam have no option of their own in every release. One of these stands in
// the groups of all others that have betas: Adam's, FusedAdam's, that of transformers, and ours.
const char* const kNotNearRAdam[] = {"amsgrad", "bias_correction", "correct_bias", "dampening",
                                     "master_weights"};

std::string near_radam(const std::vector<SavedGroup>& groups) {
  for (const SavedGroup& saved : groups) {
    const Keys& group = saved.keys;
    const bool is_another = std::any_of(std::begin(kNotNearRAdam), std::end(kNotNearRAdam),
                                        [&](const char* key) { return has(group, key); });
    if (!has(group, "betas") || !has(group, "eps") || is_another) continue;
    const char* name = "RAdam";
    if (!has(group, "weight_decay")) {
      name = "SparseAdam";
    } else if (has(group, "capturable") && !has(group, "decoupled_weight_decay")) {
      name = "Adamax";
    }
    return std::string("torch.optim.") + name +
           ": it has 'betas' without 'amsgrad' or 'bias_correction'";
  }
  return {};
}

// Which other optimizer wrote a state dict, with what tells it; empty if none is known.
std::string other_writer(const Loader& loader, const std::vector<SavedGroup>& groups,
                         const Keys& state_keys) {
  std::set<std::string> keys(state_keys.begin(), state_keys.end());
  bool is_ours = false;
  for (const SavedGroup& group : groups) {
    keys.insert(group.keys.begin(), group.keys.end());
    is_ours |= has(group.keys, "master_weights");
  }
  for (const std::string& key : loader.own_keys) keys.erase(key);
  const auto told = [](const std::string& name, const char* key) {
    return name + ": it has '" + key + "'";
  };
  for (const auto& [key, name] : kToldBy) {
    if (keys.count(key) != 0) return told(name, key);
  }
  std::string near = near_radam(groups);
  if (!near.empty()) return near;
  for (const auto& [key, name] : kToldLastBy) {
    if (keys.count(key) == 0 || has(loader.classes, name)) continue;
    return told(std::string(is_ours ? "amp_ext" : "torch") + ".optim." + name, key);
  }
  return {};
}

}  // namespace

bool SavedGroup::counts_for_states() const {
  const auto flag = flags.find("bias_correction");
  return has_step && flag != flags.end() && flag->second.is_set;
}

void check_saved_groups(const Loader& loader, const std::vector<SavedGroup>& groups,
                        const Keys& state_keys) {
  const std::string writer = other_writer(loader, groups, state_keys);
  TORCH_CHECK_VALUE(writer.empty(), loader.operation,
                    ": state_dict must have the options and states of ", loader.classes.front(),
                    ", but is a state dict of ", writer);
  for (size_t i = 0; i < groups.size(); ++i) {
    Keys missing;
    for (const std::string& name : loader.required) {
      if (!has(groups[i].keys, name)) missing.push_back(name);
    }
    TORCH_CHECK_VALUE(missing.empty(), loader.operation, ": param_groups[", i, "] must have ",
                      python_list(missing), ", got ", groups[i].shown_keys);
    for (const auto& [name, flag] : groups[i].flags) {
      const bool is_wanted = name != "differentiable";
      TORCH_CHECK_VALUE(
          flag.is_set == is_wanted, loader.operation, ": ", name, " of param_groups[", i,
          is_wanted ? "] must be True, got " + flag.text
                    : "] must be False, got True: a fused kernel is not differentiable; set it to "
                      "False in the state dict to go on without gradients through the steps");
    }
  }
}

void check_lengths(const std::vector<size_t>& own, const std::vector<size_t>& saved) {
  TORCH_CHECK_VALUE(own.size() == saved.size(),
                    "loaded state dict has a different number of parameter groups");
  TORCH_CHECK_VALUE(own == saved,
                    "loaded state dict contains a parameter group that doesn't match the size of "
                    "optimizer's group");
}

}  // namespace amp_ext::optim
