// Checks whether an optimizer can load the groups and the state keys of a file.
#pragma once

#include <amp_ext/export.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace amp_ext::optim {

struct OptimizerDescription;

using Keys = std::vector<std::string>;

// One parameter group of a file, which the caller has converted from Python's containers.
struct AMP_EXT_API SavedGroup {
  struct Flag {
    bool is_set;
    std::string text;  // as errors print it
  };

  Keys keys;                          // the keys that are strings
  std::string shown_keys;             // all keys, as errors print them
  std::map<std::string, Flag> flags;  // entries whose keys are in saved_flags()
  bool has_step = false;              // whether there is an entry "step"

  // True if "step" counts the steps of all states of the group, as in files of FusedAdam (apex,
  // TransformerEngine).
  bool counts_for_states() const;
};

// Returns the names of flags that change the formula of other optimizers: flags of torch that ours
// refuse, `bias_correction` of FusedAdam, `correct_bias` of transformers, and `fixed_decay` and
// `weight_decouple` of pytorch_optimizer.
AMP_EXT_API const Keys& saved_flags();

// The optimizer that is to load a state dict.
struct AMP_EXT_API Loader {
  std::string operation;  // "AdamW.load_state_dict"
  std::string name;       // "AdamW"
  const OptimizerDescription* description;
  Keys own_keys;                // keys of its groups
  std::vector<bool> decouples;  // value of decoupled_weight_decay in each group
};

// Throws if the groups or states of a file lack a required key, or have an unknown key that may
// change a step. Unknown keys are allowed in groups of torch or amp_ext, where users may add keys,
// and if the optimizer's own groups have the same keys.
AMP_EXT_API void check_saved_groups(const Loader& loader, const std::vector<SavedGroup>& groups,
                                    const Keys& state_keys);

// Throws torch's error unless the saved groups have as many parameters as the optimizer's (`own`).
AMP_EXT_API void check_lengths(const std::vector<size_t>& own, const std::vector<size_t>& saved);

}  // namespace amp_ext::optim
