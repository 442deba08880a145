// Descriptions of the options of each optimizer, which the Python classes and the formulas share.
#pragma once

#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>

#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "optimizer/group_table.h"

namespace amp_ext::optim {

enum class OptionType {  // options of the types up to kLimit hold one number
  kLearningRate,  // a number; in Python also a tensor, whose value kernels read on its device
  kNumber,
  kNumberFrom0,
  kLimit,    // a number of at least 0, or None
  kNumbers,  // a tuple, with one number for each field
  kFlag,
  kMasters,       // MasterWeights
  kStates,        // StateDType
  kRounding,      // "dither", "nearest" or None
  kUnused,        // a flag of torch's optimizers that our steps ignore
  kUnusedOrNone,  // a flag or None of torch's optimizers that our steps ignore
  kRefused,       // a flag of torch's optimizers that must be false
};

// How load_state_dict sets an option.
enum class OnLoad {
  kRequired,       // the file must have it
  kOffIfMissing,   // False if missing: older versions of torch do not write it
  kKeptIfMissing,  // keeps the configured value if missing: torch has no such option
  kKept,           // keeps the configured value, whatever the file says
};

struct OptionDescription {
  const char* name;
  OptionType type;
  OnLoad on_load;
  // Beginning of torch's error for a default outside [0, largest]; null if torch accepts any value.
  const char* refusal_of_torch = nullptr;
  double largest = std::numeric_limits<double>::infinity();
  // Names of the hyperparameters that the option sets. If empty: the hyperparameter of its name.
  std::vector<const char*> fields = {};
  size_t index = 0;  // position among the options of the optimizer

  bool is_read() const { return type < OptionType::kUnused; }
};

// Return the names that Python shows: "learning rate", "kept if missing".
AMP_EXT_API const char* name_of(OptionType type);
AMP_EXT_API const char* name_of(OnLoad on_load);

// Returns the allowed values in words, without a range: "a number or None".
AMP_EXT_API std::string wanted(const OptionDescription& option);

struct OptimizerDescription;

// Reads the options of one group, or the defaults of an optimizer, from Python objects.
class AMP_EXT_API GroupOptions {
 public:
  explicit GroupOptions(const OptimizerDescription& description) : description_(&description) {}
  virtual ~GroupOptions() = default;
  const OptimizerDescription& description() const { return *description_; }

  // Returns the number at `index` of an option. A flag is 0 or 1; a limit of None is infinity.
  virtual double number(const OptionDescription& option, size_t index) const = 0;
  virtual MasterWeights master_weights() const = 0;
  virtual StateDType state_dtype() const = 0;
  virtual std::optional<std::string> rounding() const = 0;
  virtual std::optional<double> max_grad_norm() const = 0;
  virtual OptionalTensor lr_tensor() const { return {}; }  // the learning rate, if it is a tensor

  virtual bool has_float16_params() const = 0;

  // name_of returns the name of an option in errors ("Adam: lr of group 1"). shown returns the
  // value as errors print it, or only the number at `index` of a tuple.
  virtual std::string name_of(const OptionDescription& option) const = 0;
  virtual std::string shown(const OptionDescription& option, std::optional<size_t> index) const = 0;

  // True if a number is not 0, or a flag is set.
  bool is_set(const char* option) const;

 private:
  const OptimizerDescription* description_;
};

struct AMP_EXT_API OptimizerDescription {
  // The option from which a hyperparameter is read.
  struct Source {
    size_t option;
    size_t number;  // index among the numbers of the option
  };

  std::vector<OptionDescription> options;  // common options such as lr come first
  std::vector<BufferDescription> buffers;  // all buffers of the formula
  std::vector<Source> sources;  // one for each hyperparameter, in the order of set_fields
  // True if torch stores no step count, so that a state without a buffer has taken no step so far.
  bool counts_from_buffer = false;
  // Builds the table of hyperparameters from the options of all groups.
  GroupTable (*table)(const std::vector<const GroupOptions*>& groups) = nullptr;
  // Returns torch's error message for defaults that contradict each other, or null.
  const char* (*refusal_of_torch)(const GroupOptions&) = nullptr;

  const OptionDescription& option(const char* name) const;
  StateRequirements requirements(const GroupOptions& options) const {
    return table({&options}).groups[0].requirements;
  }
};

// Returns the description of the optimizer that uses these hyperparameters.
template <typename Hyperparameters>
AMP_EXT_API const OptimizerDescription& description_of();

// Returns the names of all options that loading a checkpoint leaves as configured.
AMP_EXT_API std::vector<std::string> configured_options();

// Returns the names of the options of all our optimizers.
AMP_EXT_API std::vector<std::string> names_of_all_options();

// Returns the names of the buffers of all our optimizers.
AMP_EXT_API std::vector<std::string> names_of_all_buffers();

// Returns the names of the flags that our optimizers refuse, such as "differentiable".
AMP_EXT_API std::vector<std::string> names_of_refused_flags();

// Throws torch's error if torch would refuse these defaults. Groups are not checked in this way.
AMP_EXT_API void check_as_torch(const GroupOptions& options);

// Throws if a step can't use the value of an option, in defaults or in a group. Does not check
// ranges that only torch enforces; see check_as_torch.
AMP_EXT_API void check_values(const GroupOptions& options);

// Calls check_values, and throws if options of a group contradict each other.
AMP_EXT_API void check_group(const GroupOptions& options);

// Options that must be the same in all groups, because they use the norm over all gradients.
struct ClippingOptions {
  std::optional<double> max_grad_norm;
  bool skip_nonfinite = false;
};

// Returns the clipping options of all groups; throws if groups differ.
AMP_EXT_API ClippingOptions clipping_options(const std::string& optimizer,
                                             const std::vector<const GroupOptions*>& groups);

// Properties of states that the options of a group determine. Two groups with equal specs have
// states in the same formats.
struct StateSpec {
  at::ArrayRef<BufferDescription> buffers;  // all buffers of the formula, in static memory
  int buffer_count = 0;                     // how many of `buffers` the group uses
  bool keeps_step = true;                   // whether states have a step count
  MasterWeights master_weights = true;
  StateDType state_dtype;
  std::optional<std::string> rounding;

  friend bool operator==(const StateSpec& a, const StateSpec& b) {
    return a.buffer_count == b.buffer_count && a.keeps_step == b.keeps_step &&
           a.master_weights == b.master_weights && a.state_dtype == b.state_dtype &&
           a.rounding == b.rounding;
  }
};
StateSpec state_spec_of(const GroupOptions& options, const StateRequirements& requirements);

// True if the options of a group allow dithering, whatever the dtypes of its parameters.
AMP_EXT_API bool may_dither(const MasterWeights& master_weights, const StateDType& state_dtype,
                            const std::optional<std::string>& rounding);
AMP_EXT_API bool may_dither(const GroupOptions& options);

// Returns how many buffers of the formula a group uses, depending on the option of the last buffer.
AMP_EXT_API int buffer_count(const GroupOptions& options);

// Fills the hyperparameters of a step with the options of a group.
template <typename Hyperparameters>
void set_fields(Hyperparameters& hyperparameters, const GroupOptions& options) {
  auto source = options.description().sources.begin();
  const auto next = [&] {
    const auto [option, number] = *source++;
    return options.number(options.description().options[option], number);
  };
  hyperparameters.lr = next();
  hyperparameters.clip_value = next();
  Hyperparameters::for_each_field([&](const char* name, auto member) {
    if (!Hyperparameters::is_option(name)) return;
    auto& field = hyperparameters.*member;
    field = static_cast<std::decay_t<decltype(field)>>(next());
  });
  hyperparameters.dither = may_dither(options);
}

}  // namespace amp_ext::optim
