// The private members of an optimizer of the C++ interface, the description of its class, and
// access to its options by index.
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

#include "libtorch/values.h"
#include "optimizer/optimizer_description.h"
#include "optimizer/plan.h"
#include "optimizer/states.h"
#include "tensors/python_names.h"

namespace amp_ext::optim {

// Reads the options of a group through the pointers of FusedOptions::options(), which are in the
// order of OptimizerDescription::options.
class PlacedOptions final : public GroupOptions {
 public:
  // The last three arguments are needed only for checks. Errors name an option by `operation`, its
  // name and place(), for example "AdamW: lr of group 1". `params` are the parameters of the group.
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

// Copies the value of an option from one FusedOptions to another.
void copy_option(const OptionPlace& from, const OptionPlace& to);

struct OptimizerClass : OptimizerDescription {
  const std::type_info* type = nullptr;
  const char* name = nullptr;          // name of the class in messages and state dicts: "AdamW"
  const char* base_class = nullptr;    // name of the Python base class; `name` if there is none
  const char* fixed_option = nullptr;  // name of an option that state dicts can't change, or null
  std::unique_ptr<FusedOptions> (*make_options)() = nullptr;
};

struct FusedOptimizer::Impl {
  explicit Impl(const OptimizerClass& optimizer_class)
      : optimizer_class(optimizer_class), plan(std::make_unique<Plan>(optimizer_class.name)) {}

  const OptimizerClass& optimizer_class;
  std::unique_ptr<Plan> plan;
  size_t state_count = 0;           // size of state() when the parameters were registered
  std::vector<Dict> other_entries;  // for each group, unknown entries of the loaded state dict
  Dict other_states = new_dict();   // states of the loaded state dict that belong to no parameter
};

// Returns the parameters of all groups, to be registered. Errors begin with the optimizer's name.
std::vector<ParamTable::Param> params_in(const FusedOptimizer& optimizer, const char* name);

// True if two states have the same tensors under the same keys.
bool have_same_tensors(const StateMap& a, const StateMap& b);

// Returns the name of a parameter for errors, for example "group 0, param 3".
inline std::string place(size_t group, size_t index) {
  return c10::str("group ", group, ", param ", index);
}

}  // namespace amp_ext::optim
