// The keys of groups and of states that some optimizers have and others have not.
#include "optimizer/writers.h"

#include <algorithm>
#include <iterator>
#include <set>

namespace amp_ext {

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

std::string near_radam(const std::vector<Keys>& groups) {
  for (const Keys& group : groups) {
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

}  // namespace

std::string other_writer(const std::vector<std::string>& classes, const Keys& own_keys,
                         const std::vector<Keys>& groups, const Keys& states) {
  std::set<std::string> keys(states.begin(), states.end());
  bool is_ours = false;
  for (const Keys& group : groups) {
    keys.insert(group.begin(), group.end());
    is_ours |= has(group, "master_weights");
  }
  for (const std::string& key : own_keys) keys.erase(key);
  const auto told = [](const std::string& name, const char* key) {
    return name + ": it has '" + key + "'";
  };
  for (const auto& [key, name] : kToldBy) {
    if (keys.count(key) != 0) return told(name, key);
  }
  std::string near = near_radam(groups);
  if (!near.empty()) return near;
  for (const auto& [key, name] : kToldLastBy) {
    if (keys.count(key) == 0 || has(classes, name)) continue;
    return told(std::string(is_ours ? "amp_ext" : "torch") + ".optim." + name, key);
  }
  return {};
}

}  // namespace amp_ext
