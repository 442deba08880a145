// The options of a group: which there are, and which values they may have.
#include <amp_ext/optim.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "libtorch/optimizer_impl.h"

namespace amp_ext::optim {

namespace {

// As Python prints it.
std::string name_of_form(const StateDType& state_dtype) {
  if (const auto* const dtype = std::get_if<at::ScalarType>(&state_dtype.value())) {
    return python_name(*dtype);
  }
  const auto* const text = std::get_if<std::string>(&state_dtype.value());
  return text == nullptr ? "None" : "'" + *text + "'";
}

}  // namespace

void check_options(const std::string& operation, const OptimizerKind& kind,
                   const std::vector<FusedOptions::Option>& options,
                   const std::function<std::string()>& place_of_option) {
  const auto check = [&](const char* name, bool fits, const char* wanted, const auto&... got) {
    TORCH_CHECK(fits, operation, ": ", name, place_of_option(), " must be ", wanted, ", got ",
                got...);
  };
  const auto& not_negative = kind.not_negative;
  for (const auto& [name, place] : options) {
    if (auto* const* number = std::get_if<double*>(&place)) {
      const bool has_floor =
          std::find(not_negative.begin(), not_negative.end(), name) != not_negative.end();
      check(name, has_floor ? **number >= 0.0 : !std::isnan(**number),
            has_floor ? "a number of at least 0" : "a number", **number);
    } else if (auto* const* limit = std::get_if<std::optional<double>*>(&place)) {
      const double value = (*limit)->value_or(0.0);
      check(name, value >= 0.0, "a number of at least 0 or None", value);
    } else if (auto* const betas = std::get_if<NumberPlaces>(&place)) {
      const double beta1 = (*betas)[0], beta2 = (*betas)[1];
      check(name, !std::isnan(beta1) && !std::isnan(beta2), "two numbers", "(", beta1, ", ", beta2,
            ")");
    } else if (auto* const* state_dtype = std::get_if<StateDType*>(&place)) {
      const StateDType& value = **state_dtype;
      const bool fits = !value.has_value() || value == at::kFloat || value == at::kBFloat16;
      check(name, fits || value.is_coded(),
            "torch.float32, torch.bfloat16, '8bit-bf16', '8bit' or None", name_of_form(value),
            value == at::kHalf || value == "float16"
                ? ", in which second moments of small gradients are 0"
                : "");
    } else if (auto* const* masters = std::get_if<MasterWeights*>(&place)) {
      const auto* const form = std::get_if<std::string>(&(*masters)->value());
      check(name, form == nullptr || *form == "split" || *form == "split8",
            "True, False, 'split' or 'split8'", "'", form == nullptr ? "" : *form, "'");
    } else if (auto* const* rounding = std::get_if<std::optional<std::string>*>(&place)) {
      const std::string value = (*rounding)->value_or("nearest");
      check(name, value == "dither" || value == "nearest", "'dither', 'nearest' or None", "'",
            value, "'");
    }
  }
}

void check_group(const std::string& operation, const OptimizerKind& kind,
                 const std::vector<FusedOptions::Option>& options,
                 const std::function<std::string()>& place_of_option) {
  check_options(operation, kind, options, place_of_option);
  const auto place_of = [&](const char* name) {
    const auto is_it = [&](const auto& option) { return std::strcmp(option.name, name) == 0; };
    const auto found = std::find_if(options.begin(), options.end(), is_it);
    return found == options.end() ? OptionPlace() : found->place;
  };
  const StateDType& state_dtype = *std::get<StateDType*>(place_of("state_dtype"));
  if (!state_dtype.is_coded()) return;
  const OptionPlace amsgrad = place_of("amsgrad");
  const bool* const* const flag = std::get_if<bool*>(&amsgrad);
  TORCH_CHECK(flag == nullptr || !**flag, operation, ": state_dtype", place_of_option(),
              " must be torch.float32, torch.bfloat16 or None with amsgrad, whose maximum has no "
              "code, got ",
              name_of_form(state_dtype));
}

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

bool FusedOptions::dithers() const {
  return optim::dithers(master_weights_, state_dtype_, rounding_);
}

double PlacedOptions::number(const OptionDescription& option, size_t index) const {
  const OptionPlace& place = places_[option.index].place;
  if (auto* const* number = std::get_if<double*>(&place)) return **number;
  if (auto* const* flag = std::get_if<bool*>(&place)) return **flag ? 1.0 : 0.0;
  if (auto* const numbers = std::get_if<NumberPlaces>(&place)) return (*numbers)[index];
  const auto& limit = *std::get<std::optional<double>*>(place);
  return limit.value_or(std::numeric_limits<double>::infinity());
}

std::string PlacedOptions::shown(const OptionDescription& option,
                                 std::optional<size_t> index) const {
  return c10::str(number(option, *index));
}

void copy_option(const OptionPlace& from, const OptionPlace& to) {
  const auto copy = [&](const auto& place) {
    const auto& source = std::get<std::decay_t<decltype(place)>>(from);
    if constexpr (std::is_same_v<std::decay_t<decltype(place)>, NumberPlaces>) {
      for (size_t i = 0; i < place.size(); ++i) place[i] = source[i];
    } else {
      *place = *source;
    }
  };
  std::visit(copy, to);
}

}  // namespace amp_ext::optim
