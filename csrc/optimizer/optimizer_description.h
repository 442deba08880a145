// What an optimizer says of the options of its groups, for the classes of Python and of C++.
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

enum class OptionType {  // one number first
  kLearningRate,         // a number; in Python also a tensor, which steps read on its device
  kNumber,
  kNumberFrom0,
  kLimit,    // a number of at least 0, or none
  kNumbers,  // one for each of its fields
  kFlag,
  kMasters,       // MasterWeights
  kStates,        // StateDType
  kRounding,      // "dither", "nearest" or none
  kUnused,        // a flag that torch has and no step reads
  kUnusedOrNone,  // likewise, or none
};

// What a load makes of an option.
enum class OnLoad {
  kRequired,       // the file must have it
  kOffIfMissing,   // a file without it is older than torch's option
  kKeptIfMissing,  // torch has no such option
  kKept,           // it stays as configured, whatever the file says
};

struct OptionDescription {
  const char* name;
  OptionType type;
  OnLoad on_load;
  // How torch refuses a default that is not between 0 and `largest`, up to the index of the number
  // or to what it is; null where it takes any.
  const char* refusal_of_torch = nullptr;
  double largest = std::numeric_limits<double>::infinity();
  // The hyperparameters that a step gets from it; empty: the one of its name, if there is one.
  std::vector<const char*> fields = {};
  size_t index = 0;  // among the options of the optimizer

  bool is_read() const { return type != OptionType::kUnused && type != OptionType::kUnusedOrNone; }
};

// How the types of Python call them.
AMP_EXT_API const char* name_of(OptionType type);
AMP_EXT_API const char* name_of(OnLoad on_load);

// What an option must be, in words, its range aside. `takes_tensors`: where a number may be one.
AMP_EXT_API std::string wanted(const OptionDescription& option, bool takes_tensors);

struct OptimizerDescription;

// The options of one group, or the defaults of an optimizer, as a language has them.
class AMP_EXT_API GroupOptions {
 public:
  explicit GroupOptions(const OptimizerDescription& description) : description_(&description) {}
  virtual ~GroupOptions() = default;
  const OptimizerDescription& description() const { return *description_; }

  // The number that an option is, or one of its numbers. A flag is 0 or 1, and no limit infinity.
  virtual double number(const OptionDescription& option, size_t index) const = 0;
  virtual MasterWeights master_weights() const = 0;
  virtual StateDType state_dtype() const = 0;
  virtual std::optional<std::string> rounding() const = 0;
  virtual std::optional<double> max_grad_norm() const = 0;
  virtual OptionalTensor lr_tensor() const { return {}; }  // the learning rate, if it is one

  virtual bool has_float16_params() const = 0;
  virtual bool takes_tensors() const = 0;

  // What errors call an option: "Adam: lr of group 1"; and what they show of it, or of one of its
  // numbers.
  virtual std::string name_of(const OptionDescription& option) const = 0;
  virtual std::string shown(const OptionDescription& option, std::optional<size_t> index) const = 0;

  // Whether a number is not 0, or a flag set.
  bool is_set(const char* option) const;

 private:
  const OptimizerDescription* description_;
};

struct AMP_EXT_API OptimizerDescription {
  // Where a hyperparameter comes from.
  struct Source {
    size_t option;
    size_t number;  // of it
  };

  std::vector<OptionDescription> options;  // those that all optimizers have come first
  std::vector<BufferDescription> buffers;  // all that the formula may keep
  std::vector<Source> sources;             // in the order of `set_fields`
  bool counts_from_buffer = false;  // torch has no counter: the first step is without a buffer
  // Reads the hyperparameters of groups.
  GroupTable (*table)(const std::vector<const GroupOptions*>& groups) = nullptr;
  // How torch refuses defaults that do not go together; null where they do.
  const char* (*refusal_of_torch)(const GroupOptions&) = nullptr;

  const OptionDescription& option(const char* name) const;
  StateRequirements requirements(const GroupOptions& options) const {
    return table({&options}).groups[0].requirements;
  }
};

// That of the formula with these hyperparameters.
template <typename Hyperparameters>
AMP_EXT_API const OptimizerDescription& description_of();

// The options of all our optimizers that a load leaves as they were configured.
AMP_EXT_API std::vector<std::string> configured_options();

// Returns the names of the options of all our optimizers.
AMP_EXT_API std::vector<std::string> names_of_all_options();

// Returns the names of the buffers of all our optimizers.
AMP_EXT_API std::vector<std::string> names_of_all_buffers();

// Throws, in torch's words, if the options are not what torch takes as defaults. It does not check
// those of groups.
AMP_EXT_API void check_as_torch(const GroupOptions& options);

// Throws if a step has no use for an option, whether it is a default or a group's. Ranges that
// torch has are left to `check_as_torch`: a group may well have other values.
AMP_EXT_API void check_values(const GroupOptions& options);

// Throws also if options of a group do not go together.
AMP_EXT_API void check_group(const GroupOptions& options);

// The options that concern the norm of all gradients together.
struct ClippingOptions {
  std::optional<double> max_grad_norm;
  bool skip_nonfinite = false;
};

// Throws on behalf of an optimizer unless they are the same in all groups.
AMP_EXT_API ClippingOptions clipping_options(const std::string& optimizer,
                                             const std::vector<const GroupOptions*>& groups);

// Whether the options of a group let numbers be dithered, whatever the dtypes of its parameters.
AMP_EXT_API bool may_dither(const MasterWeights& master_weights, const StateDType& state_dtype,
                            const std::optional<std::string>& rounding);
AMP_EXT_API bool may_dither(const GroupOptions& options);

// How many of its buffers a group keeps, the first ones: AMSGrad's maximum is the last.
AMP_EXT_API int buffer_count(const GroupOptions& options, const StateRequirements& requirements);

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
