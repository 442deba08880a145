// Defines the options of each optimizer, checks their values, and derives settings from them.
#include "optimizer/optimizer_description.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string_view>
#include <utility>

#include "kernels.h"

namespace amp_ext::optim {

namespace {

OptimizerDescription::Source source_of(const OptimizerDescription& description, const char* field) {
  for (const OptionDescription& option : description.options) {
    const std::vector<const char*> own = {option.name};
    const auto& fields = option.fields.empty() ? own : option.fields;
    for (size_t i = 0; i < fields.size(); ++i) {
      if (std::strcmp(fields[i], field) == 0) return {option.index, i};
    }
  }
  TORCH_CHECK(false, "optimizer_description.cpp must have an option for the hyperparameter ",
              field);
}

// Words for an option type: its name in Python, and the allowed values without and with a range.
struct TypeWords {
  const char* name;
  const char* wanted;
  const char* in_range = nullptr;
};

// Indexed by OptionType.
constexpr TypeWords kWords[] = {
    {"learning rate", "a number"},
    {"number", "a number"},
    {"number", "a number", "a number of at least 0"},
    {"limit", "a number or None", "a number of at least 0 or None"},
    {"numbers", " numbers"},
    {"flag", "True or False"},
    {"masters", "True, False, 'split' or 'split8'"},
    {"states", "torch.float32, torch.bfloat16, '8bit-bf16', '8bit' or None"},
    {"rounding", "'dither', 'nearest' or None"},
    {"flag", "True or False"},
    {"flag or none", "True, False or None"},
    {"refused flag", "True or False"}};

const TypeWords& words_of(OptionType type) { return kWords[static_cast<size_t>(type)]; }

// Returns how many numbers an option holds.
size_t number_count(const OptionDescription& option) {
  if (option.type == OptionType::kNumbers) return option.fields.size();
  return option.type <= OptionType::kLimit ? 1 : 0;
}

void check_value(const OptionDescription& option, const GroupOptions& options) {
  bool fits = true;
  const bool is_from_0 = words_of(option.type).in_range != nullptr;
  const char* why = "";
  for (size_t i = 0; i < number_count(option); ++i) {
    const double number = options.number(option, i);
    fits = fits && (is_from_0 ? number >= 0.0 : !std::isnan(number));
  }
  if (option.type == OptionType::kMasters) {
    const MasterWeights masters = options.master_weights();
    const auto* const form = std::get_if<std::string>(&masters.value());
    fits = form == nullptr || *form == "split" || *form == "split8";
  } else if (option.type == OptionType::kStates) {
    const StateDType dtype = options.state_dtype();
    fits = !dtype.has_value() || dtype == at::kFloat || dtype == at::kBFloat16 || dtype.is_coded();
    const bool is_half = !fits && (dtype == at::kHalf || dtype == "float16");
    if (is_half) why = ", in which second moments of small gradients are 0";
  } else if (option.type == OptionType::kRounding) {
    const std::string rounding = options.rounding().value_or("nearest");
    fits = rounding == "dither" || rounding == "nearest";
  }
  if (fits) return;
  const char* const in_range = words_of(option.type).in_range;
  const std::string message = c10::str(options.name_of(option), " must be ",
                                       in_range != nullptr ? in_range : wanted(option), ", got ",
                                       options.shown(option, {}), why);
  TORCH_CHECK_TYPE(option.type != OptionType::kMasters, message);
  TORCH_CHECK_VALUE(false, message);
}

template <typename Hyperparameters>
GroupTable table_of(const std::vector<const GroupOptions*>& groups) {
  std::vector<Group<Hyperparameters>> read(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    set_fields(read[i], *groups[i]);
    read[i].lr_tensor = groups[i]->lr_tensor();
  }
  return GroupTable::of(read);
}

// Returns the option "betas", which sets all hyperparameters named beta1, beta2 and so on.
template <typename Hyperparameters>
OptionDescription betas() {
  constexpr double kBelow1 = 1.0 - std::numeric_limits<double>::epsilon() / 2;
  std::vector<const char*> fields;
  Hyperparameters::for_each_field([&](const char* field, auto) {
    if (std::string_view(field).substr(0, 4) == "beta") fields.push_back(field);
  });
  return {"betas", OptionType::kNumbers, OnLoad::kRequired, "Invalid beta parameter at index ",
          kBelow1, std::move(fields)};
}

// Returns the description of an optimizer with the common options and the options `own`. `missing`
// is the OnLoad of torch's common options, such as `maximize`.
template <typename Hyperparameters>
OptimizerDescription described(OnLoad missing, OnLoad decoupled_weight_decay,
                               const std::vector<OptionDescription>& own,
                               const char* (*refusal_of_torch)(const GroupOptions&) = nullptr) {
  OptimizerDescription description;
  description.table = &table_of<Hyperparameters>;
  description.refusal_of_torch = refusal_of_torch;
  description.options = {
      {"lr", OptionType::kLearningRate, OnLoad::kRequired, "Invalid learning rate: "},
      {"weight_decay", OptionType::kNumber, OnLoad::kRequired, "Invalid weight_decay value: "},
      {"maximize", OptionType::kFlag, missing},
      {"decoupled_weight_decay", OptionType::kFlag, decoupled_weight_decay},
      {"master_weights", OptionType::kMasters, OnLoad::kKept},
      {"state_dtype", OptionType::kStates, OnLoad::kKept},
      {"rounding", OptionType::kRounding, OnLoad::kKept},
      {"max_grad_norm", OptionType::kLimit, OnLoad::kKept},
      {"clip_value", OptionType::kLimit, OnLoad::kKept},
      {"skip_nonfinite", OptionType::kFlag, OnLoad::kKept},
      {"write_back_grads", OptionType::kFlag, OnLoad::kKept}};
  description.options.insert(description.options.end(), own.begin(), own.end());
  description.options.insert(description.options.end(),
                             {{"foreach", OptionType::kUnusedOrNone, missing},
                              {"differentiable", OptionType::kRefused, missing}});
  for (size_t i = 0; i < description.options.size(); ++i) description.options[i].index = i;
  description.buffers.assign(std::begin(Hyperparameters::kBuffers),
                             std::end(Hyperparameters::kBuffers));
  description.sources = {source_of(description, "lr"), source_of(description, "clip_value")};
  Hyperparameters::for_each_field([&](const char* field, auto) {
    if (Hyperparameters::is_option(field))
      description.sources.push_back(source_of(description, field));
  });
  return description;
}

}  // namespace

template <>
const OptimizerDescription& description_of<AdamHyperparameters>() {
  static const OptimizerDescription description = described<AdamHyperparameters>(
      OnLoad::kOffIfMissing, OnLoad::kOffIfMissing,
      {betas<AdamHyperparameters>(),
       {"eps", OptionType::kNumber, OnLoad::kRequired, "Invalid epsilon value: "},
       {"amsgrad", OptionType::kFlag, OnLoad::kOffIfMissing},
       {"denominator_floor", OptionType::kNumberFrom0, OnLoad::kKept},
       {"capturable", OptionType::kUnused, OnLoad::kOffIfMissing},
       {"fused", OptionType::kUnusedOrNone, OnLoad::kOffIfMissing}});
  return description;
}

template <>
const OptimizerDescription& description_of<SgdHyperparameters>() {
  static const OptimizerDescription description = [] {
    OptimizerDescription sgd = described<SgdHyperparameters>(
        OnLoad::kOffIfMissing, OnLoad::kKeptIfMissing,
        {{"momentum", OptionType::kNumber, OnLoad::kRequired, "Invalid momentum value: "},
         {"dampening", OptionType::kNumber, OnLoad::kRequired},
         {"nesterov", OptionType::kFlag, OnLoad::kOffIfMissing},
         {"fused", OptionType::kUnusedOrNone, OnLoad::kOffIfMissing}},
        [](const GroupOptions& options) {
          const bool is_nesterov = options.is_set("nesterov");
          const bool can = options.is_set("momentum") && !options.is_set("dampening");
          return is_nesterov && !can ? "Nesterov momentum requires a momentum and zero dampening"
                                     : nullptr;
        });
    sgd.counts_from_buffer = true;
    return sgd;
  }();
  return description;
}

template <>
const OptimizerDescription& description_of<LionHyperparameters>() {
  static const OptimizerDescription description = described<LionHyperparameters>(
      OnLoad::kKeptIfMissing, OnLoad::kKeptIfMissing,
      {betas<LionHyperparameters>(), {"fused", OptionType::kUnusedOrNone, OnLoad::kKeptIfMissing}});
  return description;
}

namespace {

void add_once(const char* name, std::vector<std::string>& names) {
  if (std::find(names.begin(), names.end(), name) == names.end()) names.emplace_back(name);
}

// Returns the names of the options of all our optimizers for which `is_wanted` returns true.
template <typename IsWanted>
std::vector<std::string> names_of_options(const IsWanted& is_wanted) {
  std::vector<std::string> names;
#define AMP_EXT_ADD(Functor)                                                               \
  for (const OptionDescription& each : description_of<Functor##Hyperparameters>().options) \
    if (is_wanted(each)) add_once(each.name, names);
  AMP_EXT_FOR_EACH_OPTIMIZER(AMP_EXT_ADD)
#undef AMP_EXT_ADD
  return names;
}

}  // namespace

std::vector<std::string> configured_options() {
  return names_of_options([](const auto& option) { return option.on_load == OnLoad::kKept; });
}

std::vector<std::string> names_of_all_options() {
  return names_of_options([](const auto& /*option*/) { return true; });
}

std::vector<std::string> names_of_refused_flags() {
  return names_of_options([](const auto& option) { return option.type == OptionType::kRefused; });
}

std::vector<std::string> names_of_all_buffers() {
  std::vector<std::string> names;
#define AMP_EXT_ADD(Functor)                                               \
  for (const BufferDescription& each : Functor##Hyperparameters::kBuffers) \
    add_once(each.name, names);
  AMP_EXT_FOR_EACH_OPTIMIZER(AMP_EXT_ADD)
#undef AMP_EXT_ADD
  return names;
}

const OptionDescription& OptimizerDescription::option(const char* name) const {
  for (const OptionDescription& each : options) {
    if (std::strcmp(each.name, name) == 0) return each;
  }
  TORCH_CHECK(false, "optimizer_description.cpp must have the option ", name);
}

bool GroupOptions::is_set(const char* option) const {
  return number(description().option(option), 0) != 0.0;
}

const char* name_of(OptionType type) { return words_of(type).name; }

const char* name_of(OnLoad on_load) {
  switch (on_load) {
    case OnLoad::kRequired:
      return "required";
    case OnLoad::kOffIfMissing:
      return "off if missing";
    case OnLoad::kKeptIfMissing:
      return "kept if missing";
    case OnLoad::kKept:
      return "kept";
  }
  return nullptr;
}

std::string wanted(const OptionDescription& option) {
  constexpr const char* kCounts[] = {"no", "one", "two", "three", "four", "five"};
  const bool is_tuple = option.type == OptionType::kNumbers;
  const std::string count = is_tuple ? kCounts[option.fields.size()] : "";
  const std::string tensors = is_tuple                                   ? count + " tensors"
                              : option.type == OptionType::kLearningRate ? "a tensor"
                                                                         : "";
  const std::string words = count + words_of(option.type).wanted;
  return tensors.empty() ? words : words + " or " + tensors + " of one element";
}

void check_as_torch(const GroupOptions& options) {
  for (const OptionDescription& option : options.description().options) {
    if (option.refusal_of_torch == nullptr) continue;
    const bool is_tuple = option.type == OptionType::kNumbers;
    for (size_t i = 0; i < number_count(option); ++i) {
      const double number = options.number(option, i);
      TORCH_CHECK_VALUE(0.0 <= number && number <= option.largest, option.refusal_of_torch,
                        is_tuple ? c10::str(i, ": ") : std::string(), options.shown(option, i));
    }
  }
  const auto refusal_of_torch = options.description().refusal_of_torch;
  const char* const refusal = refusal_of_torch == nullptr ? nullptr : refusal_of_torch(options);
  TORCH_CHECK_VALUE(refusal == nullptr, refusal);
}

void check_values(const GroupOptions& options) {
  for (const OptionDescription& option : options.description().options)
    check_value(option, options);
}

void check_group(const GroupOptions& options) {
  check_values(options);
  const OptimizerDescription& description = options.description();
  const OptionDescription& state_dtype = description.option("state_dtype");
  const MasterWeights masters = options.master_weights();
  const auto* const form = std::get_if<std::string>(&masters.value());
  const int count = buffer_count(options);
  if (options.state_dtype().is_coded()) {
    const bool keeps_maximum =
        count > 0 && description.buffers[count - 1].role == BufferRole::kMaximum;
    TORCH_CHECK_VALUE(!keeps_maximum, options.name_of(state_dtype),
                      " must be torch.float32, torch.bfloat16 or None with amsgrad, got ",
                      options.shown(state_dtype, {}));
  } else if (form != nullptr && !options.state_dtype().has_value()) {
    // Kernels with a split master weight support moments in float32 and bfloat16 only.
    TORCH_CHECK_VALUE(count == 0 || !options.has_float16_params(), options.name_of(state_dtype),
                      " must be torch.float32 or torch.bfloat16 for parameters in torch.float16 "
                      "with master_weights='",
                      *form, "', got None");
  }
}

ClippingOptions clipping_options(const std::string& optimizer,
                                 const std::vector<const GroupOptions*>& groups) {
  if (groups.empty()) return {};
  const auto check_same = [&](const char* name, const auto& read) {
    const bool is_same = std::all_of(groups.begin(), groups.end(), [&](const GroupOptions* group) {
      return read(*group) == read(*groups.front());
    });
    if (is_same) return;
    std::string shown;
    for (const GroupOptions* const group : groups) {
      shown += (shown.empty() ? "" : ", ") + group->shown(group->description().option(name), {});
    }
    TORCH_CHECK_VALUE(false, optimizer, ": ", name, " must be the same in all groups, got [", shown,
                      "]");
  };
  const auto max_grad_norm = [](const GroupOptions& group) { return group.max_grad_norm(); };
  const auto skip_nonfinite = [](const GroupOptions& group) {
    return group.is_set("skip_nonfinite");
  };
  check_same("max_grad_norm", max_grad_norm);
  check_same("skip_nonfinite", skip_nonfinite);
  return {max_grad_norm(*groups.front()), skip_nonfinite(*groups.front())};
}

bool may_dither(const MasterWeights& master_weights, const StateDType& state_dtype,
                const std::optional<std::string>& rounding) {
  // With a full master and float32 moments, only the parameter is rounded: the master loses
  // nothing.
  const bool stores_low_precision =
      !master_weights || master_weights == "split8" || state_dtype != at::kFloat;
  return stores_low_precision &&
         (rounding.has_value() ? *rounding == "dither" : state_dtype.has_value());
}

bool may_dither(const GroupOptions& options) {
  return may_dither(options.master_weights(), options.state_dtype(), options.rounding());
}

StateSpec state_spec_of(const GroupOptions& options, const StateRequirements& requirements) {
  return {options.description().buffers, buffer_count(options), requirements.counted_steps(),
          options.master_weights(),      options.state_dtype(), options.rounding()};
}

int buffer_count(const GroupOptions& options) {
  const std::vector<BufferDescription>& buffers = options.description().buffers;
  const char* const option = buffers.back().option;
  const auto count = static_cast<int>(buffers.size());
  return option != nullptr && !options.is_set(option) ? count - 1 : count;
}

}  // namespace amp_ext::optim
