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

// True if amp_ext or torch since 2.4 wrote the group: the group has `master_weights`, or all flags
// that torch's class has.
bool may_have_entries_of_users(const SavedGroup& group, const Loader& loader) {
  int missing = 0, found = 0;
  for (const OptionDescription& option : loader.description->options) {
    if (option.is_read() || option.on_load != OnLoad::kOffIfMissing) continue;
    ++(has(group.keys, option.name) ? found : missing);
  }
  return has(group.keys, "master_weights") || (found > 0 && missing == 0);
}

// Returns the keys that the optimizer does not know and that may change what a step does.
Keys unknown_among(const Keys& keys, const Loader& loader, bool users_may_add) {
  static const Keys options = names_of_all_options(), buffers = names_of_all_buffers();
  Keys own = loader.own_keys, unknown;
  for (const OptionDescription& option : loader.description->options) own.push_back(option.name);
  for (const BufferDescription& buffer : loader.description->buffers) own.push_back(buffer.name);
  for (const std::string& key : keys) {
    if (has(own, key) || has(kAllowed, key) || has(unknown, key)) continue;
    if (std::find(kMasterKeys.begin(), kMasterKeys.end(), key) != kMasterKeys.end()) continue;
    if (has(saved_flags(), key)) continue;
    if (!users_may_add || has(options, key) || has(buffers, key)) unknown.push_back(key);
  }
  return unknown;
}

// Adam also requires 'amsgrad', because files of RAdam, Adamax and others lack it. Files of
// FusedAdam and of transformers' AdamW have 'bias_correction' or 'correct_bias' instead.
void check_required(const Loader& loader, const SavedGroup& group, const std::string& where) {
  Keys missing;
  bool is_adam = false;
  for (const OptionDescription& option : loader.description->options) {
    const std::string name = option.name;
    if (option.on_load == OnLoad::kRequired && !has(group.keys, name)) missing.push_back(name);
    is_adam |= name == "amsgrad";
  }
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
    std::string why;
    if (name == "fixed_decay") {
      why = ": the weight decay of a step is multiplied by lr";
    } else if (name == "weight_decouple") {
      why = ". Set decoupled_weight_decay of the optimizer to the value in the file";
    } else if (!is_wanted) {
      why = ". Set it to False in the state dict, or use an optimizer of torch.optim for " + name +
            " steps";
    }
    TORCH_CHECK_VALUE(flag.is_set == is_wanted, loader.operation, ": ", name, " of param_groups[",
                      index, is_wanted ? "] must be True, got " : "] must be False, got ",
                      flag.text, why);
  }
}

}  // namespace

const Keys& saved_flags() {
  static const Keys flags = [] {
    Keys all = names_of_refused_flags();
    all.insert(all.end(), {"bias_correction", "correct_bias", "fixed_decay", "weight_decouple"});
    return all;
  }();
  return flags;
}

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
    const bool users_may_add_here = may_have_entries_of_users(groups[i], loader);
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
