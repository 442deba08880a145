// Writes and loads the state dicts of optimizers, which have the same layout as in Python.
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <amp_ext/optim.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "libtorch/optimizer_impl.h"
#include "libtorch/values.h"
#include "optimizer/saved_groups.h"
#include "optimizer/saved_states.h"
#include "tensors/tensor_memory.h"

namespace amp_ext::optim {

namespace {

using SavedGroups = std::vector<Dict>;

// Returns the value of an option as Python's state dicts store it, for example a dtype by name.
c10::IValue value_of(const OptionPlace& place) {
  if (auto* const* number = std::get_if<double*>(&place)) return **number;
  if (auto* const* flag = std::get_if<bool*>(&place)) return **flag;
  if (auto* const* masters = std::get_if<MasterWeights*>(&place)) {
    return std::visit([](const auto& value) { return c10::IValue(value); }, (*masters)->value());
  }
  if (auto* const* limit = std::get_if<std::optional<double>*>(&place)) {
    return (*limit)->has_value() ? c10::IValue(***limit) : c10::IValue();
  }
  if (auto* const numbers = std::get_if<std::vector<double*>>(&place)) {
    std::vector<c10::IValue> values;
    for (size_t i = 0; i < numbers->size(); ++i) values.emplace_back(*(*numbers)[i]);
    return c10::ivalue::Tuple::create(std::move(values));
  }
  if (auto* const* text = std::get_if<std::optional<std::string>*>(&place)) {
    return (*text)->has_value() ? c10::IValue(***text) : c10::IValue();
  }
  const StateDType& state_dtype = *std::get<StateDType*>(place);
  if (!state_dtype.has_value()) return c10::IValue();
  if (state_dtype.is_coded()) return std::get<std::string>(state_dtype.value());
  return c10::IValue(state_dtype == at::kBFloat16 ? "bfloat16" : "float32");
}

// Returns the number that Python saved as a number, a bool, None or a tensor with one element; None
// and False count as 0. Returns nullopt for any other value.
std::optional<double> plain_number(const c10::IValue& value) {
  if (value.isNone()) return 0.0;
  if (is_number(value)) return number_in(value);
  if (!value.isTensor() || value.toTensor().numel() != 1) return {};
  return value.toTensor().item().toDouble();
}

// Writes the saved `value` of an option to `place`. `where` names the option in errors.
void read_option(const OptionDescription& option, const OptionPlace& place,
                 const c10::IValue& value, const std::string& where) {
  if (auto* const numbers = std::get_if<std::vector<double*>>(&place)) {
    const auto elements = elements_of(value);
    bool fits = elements.size() == numbers->size();
    for (size_t i = 0; fits && i < numbers->size(); ++i) {
      const auto number = plain_number(elements[i]);
      fits = number.has_value();
      if (fits) *(*numbers)[i] = *number;
    }
    TORCH_CHECK(fits, where, " must be ", wanted(option, false), ", got ", shown(value));
    return;
  }
  const std::optional<double> number = plain_number(value);
  if (auto* const* flag = std::get_if<bool*>(&place)) {
    TORCH_CHECK(number.has_value(), where, " must be ", wanted(option, false), ", got ",
                shown(value));
    **flag = *number != 0.0;
  } else {
    TORCH_CHECK(number.has_value() && !value.isNone(), where, " must be ", wanted(option, false),
                ", got ", shown(value));
    *std::get<double*>(place) = *number;
  }
}

// Converts an entry of a saved state to the form that the checks read.
SavedValue saved_value(const c10::IValue& value) {
  SavedValue saved;
  saved.type = saved.text = shown(value);
  if (value.isTensor()) saved.tensor = value.toTensor();
  const bool is_complex = value.isTensor() && saved.tensor.is_complex();
  if (!is_complex) saved.number = plain_number(value);
  if (value.isTensor() && saved.number.has_value()) saved.text = c10::str(*saved.number);
  return saved;
}

SavedState saved_state(const StateSpec& spec, const Dict& dict) {
  SavedState saved;
  saved.keys = shown_keys(dict);
  for (const auto& entry : dict) {
    if (!entry.key().isString() || !spec.is_key(entry.key().toStringRef())) continue;
    if (entry.value().isNone()) continue;
    saved.values.emplace_back(entry.key().toStringRef(), saved_value(entry.value()));
  }
  return saved;
}

Keys keys_of(const Dict& dict) {
  Keys keys;
  for (const auto& entry : dict) {
    if (entry.key().isString()) keys.push_back(entry.key().toStringRef());
  }
  return keys;
}

// Adds each entry of `others` to `dict`, unless `dict` already has the key of the entry.
void insert_others(const Dict& dict, const Dict& others) {
  for (const auto& entry : others) dict.insert(entry.key(), entry.value());
}

// Returns the keys and flags of a saved group. The checks use them to recognize the library that
// wrote the group.
SavedGroup saved_group(const Dict& group) {
  SavedGroup saved;
  saved.keys = keys_of(group);
  saved.shown_keys = shown_keys(group);
  saved.has_step = find(group, "step").has_value();
  for (const std::string& name : saved_flags()) {
    const auto value = find(group, name);
    if (!value.has_value()) continue;
    saved.flags[name] = {plain_number(*value).value_or(1.0) != 0.0, shown(*value)};
  }
  return saved;
}

// Returns a copy of a state without the buffers that belong to other optimizers and contain only
// zeros. For example, DeepSpeedCPULion writes an exp_avg_sq of zeros, which Lion never uses.
Dict without_unused_moments(const OptimizerClass& optimizer_class, const Dict& state) {
  const Keys names = names_of_all_buffers();
  auto spec = new_dict();
  for (const auto& entry : state) {
    const std::string key = entry.key().isString() ? entry.key().toStringRef() : "";
    const auto is_it = [&](const auto& buffer) { return key == buffer.name; };
    const bool is_own =
        std::any_of(optimizer_class.buffers.begin(), optimizer_class.buffers.end(), is_it);
    const bool is_of_another = !is_own && std::find(names.begin(), names.end(), key) != names.end();
    const bool is_unused =
        is_of_another && entry.value().isTensor() && !entry.value().toTensor().any().item<bool>();
    if (!is_unused) spec.insert(entry.key(), entry.value());
  }
  return spec;
}

// Returns the states of a state dict, with keys as text: "0" for the int 0 in Python's files.
std::map<std::string, c10::IValue> states_of(const OptimizerClass& optimizer_class,
                                             const Dict& state_dict) {
  std::map<std::string, c10::IValue> states;
  for (const auto& entry : find(state_dict, "state")->toGenericDict()) {
    const c10::IValue& value = entry.value();
    const bool is_dict = value.isGenericDict();
    states[shown(entry.key())] =
        is_dict ? c10::IValue(without_unused_moments(optimizer_class, value.toGenericDict()))
                : value;
  }
  return states;
}

// Returns the options that a group has after a load: the configured value of an option that a load
// does not change (see OnLoad), and the saved value of any other option.
std::unique_ptr<FusedOptions> read_options(const OptimizerClass& optimizer_class,
                                           const std::string& operation, const Dict& saved,
                                           size_t group, FusedOptions& configured) {
  const std::string place = c10::str(" of param_groups[", group, "]");
  auto options = optimizer_class.make_options();
  const auto spec = configured.options();
  const auto places = options->options();
  for (size_t i = 0; i < places.size(); ++i) {
    const auto& [name, option] = places[i];
    const bool is_fixed = optimizer_class.fixed_option != nullptr &&
                          name == std::string(optimizer_class.fixed_option);
    const auto value = find(saved, name);
    const OnLoad on_load = optimizer_class.options[i].on_load;
    const bool stays = !value.has_value() && on_load == OnLoad::kKeptIfMissing;
    if (on_load == OnLoad::kKept || stays) {
      copy_option(spec[i].place, option);
    } else if (value.has_value() && !is_fixed) {
      read_option(optimizer_class.options[i], option, *value,
                  c10::str(operation, ": ", name, place));
    }
  }
  return options;
}

// Returns a hint for the error about a dict that is not an optimizer's state dict. The hint names
// the keys of `dict` whose values are such state dicts. It also says if the dict has master weights
// of apex, because a load does not read them.
std::string what_to_load(const Dict& dict) {
  std::string names, masters;
  for (const auto& entry : dict) {
    const bool is_of_masters =
        entry.key().isString() && entry.key().toStringRef().rfind("fp32_", 0) == 0;
    if (is_of_masters && masters.empty()) {  // a key of apex's FP16_Optimizer or a similar class
      masters = "; the masters in " + shown(entry.key()) +
                " are not read, but taken from the parameters: load the model first";
    }
    if (!entry.value().isGenericDict()) continue;
    const Dict inner = entry.value().toGenericDict();
    if (!find(inner, "state").has_value() || !find(inner, "param_groups").has_value()) continue;
    names += (names.empty() ? "" : " or ") + shown(entry.key());
  }
  return (names.empty() ? names : "; load its entry " + names + " instead") + masters;
}

// Returns the groups of a state dict. Throws if the state dict lacks "state" or "param_groups", or
// if a group is not a dict with a list under "params".
SavedGroups saved_groups(const std::string& operation, const Dict& state_dict) {
  for (const char* const name : {"state", "param_groups"}) {
    TORCH_CHECK(find(state_dict, name).has_value(), operation, ": state_dict must have '", name,
                "', got ", shown_keys(state_dict), what_to_load(state_dict));
  }
  const c10::IValue state = *find(state_dict, "state"), list = *find(state_dict, "param_groups");
  TORCH_CHECK(state.isGenericDict(), operation, ": state must be a dict, got ", shown(state));
  TORCH_CHECK(list.isList(), operation, ": param_groups must be a list, got ", shown(list));
  SavedGroups groups;
  for (const c10::IValue& group : list.toListRef()) {
    const std::string where = c10::str(operation, ": param_groups[", groups.size(), "]");
    TORCH_CHECK(group.isGenericDict(), where, " must be a dict, got ", shown(group));
    groups.push_back(group.toGenericDict());
    const auto params = find(groups.back(), "params");
    TORCH_CHECK(params.has_value(), where, " must have ['params'], got ",
                shown_keys(groups.back()));
    TORCH_CHECK(params->isList(), where, "['params'] must be a list, got ", shown(*params));
  }
  return groups;
}

}  // namespace

c10::IValue FusedOptimizer::state_dict() const {
  const OptimizerClass& optimizer_class = checked("state_dict").optimizer_class;
  impl_->plan->check_not_swapped_in("state_dict");
  auto states = new_dict();
  auto groups = new_list();
  int64_t number = 0;
  std::set<const void*> registered;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const auto& param_group = param_groups_[i];
    auto group = new_dict();
    if (i < impl_->other_entries.size()) insert_others(group, impl_->other_entries[i]);
    const auto options = checked_options(i).clone();
    for (const auto& [name, place] : static_cast<FusedOptions&>(*options).options()) {
      group.insert_or_assign(name, value_of(place));
    }
    for (const OptionDescription& option : optimizer_class.options) {
      const bool may_be_none = option.type == OptionType::kUnusedOrNone;
      if (option.is_read()) continue;
      group.insert_or_assign(option.name, may_be_none ? c10::IValue() : c10::IValue(false));
    }
    auto params = new_list();
    for (const at::Tensor& param : param_group.params()) {
      registered.insert(param.unsafeGetTensorImpl());
      if (const FusedParamState* const state = state_of(param)) {
        auto tensors = new_dict();
        for (const auto& [name, tensor] : state->tensors()) tensors.insert(name, tensor);
        if (state->others_ != nullptr) insert_others(tensors, state->others_->toGenericDict());
        states.insert(number, tensors);
      }
      params.push_back(number++);
    }
    group.insert_or_assign("params", params);
    groups.push_back(group);
  }
  for (const auto& [param, state] : state_) {
    const auto* const own = dynamic_cast<const FusedParamState*>(state.get());
    TORCH_CHECK(own == nullptr || registered.count(param) != 0, optimizer_class.name,
                ".state_dict: a parameter of shape ", own->param_.sizes(),
                " has a state but is in no group. Put the parameter back into a group, or delete "
                "its state with optimizer.state().erase(param.unsafeGetTensorImpl()).");
  }
  insert_others(states, impl_->other_states);
  auto state_dict = new_dict();
  state_dict.insert("state", states);
  state_dict.insert("param_groups", groups);
  return state_dict;
}

// A state dict that is being loaded. read() checks and converts the whole state dict before keep()
// changes the optimizer, so that a failed load changes nothing.
struct FusedOptimizer::Load {
  FusedOptimizer& optimizer;
  const OptimizerClass& optimizer_class = optimizer.impl_->optimizer_class;
  const std::string operation = c10::str(optimizer_class.name, ".load_state_dict");
  SavedGroups groups = {};
  std::vector<SavedGroup> groups_of_file = {};
  std::map<std::string, c10::IValue> saved = {};  // saved states, with each key as text
  std::vector<std::unique_ptr<FusedOptions>> options = {};
  std::vector<std::unique_ptr<FusedParamState>> states = {};
  std::vector<Dict> other_entries = {};  // for each group, entries such as a scheduler's initial_lr
  Dict other_states = new_dict();        // states that belong to no parameter
  std::set<std::string> registered = {};  // keys of the states that belong to a parameter

  void read(const c10::IValue& state_dict) {
    const Dict dict = dict_of(operation, state_dict);
    groups = saved_groups(operation, dict);
    saved = states_of(optimizer_class, dict);
    check_file();
    for (size_t i = 0; i < groups.size(); ++i) read_group(i);
    const Dict all_states = find(dict, "state")->toGenericDict();
    TORCH_CHECK(!registered.empty() || saved.empty(), operation,
                ": state must have the keys in params of param_groups, got ",
                shown_keys(all_states));
    for (const auto& entry : all_states) {
      if (registered.count(shown(entry.key())) != 0) continue;
      other_states.insert(entry.key(), entry.value().deepcopy());
    }
  }

  // Throws unless this optimizer class can load the saved groups and states, and each saved group
  // has as many parameters as the optimizer's group.
  void check_file() {
    Keys state_keys;
    for (const auto& [key, state] : saved) {
      if (!state.isGenericDict()) continue;
      const Keys keys = keys_of(state.toGenericDict());
      state_keys.insert(state_keys.end(), keys.begin(), keys.end());
    }
    std::vector<size_t> own_lengths, lengths;
    Loader loader = {operation, optimizer_class.name, &optimizer_class, {}, {}};
    for (size_t i = 0; i < optimizer.param_groups_.size(); ++i) {
      own_lengths.push_back(optimizer.param_groups_[i].params().size());
      const auto options = optimizer.checked_options(i).clone();
      for (const auto& [name, place] : static_cast<FusedOptions&>(*options).options()) {
        if (name == std::string("decoupled_weight_decay")) {
          loader.decouples.push_back(*std::get<bool*>(place));
        }
      }
      if (i >= optimizer.impl_->other_entries.size()) continue;
      for (std::string& key : keys_of(optimizer.impl_->other_entries[i])) {
        loader.own_keys.push_back(std::move(key));
      }
    }
    for (const Dict& group : groups) {
      groups_of_file.push_back(saved_group(group));
      lengths.push_back(find(group, "params")->toListRef().size());
    }
    check_saved_groups(loader, groups_of_file, state_keys);
    check_lengths(own_lengths, lengths);
  }

  void read_group(size_t i) {
    const std::vector<at::Tensor>& params = optimizer.param_groups_[i].params();
    const auto configured = optimizer.checked_options(i).clone();
    options.push_back(read_options(optimizer_class, operation, groups[i], i,
                                   static_cast<FusedOptions&>(*configured)));
    options.back()->given_ = static_cast<FusedOptions&>(*configured).given_;
    const auto place = [i] { return c10::str(" of param_groups[", i, "]"); };
    const PlacedOptions placed(optimizer_class, *options.back(), operation, place, &params);
    check_group(placed);
    other_entries.push_back(new_dict());
    const bool counts_for_states = groups_of_file[i].counts_for_states();
    for (const auto& entry : groups[i]) {
      const std::string key = shown(entry.key());
      if (key == "'bias_correction'" || (key == "'step'" && counts_for_states)) continue;
      other_entries.back().insert(entry.key(), entry.value().deepcopy());
    }
    const StateSpec spec = state_spec_of(optimizer_class.name, placed);
    const auto keys = find(groups[i], "params")->toList();
    for (size_t j = 0; j < keys.size(); ++j) {
      const auto state = saved.find(shown(keys.get(j)));
      if (state == saved.end()) continue;
      registered.insert(state->first);
      TORCH_CHECK(state->second.isNone() || state->second.isGenericDict(), operation, ": state[",
                  state->first, "] must be a dict, got ", shown(state->second));
      if (state->second.isNone() || state->second.toGenericDict().empty()) continue;
      const auto step = counts_for_states ? find(groups[i], "step") : std::nullopt;
      read_state(spec, {params[j], params[j], i, j}, state->second.toGenericDict(), step);
    }
  }

  // Converts the saved state of a parameter. `step` is the group's step count if the library that
  // wrote the file counts steps by group (SavedGroup::counts_for_states).
  void read_state(const StateSpec& spec, const ParamRef& param, const Dict& dict,
                  const std::optional<c10::IValue>& step) {
    SavedState found = saved_state(spec, dict);
    if (step.has_value() && found.find("step") == nullptr) {
      found.values.emplace_back("step", saved_value(*step));
    }
    check_saved_state(spec, param, found, operation);
    auto state = std::make_unique<FusedParamState>(param.local);
    state->tensors_ = loaded_state(spec, param, found);
    auto others = new_dict();
    for (const auto& entry : dict) {
      const c10::IValue &key = entry.key(), &value = entry.value();
      if (key.isString() && spec.is_key(key.toStringRef())) continue;
      if (key.isString() && value.isTensor()) {
        state->tensors_.emplace_back(key.toStringRef(), value.toTensor().detach().clone());
      } else {
        others.insert(key, value.deepcopy());
      }
    }
    if (!others.empty()) state->others_ = std::make_shared<const c10::IValue>(others);
    states.push_back(std::move(state));
  }

  void keep() {
    for (size_t i = 0; i < groups.size(); ++i) {
      optimizer.param_groups_[i].set_options(std::move(options[i]));
    }
    optimizer.state_.clear();
    for (auto& state : states) {
      void* const param = state->param_.unsafeGetTensorImpl();
      optimizer.state_[param] = std::move(state);
    }
    Impl& impl = *optimizer.impl_;
    impl.other_entries = std::move(other_entries);
    impl.other_states = std::move(other_states);
    auto plan = std::make_unique<Plan>(optimizer_class.name);
    plan->take_over(*impl.plan);  // takes what state dicts lack
    impl.plan = std::move(plan);
  }
};

void FusedOptimizer::load_state_dict(const c10::IValue& state_dict) {
  checked("load_state_dict").plan->check_not_swapped_in("load_state_dict");
  const OutsideInferenceMode normal;
  Load load{*this};
  load.read(state_dict);
  load.keep();
}

}  // namespace amp_ext::optim
