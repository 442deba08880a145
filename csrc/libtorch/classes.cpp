// The classes for C++ programs: optimizers and a gradient scaler over the operations of ops.h.
#include <ATen/ATen.h>
#include <amp_ext/amp_ext.h>
#include <torch/serialize/archive.h>

#include <set>
#include <unordered_map>

#include "tensors/autocast_cache.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

namespace {

using torch::optim::Optimizer;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

// Returns the gradients of an optimizer by device; of a sparse gradient, its elements.
std::unordered_map<at::Device, TensorList> grads_by_device(const Groups& groups) {
  std::unordered_map<at::Device, TensorList> grads;
  for (const auto& group : groups) {
    for (const at::Tensor& param : group.params()) {
      const at::Tensor& grad = param.grad();
      if (!grad.defined()) continue;
      grads[grad.device()].push_back(grad.is_sparse() ? grad._values() : grad);
    }
  }
  return grads;
}

at::Tensor zero_on(const at::Device& device, at::ScalarType dtype) {
  return at::zeros({}, at::TensorOptions(device).dtype(dtype));
}

// Returns the sum of numbers of several devices, on one device.
at::Tensor sum_on(const at::Device& device, const TensorList& numbers, at::ScalarType dtype) {
  if (numbers.size() == 1) return to_device(numbers[0], device);
  at::Tensor sum = zero_on(device, dtype);
  for (const at::Tensor& number : numbers) sum += to_device(number, device);
  return sum;
}

void write(OutputArchive& archive, const Tensors& tensors) {
  for (const auto& [key, tensor] : tensors) archive.write(key, tensor, /*is_buffer=*/true);
}

Tensors tensors_in(InputArchive& archive) {
  Tensors tensors;
  for (const std::string& key : archive.keys()) archive.read(key, tensors[key], /*is_buffer=*/true);
  return tensors;
}

// Copies the tensors of an archive. Throws if keys, dtypes or sizes differ.
void copy(const char* name, const Tensors& saved, const Tensors& own) {
  Tensors all = own;
  all.insert(saved.begin(), saved.end());
  for (const auto& [key, either] : all) {
    const auto shown = [&key = key](const Tensors& tensors) {
      const auto found = tensors.find(key);
      if (found == tensors.end()) return std::string("nothing");
      return c10::str(found->second.scalar_type(), " of sizes ", found->second.sizes());
    };
    TORCH_CHECK(shown(saved) == shown(own), "torch::load of ", name, ": ", key,
                " of the archive must be ", shown(own), ", got ", shown(saved),
                ". Configure groups, parameters, master_weights and state_dtype as they were.");
  }
  const OutsideInferenceMode normal;
  for (const auto& [key, tensor] : own) tensor.copy_(saved.at(key));
}

}  // namespace

namespace optim {

struct FusedParamState : torch::optim::OptimizerParamState {
  explicit FusedParamState(const at::Tensor& param) : param(param), dtype(param.scalar_type()) {
    SeenTensor::remember(seen_param, param, version_of(param));
  }

  at::Tensor param;  // kept alive, because torch finds the state by the parameter's address
  at::ScalarType dtype;
  ParamState tensors;
  std::optional<SeenTensor> seen_param;   // the parameter when its master weight was written
  std::optional<SeenTensor> scaled_grad;  // the gradient of the last step, if it was scaled
};

namespace {

// Returns the dtype that says how a moment is stored: Char as ratios, Byte in blocks.
at::ScalarType dtype_of_buffer(const BufferDescription& buffer, const StateDType& state_dtype,
                               const at::Tensor& param) {
  if (param.scalar_type() == at::kDouble) return at::kDouble;
  if (const auto* const dtype = std::get_if<at::ScalarType>(&state_dtype.value())) return *dtype;
  if (!state_dtype.is_coded()) return param.scalar_type();
  if (buffer.code == BufferCode::kRatio) return at::kChar;
  const bool may_have_blocks = buffer.code == BufferCode::kMagnitude ||
                               (buffer.code == BufferCode::kRoot && state_dtype == "8bit");
  return may_have_blocks && blocks_in_row(param) > 0 ? at::kByte : at::kBFloat16;
}

// Creates what the state of a parameter lacks.
void complete(ParamState& state, const at::Tensor& param, at::ArrayRef<BufferDescription> buffers,
              const MasterWeights& masters, const StateDType& state_dtype) {
  const OutsideInferenceMode normal;
  const auto like = at::TensorOptions(param.device());
  if (!state.step.defined()) state.step = zero_on(param.device(), at::kFloat);
  if (masters && is_16_bit(param.scalar_type()) && !state.master_param.defined()) {
    const at::Tensor master = param.to(at::kFloat);
    const bool is_split = std::holds_alternative<std::string>(masters.value());
    state.master_param = is_split ? split_fp32(param, master, masters == "split" ? 16 : 8) : master;
  }
  while (state.buffers.size() < buffers.size()) {
    // The next step is the first with a momentum that was switched on.
    if (state.buffers.empty()) state.step.zero_();
    const at::ScalarType dtype = dtype_of_buffer(buffers[state.buffers.size()], state_dtype, param);
    state.buffers.push_back(at::zeros_like(param, like.dtype(dtype)));
    if (dtype == at::kByte) {  // a block of zeros has the exponent 1
      state.exponents = at::ones({param.size(0), blocks_in_row(param)}, like.dtype(at::kByte));
    }
  }
}

// Returns the buffers of a group. The last one may need an option.
template <typename Hyperparameters>
at::ArrayRef<BufferDescription> buffers_of(const Hyperparameters& numbers, bool amsgrad) {
  const at::ArrayRef<BufferDescription> all = Hyperparameters::kBuffers;
  const bool has_last = all.back().role == BufferRole::kMaximum ? amsgrad : numbers.needs_buffers();
  return all.slice(0, all.size() - (has_last ? 0 : 1));
}

// Calls visit(name, number) for lr and the hyperparameters that are options.
template <typename Hyperparameters, typename Visit>
void for_each_number(Hyperparameters& numbers, const Visit& visit) {
  visit("lr", numbers.lr);
  Hyperparameters::for_each_field([&](const char* name, auto member) {
    if (Hyperparameters::is_option(name)) visit(name, numbers.*member);
  });
}

}  // namespace

// Throws if a step can't use an option. `place` is " of group 1", or empty for the defaults.
template <typename Options>
void FusedOptimizer<Options>::check_options(const Options& options, const std::string& place) {
  const auto check = [&](bool fits, const std::string& name, const auto&... wanted) {
    TORCH_CHECK(fits, Options::kName, ": ", name, place, " must be ", wanted...);
  };
  for_each_number(options.numbers_, [&](const std::string& name, double number) {
    check(number >= 0.0 || name == "dampening", name, "at least 0, got ", number);
    check(number < 1.0 || name.substr(0, 4) != "beta", name, "below 1, got ", number);
  });
  check(options.numbers_.can_decay(), "cautious_weight_decay",
        "false unless decoupled_weight_decay is true");
  const auto& masters = options.master_weights_;
  check(masters == true || masters == false || masters == "split" || masters == "split8",
        "master_weights", "true, false, 'split' or 'split8'");
  const StateDType& dtype = options.state_dtype_;
  check(!dtype.has_value() || dtype.is_coded() || dtype == at::kFloat || dtype == at::kBFloat16,
        "state_dtype", "Float, BFloat16, '8bit-bf16', '8bit' or nullopt");
  check(!options.amsgrad_ || !dtype.is_coded(), "state_dtype",
        "Float, BFloat16 or nullopt with amsgrad");
  check(!options.rounding_ || options.rounding_ == "nearest" || options.rounding_ == "dither",
        "rounding", "'dither', 'nearest' or nullopt");
  if constexpr (std::is_same_v<Formula, SgdHyperparameters>) {
    TORCH_CHECK(!options.nesterov() || (options.momentum() > 0.0 && options.dampening() == 0.0),
                "Nesterov momentum requires a momentum and zero dampening");
  }
}

template <typename Options>
FusedOptimizer<Options>::FusedOptimizer(const Groups& param_groups, const Options& defaults)
    : ScaledOptimizer(Groups(), defaults.clone()) {
  check_options(defaults, "");
  for (const auto& group : param_groups) add_param_group(group);
  TORCH_CHECK(!param_groups.empty(), "optimizer got an empty parameter list");
}

template <typename Options>
void FusedOptimizer<Options>::add_param_group(const torch::optim::OptimizerParamGroup& given) {
  const std::string place = c10::str(" of group ", param_groups_.size());
  auto options = std::make_unique<Options>(static_cast<const Options&>(*defaults_));
  options->is_of_group_ = true;
  if (given.has_options()) {
    const auto* const own = dynamic_cast<const Options*>(&given.options());
    TORCH_CHECK(own != nullptr, Options::kName, ": options", place,
                " must be amp_ext::optim::", Options::kName, "Options");
    for (const auto& [name, change] : own->changes_) change(*options);
  }
  check_options(*options, place);
  std::set<const void*> known;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& param : group.params()) known.insert(param.unsafeGetTensorImpl());
  }
  for (const at::Tensor& param : given.params()) {
    TORCH_CHECK(param.is_leaf(), "can't optimize a non-leaf Tensor");
    TORCH_CHECK(known.insert(param.unsafeGetTensorImpl()).second,
                "some parameters appear in more than one parameter group");
  }
  param_groups_.emplace_back(given.params(), std::move(options));
}

template <typename Options>
Options& FusedOptimizer<Options>::options_of(size_t group) {
  auto* const options = dynamic_cast<Options*>(&param_groups_[group].options());
  TORCH_CHECK(options != nullptr && options->is_of_group_, Options::kName, ": group ", group,
              " has no options of its own. Call add_param_group() of amp_ext::optim::",
              Options::kName, ", because that of torch::optim::Optimizer drops them.");
  return *options;
}

// Returns the complete state of a parameter.
template <typename Options>
FusedParamState& FusedOptimizer<Options>::state_of(const Options& options, size_t group,
                                                   size_t index) {
  const at::Tensor& param = param_groups_[group].params()[index];
  auto& held = state_[param.unsafeGetTensorImpl()];
  if (held == nullptr) held = std::make_unique<FusedParamState>(param);
  auto& state = static_cast<FusedParamState&>(*held);
  TORCH_CHECK(state.dtype == param.scalar_type(), Options::kName, ": param of group ", group,
              ", param ", index, " must stay ", state.dtype, " after its first step");
  complete(state.tensors, param, buffers_of(options.numbers_, options.amsgrad_),
           options.master_weights_, options.state_dtype_);
  return state;
}

template <typename Options>
at::Tensor FusedOptimizer<Options>::step(LossClosure closure) {
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  GradientOptions gradients = std::exchange(scaled_, {});
  TORCH_CHECK(!param_groups_.empty(), Options::kName, ": the optimizer was moved from");
  const Options& first = options_of(0);
  std::vector<std::vector<StepParam>> groups;
  std::vector<Group<Formula>> numbers;
  std::vector<FusedParamState*> states;
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const Options& options = options_of(group);
    check_options(options, c10::str(" of group ", group));
    TORCH_CHECK(options.max_grad_norm_ == first.max_grad_norm_ &&
                    options.skip_nonfinite_ == first.skip_nonfinite_,
                Options::kName,
                ": max_grad_norm and skip_nonfinite must be the same in all groups");
    Group<Formula>& own = numbers.emplace_back(options.numbers_);
    own.clip_value = options.clip_value_.value_or(own.clip_value);
    const bool may_dither = options.rounding_.has_value() ? options.rounding_ == "dither"
                                                          : options.state_dtype_.has_value();
    own.dither = may_dither && (!options.master_weights_ || options.master_weights_ == "split8" ||
                                options.state_dtype_ != at::kFloat);
    groups.emplace_back();
    for (const at::Tensor& param : param_groups_[group].params()) {
      const at::Tensor& grad = param.grad();
      const size_t index = groups.back().size();
      StepParam& step = groups.back().emplace_back(StepParam{param, grad});
      if (!grad.defined()) continue;
      FusedParamState& state = *states.emplace_back(&state_of(options, group, index));
      TORCH_CHECK(gradients.found_inf.has_value() || !state.scaled_grad.has_value() ||
                      !state.scaled_grad->is(grad, version_of(grad)),
                  Options::kName, ": grad of group ", group, ", param ", index,
                  " still carries the loss scale, because scaler.step(optimizer) has already used "
                  "this gradient. Call only scaler.step(), and zero_grad() before backward().");
      state.scaled_grad.reset();
      if (gradients.grad_scale) SeenTensor::remember(state.scaled_grad, grad, version_of(grad));
      step.state = state.tensors;
      step.state.buffers.resize(buffers_of(own, options.amsgrad_).size());
      step.master_is_current =
          state.seen_param.has_value() && state.seen_param->is(param, version_of(param));
    }
  }
  if (states.empty()) return loss;
  gradients.max_grad_norm = first.max_grad_norm_;
  gradients.skip_nonfinite = first.skip_nonfinite_;
  if (first.max_grad_norm_) gradients.grad_norm = zero_on(states[0]->param.device(), at::kFloat);
  grad_norm_ = gradients.grad_norm.value_or(at::Tensor());
  step_groups_(groups, numbers, gradients, Options::kName);
  for (FusedParamState* const state : states) {
    SeenTensor::remember(state->seen_param, state->param, version_of(state->param));
  }
  return loss;
}

template <typename Options>
std::vector<at::Tensor> FusedOptimizer<Options>::master_params() {
  std::vector<at::Tensor> masters;
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    for (size_t i = 0; i < param_groups_[group].params().size(); ++i) {
      const FusedParamState& state = state_of(options_of(group), group, i);
      const at::Tensor& master = state.tensors.master_param;
      masters.push_back(!master.defined()                    ? state.param.detach()
                        : master.scalar_type() == at::kFloat ? master
                                                             : join_fp32(state.param, master));
    }
  }
  return masters;
}

// Returns what archives have: options, as numbers, and states. Creates states that an archive has.
template <typename Options>
Tensors FusedOptimizer<Options>::saved_tensors(const Tensors& archived) {
  Tensors saved{{Options::kName, at::zeros({})}};
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const Options& options = options_of(group);
    for_each_number(options.numbers_, [&](const std::string& name, double number) {
      saved[c10::str("group", group, "_", name)] = at::scalar_tensor(number, at::kDouble);
    });
    const std::vector<at::Tensor>& params = param_groups_[group].params();
    saved[c10::str("group", group, "_of_", params.size(), "_params")] = at::zeros({});
    for (size_t i = 0; i < params.size(); ++i) {
      const std::string prefix = c10::str("group", group, "_param", i, "_");
      void* const param = params[i].unsafeGetTensorImpl();
      if (state_.count(param) + archived.count(prefix + "step") == 0) continue;
      const ParamState& state = state_of(options, group, i).tensors;
      saved[prefix + "step"] = state.step;
      if (state.master_param.defined()) saved[prefix + "master_param"] = state.master_param;
      if (state.exponents.defined()) saved[prefix + "exponents"] = state.exponents;
      for (size_t buffer = 0; buffer < state.buffers.size(); ++buffer) {
        saved[prefix + Formula::kBuffers[buffer].name] = state.buffers[buffer];
      }
    }
  }
  return saved;
}

template <typename Options>
void FusedOptimizer<Options>::save(OutputArchive& archive) const {
  write(archive, const_cast<FusedOptimizer&>(*this).saved_tensors());  // completes states
}

template <typename Options>
void FusedOptimizer<Options>::load(InputArchive& archive) {
  Tensors saved = tensors_in(archive);
  const Tensors own = saved_tensors(saved);
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    // Archives of before this option leave it as it is.
    const std::string key = c10::str("group", group, "_cautious_weight_decay");
    saved.emplace(key, own.at(key));
  }
  copy(Options::kName, saved, own);
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    for_each_number(options_of(group).numbers_, [&](const std::string& name, auto& number) {
      number = own.at(c10::str("group", group, "_", name)).item().toDouble();
    });
  }
  // The next step compares loaded master weights with the parameters, which may be others.
  for (const auto& [param, held] : state_) {
    static_cast<FusedParamState&>(*held).seen_param.reset();
  }
}

#define AMP_EXT_INSTANTIATE(Optimizer) template class FusedOptimizer<Optimizer##Options>;
AMP_EXT_FOR_EACH_CLASS(AMP_EXT_INSTANTIATE)
#undef AMP_EXT_INSTANTIATE

}  // namespace optim

GradScaler::GradScaler(const GradScalerOptions& options) : options_(options) {
  if (!is_enabled()) return;
  TORCH_CHECK(options.growth_factor > 1.0, "The growth factor must be > 1.0.");
  TORCH_CHECK(options.backoff_factor < 1.0, "The backoff factor must be < 1.0.");
  TORCH_CHECK(options.growth_interval >= 1 && options.hysteresis >= 1,
              "GradScaler: growth_interval and hysteresis must be at least 1");
  const double scale = options.init_scale;
  TORCH_CHECK(0.0 <= options.min_scale && options.min_scale <= scale && scale <= options.max_scale,
              "GradScaler: init_scale must lie between min_scale and max_scale, got ", scale);
  state_ = {{"scale", at::scalar_tensor(scale, at::kFloat)},
            {"growth_tracker", at::scalar_tensor(0, at::kInt)},
            {"hysteresis_tracker", at::scalar_tensor(options.hysteresis, at::kInt)}};
}

// Throws unless scale() was called.
void GradScaler::check_has_scaled(const char* operation) const {
  TORCH_CHECK(has_scaled_, "Attempted ", operation,
              " but _scale is None.  This may indicate your script did not use "
              "scaler.scale(loss or outputs) earlier in the iteration.");
}

at::Tensor GradScaler::scale(const at::Tensor& output) {
  if (!is_enabled()) return output;
  if (!std::exchange(has_scaled_, true)) {
    for (auto& [key, tensor] : state_) tensor = tensor.to(output.device());
  }
  return output * to_device(state_.at("scale"), output.device());
}

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!is_enabled()) return;
  check_has_scaled("unscale_");
  Iteration& iteration = iterations_[&optimizer];
  TORCH_CHECK(iteration.stage != Stage::kUnscaled,
              "unscale_() has already been called on this optimizer since the last update().");
  TORCH_CHECK(iteration.stage != Stage::kStepped, "unscale_() is being called after step().");
  const auto grads = grads_by_device(optimizer.param_groups());
  for (const auto& [device, list] : grads) {
    for (const at::Tensor& grad : list) {
      TORCH_CHECK(grad.scalar_type() != at::kHalf,
                  "Attempting to unscale FP16 gradients. They would vanish in float16. Call step() "
                  "alone, with an optimizer of amp_ext::optim, and clip by its max_grad_norm.");
    }
  }
  const at::Tensor inv_scale = state_.at("scale").to(at::kDouble).reciprocal().to(at::kFloat);
  for (const auto& [device, list] : grads) {
    iteration.found_infs.push_back(zero_on(device, at::kFloat));
    amp_ext::unscale_(list, to_device(inv_scale, device), iteration.found_infs.back(), {});
  }
  iteration.stage = Stage::kUnscaled;
}

at::Tensor GradScaler::step(Optimizer& optimizer, const Optimizer::LossClosure& closure) {
  struct ClearsCasts {
    ~ClearsCasts() { clear_autocast_cache(); }
  } const clears_casts;
  if (!is_enabled()) return optimizer.step(closure);
  TORCH_CHECK(closure == nullptr,
              "Closure use is not currently supported if GradScaler is enabled.");
  check_has_scaled("step");
  Iteration& iteration = iterations_[&optimizer];
  TORCH_CHECK(iteration.stage != Stage::kStepped,
              "step() has already been called since the last update().");
  const at::Tensor& scale = state_.at("scale");
  at::Tensor returned;
  auto* const scaled = dynamic_cast<optim::ScaledOptimizer*>(&optimizer);
  if (scaled != nullptr && scaled->unscales_in_step()) {
    GradientOptions gradients;
    if (iteration.stage == Stage::kReady) {
      TensorList found_infs, sums;
      for (const auto& [device, grads] : grads_by_device(optimizer.param_groups())) {
        found_infs.push_back(zero_on(device, at::kFloat));
        sums.push_back(zero_on(device, at::kDouble));
        check_finite_(grads, found_infs.back(), to_device(scale, device), sums.back(), {});
      }
      iteration.found_infs = found_infs;
      gradients.grad_scale = scale;
      gradients.sum_of_squares = sum_on(scale.device(), sums, at::kDouble);
    }
    gradients.found_inf = sum_on(scale.device(), iteration.found_infs, at::kFloat);
    scaled->scaled_ = gradients;
    returned = optimizer.step();
  } else {
    if (iteration.stage == Stage::kReady) unscale_(optimizer);
    TORCH_CHECK(!iteration.found_infs.empty(), "No inf checks were recorded for this optimizer.");
    const at::Tensor found_inf = sum_on(at::kCPU, iteration.found_infs, at::kFloat);
    if (found_inf.item().toDouble() == 0.0) returned = optimizer.step();
  }
  const auto after = iterations_.find(&optimizer);
  if (after != iterations_.end()) after->second.stage = Stage::kStepped;
  return returned;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!is_enabled()) return;
  check_has_scaled("update");
  const at::Tensor& scale = state_.at("scale");
  TensorList found_infs;
  for (const auto& [optimizer, iteration] : iterations_) {
    for (const at::Tensor& flag : iteration.found_infs) {
      found_infs.push_back(to_device(flag, scale.device()));
    }
  }
  if (new_scale.has_value()) {
    scale.fill_(*new_scale);
  } else {
    TORCH_CHECK(!found_infs.empty(), "No inf checks were recorded prior to update.");
    OptionalTensor hysteresis_tracker;
    if (options_.hysteresis != 1) hysteresis_tracker = state_.at("hysteresis_tracker");
    update_scale_(scale, state_.at("growth_tracker"), found_infs, options_, hysteresis_tracker);
  }
  iterations_.clear();
}

double GradScaler::get_scale() const {
  return is_enabled() ? state_.at("scale").item().toDouble() : 1.0;
}

OutputArchive& operator<<(OutputArchive& archive, const GradScaler& scaler) {
  write(archive, scaler.state());
  return archive;
}

InputArchive& operator>>(InputArchive& archive, GradScaler& scaler) {
  copy("a GradScaler", tensors_in(archive), scaler.state());
  return archive;
}

}  // namespace amp_ext
