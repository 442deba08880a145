// Dynamic loss scaling for float16 training: the C++ counterpart of torch.amp.GradScaler in Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/scaler_stats.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

namespace c10 {
struct IValue;
}  // namespace c10

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace amp_ext {

// Options of GradScaler, set by chained calls:
// GradScalerOptions().device(torch::kCPU).init_scale(1024).
struct GradScalerOptions {
  // Device type on which the model trains: at::kCUDA or at::kCPU.
  TORCH_ARG(c10::DeviceType, device) = c10::DeviceType::CUDA;
  TORCH_ARG(double, init_scale) = 65536.0;
  // Factor, above 1, by which the scale grows after `growth_interval` steps without overflow.
  TORCH_ARG(double, growth_factor) = 2.0;
  // Factor, below 1, by which the scale shrinks after an overflow.
  TORCH_ARG(double, backoff_factor) = 0.5;
  TORCH_ARG(int64_t, growth_interval) = 2000;
  // If false, scaling is off and every method passes its inputs through.
  TORCH_ARG(bool, enabled) = true;
  // Limits of the scale: it neither shrinks below `min_scale` nor grows above `max_scale`.
  TORCH_ARG(double, min_scale) = 0.0;
  TORCH_ARG(double, max_scale) = std::numeric_limits<double>::infinity();
  // If false, the scale stays at `init_scale`; steps with an overflow are still skipped.
  TORCH_ARG(bool, dynamic) = true;
  // Number of overflows since the last growth that it takes to lower the scale.
  TORCH_ARG(int64_t, hysteresis) = 1;
  // Number of consecutive skipped updates after which a warning names the first bad gradient.
  TORCH_ARG(int64_t, warn_after) = 10;
};

// Result of a scan of all gradients of an optimizer for inf and NaN.
struct GradientScan {
  // For each device one float32 tensor, not 0 if a gradient on it contains inf or NaN.
  std::vector<at::Tensor> found_infs;
  // For each device one int64 tensor: the smallest index of a gradient with inf or NaN, counted
  // over the parameters of all groups, or the previous, larger value if there is none.
  // GradScaler::update reads and resets it.
  std::vector<at::Tensor> first_nonfinites;
};

// Interface of optimizers that unscale gradients inside their step and skip it on the device,
// without waiting for the host. GradScaler detects it by dynamic_cast; the optimizers of
// amp_ext::optim implement it.
class AMP_EXT_API ScaledStep {
 public:
  virtual ~ScaledStep();

  // Steps with gradients that are multiplied by `grad_scale` (one float32; undefined: gradients are
  // not scaled). Must write nothing if `found_inf` (one float32, same device) is not 0.
  virtual at::Tensor step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) = 0;

  // Scans all gradients for inf and NaN without writing them. The result starts from a copy of
  // `found_inf`; a `grad_scale` without a finite inverse counts as an overflow. The default returns
  // nullopt, which makes the scaler scan the gradients itself.
  virtual std::optional<GradientScan> scan_gradients(const at::Tensor& found_inf,
                                                     const at::Tensor& grad_scale);

  // True if this optimizer unscales in its step. If false, the scaler treats it like any other
  // torch::optim::Optimizer.
  virtual bool unscales_in_step() const { return true; }
};

// Scales the loss so that float16 gradients neither vanish nor overflow. Methods, order of calls,
// state and messages are the same as in Python's amp_ext.GradScaler, whose documentation also
// applies here.
//
//   scaler.scale(loss).backward();
//   scaler.step(optimizer);
//   scaler.update();
//
// Optimizers of amp_ext::optim, and any other ScaledStep, unscale and skip on their device. For any
// other torch::optim::Optimizer the gradients are unscaled in place, and `step` waits for the GPU
// to learn whether to skip. Errors are c10::Error.
//
// Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
class AMP_EXT_API GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});
  ~GradScaler();
  // A moved-from scaler throws on use, until another scaler is moved into it.
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  // Returns the output times the scale. The first call creates the scale on the output's device.
  at::Tensor scale(const at::Tensor& output);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  // Unscales the gradients of an optimizer in place and checks them for inf and NaN. Call it at
  // most once between two updates, before the step. float16 gradients are refused, since small
  // values vanish.
  void unscale_(torch::optim::Optimizer& optimizer);

  // Steps the optimizer if its gradients are finite and skips the step otherwise; at most once
  // between two updates. Returns the result of the optimizer's step. Throws if given a closure,
  // unless scaling is disabled. If step or unscale_ fails after it may have written, both are
  // refused until `update`.
  at::Tensor step(torch::optim::Optimizer& optimizer,
                  const torch::optim::Optimizer::LossClosure& closure = nullptr);

  // Adjusts the scale to the overflows of the iteration, or sets it to `new_scale`, a number or a
  // tensor of one element on any device.
  void update();
  void update(double new_scale);
  void update(const at::Tensor& new_scale);

  // Returns the scale, 1 if scaling is disabled. Waits for a GPU.
  double get_scale() const;
  bool is_enabled() const;
  double get_growth_factor() const;
  void set_growth_factor(double factor);
  double get_backoff_factor() const;
  void set_backoff_factor(double factor);
  int64_t get_growth_interval() const;
  void set_growth_interval(int64_t interval);

  // Returns whether the step before the last update was skipped, of one optimizer or (null) of any;
  // nullopt if there was no such step. Does not wait for a GPU, unless `wait` is true.
  std::optional<bool> last_step_skipped(const torch::optim::Optimizer* optimizer = nullptr,
                                        bool wait = false) const;
  ScalerStats stats(bool wait = false) const;

  // Returns Python's state dict: torch's five entries and, with hysteresis, a sixth; empty if
  // disabled.
  c10::IValue state_dict() const;
  // Loads a state dict of this class, of Python's amp_ext.GradScaler or of torch's. The limits stay
  // as constructed. Nothing is changed if the call throws.
  void load_state_dict(const c10::IValue& state_dict);

 private:
  struct State;

  // Returns the state; throws on behalf of the method `operation` if the scaler was moved from.
  State& checked(const char* operation) const;

  std::unique_ptr<State> state_;  // null after a move
};

// For torch::save(scaler, path) and torch::load(scaler, path).
AMP_EXT_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                        const GradScaler& scaler);
AMP_EXT_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                       GradScaler& scaler);

}  // namespace amp_ext
