// The state dicts of optimizers, in Python's layout.
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <amp_ext/optim.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "libtorch/optimizer_impl.h"
#include "libtorch/values.h"
#include "optimizer/masters.h"
#include "optimizer/moments.h"
#include "optimizer/writers.h"
#include "tensors/tensor_memory.h"

namespace amp_ext::optim {

namespace {

using SavedGroups = std::vector<Dict>;

// What Python gives for an option. Its optimizers keep a dtype by its name.
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

// A number as Python may save it: also a tensor of one element, and 0, 1 and None for flags.
std::optional<double> plain_number(const c10::IValue& value) {
  if (value.isNone()) return 0.0;
  if (is_number(value)) return number_in(value);
  if (!value.isTensor() || value.toTensor().numel() != 1) return {};
  return value.toTensor().item().toDouble();
}

// Takes an option out of a saved group.
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

at::Tensor read_step(const c10::IValue& value, const at::Device& device, const std::string& where) {
  TORCH_CHECK(!value.isTensor() || value.toTensor().numel() == 1, where,
              " must be one number, got shape ", value.toTensor().sizes());
  const std::optional<double> number = value.isNone() ? std::nullopt : plain_number(value);
  TORCH_CHECK(number.has_value(), where, " must be one number, got ", shown(value));
  TORCH_CHECK(*number >= 0.0 && *number <= std::numeric_limits<float>::max(), where,
              " must be finite and at least 0, got ", *number);
  return at::full({}, *number, at::TensorOptions(device).dtype(at::kFloat));
}

// Copies of the masters in a saved state, in the parameter's layout. `where` has a key's place.
Masters saved_masters(const Dict& saved, const at::Tensor& param,
                      const std::function<std::string(const std::string&)>& where) {
  Masters masters;
  for (const char* const key : kMasterKeys) {
    const c10::IValue value = find(saved, key).value_or(c10::IValue());
    if (value.isNone()) continue;
    at::Tensor master;
    if (key != std::string(kWholeMaster)) {
      const at::Tensor low = tensor_in(value, where(key));
      if (!is_lower_part(key, low, param, where(key))) continue;
      master = empty_lower_part(key, param).copy_(low);
    } else {
      TORCH_CHECK(!value.isTensor() || value.toTensor().scalar_type() != at::kShort, where(key),
                  " must be floating, got the lower halves of masters, as TransformerEngine's "
                  "FusedAdam writes with store_param_remainders=True; without 'master_param' in "
                  "the states, masters are taken from the parameters");
      master = read_tensor(value, param, at::kFloat, where(key));
    }
    masters[key] = master;
  }
  return masters;
}

// Copies of the moments in a saved state, in these formats. A number beside a code was written by
// somebody who knows the former only: it is the newer one. `where` has a key's place.
Moments read_moments(const Dict& saved, const std::vector<MomentFormat>& formats,
                     const at::Tensor& param,
                     const std::function<std::string(const std::string&)>& where) {
  const auto value_of = [&](const std::string& key) {
    return find(saved, key).value_or(c10::IValue());
  };
  const auto has_key = [&](const std::string& key) { return !value_of(key).isNone(); };
  Moments found;
  for (const MomentFormat& wanted : formats) {
    if (has_key(wanted.name)) continue;
    for (const MomentFormat& format : saved_codes(has_key, wanted.name)) {
      for (const std::string& key : format.keys()) {
        TORCH_CHECK(has_key(key), where(key), " must be there, got ", shown_keys(saved));
        const at::Tensor code = tensor_in(value_of(key), where(key));
        check_code(code, format, key, param, where(key));
        found[key] = empty_code(format, key, param).copy_(code);
      }
    }
  }
  const bool has_codes = !found.empty();
  for (const MomentFormat& wanted : formats) {
    const c10::IValue value = value_of(wanted.name);
    if (value.isNone()) continue;
    // The root of a second moment is the unit of a code: not to be rounded before.
    const bool is_exact = wanted.code.empty() && (!has_codes || wanted.dtype == at::kDouble);
    const auto dtype = is_exact ? wanted.dtype : at::kFloat;
    found[wanted.name] = read_tensor(value, param, dtype, where(wanted.name));
  }
  std::vector<MomentFormat> present;
  for (const MomentFormat& wanted : formats) {
    const auto is_found = [&](const std::string& key) { return found.count(key) != 0; };
    if (has_moment(is_found, wanted.name)) present.push_back(wanted);
  }
  return made_moments(found, present, param);
}

Keys keys_of(const Dict& dict) {
  Keys keys;
  for (const auto& entry : dict) {
    if (entry.key().isString()) keys.push_back(entry.key().toStringRef());
  }
  return keys;
}

// The states of a state dict by the text of their keys, which are ints in files of Python.
std::map<std::string, c10::IValue> states_of(const Dict& state_dict) {
  std::map<std::string, c10::IValue> states;
  for (const auto& entry : find(state_dict, "state")->toGenericDict()) {
    states[shown(entry.key())] = entry.value();
  }
  return states;
}

// Adds the entries of a dict whose keys another has not.
void insert_others(const Dict& dict, const Dict& others) {
  for (const auto& entry : others) dict.insert(entry.key(), entry.value());
}

// The options of a group as they are after a load: those of the file, but for the configured ones.
std::unique_ptr<FusedOptions> read_options(const OptimizerKind& kind, const std::string& operation,
                                           const Dict& saved, size_t group,
                                           FusedOptions& configured) {
  const std::string place = c10::str(" of param_groups[", group, "]");
  auto missing = new_list();
  for (const OptionDescription& option : kind.options) {
    const bool is_required = option.on_load == OnLoad::kRequired;
    if (is_required && !find(saved, option.name).has_value()) missing.push_back(option.name);
  }
  TORCH_CHECK(missing.empty(), operation, ": param_groups[", group, "] must have ", shown(missing),
              ", got ", shown_keys(saved));
  auto options = kind.make_options();
  const auto kept = configured.options();
  const auto places = options->options();
  for (size_t i = 0; i < places.size(); ++i) {
    const auto& [name, option] = places[i];
    const bool is_fixed = kind.fixed_option != nullptr && name == std::string(kind.fixed_option);
    const auto value = find(saved, name);
    const OnLoad on_load = kind.options[i].on_load;
    const bool stays = !value.has_value() && on_load == OnLoad::kKeptIfMissing;
    if (on_load == OnLoad::kKept || stays) {
      copy_option(kept[i].place, option);
    } else if (value.has_value() && !is_fixed) {
      read_option(kind.options[i], option, *value, c10::str(operation, ": ", name, place));
    }
  }
  for (const char* const name :
       {"bias_correction", "correct_bias"}) {  // the latter of transformers
    const auto value = find(saved, name);
    TORCH_CHECK(!value.has_value() || plain_number(*value).value_or(1.0) != 0.0, operation, ": ",
                name, place, " must be True, got ", shown(*value));
  }
  const auto differentiable = find(saved, "differentiable");
  TORCH_CHECK(!differentiable.has_value() || plain_number(*differentiable).value_or(1.0) == 0.0,
              operation, ": differentiable", place,
              " must be False, got True: a fused kernel is "
              "not differentiable; set it to False in the state dict to go on without gradients "
              "through the steps");
  return options;
}

// Where the state dict of an optimizer lies in a dict that is not one.
std::string what_to_load(const Dict& dict) {
  std::string names, masters;
  for (const auto& entry : dict) {
    const bool is_of_masters =
        entry.key().isString() && entry.key().toStringRef().rfind("fp32_", 0) == 0;
    if (is_of_masters && masters.empty()) {  // apex's FP16_Optimizer and those made after it
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

// The groups of a state dict, which has to have some.
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

at::Tensor tensor_in(const c10::IValue& value, const std::string& where) {
  TORCH_CHECK(value.isTensor(), where, " must be a tensor, got ", shown(value));
  return value.toTensor();
}

at::Tensor read_tensor(const c10::IValue& value, const at::Tensor& param, at::ScalarType dtype,
                       const std::string& where) {
  const at::Tensor tensor = tensor_in(value, where);
  TORCH_CHECK(tensor.sizes().equals(param.sizes()), where, " must have shape ", param.sizes(),
              ", got ", tensor.sizes());
  TORCH_CHECK(tensor.layout() == at::kStrided && tensor.is_floating_point(), where,
              " must be dense and floating, got ", tensor.layout(), ", ",
              python_name(tensor.scalar_type()));
  return at::empty_like(param, param.options().dtype(dtype).requires_grad(false)).copy_(tensor);
}

c10::IValue FusedOptimizer::state_dict() const {
  const OptimizerKind& kind = checked("state_dict").kind;
  auto states = new_dict();
  auto groups = new_list();
  int64_t number = 0;
  std::set<const void*> listed;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const auto& param_group = param_groups_[i];
    auto group = new_dict();
    if (i < impl_->other_entries.size()) insert_others(group, impl_->other_entries[i]);
    const auto options = checked_options(i).clone();
    for (const auto& [name, place] : static_cast<FusedOptions&>(*options).options()) {
      group.insert_or_assign(name, value_of(place));
    }
    for (const OptionDescription& option : kind.options) {
      const bool may_be_none = option.kind == OptionKind::kUnusedOrNone;
      if (option.is_read()) continue;
      group.insert_or_assign(option.name, may_be_none ? c10::IValue() : c10::IValue(false));
    }
    auto params = new_list();
    for (const at::Tensor& param : param_group.params()) {
      listed.insert(param.unsafeGetTensorImpl());
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
    TORCH_CHECK(own == nullptr || listed.count(param) != 0, kind.name,
                ".state_dict: state must be of parameters in param_groups, got one of shape ",
                own->param_.sizes(),
                " that is in no group: put it back, or drop its state, "
                "optimizer.state().erase(param.unsafeGetTensorImpl())");
  }
  insert_others(states, impl_->other_states);
  auto state_dict = new_dict();
  state_dict.insert("state", states);
  state_dict.insert("param_groups", groups);
  return state_dict;
}

void FusedOptimizer::load_state_dict(const c10::IValue& state_dict) {
  const OptimizerKind& kind = checked("load_state_dict").kind;
  const OutsideInferenceMode normal;
  const std::string operation = c10::str(kind.name, ".load_state_dict");
  TORCH_CHECK(state_dict.isGenericDict(), operation, ": state_dict must be a dict, got ",
              shown(state_dict));
  check_nesting(operation, "state_dict", state_dict);
  const SavedGroups groups = saved_groups(operation, state_dict.toGenericDict());
  TORCH_CHECK(groups.size() == param_groups_.size(),
              "loaded state dict has a different number of parameter groups");
  for (size_t i = 0; i < groups.size(); ++i) {
    TORCH_CHECK(find(groups[i], "params")->toListRef().size() == param_groups_[i].params().size(),
                "loaded state dict contains a parameter group that doesn't match the size of "
                "optimizer's group");
  }

  const std::map<std::string, c10::IValue> saved = states_of(state_dict.toGenericDict());
  std::vector<std::string> own = kind.buffer_names(kind.buffers.size());
  for (const auto& [name, place] : kind.make_options()->options()) own.push_back(name);
  std::vector<Keys> group_keys;
  for (const Dict& group : groups) group_keys.push_back(keys_of(group));
  Keys state_keys;
  for (const auto& [key, state] : saved) {
    if (!state.isGenericDict()) continue;
    const Keys keys = keys_of(state.toGenericDict());
    state_keys.insert(state_keys.end(), keys.begin(), keys.end());
  }
  const std::string writer =
      other_writer({kind.name, kind.base_class}, own, group_keys, state_keys);
  TORCH_CHECK(writer.empty(), operation, ": state_dict must have the options and states of ",
              kind.name, ", but is a state dict of ", writer);
  std::vector<std::unique_ptr<FusedOptions>> options;
  std::vector<std::unique_ptr<FusedParamState>> states;
  std::vector<Dict> other_entries;  // such as initial_lr of a scheduler
  std::set<std::string> listed;
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto configured = checked_options(i).clone();
    options.push_back(
        read_options(kind, operation, groups[i], i, static_cast<FusedOptions&>(*configured)));
    options.back()->given_ = static_cast<FusedOptions&>(*configured).given_;
    const auto place = [i] { return c10::str(" of param_groups[", i, "]"); };
    check_group(PlacedOptions(kind, *options.back(), operation, place, &param_groups_[i].params()));
    other_entries.push_back(c10::IValue(groups[i]).deepcopy().toGenericDict());
    const auto params = *find(groups[i], "params");
    const auto keys = params.toListRef();
    for (size_t j = 0; j < keys.size(); ++j) {
      const auto state = saved.find(shown(keys[j]));
      if (state == saved.end()) continue;
      listed.insert(state->first);
      TORCH_CHECK(state->second.isNone() || state->second.isGenericDict(), operation, ": state[",
                  state->first, "] must be a dict, got ", shown(state->second));
      if (state->second.isNone() || state->second.toGenericDict().empty()) continue;
      states.push_back(read_state(*options.back(), param_groups_[i].params()[j],
                                  c10::str(" of group ", i, ", param ", j), state->second));
    }
  }
  const Dict all_states = find(state_dict.toGenericDict(), "state")->toGenericDict();
  TORCH_CHECK(!listed.empty() || saved.empty(), operation,
              ": state must have entries of the parameters that param_groups lists, got ",
              shown_keys(all_states));
  auto other_states = new_dict();
  for (const auto& entry : all_states) {
    if (listed.count(shown(entry.key())) == 0) {
      other_states.insert(entry.key(), entry.value().deepcopy());
    }
  }

  for (size_t i = 0; i < groups.size(); ++i) param_groups_[i].set_options(std::move(options[i]));
  state_.clear();
  for (auto& state : states) {
    void* const param = state->param_.unsafeGetTensorImpl();
    state_[param] = std::move(state);
  }
  impl_->other_entries = std::move(other_entries);
  impl_->other_states = std::move(other_states);
  rebuild();
  impl_->rounded_params = {};
  impl_->progress.reset();
  impl_->grad_norm.reset();
}

// A saved state, checked and copied as the optimizer keeps it.
std::unique_ptr<FusedParamState> FusedOptimizer::read_state(const FusedOptions& options,
                                                            const at::Tensor& param,
                                                            const std::string& place,
                                                            const c10::IValue& value) const {
  const OptimizerKind& kind = impl_->kind;
  const Dict saved = value.toGenericDict();
  const auto where = [&](const std::string& name) {
    return c10::str(kind.name, ".load_state_dict: ", name, place);
  };
  const int count = kind.counts_from_buffer ? 0 : kind.buffer_count(options);
  const auto check_there = [&](const std::string& name, bool is_there) {
    TORCH_CHECK(is_there, where(name), " must be there, got ", shown_keys(saved));
  };
  const auto has_key = [&](const std::string& key) {
    return !find(saved, key).value_or(c10::IValue()).isNone();
  };
  for (const std::string& name : kind.buffer_names(count)) {
    check_there(name, has_moment(has_key, name));
  }
  if (kind.needs_step(options) && !kind.counts_from_buffer) check_there("step", has_key("step"));
  const std::string master_key = key_of_master(options.master_weights_, param.scalar_type());
  const Masters masters = saved_masters(saved, param, where);
  const auto formats = formats_of(options.state_dtype_, kind.buffers, param);
  const Moments moments = read_moments(saved, formats, param, where);
  auto state = std::make_unique<FusedParamState>(param);
  auto others = new_dict();
  for (const auto& entry : saved) {
    const c10::IValue value = entry.value();
    const std::string name = entry.key().isString() ? entry.key().toStringRef() : std::string();
    if (std::find(kMasterKeys.begin(), kMasterKeys.end(), name) != kMasterKeys.end()) {
      if (masters.empty() || master_key.empty() || state->get(master_key).defined()) continue;
      state->set(master_key, loaded_master(param, masters, master_key));  // in the file's order
      continue;
    }
    if (name == "step") {
      if (value.isNone()) continue;
      state->set(name, read_step(value, param.device(), where(name)));
    } else if (is_key_of_moment(name, kind.buffer_names(kind.buffers.size()))) {
      for (const MomentFormat& format : formats) {
        for (const std::string& key : format.keys()) {
          const auto moment = moments.find(key);
          if (moment != moments.end()) state->set(key, moment->second);
        }
      }
    } else if (entry.key().isString() && value.isTensor()) {
      state->set(name, value.toTensor().detach().clone());  // of somebody else
    } else {
      others.insert(entry.key(), value.deepcopy());
    }
  }
  if (!others.empty()) state->others_ = std::make_shared<const c10::IValue>(others);
  return state;
}

}  // namespace amp_ext::optim
