// What the groups of a state dict mean: which optimizer wrote it, and whether another one goes on
// from it.
#pragma once

#include <amp_ext/export.h>

#include <array>
#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace amp_ext::optim {

using Keys = std::vector<std::string>;

// What a file has of one group, read by whoever knows its containers.
struct AMP_EXT_API SavedGroup {
  struct Flag {
    bool is_set;
    std::string text;  // as errors print it
  };

  Keys keys;                          // those that are texts
  std::string shown_keys;             // all of them, as errors print them
  std::map<std::string, Flag> flags;  // those of kSavedFlags that it has
  bool has_step = false;              // under "step"

  // Whether its step is that of its states, as apex's and TransformerEngine's FusedAdam keep it.
  bool counts_for_states() const;
};

// `correct_bias` is of transformers' AdamW.
inline constexpr std::array<const char*, 3> kSavedFlags = {"bias_correction", "correct_bias",
                                                           "differentiable"};

// The optimizer that is to load a state dict.
struct AMP_EXT_API Loader {
  std::string operation;  // "AdamW.load_state_dict"
  Keys classes;           // its name, and those of the classes that it extends
  Keys own_keys;          // its options and buffers
  Keys required;          // options that each group must have
};

// Throws if another optimizer wrote a state dict, a group lacks an option, or goes another way than
// ours can. A key that the loader has as well tells nothing of the writer, nor does one of a class
// that it extends.
AMP_EXT_API void check_saved_groups(const Loader& loader, const std::vector<SavedGroup>& groups,
                                    const Keys& state_keys);

// Throws, in torch's words, unless groups have as many parameters as those of the optimizer.
AMP_EXT_API void check_lengths(const std::vector<size_t>& own, const std::vector<size_t>& saved);

}  // namespace amp_ext::optim
