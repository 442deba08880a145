// Constructs the optimizers of the C++ interface, and adds and checks their parameter groups.
#include <amp_ext/optim.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "libtorch/optimizer_impl.h"

namespace amp_ext::optim {

namespace {

// Copies the options that the user has set in `from` to `options`.
void take_given(FusedOptions& options, FusedOptions& from) {
  const auto places = options.options();
  const auto given = from.options();
  for (size_t i = 0; i < places.size(); ++i) {
    if (from.is_given(given[i].name)) copy_option(given[i].place, places[i].place);
  }
}

PlacedOptions options_of_group(const OptimizerClass& optimizer_class, const FusedOptions& options,
                               size_t group, const std::vector<at::Tensor>& params) {
  const auto place = [group] { return c10::str(" of group ", group); };
  return {optimizer_class, options, optimizer_class.name, place, &params};
}

}  // namespace

FusedOptimizer::FusedOptimizer(const OptimizerClass& optimizer_class,
                               const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                               std::unique_ptr<FusedOptions> defaults)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::move(defaults)),
      impl_(std::make_shared<Impl>(optimizer_class)) {
  auto& options = static_cast<FusedOptions&>(*defaults_);
  options.are_defaults_ = true;
  const PlacedOptions placed(
      optimizer_class, options, optimizer_class.name, [] { return std::string(); }, nullptr);
  check_as_torch(placed);
  check_values(placed);
  TORCH_CHECK(!param_groups.empty(), "optimizer got an empty parameter list");
  for (const auto& group : param_groups) add_param_group(group);
}

FusedOptimizer::~FusedOptimizer() = default;
FusedOptimizer::FusedOptimizer(FusedOptimizer&&) noexcept = default;

FusedOptimizer& FusedOptimizer::operator=(FusedOptimizer&& other) noexcept {
  if (this == &other) return *this;  // torch's self-assignment would lose the parameter groups
  Optimizer::operator=(std::move(other));
  impl_ = std::move(other.impl_);
  return *this;
}

// Returns the private members. Throws if the optimizer was moved from; errors name `operation`.
FusedOptimizer::Impl& FusedOptimizer::checked(const char* operation) const {
  TORCH_CHECK(impl_ != nullptr, c10::demangle(typeid(*this).name()), ".", operation,
              ": the optimizer was moved from. Use the object that it was moved to.");
  return *impl_;
}

void FusedOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& param_group) {
  const char* const name = checked("add_param_group").optimizer_class.name;
  const size_t group = param_groups_.size();
  auto merged = defaults_->clone();
  auto& options = static_cast<FusedOptions&>(*merged);
  options.are_defaults_ = false;
  if (param_group.has_options()) {
    const auto given = param_group.options().clone();
    check_options_type(*given, group);
    take_given(options, static_cast<FusedOptions&>(*given));
  }
  check_group(options_of_group(impl_->optimizer_class, options, group, param_group.params()));
  std::unordered_set<const void*> others;
  for (const auto& other : param_groups_) {
    for (const at::Tensor& param : other.params()) others.insert(param.unsafeGetTensorImpl());
  }
  std::unordered_map<const void*, size_t> first_index;
  const auto& params = param_group.params();
  for (size_t i = 0; i < params.size(); ++i) {
    TORCH_CHECK(params[i].defined(), name, ": param of ", place(group, i),
                " must be a tensor, got an undefined one");
    TORCH_CHECK(params[i].is_leaf(), "can't optimize a non-leaf Tensor");
    const void* const param = params[i].unsafeGetTensorImpl();
    TORCH_CHECK(others.count(param) == 0,
                "some parameters appear in more than one parameter group");
    const size_t first = first_index.emplace(param, i).first->second;
    TORCH_CHECK(first == i, name, ": param ", i, " of group ", group,
                " is already listed as param ", first, ". List each parameter once.");
  }
  for (const auto& option : options.options()) options.given_.insert(option.name);
  // Doesn't call torch's add_param_group, which may drop the options.
  param_groups_.emplace_back(params, std::move(merged));
  rebuild();
}

// Throws if a user has set the options of another optimizer class through torch's interface.
void FusedOptimizer::check_options_type(const torch::optim::OptimizerOptions& options,
                                        size_t group) const {
  const torch::optim::OptimizerOptions& defaults = *defaults_;
  TORCH_CHECK(typeid(options) == typeid(defaults), impl_->optimizer_class.name,
              ": options of group ", group,
              " must be amp_ext::optim::", impl_->optimizer_class.name,
              "Options, got those of another optimizer");
}

// Returns the options of a group. Throws if the group shares the defaults of the optimizer.
const FusedOptions& FusedOptimizer::checked_options(size_t group) const {
  check_options_type(param_groups_[group].options(), group);
  const auto& options = static_cast<const FusedOptions&>(param_groups_[group].options());
  TORCH_CHECK(
      !options.are_defaults_, impl_->optimizer_class.name, ": group ", group,
      " has no options of its own, because add_param_group() of torch::optim::Optimizer drops "
      "them. Add the group with add_param_group() of amp_ext::optim::",
      impl_->optimizer_class.name, ".");
  return options;
}

FusedOptions& FusedOptimizer::options_of(size_t group) {
  return const_cast<FusedOptions&>(checked_options(group));
}

// Checks and returns the options of all groups, which a training loop may have changed.
std::vector<PlacedOptions> FusedOptimizer::checked_groups() {
  TORCH_CHECK(!param_groups_.empty(), impl_->optimizer_class.name,
              ": the optimizer has no parameter groups. Call add_param_group() first.");
  std::vector<PlacedOptions> groups;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    groups.push_back(
        options_of_group(impl_->optimizer_class, options_of(i), i, param_groups_[i].params()));
    check_group(groups[i]);
  }
  return groups;
}

bool FusedOptimizer::unscales_in_step() const {
  return typeid(*this) == *checked("unscales_in_step").optimizer_class.type;
}

std::shared_ptr<const void> FusedOptimizer::identity() const { return impl_; }

}  // namespace amp_ext::optim
