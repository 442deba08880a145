// What tells one optimizer of the C++ interface from the others.
#pragma once

#include <amp_ext/hyperparameters.h>
#include <amp_ext/optim.h>
#include <amp_ext/options.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "optimizer/optimizer_description.h"

namespace amp_ext::optim {

// The options of a group by the places of FusedOptions, which are in the order of the description.
class PlacedOptions final : public GroupOptions {
 public:
  // For checks with what errors call the optimizer, what stands behind the names of options in
  // them, " of group 1", and the parameters of the group.
  PlacedOptions(const OptimizerDescription& optimizer_class, const FusedOptions& options,
                std::string operation = {}, std::function<std::string()> place = {},
                const std::vector<at::Tensor>* params = nullptr)
      : GroupOptions(optimizer_class),
        places_(const_cast<FusedOptions&>(options).options()),
        operation_(std::move(operation)),
        place_(std::move(place)),
        params_(params) {}

  double number(const OptionDescription& option, size_t index) const override;
  MasterWeights master_weights() const override { return value<MasterWeights>("master_weights"); }
  StateDType state_dtype() const override { return value<StateDType>("state_dtype"); }
  std::optional<std::string> rounding() const override {
    return value<std::optional<std::string>>("rounding");
  }
  std::optional<double> max_grad_norm() const override {
    return value<std::optional<double>>("max_grad_norm");
  }
  std::string shown(const OptionDescription& option, std::optional<size_t> index) const override;
  std::string name_of(const OptionDescription& option) const override;
  bool has_float16_params() const override;
  bool takes_tensors() const override { return false; }

 private:
  template <typename Value>
  const Value& value(const char* option) const {
    return *std::get<Value*>(places_[description().option(option).index].place);
  }

  std::vector<FusedOptions::Option> places_;
  std::string operation_;
  std::function<std::string()> place_;
  const std::vector<at::Tensor>* params_ = nullptr;
};

// Copies an option to the place of the same in other options.
void copy_option(const OptionPlace& from, const OptionPlace& to);

struct OptimizerClass : OptimizerDescription {
  const std::type_info* type = nullptr;
  const char* name = nullptr;          // in messages and state dicts: "AdamW"
  const char* base_class = nullptr;    // that it extends in Python, or its own
  const char* fixed_option = nullptr;  // that a state dict can't change either
  std::unique_ptr<FusedOptions> (*make_options)() = nullptr;
};

}  // namespace amp_ext::optim
