// Checks the groups and the state keys of files.
#include "optimizer/saved_groups.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "optimizer/masters.h"
#include "optimizer/optimizer_description.h"
#include "tensors/python_names.h"

namespace amp_ext::optim {

namespace {

// Keys that every group may have: the parameters, a step count, and entries that schedulers write.
const Keys kAllowed = {"params", "param_names",   "step",   "initial_lr",   "max_lr",
                       "min_lr", "base_momentum", "swa_lr", "max_momentum", "initial_weight_decay"};

bool has(const Keys& keys, const std::string& key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

// True if the group has an option that only amp_ext and torch since 2.4 write.
bool may_have_entries_of_users(const SavedGroup& group) {
  return has(group.keys, "master_weights") || has(group.keys, "fused");
}

// Returns the keys that the optimizer does not know and that may change what a step does.
Keys unknown_among(const Keys& keys, const Loader& loader, bool users_may_add) {
  static const Keys options = names_of_all_options(), buffers = names_of_all_buffers();
  Keys unknown;
  for (const std::string& key : keys) {
    if (has(loader.own_keys, key) || has(kAllowed, key) || has(unknown, key)) continue;
    if (std::find(kMasterKeys.begin(), kMasterKeys.end(), key) != kMasterKeys.end()) continue;
    if (std::find(kSavedFlags.begin(), kSavedFlags.end(), key) != kSavedFlags.end()) continue;
    if (!users_may_add || has(options, key) || has(buffers, key)) unknown.push_back(key);
  }
  return unknown;
}

// Adam also requires 'amsgrad', because files of RAdam, Adamax and others lack it. Files of
// FusedAdam and of transformers' AdamW have 'bias_correction' or 'correct_bias' instead.
void check_required(const Loader& loader, const SavedGroup& group, const std::string& where) {
  Keys missing;
  for (const std::string& name : loader.required) {
    if (!has(group.keys, name)) missing.push_back(name);
  }
  const bool is_adam = has(loader.own_keys, "amsgrad");
  const bool has_flag = has(group.keys, "bias_correction") || has(group.keys, "correct_bias");
  if (is_adam && !has(group.keys, "amsgrad") && !has_flag) missing.emplace_back("amsgrad");
  TORCH_CHECK_VALUE(missing.empty(), where, " must have ", python_list(missing), ", got ",
                    group.shown_keys);
}

void check_flags(const Loader& loader, const SavedGroup& group, size_t index) {
  const bool decouples = index < loader.decouples.size() && loader.decouples[index];
  for (const auto& [name, flag] : group.flags) {
    bool is_wanted = name == "bias_correction" || name == "correct_bias";
    if (name == "weight_decouple") is_wanted = decouples;
    const char* why = "";
    if (name == "differentiable") {
      why =
          ". Set it to False in the state dict, or use an optimizer of torch.optim for "
          "differentiable steps";
    } else if (name == "fixed_decay") {
      why = ": the weight decay of a step is multiplied by lr";
    } else if (name == "weight_decouple") {
      why = ". Set decoupled_weight_decay of the optimizer to the value in the file";
    }
    TORCH_CHECK_VALUE(flag.is_set == is_wanted, loader.operation, ": ", name, " of param_groups[",
                      index, is_wanted ? "] must be True, got " : "] must be False, got ",
                      flag.text, why);
  }
}

}  // namespace

bool SavedGroup::counts_for_states() const {
  const auto flag = flags.find("bias_correction");
  return has_step && flag != flags.end() && flag->second.is_set;
}

void check_saved_groups(const Loader& loader, const std::vector<SavedGroup>& groups,
                        const Keys& state_keys) {
  bool users_may_add = true;
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::string where = c10::str(loader.operation, ": param_groups[", i, "]");
    check_required(loader, groups[i], where);
    const bool users_may_add_here = may_have_entries_of_users(groups[i]);
    users_may_add &= users_may_add_here;
    const Keys unknown = unknown_among(groups[i].keys, loader, users_may_add_here);
    TORCH_CHECK_VALUE(unknown.empty(), where, " must have only options of ", loader.name, ", got ",
                      python_list(unknown),
                      ". Delete them from the file if they don't change a step, or add the same "
                      "keys to the optimizer's groups");
    check_flags(loader, groups[i], i);
  }
  const Keys unknown = unknown_among(state_keys, loader, users_may_add);
  TORCH_CHECK_VALUE(unknown.empty(), loader.operation, ": state must have only entries of ",
                    loader.name, ", got ", python_list(unknown),
                    ". Delete them from the file if they don't change a step");
}

void check_lengths(const std::vector<size_t>& own, const std::vector<size_t>& saved) {
  TORCH_CHECK_VALUE(own.size() == saved.size(),
                    "loaded state dict has a different number of parameter groups");
  TORCH_CHECK_VALUE(own == saved,
                    "loaded state dict contains a parameter group that doesn't match the size of "
                    "optimizer's group");
}

}  // namespace amp_ext::optim
