// Checks and converts the states of parameters in files.
#include "optimizer/saved_states.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "tensors/python_names.h"

namespace amp_ext::optim {

namespace {

using Where = std::function<std::string(const std::string& key)>;

HasKey present_in(const SavedState& saved) {
  return [&saved](const std::string& key) { return saved.find(key) != nullptr; };
}

const at::Tensor& tensor_in(const SavedValue& value, const std::string& where) {
  TORCH_CHECK_VALUE(value.tensor.defined(), where, " must be a tensor, got ", value.type);
  return value.tensor;
}

void check_numbers(const SavedValue& value, const at::Tensor& param, const std::string& where) {
  const at::Tensor& tensor = tensor_in(value, where);
  TORCH_CHECK_VALUE(tensor.sizes().equals(param.sizes()), where, " must have shape ",
                    python_name(param.sizes()), ", got ", python_name(tensor.sizes()));
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.is_floating_point(), where,
                    " must be dense and floating-point, got ", python_name(tensor.layout()), ", ",
                    python_name(tensor.scalar_type()));
}

void check_step(const SavedValue& value, const std::string& where) {
  const at::Tensor& tensor = value.tensor;
  TORCH_CHECK_VALUE(!tensor.defined() || tensor.numel() == 1, where,
                    " must be one number, got shape ", python_name(tensor.sizes()));
  TORCH_CHECK_VALUE(value.number.has_value(), where, " must be one number, got ", value.text);
  TORCH_CHECK_VALUE(*value.number >= 0.0 && *value.number <= std::numeric_limits<float>::max(),
                    where, " must be finite and at least 0, got ", value.text);
}

void check_masters(const ParamRef& param, const SavedState& saved, const Where& where) {
  for (const char* const key : kMasterKeys) {
    const SavedValue* const value = saved.find(key);
    if (value == nullptr) continue;
    if (key != std::string(kFp32Master)) {
      const at::Tensor& residual = tensor_in(*value, where(key));
      if (is_residual(residual)) check_residual_layout(key, residual, param.unsharded, where(key));
      continue;
    }
    TORCH_CHECK_VALUE(
        !value->tensor.defined() || value->tensor.scalar_type() != at::kShort, where(key),
        " must be floating-point, got torch.int16, as TransformerEngine's FusedAdam writes with "
        "store_param_remainders=True. Delete 'master_param' from the states, so that masters are "
        "made from the parameters");
    check_numbers(*value, param.unsharded, where(key));
  }
}

// Returns the quantized formats in which a file has a moment. None if the file also has it as a
// floating-point tensor, which a program without 8-bit support must have added later.
std::vector<MomentFormat> codes_of(const SavedState& saved, const std::string& name) {
  if (saved.find(name) != nullptr) return {};
  return saved_codes(present_in(saved), name);
}

void check_moments(const StateSpec& spec, const ParamRef& param, const SavedState& saved,
                   const Where& where) {
  for (const std::string& name : spec.all_names()) {
    if (const SavedValue* const numbers = saved.find(name)) {
      check_numbers(*numbers, param.unsharded, where(name));
    }
    for (const MomentFormat& format : codes_of(saved, name)) {
      for (const std::string& key : format.keys()) {
        const SavedValue* const value = saved.find(key);
        TORCH_CHECK_VALUE(value != nullptr, where(key), " must be present, got ", saved.keys);
        check_code(tensor_in(*value, where(key)), format, key, param.unsharded, where(key));
      }
    }
  }
}

// Returns a copy of a floating-point tensor in the layout of the parameter.
at::Tensor copy_of(const SavedValue& value, const at::Tensor& param, at::ScalarType dtype) {
  const auto options = param.options().dtype(dtype).requires_grad(false);
  return at::empty_like(param, options).copy_(value.tensor);
}

Masters loaded_masters(const ParamRef& param, const SavedState& saved) {
  Masters masters;
  for (const char* const key : kMasterKeys) {
    const SavedValue* const value = saved.find(key);
    if (value == nullptr) continue;
    if (key == std::string(kFp32Master)) {
      masters[key] = copy_of(*value, param.local, at::kFloat);
    } else if (is_residual(value->tensor)) {
      masters[key] = empty_residual(key, param.local).copy_(value->tensor);
    }
  }
  return masters;
}

// Returns all moments in a file, also unused ones: a training loop may change the group's options.
StateMap loaded_moments(const StateSpec& spec, const ParamRef& param, const SavedState& saved) {
  const std::vector<MomentFormat> formats = spec.formats(param);
  Moments found;
  for (const MomentFormat& wanted : formats) {
    for (const MomentFormat& format : codes_of(saved, wanted.name)) {
      for (const std::string& key : format.keys()) {
        found[key] = empty_code(format, key, param.local).copy_(saved.find(key)->tensor);
      }
    }
  }
  const bool has_codes = !found.empty();
  for (const MomentFormat& wanted : formats) {
    const SavedValue* const numbers = saved.find(wanted.name);
    if (numbers == nullptr) continue;
    // A second moment stays float32 until the ratios to its root are quantized.
    const bool is_exact = !wanted.is_coded() && (!has_codes || wanted.dtype == at::kDouble);
    found[wanted.name] = copy_of(*numbers, param.local, is_exact ? wanted.dtype : at::kFloat);
  }
  std::vector<MomentFormat> present;
  for (const MomentFormat& wanted : formats) {
    const auto is_found = [&](const std::string& key) { return found.count(key) != 0; };
    if (has_moment(is_found, wanted.name)) present.push_back(wanted);
  }
  const Moments made = convert_moments(found, present, param.local);
  StateMap moments;
  for (const MomentFormat& format : present) {
    for (const std::string& key : format.keys()) moments.emplace_back(key, made.at(key));
  }
  return moments;
}

}  // namespace

const SavedValue* SavedState::find(const std::string& key) const {
  const auto is_it = [&](const auto& entry) { return entry.first == key; };
  const auto found = std::find_if(values.begin(), values.end(), is_it);
  return found == values.end() ? nullptr : &found->second;
}

void check_saved_state(const StateSpec& spec, const ParamRef& param, const SavedState& saved,
                       const std::string& operation) {
  const auto where = [&](const std::string& key) {
    return c10::str(operation, ": ", key, " of ", param.place());
  };
  for (const std::string& key : spec.missing_from(present_in(saved))) {
    TORCH_CHECK_VALUE(false, where(key), " must be present, got ", saved.keys);
  }
  check_masters(param, saved, where);
  check_moments(spec, param, saved, where);
  if (const SavedValue* const step = saved.find("step")) check_step(*step, where("step"));
}

StateMap loaded_state(const StateSpec& spec, const ParamRef& param, const SavedState& saved) {
  const std::string master_key = spec.master_key(param);
  const Masters masters = loaded_masters(param, saved);
  const StateMap moments = loaded_moments(spec, param, saved);
  const auto names = spec.all_names();
  StateMap state;
  for (const auto& [key, value] : saved.values) {
    if (key == "step") {
      const auto options = at::TensorOptions(param.local.device()).dtype(at::kFloat);
      set_under(state, key, at::full({}, *value.number, options));
    } else if (is_key_of_moment(key, names)) {
      for (const auto& [name, moment] : moments) set_under(state, name, moment);
    } else if (!masters.empty() && !master_key.empty()) {
      set_under(state, master_key, loaded_master(param.local, masters, master_key));
    }
  }
  return state;
}

std::vector<MomentFormat> blocks_in(const StateSpec& spec, const SavedState& saved) {
  std::vector<MomentFormat> found;
  for (const std::string& name : spec.all_names()) {
    for (MomentFormat& format : codes_of(saved, name)) {
      if (!format.exponents_key().empty()) found.push_back(std::move(format));
    }
  }
  return found;
}

}  // namespace amp_ext::optim
