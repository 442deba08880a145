// Dynamic loss scaling in the C++ interface.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros.h>
#include <amp_ext/grad_scaler.h>
#include <amp_ext/ops.h>
#include <amp_ext/optim.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <utility>

#include "libtorch/values.h"
#include "scaler/loss_scale.h"
#include "scaler/scaled_iteration.h"
#include "scaler/scaler_ranges.h"
#include "tensors/autocast_cache.h"
#include "tensors/mirrored_bytes.h"
#include "tensors/tensor_memory.h"
#include "tensors/to_device.h"

namespace amp_ext {

namespace {

using torch::optim::Optimizer;

// Clears autocast's cached casts after a step, because even a failed step may write parameters.
struct ClearsCasts {
  ~ClearsCasts() { clear_autocast_cache(); }
};

template <typename Number>
void check_range(const char* operation, const char* name, Number value) {
  const std::string wanted = wanted_of_scaler(name, static_cast<double>(value));
  TORCH_CHECK(wanted.empty(), operation, ": ", name, " must be ", wanted, ", got ", value);
}

void check_options(const GradScalerOptions& options) {
  const char* const operation = "GradScaler";
  TORCH_CHECK(!(options.growth_factor() <= 1.0), "The growth factor must be > 1.0.");
  TORCH_CHECK(!(options.backoff_factor() >= 1.0), "The backoff factor must be < 1.0.");
  const double smallest = options.min_scale(), largest = options.max_scale();
  check_range(operation, "init_scale", options.init_scale());
  check_range(operation, "growth_factor", options.growth_factor());
  check_range(operation, "backoff_factor", options.backoff_factor());
  check_range(operation, "growth_interval", options.growth_interval());
  check_range(operation, "min_scale", smallest);
  check_range(operation, "max_scale", largest);
  check_range(operation, "hysteresis", options.hysteresis());
  check_range(operation, "warn_after", options.warn_after());
  TORCH_CHECK(smallest <= options.init_scale() && options.init_scale() <= largest,
              "GradScaler: init_scale must lie between min_scale and max_scale, got init_scale=",
              options.init_scale(), ", min_scale=", smallest, ", max_scale=", largest);
  TORCH_CHECK(options.device() == at::kCPU || options.device() == at::kCUDA,
              "GradScaler: device must be cuda or cpu, got ", options.device());
}

// Calls visit(param) for the parameters of all groups.
template <typename Visit>
void for_each_param(const Optimizer& optimizer, const Visit& visit) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) visit(param);
  }
}

ParamGrad grad_of(const at::Tensor& param) {
  const at::Tensor& grad = param.grad();
  return {param.unsafeGetTensorImpl(), grad.defined() && grad.is_sparse() ? grad._values() : grad,
          grad.defined() ? version_of(grad) : 0};
}

std::vector<ParamGrad> grads_in(const Optimizer& optimizer) {
  std::vector<ParamGrad> grads;
  for_each_param(optimizer, [&](const at::Tensor& param) { grads.push_back(grad_of(param)); });
  return grads;
}

// Returns the sum of the found_inf flags of all devices, as a new [] float32 tensor on `device`.
at::Tensor sum_of_flags(const std::vector<at::Tensor>& flags, const at::Device& device) {
  at::Tensor sum;
  for (const at::Tensor& flag : flags) {
    const at::Tensor here = to_device(flag, device);
    sum = sum.defined() ? sum + here : here.clone();
  }
  return sum.defined() ? sum : at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
}

// Returns the name of a parameter, "group 0, param 3". `index` counts the parameters of all groups.
std::string place_in(const std::vector<size_t>& group_sizes, int64_t index) {
  for (size_t group = 0; group < group_sizes.size(); ++group) {
    const auto size = static_cast<int64_t>(group_sizes[group]);
    if (index < size) return c10::str("group ", group, ", param ", index);
    index -= size;
  }
  return {};
}

std::vector<size_t> group_sizes_of(const Optimizer& optimizer) {
  std::vector<size_t> sizes;
  for (const auto& group : optimizer.param_groups()) sizes.push_back(group.params().size());
  return sizes;
}

}  // namespace

ScaledStep::~ScaledStep() = default;

std::optional<GradientScan> ScaledStep::scan_gradients(const at::Tensor&, const at::Tensor&) {
  return {};
}

struct GradScaler::State {
  enum class Stage { kReady, kUnscaled, kStepped };

  // The present iteration of one optimizer, which began after the scaler's last update.
  struct Iteration : ScaledIteration {
    Iteration(int64_t slot, NameOf name_of) : ScaledIteration(slot, std::move(name_of)) {}

    Optimizer* optimizer = nullptr;
    Stage stage = Stage::kReady;
    std::vector<at::Tensor> found_infs;  // [] float32 flags, one for each device
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> params;  // all parameters at unscale_()
  };

  LossScale loss_scale;
  c10::DeviceType device;
  bool enabled;
  std::deque<Iteration> iterations;  // in the order of their first scans; references stay valid
  // For each optimizer slot, the number of parameters in each group.
  std::map<int64_t, std::vector<size_t>> group_sizes;
  bool is_stepping = false;

  void check_scale(const char* operation) const {
    TORCH_CHECK(loss_scale.scale.defined(), "Attempted ", operation,
                " but _scale is None.  This may indicate your script did not use "
                "scaler.scale(loss or outputs) earlier in the iteration.");
  }

  // Returns a pointer that identifies an optimizer. An optimizer of amp_ext keeps its identity when
  // it is moved to another address. Any other optimizer is identified by its address.
  static std::shared_ptr<const void> key_of(const Optimizer& optimizer, const char* operation) {
    const auto* const ours = dynamic_cast<const optim::FusedOptimizer*>(&optimizer);
    if (ours == nullptr) return {std::shared_ptr<const void>(), &optimizer};
    auto key = ours->identity();
    TORCH_CHECK(key != nullptr, "GradScaler.", operation,
                ": the optimizer was moved from. Use the object that it was moved to.");
    return key;
  }

  // Returns the iteration of an optimizer, or starts an iteration if there is none. The reference
  // stays valid until the update, even if the optimizer's step() steps a second optimizer, for
  // which another iteration starts.
  Iteration& iteration_of(Optimizer& optimizer, const char* operation) {
    const auto key = key_of(optimizer, operation);
    auto known = loss_scale.find_optimizer(key.get());
    if (!known.has_value()) {
      const bool is_ours = key.use_count() > 0;
      const std::weak_ptr<const void> token = key;
      known = loss_scale.add_optimizer(
          key.get(), [is_ours, token] { return !is_ours || !token.expired(); },
          [this, slot = loss_scale.number_of_optimizers()](int64_t index) {
            return place_in(group_sizes[slot], index);
          },
          [] { return false; });
    }
    group_sizes[*known] = group_sizes_of(optimizer);
    auto found = std::find_if(iterations.begin(), iterations.end(),
                              [&](const Iteration& each) { return each.slot == *known; });
    if (found == iterations.end()) {
      iterations.emplace_back(*known, loss_scale.names_of(*known));
      found = std::prev(iterations.end());
    }
    found->optimizer = &optimizer;  // the optimizer may have been moved to another address
    return *found;
  }

  // Scans the gradients of an optimizer, and unscales them in place if `inv_scale` is given.
  void scan(Iteration& iteration, const OptionalTensor& inv_scale) {
    TensorList params, present;
    for_each_param(*iteration.optimizer, [&](const at::Tensor& param) {
      params.push_back(param);
      present.push_back(param.grad());
    });
    const auto grads =
        grads_by_device(params, std::move(present), !inv_scale.has_value(), iteration.name_of);
    const at::Tensor no_overflow = loss_scale.start_iteration(iteration.slot);
    if (inv_scale.has_value()) iteration.begin_unscaling(grads_in(*iteration.optimizer));
    iteration.found_infs = iteration.scan(loss_scale, grads, no_overflow, inv_scale);
  }

  void unscale(Iteration& iteration) {
    iteration.check_needs_no_reset("unscale_");
    TORCH_CHECK(iteration.stage != Stage::kUnscaled,
                "unscale_() has already been called on this optimizer since the last update().");
    TORCH_CHECK(iteration.stage != Stage::kStepped, "unscale_() is being called after step().");
    check_still_scaled("unscale_", iteration);
    scan(iteration, loss_scale.scale.to(at::kDouble).reciprocal().to(at::kFloat));
    iteration.params.clear();
    for_each_param(*iteration.optimizer, [&](const at::Tensor& param) {
      iteration.params.emplace_back(param.getIntrusivePtr());
    });
    iteration.stage = Stage::kUnscaled;
    iteration.needs_reset = false;
  }

  // Throws if a gradient may still be scaled because it changed after unscale_().
  static void check_unscaled(const Iteration& iteration) {
    const std::vector<ParamGrad> grads = grads_in(*iteration.optimizer);
    const auto is_there = [](const ParamGrad& each) { return each.grad.defined(); };
    TORCH_CHECK(!iteration.found_infs.empty() || std::none_of(grads.begin(), grads.end(), is_there),
                "No inf checks were recorded for this optimizer.");
    iteration.check_unscaled(grads);
  }

  // Tells the iterations with unscaled gradients that another loss is scaled. Reads gradients
  // through weak references to the parameters, because optimizers may have been destroyed.
  void on_loss_scaled() {
    for (Iteration& iteration : iterations) {  // often empty: most loops scale one loss per update
      if (!iteration.is_unscaled()) continue;
      std::vector<ParamGrad> grads;
      for (const auto& param : iteration.params) {
        if (auto present = param.lock()) grads.push_back(grad_of(at::Tensor(std::move(present))));
      }
      iteration.on_loss_scaled(grads, iteration.stage == Stage::kStepped);
    }
  }

  // Throws if a gradient was already unscaled with another optimizer that has the same parameter.
  void check_still_scaled(const char* operation, const Iteration& iteration) const {
    for (const Iteration& other : iterations) {
      if (&other == &iteration || !other.is_unscaled()) continue;
      iteration.check_still_scaled(operation, other, grads_in(*iteration.optimizer));
    }
  }

  at::Tensor step_scaled(Iteration& iteration, ScaledStep& scaled, bool grad_mode) {
    const at::Tensor& scale = loss_scale.scale;
    at::Tensor grad_scale;
    if (iteration.stage == Stage::kReady) {
      check_still_scaled("step", iteration);
      grad_scale = scale.clone();
      std::optional<GradientScan> found =
          scaled.scan_gradients(loss_scale.start_iteration(iteration.slot), scale);
      if (found.has_value()) {
        TORCH_CHECK(found->first_nonfinites.size() == found->found_infs.size(),
                    "GradScaler.step: scan_gradients must give a first_nonfinite for each "
                    "found_inf, got ",
                    found->first_nonfinites.size(), " for ", found->found_infs.size());
        loss_scale.keep_first_nonfinites(iteration.slot, found->first_nonfinites,
                                         /*counts_tensors=*/false);
        iteration.found_infs = std::move(found->found_infs);
      } else {
        scan(iteration, {});
      }
    }
    const at::Tensor found_inf = sum_of_flags(iteration.found_infs, scale.device());
    // An optimizer of amp_ext needs no reset if its step throws: either the step wrote nothing, or
    // the optimizer itself refuses further steps.
    iteration.needs_reset = dynamic_cast<optim::FusedOptimizer*>(iteration.optimizer) == nullptr;
    const at::AutoGradMode as_outside(grad_mode);
    return scaled.step_scaled(grad_scale, found_inf);
  }

  at::Tensor step_unscaled(Iteration& iteration, bool grad_mode) {
    if (iteration.stage == Stage::kReady) unscale(iteration);
    TORCH_CHECK(!iteration.found_infs.empty(), "No inf checks were recorded for this optimizer.");
    for (const at::Tensor& found_inf : iteration.found_infs) {
      if (found_inf.item().toDouble() != 0.0) return {};
    }
    iteration.needs_reset = true;  // a step that throws may have written some parameters
    const at::AutoGradMode as_outside(grad_mode);
    return iteration.optimizer->step();
  }

  void update(const std::function<void()>& set) {
    check_scale("update");
    TORCH_CHECK(
        !is_stepping,
        "GradScaler.update: update() was called inside step(). Call it after step() has returned.");
    std::vector<std::pair<int64_t, at::Tensor>> flags;
    bool had_reset = false;
    for (const Iteration& iteration : iterations) {
      had_reset |= iteration.needs_reset;
      for (const at::Tensor& flag : iteration.found_infs) flags.emplace_back(iteration.slot, flag);
    }
    TORCH_CHECK(!flags.empty() || set != nullptr || had_reset,
                "No inf checks were recorded prior to update.");
    const LogMessages messages = loss_scale.update(flags, set);
    iterations.clear();
    if (!messages.skips.empty()) TORCH_WARN(messages.skips);
    if (messages.scale_is_too_small) warn_of_scale(loss_scale.scale.item().toDouble());
  }

  static void warn_of_scale(double value) { TORCH_WARN(LossScale::warning_of(c10::str(value))); }
};

GradScaler::GradScaler(GradScalerOptions options) : state_(std::make_shared<State>()) {
  state_->enabled = options.enabled();
  if (options.enabled() && options.device() == at::kCUDA && !at::hasCUDA()) {
    TORCH_WARN(
        "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling. To train on "
        "the CPU, pass GradScalerOptions().device(torch::kCPU).");
    state_->enabled = false;
  }
  if (state_->enabled) check_options(options);
  state_->device = options.device();
  LossScale& loss_scale = state_->loss_scale;
  loss_scale.init_scale = options.init_scale();
  loss_scale.init_hysteresis_tracker = options.hysteresis();
  loss_scale.warn_after = options.warn_after();
  LossScaleHyperparameters& hyperparameters = loss_scale.hyperparameters;
  hyperparameters.growth_factor = options.growth_factor();
  hyperparameters.backoff_factor = options.backoff_factor();
  hyperparameters.growth_interval = options.growth_interval();
  hyperparameters.min_scale = options.min_scale();
  hyperparameters.max_scale = options.max_scale();
  hyperparameters.hysteresis = static_cast<int32_t>(options.hysteresis());
  hyperparameters.dynamic = options.dynamic();
}

GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

GradScaler::State& GradScaler::checked(const char* operation) const {
  TORCH_CHECK(state_ != nullptr, "GradScaler.", operation,
              ": the scaler was moved from. Use the object that it was moved to.");
  return *state_;
}

at::Tensor GradScaler::scale(const at::Tensor& output) {
  State& state = checked("scale");
  if (!state.enabled) return output;
  TORCH_CHECK(output.defined(), "outputs must be a Tensor or an iterable of Tensors");
  state.on_loss_scaled();
  LossScale& loss_scale = state.loss_scale;
  if (!loss_scale.scale.defined()) loss_scale.make(output.device());
  return output * to_device(loss_scale.scale, output.device());
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scaled;
  for (const at::Tensor& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

void GradScaler::unscale_(Optimizer& optimizer) {
  State& state = checked("unscale_");
  if (!state.enabled) return;
  const at::NoGradGuard no_grad;
  state.check_scale("unscale_");
  state.unscale(state.iteration_of(optimizer, "unscale_"));
}

at::Tensor GradScaler::step(Optimizer& optimizer, const Optimizer::LossClosure& closure) {
  State& state = checked("step");
  const ClearsCasts clears_casts;
  if (!state.enabled) return optimizer.step(closure);
  const bool grad_mode = at::GradMode::is_enabled();
  const at::NoGradGuard no_grad;
  TORCH_CHECK(closure == nullptr,
              "Closure use is not currently supported if GradScaler is enabled.");
  state.check_scale("step");
  State::Iteration& iteration = state.iteration_of(optimizer, "step");
  iteration.check_needs_no_reset("step");
  if (iteration.stage == State::Stage::kUnscaled) state.check_unscaled(iteration);
  TORCH_CHECK(iteration.stage != State::Stage::kStepped,
              "step() has already been called since the last update().");
  auto* scaled = dynamic_cast<ScaledStep*>(&optimizer);
  if (scaled != nullptr && !scaled->unscales_in_step()) scaled = nullptr;
  const bool was_stepping = std::exchange(state.is_stepping, true);
  try {
    at::Tensor returned = scaled != nullptr ? state.step_scaled(iteration, *scaled, grad_mode)
                                            : state.step_unscaled(iteration, grad_mode);
    iteration.stage = State::Stage::kStepped;
    iteration.needs_reset = false;
    state.is_stepping = was_stepping;
    return returned;
  } catch (...) {
    state.is_stepping = was_stepping;
    throw;
  }
}

void GradScaler::update() {
  State& state = checked("update");
  if (state.enabled) state.update(nullptr);
}

void GradScaler::update(double new_scale) {
  State& state = checked("update");
  if (!state.enabled) return;
  state.check_scale("update");
  check_range("GradScaler.update", "new_scale", new_scale);
  state.update([&] { state.loss_scale.scale.fill_(new_scale); });
}

void GradScaler::update(const at::Tensor& new_scale) {
  State& state = checked("update");
  if (!state.enabled) return;
  TORCH_CHECK(new_scale.defined() && new_scale.device().type() == state.device &&
                  new_scale.numel() == 1 && !new_scale.requires_grad(),
              "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
              "torch.FloatTensor with requires_grad=False.");
  if (new_scale.is_cpu()) {
    TORCH_CHECK(!new_scale.is_complex(), "GradScaler.update: new_scale must be a number, got ",
                new_scale.scalar_type());
    check_range("GradScaler.update", "new_scale", new_scale.item().toDouble());
  }
  state.update([&] { state.loss_scale.scale.copy_(new_scale.reshape({})); });
}

double GradScaler::get_scale() const {
  State& state = checked("get_scale");
  if (!state.enabled) return 1.0;
  LossScale& loss_scale = state.loss_scale;
  const bool is_made = loss_scale.scale.defined();
  const double scale = is_made ? loss_scale.scale.item().toDouble() : loss_scale.init_scale;
  if (loss_scale.must_warn_of(scale)) State::warn_of_scale(scale);
  return scale;
}

bool GradScaler::is_enabled() const { return checked("is_enabled").enabled; }

#define AMP_EXT_RULE(Type, name)                                           \
  Type GradScaler::get_##name() const {                                    \
    return checked("get_" #name).loss_scale.hyperparameters.name;          \
  }                                                                        \
  void GradScaler::set_##name(Type value) {                                \
    State& state = checked("set_" #name);                                  \
    if (state.enabled) check_range("GradScaler.set_" #name, #name, value); \
    state.loss_scale.hyperparameters.name = value;                         \
  }
AMP_EXT_RULE(double, growth_factor)
AMP_EXT_RULE(double, backoff_factor)
AMP_EXT_RULE(int64_t, growth_interval)
#undef AMP_EXT_RULE

c10::IValue GradScaler::state_dict() const {
  State& state = checked("state_dict");
  auto dict = new_dict();
  if (!state.enabled) return dict;
  const auto value = [](const at::Tensor& tracker, int64_t initial) {
    return tracker.defined() ? tracker.item().toLong() : initial;
  };
  dict.insert("scale", get_scale());
  const LossScale& loss_scale = state.loss_scale;
  dict.insert("growth_factor", loss_scale.hyperparameters.growth_factor);
  dict.insert("backoff_factor", loss_scale.hyperparameters.backoff_factor);
  dict.insert("growth_interval", loss_scale.hyperparameters.growth_interval);
  dict.insert("_growth_tracker", value(loss_scale.growth_tracker, loss_scale.init_growth_tracker));
  if (loss_scale.hyperparameters.hysteresis != 1) {
    dict.insert("_hysteresis_tracker",
                value(loss_scale.hysteresis_tracker, loss_scale.init_hysteresis_tracker));
  }
  return dict;
}

void GradScaler::load_state_dict(const c10::IValue& state_dict) {
  State& state = checked("load_state_dict");
  if (!state.enabled) return;
  const std::string operation = "GradScaler.load_state_dict";
  const Dict dict = dict_of(operation, state_dict);
  TORCH_CHECK(!dict.empty(),
              "The source state dict is empty, possibly because it was saved from a disabled "
              "instance of GradScaler.");
  state.loss_scale.load([&](const char* name, bool is_required) -> std::optional<at::Scalar> {
    if (!is_required && !find(dict, name).has_value()) return {};
    c10::IValue value = entry_of(operation, dict, name);
    if (value.isTensor() && value.toTensor().numel() == 1) value = value.toTensor().item();
    const bool is_count = name[0] == '_' || name == std::string("growth_interval");
    const bool is_numeric = value.isInt() || (value.isDouble() && !is_count);
    const std::string wanted = wanted_of_scaler(name, is_numeric ? number_in(value) : NAN);
    TORCH_CHECK(wanted.empty(), operation, ": ", name, " must be ", wanted, ", got ", shown(value));
    return value.toScalar();
  });
}

}  // namespace amp_ext
