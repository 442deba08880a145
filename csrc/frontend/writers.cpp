// The keys of groups and of states that one optimizer has and others have not.
#include "frontend/writers.h"

#include <set>
#include <utility>

namespace amp_ext {

namespace {

using Table = std::vector<std::pair<const char*, const char*>>;

// The first that a file has names its writer.
const Table& told_by() {
  static const Table table = {{"acc_delta", "torch.optim.Adadelta"},
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
                              {"init_zero", "apex.optimizers.FusedNovoGrad"},
                              {"grad_averaging", "apex.optimizers.FusedLAMB"}};
  return table;
}

// Those that some of the others have as well: looked at last.
const Table& told_last_by() {
  static const Table table = {{"amsgrad", "Adam"},
                              {"exp_avg_sq", "Adam"},
                              {"dampening", "SGD"},
                              {"momentum_buffer", "SGD"}};
  return table;
}

bool has(const Dict& dict, const char* name) { return find(dict, name).has_value(); }

// RAdam, Adamax and SparseAdam have no option of their own in every release.
std::string near_radam(const std::vector<Dict>& groups) {
  for (const Dict& group : groups) {
    bool is_adam = !has(group, "betas") || !has(group, "eps");
    for (const char* name :
         {"amsgrad", "bias_correction", "correct_bias", "dampening", "master_weights"}) {
      is_adam |= has(group, name);
    }
    if (is_adam) continue;
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

std::string other_writer(const std::string& optimizer, const std::vector<std::string>& own_keys,
                         const std::vector<Dict>& groups,
                         const std::map<std::string, c10::IValue>& states) {
  std::set<std::string> keys;
  const auto take = [&](const Dict& dict) {
    for (const auto& entry : dict) {
      if (entry.key().isString()) keys.insert(entry.key().toStringRef());
    }
  };
  bool is_ours = false;
  for (const Dict& group : groups) {
    take(group);
    is_ours |= has(group, "master_weights");
  }
  for (const auto& [key, state] : states) {
    if (state.isGenericDict()) take(state.toGenericDict());
  }
  for (const std::string& key : own_keys) keys.erase(key);
  for (const auto& [key, name] : told_by()) {
    if (keys.count(key) != 0) return std::string(name) + ": it has '" + key + "'";
  }
  std::string near = near_radam(groups);
  if (!near.empty()) return near;
  for (const auto& [key, name] : told_last_by()) {
    if (keys.count(key) == 0 || optimizer.rfind(name, 0) == 0) continue;  // AdamW extends Adam
    return std::string(is_ours ? "amp_ext" : "torch") + ".optim." + name + ": it has '" + key + "'";
  }
  return {};
}

}  // namespace amp_ext
