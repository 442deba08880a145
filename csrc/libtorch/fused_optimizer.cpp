// Groups, states, masters and the step of all optimizers of the C++ interface.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <amp_ext/ops.h>
#include <amp_ext/optim.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "libtorch/masters.h"
#include "libtorch/moments.h"
#include "libtorch/optimizer_impl.h"
#include "tensors/tensor_memory.h"

namespace amp_ext::optim {

namespace {

constexpr const char* kHowToGoOn =
    "load a checkpoint into the model, and into the optimizer with load_state_dict()";

std::string place(size_t group, size_t index) {
  return c10::str("group ", group, ", param ", index);
}

// Copies the options that were set.
void take_given(FusedOptions& options, FusedOptions& from) {
  const auto places = options.options();
  const auto given = from.options();
  for (size_t i = 0; i < places.size(); ++i) {
    if (!from.is_given(given[i].name)) continue;
    std::visit([&](auto* place) { *place = *std::get<decltype(place)>(given[i].place); },
               places[i].place);
  }
}

bool have_same_tensors(const FusedParamState& a, const FusedParamState& b) {
  const auto are_same = [](const auto& one, const auto& other) {
    return one.first == other.first && one.second.is_same(other.second);
  };
  return std::equal(a.tensors().begin(), a.tensors().end(), b.tensors().begin(), b.tensors().end(),
                    are_same);
}

// As Python prints it.
std::string name_of_form(const StateDType& state_dtype) {
  if (const auto* const dtype = std::get_if<at::ScalarType>(&state_dtype.value())) {
    return python_name(*dtype);
  }
  const auto* const text = std::get_if<std::string>(&state_dtype.value());
  return text == nullptr ? "None" : "'" + *text + "'";
}

// The options as the hyperparameters of a step.
Numbers numbers_of(const std::vector<FusedOptions::Option>& options) {
  Numbers numbers;
  for (const auto& [name, place] : options) {
    if (auto* const* number = std::get_if<double*>(&place)) {
      numbers.emplace_back(name, **number);
    } else if (auto* const* flag = std::get_if<bool*>(&place)) {
      numbers.emplace_back(name, **flag ? 1.0 : 0.0);
    } else if (auto* const* limit = std::get_if<std::optional<double>*>(&place)) {
      numbers.emplace_back(name, (*limit)->value_or(std::numeric_limits<double>::infinity()));
    } else if (auto* const* betas = std::get_if<std::tuple<double, double>*>(&place)) {
      numbers.emplace_back("beta1", std::get<0>(**betas));
      numbers.emplace_back("beta2", std::get<1>(**betas));
    }
  }
  return numbers;
}

}  // namespace

std::string python_name(at::ScalarType dtype) {
  return c10::str("torch.", c10::getDtypeNames(dtype).first);
}

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
    } else if (auto* const* betas = std::get_if<std::tuple<double, double>*>(&place)) {
      const auto [beta1, beta2] = **betas;
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

// Options and states.

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
  // Otherwise only what follows a master is stored in 16 bits.
  const bool stores_narrow =
      !master_weights_ || master_weights_ == "split8" || state_dtype_ != at::kFloat;
  return stores_narrow &&
         (rounding_.has_value() ? *rounding_ == "dither" : state_dtype_.has_value());
}

at::Tensor FusedParamState::get(const std::string& key) const {
  for (const auto& [name, tensor] : tensors_) {
    if (name == key) return tensor;
  }
  return {};
}

void FusedParamState::set(const std::string& key, at::Tensor value) {
  for (auto& [name, tensor] : tensors_) {
    if (name != key) continue;
    tensor = std::move(value);
    return;
  }
  tensors_.emplace_back(key, std::move(value));
}

void FusedParamState::erase(const std::string& key) {
  const auto is_it = [&](const auto& entry) { return entry.first == key; };
  tensors_.erase(std::remove_if(tensors_.begin(), tensors_.end(), is_it), tensors_.end());
}

// Groups.

FusedOptimizer::FusedOptimizer(const OptimizerKind& kind,
                               const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                               std::unique_ptr<FusedOptions> defaults)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(), std::move(defaults)),
      impl_(std::make_shared<Impl>(kind)) {
  auto& options = static_cast<FusedOptions&>(*defaults_);
  options.are_defaults_ = true;
  kind.check(options);
  check_options(kind.name, kind, options.options(), [] { return std::string(); });
  TORCH_CHECK(!param_groups.empty(), "optimizer got an empty parameter list");
  for (const auto& group : param_groups) add_param_group(group);
}

FusedOptimizer::~FusedOptimizer() = default;
FusedOptimizer::FusedOptimizer(FusedOptimizer&&) noexcept = default;

FusedOptimizer& FusedOptimizer::operator=(FusedOptimizer&& other) noexcept {
  if (this == &other) return *this;  // torch's would lose its groups
  Optimizer::operator=(std::move(other));
  impl_ = std::move(other.impl_);
  return *this;
}

// Throws on behalf of a method where there is none.
FusedOptimizer::Impl& FusedOptimizer::checked(const char* operation) const {
  TORCH_CHECK(impl_ != nullptr, c10::demangle(typeid(*this).name()), ".", operation,
              ": the optimizer must have its parameters, got one that was moved from");
  return *impl_;
}

#define AMP_EXT_OF_TORCH(Type, method)         \
  Type& FusedOptimizer::method() {             \
    checked(#method);                          \
    return Optimizer::method();                \
  }                                            \
  const Type& FusedOptimizer::method() const { \
    checked(#method);                          \
    return Optimizer::method();                \
  }
AMP_EXT_OF_TORCH(torch::optim::OptimizerOptions, defaults)
AMP_EXT_OF_TORCH(FusedOptimizer::ParamGroups, param_groups)
AMP_EXT_OF_TORCH(FusedOptimizer::States, state)
AMP_EXT_OF_TORCH(std::vector<at::Tensor>, parameters)
#undef AMP_EXT_OF_TORCH

size_t FusedOptimizer::size() const {
  checked("size");
  return Optimizer::size();
}

void FusedOptimizer::zero_grad(bool set_to_none) {
  checked("zero_grad");
  Optimizer::zero_grad(set_to_none);
}

void FusedOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& param_group) {
  const char* const name = checked("add_param_group").kind.name;
  const size_t group = param_groups_.size();
  auto merged = defaults_->clone();
  auto& options = static_cast<FusedOptions&>(*merged);
  options.are_defaults_ = false;
  if (param_group.has_options()) {
    const auto given = param_group.options().clone();
    check_kind(*given, group);
    take_given(options, static_cast<FusedOptions&>(*given));
  }
  check_group(name, impl_->kind, options.options(), [&] { return c10::str(" of group ", group); });
  check_moments(name, options, param_group.params(), c10::str(" of group ", group));
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
                " must be listed once, got it as param ", first, " already");
  }
  for (const auto& option : options.options()) options.given_.insert(option.name);
  // Not through torch's, which may drop the options.
  param_groups_.emplace_back(params, std::move(merged));
  rebuild();
}

// Somebody may have set other ones.
void FusedOptimizer::check_kind(const torch::optim::OptimizerOptions& options, size_t group) const {
  const torch::optim::OptimizerOptions& defaults = *defaults_;
  TORCH_CHECK(typeid(options) == typeid(defaults), impl_->kind.name, ": options of group ", group,
              " must be amp_ext::optim::", impl_->kind.name,
              "Options, got those of another optimizer");
}

// The options of a group, which has to have its own.
const FusedOptions& FusedOptimizer::checked_options(size_t group) const {
  check_kind(param_groups_[group].options(), group);
  const auto& options = static_cast<const FusedOptions&>(param_groups_[group].options());
  TORCH_CHECK(
      !options.are_defaults_, impl_->kind.name, ": options of group ", group,
      " must be its own, got the defaults: add groups by add_param_group of amp_ext::optim::",
      impl_->kind.name, ", since that of torch::optim::Optimizer drops their options");
  return options;
}

FusedOptions& FusedOptimizer::options_of(size_t group) {
  return const_cast<FusedOptions&>(checked_options(group));
}

// Moments in float16 and a split master are more than a kernel keeps in one step.
void FusedOptimizer::check_moments(const std::string& operation, const FusedOptions& options,
                                   const std::vector<at::Tensor>& params,
                                   const std::string& place) const {
  const auto* const form = std::get_if<std::string>(&options.master_weights_.value());
  if (options.state_dtype_.has_value() || form == nullptr) return;
  const bool are_halves = std::any_of(params.begin(), params.end(), [](const at::Tensor& param) {
    return param.defined() && param.scalar_type() == at::kHalf;
  });
  TORCH_CHECK(!are_halves || impl_->kind.buffer_count(options) == 0, operation, ": state_dtype",
              place,
              " must be torch.float32 or torch.bfloat16 for parameters in torch.float16 with "
              "master_weights='",
              *form, "', got None");
}

// Also what a loop may have written into the groups. Returns the options of each.
std::vector<std::vector<FusedOptions::Option>> FusedOptimizer::checked_groups() {
  const char* const name = impl_->kind.name;
  TORCH_CHECK(!param_groups_.empty(), name, ": param_groups must have a group, got none");
  std::vector<std::vector<FusedOptions::Option>> groups;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    groups.push_back(options_of(i).options());
    check_group(name, impl_->kind, groups[i], [&] { return c10::str(" of group ", i); });
    check_moments(name, options_of(i), param_groups_[i].params(), c10::str(" of group ", i));
  }
  return groups;
}

// Those that concern the norm of all groups together.
void FusedOptimizer::check_shared_options() {
  const auto check_same = [&](const char* option, auto member, const auto& text_of) {
    const auto& first = options_of(0).*member;
    bool are_same = true;
    for (size_t i = 1; i < param_groups_.size(); ++i) are_same &= options_of(i).*member == first;
    if (are_same) return;
    std::vector<std::string> values;
    for (size_t i = 0; i < param_groups_.size(); ++i) {
      values.push_back(text_of(options_of(i).*member));
    }
    TORCH_CHECK(false, impl_->kind.name, ": ", option,
                " must be the same in all groups, whose norm is taken "
                "together, got [",
                c10::Join(", ", values), "]");
  };
  check_same("max_grad_norm", &FusedOptions::max_grad_norm_, [](const auto& norm) {
    return norm.has_value() ? c10::str(*norm) : std::string("None");
  });
  check_same("skip_nonfinite", &FusedOptions::skip_nonfinite_,
             [](bool skips) { return std::string(skips ? "True" : "False"); });
}

// States.

FusedParamState* FusedOptimizer::state_of(const at::Tensor& param) const {
  const auto found = state_.find(param.unsafeGetTensorImpl());
  return found == state_.end() ? nullptr : dynamic_cast<FusedParamState*>(found->second.get());
}

// The state of a parameter as the options want it, its dtype and device being so. What it lacks is
// made, and what the parameter was converted under is converted; nothing is written.
std::unique_ptr<FusedParamState> FusedOptimizer::whole_state(const FusedOptions& options,
                                                             const at::Tensor& param) const {
  const OptimizerKind& kind = impl_->kind;
  const FusedParamState* const before = state_of(param);
  auto state = before != nullptr ? std::make_unique<FusedParamState>(*before)
                                 : std::make_unique<FusedParamState>(param);
  const auto want = [&](const std::string& key, at::ScalarType dtype, const auto& make) {
    const at::Tensor value = state->get(key);
    if (!value.defined()) {
      state->set(key, make());
    } else if (value.scalar_type() != dtype || value.device() != param.device()) {
      state->set(key, value.to(param.device(), dtype));
    }
  };
  const auto float32 = param.options().dtype(at::kFloat).requires_grad(false);
  if (kind.keeps_step(options)) {
    const bool counts = kind.counts_from_buffer && has_moment(*state, kind.buffers[0].name);
    if (kind.counts_from_buffer && !counts && kind.buffer_count(options) > 0) state->erase("step");
    want("step", at::kFloat, [&] { return at::full({}, counts ? 1.0 : 0.0, float32); });
  }
  const std::string master_key = key_of_master(options.master_weights_, param.scalar_type());
  if (!master_key.empty()) {
    const at::Tensor kept = state->get(master_key);
    // Whether a lower part has its dtype is the plan's to check.
    const bool is_whole = master_key == kWholeMaster || !kept.defined();
    want(master_key, is_whole ? at::kFloat : kept.scalar_type(),
         [&] { return made_master(param, masters_in(*state), master_key); });
  }
  for (const char* const other : kMasterKeys) {
    if (other != master_key) state->erase(other);
  }
  std::vector<MomentFormat> formats;
  for (const MomentFormat& format : formats_of(options.state_dtype_, kind.buffers, param)) {
    const bool is_used = formats.size() < static_cast<size_t>(kind.buffer_count(options));
    // Also buffers that the group keeps only with other options, to which a loop may change.
    if (is_used || has_moment(*state, format.name)) formats.push_back(format);
  }
  const Moments moments = moments_in(*state, kind.buffers);
  const Moments made = made_moments(moments, formats, param);
  for (const auto& [key, moment] : moments) {
    if (made.count(key) == 0) state->erase(key);
  }
  for (const MomentFormat& format : formats) {
    for (const std::string& key : format.keys()) state->set(key, made.at(key));
  }
  return state;
}

// All of them, or none if one can't be made. Returns whether a tensor is another one now.
bool FusedOptimizer::make_states(const std::vector<std::pair<size_t, at::Tensor>>& params) {
  const OutsideInferenceMode normal;
  std::vector<std::unique_ptr<FusedParamState>> states;
  for (const auto& [group, param] : params) {
    states.push_back(whole_state(options_of(group), param));
  }
  bool has_changed = false;
  for (size_t i = 0; i < params.size(); ++i) {
    auto& kept = state_[params[i].second.unsafeGetTensorImpl()];
    auto* const before = dynamic_cast<FusedParamState*>(kept.get());
    has_changed |= before == nullptr || !have_same_tensors(*before, *states[i]);
    if (before != nullptr) {
      *before = std::move(*states[i]);  // others may refer to it
    } else {
      kept = std::move(states[i]);
    }
  }
  return has_changed;
}

void FusedOptimizer::init_state() {
  checked("init_state");
  checked_groups();
  std::vector<std::pair<size_t, at::Tensor>> trainable;
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& params = param_groups_[group].params();
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& param = params[i];
      if (!param.requires_grad()) continue;
      const at::ScalarType dtype = param.scalar_type();
      TORCH_CHECK((is_16_bit(dtype) || dtype == at::kFloat || dtype == at::kDouble) &&
                      (param.is_cpu() || param.is_cuda()),
                  impl_->kind.name, ".init_state: param of ", place(group, i),
                  " must be float32, float64, float16 or bfloat16 on cpu or cuda, got ",
                  python_name(dtype), " on ", param.device());
      trainable.emplace_back(group, param);
    }
  }
  if (make_states(trainable)) rebuild();
}

std::vector<at::Tensor> FusedOptimizer::master_params() {
  checked("master_params");
  init_state();
  const OutsideInferenceMode normal;
  std::vector<at::Tensor> masters;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const FusedParamState* const state = state_of(param);
      masters.push_back(whole_master(param, state != nullptr ? masters_in(*state) : Masters()));
    }
  }
  return masters;
}

void FusedOptimizer::refresh_masters() {
  checked("refresh_masters");
  TensorList params, masters;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const FusedParamState* const state = state_of(param);
      const at::Tensor master = state != nullptr ? state->get(kWholeMaster) : at::Tensor();
      if (!master.defined()) continue;
      params.push_back(param);
      masters.push_back(master);
    }
  }
  refresh_masters_(params, masters);
}

// The plan.

void FusedOptimizer::rebuild() {
  Impl& impl = checked("rebuild");
  if (impl.plan == nullptr) return;
  impl.rounded_params = impl.plan->rounded_params();
  impl.scaled_grads = impl.plan->scaled_grads();
  impl.plan.reset();
}

// The time in which this thread has the plan, which is that of the groups and states as they are.
class FusedOptimizer::InPlan {
 public:
  InPlan(FusedOptimizer& optimizer, const char* operation) : optimizer_(optimizer) {
    Impl& impl = optimizer.checked(operation);
    const auto thread = std::this_thread::get_id();
    {
      const std::lock_guard<std::mutex> lock(impl.mutex);
      TORCH_CHECK(!impl.user.has_value(), impl.kind.name, ".", operation,
                  ": must be called by one thread at a time, got a call by thread ", thread,
                  " while thread ", *impl.user, " is in one");
      impl.user = thread;
    }
    try {
      TORCH_CHECK(impl.progress == nullptr || !impl.progress->has_failed, impl.kind.name, ".",
                  operation,
                  ": parameters must be as a whole step leaves them, got a step that "
                  "failed: ",
                  impl.progress->text(), "; ", kHowToGoOn);
      groups_ = optimizer.checked_groups();
      optimizer.check_shared_options();
      optimizer.take_plan();
    } catch (...) {
      let_go();
      throw;
    }
  }
  ~InPlan() {
    // Of a step that has failed, the plan may remember a look that no step has used.
    if (std::uncaught_exceptions() > exceptions_) optimizer_.rebuild();
    let_go();
  }
  InPlan(const InPlan&) = delete;
  InPlan& operator=(const InPlan&) = delete;

  Plan& plan() { return *optimizer_.impl_->plan; }
  const std::vector<std::vector<FusedOptions::Option>>& groups() const { return groups_; }

 private:
  void let_go() {
    Impl& impl = *optimizer_.impl_;
    if (impl.plan != nullptr) impl.plan->let_go();
    const std::lock_guard<std::mutex> lock(impl.mutex);
    impl.user.reset();
  }

  FusedOptimizer& optimizer_;
  std::vector<std::vector<FusedOptions::Option>> groups_;  // options of each
  const int exceptions_ = std::uncaught_exceptions();
};

void FusedOptimizer::take_plan() {
  std::vector<KeptByGroup> kept;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const FusedOptions& options = options_of(i);
    kept.emplace_back(impl_->kind.buffer_count(options), impl_->kind.keeps_step(options),
                      options.master_weights_, options.state_dtype_);
  }
  const bool is_current = impl_->plan != nullptr && impl_->state_count == state_.size() &&
                          impl_->kept == kept && take_params();
  if (is_current) return;
  make_plan(std::move(kept));
  take_params();
}

// Hands over the parameters if they are those that the plan was made of.
bool FusedOptimizer::take_params() {
  Plan& plan = *impl_->plan;
  int64_t number = 0, group_index = 0;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const void* const object = param.defined() ? param.unsafeGetTensorImpl() : nullptr;
      if (!plan.is_param(number, group_index, object)) return false;
      const auto was = impl_->were_contiguous.find(number);
      const bool is_coded = was != impl_->were_contiguous.end();
      if (is_coded && was->second != param.is_contiguous()) return false;
      plan.take_param(number, param);
      ++number;
    }
    ++group_index;
  }
  return number == plan.number_of_params();
}

void FusedOptimizer::make_plan(std::vector<KeptByGroup> kept) {
  rebuild();
  const OptimizerKind& kind = impl_->kind;
  int buffers = 0;
  for (const KeptByGroup& group : kept) buffers = std::max(buffers, std::get<0>(group));
  auto plan = std::make_unique<Plan>(kind.name, kind.buffer_names(buffers));
  impl_->places.clear();
  impl_->were_contiguous.clear();
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& params = param_groups_[group].params();
    for (size_t i = 0; i < params.size(); ++i) {
      TORCH_CHECK(params[i].defined(), kind.name, ": param of ", place(group, i),
                  " must be a tensor, got an undefined one");
      plan->add_param(static_cast<int64_t>(group), static_cast<int64_t>(i),
                      params[i].unsafeGetTensorImpl());
      impl_->places.emplace_back(group, i);
    }
  }
  plan->set_rounded_params(impl_->rounded_params);
  plan->set_scaled_grads(impl_->scaled_grads);
  impl_->progress = plan->progress();
  impl_->plan = std::move(plan);
  impl_->kept = std::move(kept);
  impl_->state_count = state_.size();
}

// Reads the gradients, and gives each parameter that has one its state.
void FusedOptimizer::give_states() {
  const std::vector<int64_t> numbers = impl_->plan->read_grads();
  if (numbers.empty()) return;
  std::vector<std::pair<size_t, at::Tensor>> params;
  for (const int64_t number : numbers) {
    const auto [group, index] = impl_->places[number];
    params.emplace_back(group, param_groups_[group].params()[index]);
  }
  make_states(params);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto& [group, param] = params[i];
    const FusedParamState& state = *state_of(param);
    ParamState tensors;
    const int count = std::get<0>(impl_->kept[group]);
    const StateDType& state_dtype = std::get<3>(impl_->kept[group]);
    if (state_dtype.is_coded()) impl_->were_contiguous[numbers[i]] = param.is_contiguous();
    const auto formats = formats_of(state_dtype, impl_->kind.buffers, param);
    for (int buffer = 0; buffer < count; ++buffer) {
      tensors.buffers.push_back(state.get(formats[buffer].key()));
      if (tensors.exponents.defined()) continue;
      tensors.exponents = state.get(formats[buffer].exponents_key());
    }
    tensors.master_param =
        state.get(key_of_master(std::get<2>(impl_->kept[group]), param.scalar_type()));
    if (std::get<1>(impl_->kept[group])) tensors.step = state.get("step");
    impl_->plan->set_state(numbers[i], std::move(tensors));
  }
  impl_->state_count = state_.size();
}

// The step.

at::Tensor FusedOptimizer::step(LossClosure closure) {
  checked("step");
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  run_step({}, {});
  return loss;
}

at::Tensor FusedOptimizer::step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  run_step(grad_scale, found_inf);
  return {};
}

void FusedOptimizer::run_step(const at::Tensor& grad_scale, const at::Tensor& found_inf) {
  InPlan use(*this, "step");
  give_states();
  const FusedOptions& first = options_of(0);
  GradientOptions options;
  if (grad_scale.defined()) options.grad_scale = grad_scale;
  if (found_inf.defined()) options.found_inf = found_inf;
  options.max_grad_norm = first.max_grad_norm_;
  options.skip_nonfinite = first.skip_nonfinite_;
  if (!first.max_grad_norm_.has_value()) {
    impl_->grad_norm.reset();
  } else if (!impl_->grad_norm.defined() && !impl_->places.empty()) {
    const OutsideInferenceMode normal;
    const auto [group, index] = impl_->places[0];
    const at::Tensor& param = param_groups_[group].params()[index];
    impl_->grad_norm = at::zeros({}, at::TensorOptions(param.device()).dtype(at::kFloat));
  }
  if (impl_->grad_norm.defined()) options.grad_norm = impl_->grad_norm;
  std::vector<Numbers> groups;
  for (size_t i = 0; i < use.groups().size(); ++i) {
    groups.push_back(numbers_of(use.groups()[i]));
    groups.back().emplace_back("dither", options_of(i).dithers() ? 1.0 : 0.0);
  }
  try {
    impl_->kind.step(use.plan(), groups, options);
  } catch (c10::Error& error) {
    if (impl_->progress->has_failed) {
      error.add_context(c10::str(impl_->kind.name, ".step: ", impl_->progress->text(), "; ",
                                 kHowToGoOn, ": until then it refuses to step"));
    }
    throw;
  }
}

std::optional<GradientLook> FusedOptimizer::look_at_gradients(const at::Tensor& found_inf,
                                                              const at::Tensor& grad_scale) {
  InPlan use(*this, "look_at_gradients");
  use.plan().read_grads();
  OptionalTensor scale;
  if (grad_scale.defined()) scale = grad_scale;
  const FusedOptions& first = options_of(0);
  GradientLook look;
  for (const LookResult& result : use.plan().check_finite(
           found_inf, scale, first.max_grad_norm_.has_value(), first.skip_nonfinite_)) {
    look.found_infs.push_back(result.found_inf);
    look.first_nonfinites.push_back(result.first_nonfinite);
  }
  return look;
}

const at::Tensor& FusedOptimizer::grad_norm() const { return checked("grad_norm").grad_norm; }

std::shared_ptr<const void> FusedOptimizer::identity() const { return impl_; }

}  // namespace amp_ext::optim
