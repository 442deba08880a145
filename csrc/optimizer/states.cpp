// Creates and converts the states of parameters, as the options of their groups require.
#include "optimizer/states.h"

#include <ATen/ops/full.h>

#include <algorithm>

#include "tensors/python_names.h"
#include "tensors/tensor_memory.h"

namespace amp_ext::optim {

namespace {

void drop(StateMap& state, const std::string& key) {
  const auto is_it = [&](const auto& entry) { return entry.first == key; };
  state.erase(std::remove_if(state.begin(), state.end(), is_it), state.end());
}

Moments moments_in(const StateSpec& spec, const StateMap& state) {
  const auto names = spec.all_names();
  Moments moments;
  for (const auto& [key, tensor] : state) {
    if (tensor.defined() && is_key_of_moment(key, names)) moments[key] = tensor;
  }
  return moments;
}

// Throws if only a part of a state exists: new moments of 0 would not fit an old step count. The
// buffer of an option may be missing, because a training loop may switch the option on.
void check_nothing_is_missing(const StateSpec& spec, const ParamRef& param, const StateMap& state) {
  const bool has_step = spec.keeps_step && tensor_under(state, "step").defined();
  if (!has_step && moments_in(spec, state).empty()) return;
  std::vector<std::string> keys;
  for (const auto& entry : state) keys.push_back(entry.first);
  for (const std::string& key : spec.missing_from(keys_in(state))) {
    const auto is_optional = [&](const BufferDescription& buffer) {
      return buffer.option != nullptr && key == buffer.name;
    };
    TORCH_CHECK_VALUE(std::any_of(spec.buffers.begin(), spec.buffers.end(), is_optional),
                      spec.optimizer, ": ", key, " of ", param.place(), " must be present, got ",
                      python_list(keys));
  }
}

// Returns the step count to set in a state; empty if the state's own count is valid.
std::optional<double> steps_behind(const StateSpec& spec, const StateMap& state) {
  const bool lacks_step = !tensor_under(state, "step").defined();
  if (!spec.needs_buffers && !spec.buffers.empty()) {  // torch's SGD stores no step count
    const auto names = spec.all_names();
    const bool has_buffers = std::all_of(names.begin(), names.end(), [&](const std::string& name) {
      return has_moment(keys_in(state), name);
    });
    if (!has_buffers && spec.buffer_count > 0) return 0.0;
    if (has_buffers && lacks_step) return 1.0;
  }
  return lacks_step ? std::optional<double>(0.0) : std::nullopt;
}

}  // namespace

at::Tensor tensor_under(const StateMap& state, const std::string& key) {
  for (const auto& [name, tensor] : state) {
    if (name == key) return tensor;
  }
  return {};
}

void set_under(StateMap& state, const std::string& key, at::Tensor tensor) {
  for (auto& [name, value] : state) {
    if (name != key) continue;
    value = std::move(tensor);
    return;
  }
  state.emplace_back(key, std::move(tensor));
}

HasKey keys_in(const StateMap& state) {
  return [&state](const std::string& key) { return tensor_under(state, key).defined(); };
}

Masters masters_in(const StateMap& state) {
  Masters masters;
  for (const char* const key : kMasterKeys) {
    const at::Tensor master = tensor_under(state, key);
    if (master.defined()) masters[key] = master;
  }
  return masters;
}

std::vector<std::string> StateSpec::all_names() const {
  std::vector<std::string> names;
  for (const BufferDescription& buffer : buffers) names.emplace_back(buffer.name);
  return names;
}

std::vector<std::string> StateSpec::names() const {
  std::vector<std::string> names = all_names();
  names.resize(buffer_count);
  return names;
}

bool StateSpec::is_key(const std::string& key) const {
  return key == "step" ||
         std::find(kMasterKeys.begin(), kMasterKeys.end(), key) != kMasterKeys.end() ||
         is_key_of_moment(key, all_names());
}

std::vector<MomentFormat> StateSpec::formats(const ParamRef& param) const {
  return formats_of(state_dtype, buffers, param.unsharded, param.shards_whole_rows);
}

bool StateSpec::has_codes(const ParamRef& param) const {
  const auto formats = this->formats(param);
  return std::any_of(formats.begin(), formats.end(),
                     [](const MomentFormat& format) { return format.is_coded(); });
}

std::string StateSpec::master_key(const ParamRef& param) const {
  return key_of_master(master_weights, param.unsharded.scalar_type());
}

std::vector<std::string> StateSpec::missing_from(const HasKey& has_key) const {
  std::vector<std::string> missing;
  for (const std::string& name : needs_buffers ? names() : std::vector<std::string>()) {
    if (!has_moment(has_key, name)) missing.push_back(name);
  }
  if (needs_step && keeps_step && !has_key("step")) missing.emplace_back("step");
  return missing;
}

StateSpec state_spec_of(std::string optimizer, const GroupOptions& options) {
  return state_spec_of(std::move(optimizer), options, options.description().requirements(options));
}

StateSpec state_spec_of(std::string optimizer, const GroupOptions& options,
                        const StateRequirements& requirements) {
  const bool needs_buffers = !options.description().counts_from_buffer;
  return {std::move(optimizer),
          options.description().buffers,
          buffer_count(options),
          requirements.counted_steps(),
          needs_buffers,
          needs_buffers && requirements.step,
          options.master_weights(),
          options.state_dtype(),
          options.rounding()};
}

void check_is_stepped(const StateSpec& spec, const ParamRef& param, const std::string& operation) {
  const at::ScalarType dtype = param.unsharded.scalar_type();
  const at::Device device = param.unsharded.device();
  TORCH_CHECK((is_16_bit(dtype) || dtype == at::kFloat || dtype == at::kDouble) &&
                  (device.is_cpu() || device.is_cuda()),
              spec.optimizer, ".", operation, ": param of ", param.place(),
              " must be float32, float64, float16 or bfloat16 on cpu or cuda, got ",
              python_name(dtype), " on ", device);
}

StateMap complete_state(const StateSpec& spec, const ParamRef& param, StateMap state) {
  check_nothing_is_missing(spec, param, state);
  const at::Device device = param.local.device();
  const auto convert = [&](const std::string& key, at::ScalarType dtype) {
    const at::Tensor tensor = tensor_under(state, key);
    if (tensor.scalar_type() == dtype && tensor.device() == device) return;
    set_under(state, key, tensor.to(device, dtype));
  };
  if (spec.keeps_step) {
    const auto steps = steps_behind(spec, state);
    const auto float32 = at::TensorOptions(device).dtype(at::kFloat);
    if (steps.has_value()) set_under(state, "step", at::full({}, *steps, float32));
    convert("step", at::kFloat);
  }
  const std::string master_key = spec.master_key(param);
  if (!master_key.empty()) {
    const at::Tensor master = tensor_under(state, master_key);
    if (!master.defined()) {
      set_under(state, master_key, convert_master(param.local, masters_in(state), master_key));
    } else {  // Plan checks the dtype of a residual later
      convert(master_key, master_key == kFp32Master ? at::kFloat : master.scalar_type());
    }
  }
  for (const char* const other : kMasterKeys) {
    if (other != master_key) drop(state, other);
  }
  const Moments moments = moments_in(spec, state);
  std::vector<MomentFormat> formats;
  for (const MomentFormat& format : spec.formats(param)) {
    const bool is_used = formats.size() < static_cast<size_t>(spec.buffer_count);
    // Also converts unused buffers, because a training loop may change the group's options.
    if (is_used || has_moment(keys_in(state), format.name)) formats.push_back(format);
  }
  const Moments made = convert_moments(moments, formats, param.local);
  for (const auto& [key, moment] : moments) {
    if (made.count(key) == 0) drop(state, key);
  }
  for (const MomentFormat& format : formats) {
    for (const std::string& key : format.keys()) set_under(state, key, made.at(key));
  }
  return state;
}

ParamState state_of_step(const StateSpec& spec, const ParamRef& param, const StateMap& state) {
  ParamState tensors;
  const std::vector<MomentFormat> formats = spec.formats(param);
  for (int i = 0; i < spec.buffer_count; ++i) {
    tensors.buffers.push_back(tensor_under(state, formats[i].key()));
    if (tensors.exponents.defined()) continue;
    tensors.exponents = tensor_under(state, formats[i].exponents_key());
  }
  tensors.master_param = tensor_under(state, spec.master_key(param));
  if (spec.keeps_step) tensors.step = tensor_under(state, "step");
  return tensors;
}

StateMap float32_state(const StateSpec& spec, const ParamRef& param, const StateMap& state) {
  StateMap found;
  const Moments moments = dequantized_moments(moments_in(spec, state), spec.buffers);
  for (const std::string& name : spec.all_names()) {
    const auto moment = moments.find(name);
    if (moment == moments.end()) continue;
    const at::ScalarType dtype =
        moment->second.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    found.emplace_back(name, moment->second.to(dtype, /*non_blocking=*/false, /*copy=*/true));
  }
  const Masters masters = masters_in(state);
  if (!masters.empty()) {
    found.emplace_back(kFp32Master, fp32_master(param.local, masters).detach().clone());
  }
  return found;
}

std::pair<std::vector<int64_t>, std::vector<int64_t>> layout_under(const StateSpec& spec,
                                                                   const std::string& key,
                                                                   const at::Tensor& param) {
  if (key == "step") return {};
  if (is_key_of_exponents(key, spec.all_names())) {
    std::vector<int64_t> sizes = sizes_of_exponents(param);
    std::vector<int64_t> strides(sizes.size(), 1);
    if (sizes.size() == 2) strides[0] = sizes[1];
    return {std::move(sizes), std::move(strides)};
  }
  std::vector<int64_t> sizes = param.sizes().vec(), strides = param.strides().vec();
  if (has_two_bytes(key)) {
    for (int64_t& stride : strides) stride *= 2;
    sizes.push_back(2);
    strides.push_back(1);
  }
  return {std::move(sizes), std::move(strides)};
}

}  // namespace amp_ext::optim
