// Lists the options that all optimizers share, and reads the options of a group.
#include <amp_ext/optim.h>

#include <algorithm>
#include <limits>

#include "libtorch/optimizer_impl.h"

namespace amp_ext::optim {

namespace {

// Returns a state_dtype as Python prints it: "torch.bfloat16", "'8bit'" or "None".
std::string name_of_form(const StateDType& state_dtype) {
  if (const auto* const dtype = std::get_if<at::ScalarType>(&state_dtype.value())) {
    return python_name(*dtype);
  }
  const auto* const text = std::get_if<std::string>(&state_dtype.value());
  return text == nullptr ? "None" : "'" + *text + "'";
}

}  // namespace

std::vector<FusedOptions::Option> FusedOptions::options() {
  return {{"lr", &lr_},
          {"weight_decay", &weight_decay_},
          {"maximize", &maximize_},
          {"decoupled_weight_decay", &decoupled_weight_decay_},
          {"master_weights", &master_weights_},
          {"state_dtype", &state_dtype_},
          {"rounding", &rounding_},
          {"max_grad_norm", &max_grad_norm_},
          {"clip_value", &clip_value_},
          {"skip_nonfinite", &skip_nonfinite_},
          {"write_back_grads", &write_back_grads_}};
}

bool FusedOptions::dithers() const { return may_dither(master_weights_, state_dtype_, rounding_); }

double PlacedOptions::number(const OptionDescription& option, size_t index) const {
  const OptionPlace& place = places_[option.index].place;
  if (auto* const* number = std::get_if<double*>(&place)) return **number;
  if (auto* const* flag = std::get_if<bool*>(&place)) return **flag ? 1.0 : 0.0;
  if (auto* const numbers = std::get_if<std::vector<double*>>(&place)) return *(*numbers)[index];
  const auto& limit = *std::get<std::optional<double>*>(place);
  return limit.value_or(std::numeric_limits<double>::infinity());
}

std::string PlacedOptions::shown(const OptionDescription& option,
                                 std::optional<size_t> index) const {
  switch (option.type) {
    case OptionType::kMasters:
      return "'" + std::get<std::string>(master_weights().value()) + "'";
    case OptionType::kStates:
      return name_of_form(state_dtype());
    case OptionType::kRounding:
      return "'" + rounding().value() + "'";
    case OptionType::kFlag:
      return number(option, 0) != 0.0 ? "True" : "False";
    case OptionType::kNumbers:
      if (!index.has_value()) break;
      [[fallthrough]];
    default:
      if (option.type == OptionType::kLimit &&
          !std::get<std::optional<double>*>(places_[option.index].place)->has_value()) {
        return "None";
      }
      return c10::str(number(option, index.value_or(0)));
  }
  std::string numbers;
  for (size_t i = 0; i < option.fields.size(); ++i) {
    numbers += c10::str(i == 0 ? "" : ", ", number(option, i));
  }
  return "(" + numbers + ")";
}

std::string PlacedOptions::name_of(const OptionDescription& option) const {
  return operation_ + ": " + option.name + place_();
}

bool PlacedOptions::has_float16_params() const {
  return std::any_of(params_->begin(), params_->end(), [](const at::Tensor& param) {
    return param.defined() && param.scalar_type() == at::kHalf;
  });
}

void copy_option(const OptionPlace& from, const OptionPlace& to) {
  const auto copy = [&](const auto& place) {
    const auto& source = std::get<std::decay_t<decltype(place)>>(from);
    if constexpr (std::is_same_v<std::decay_t<decltype(place)>, std::vector<double*>>) {
      for (size_t i = 0; i < place.size(); ++i) *place[i] = *source[i];
    } else {
      *place = *source;
    }
  };
  std::visit(copy, to);
}

}  // namespace amp_ext::optim
