// Dynamic loss scaling for float16 training: the C++ counterpart of torch.amp.GradScaler in Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
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
  // If false, the scale stays at `init_scale`, but steps with an overflow are still skipped.
  TORCH_ARG(bool, dynamic) = true;
  // Number of overflows, counted since the scale last grew, after which the scale shrinks.
  TORCH_ARG(int64_t, hysteresis) = 1;
  // Number of consecutive skipped updates after which a warning names the first bad gradient.
  TORCH_ARG(int64_t, warn_after) = 10;
};

// Result of a scan of all gradients of an optimizer for inf and NaN.
struct GradientScan {
  // For each device, one float32 that is not 0 if a gradient on the device contains inf or NaN.
  std::vector<at::Tensor> found_infs;
  // For each device, one int64: the index of the first gradient with inf or NaN, counted over the
  // parameters of all groups. Scans only lower this index. GradScaler::update reads the index and
  // resets it to INT64_MAX, which means "none".
  std::vector<at::Tensor> first_nonfinites;
};

// Interface of optimizers that unscale gradients inside their step and skip it on the device,
// without waiting for the host. GradScaler detects it by dynamic_cast; the optimizers of
// amp_ext::optim implement it.
class AMP_EXT_API ScaledStep {
 public:
  virtual ~ScaledStep();

  // Steps with gradients that are still multiplied by `grad_scale` (one float32; undefined if they
  // are not scaled). Must write nothing if `found_inf` (one float32 on the same device) is not 0.
  virtual at::Tensor step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) = 0;

  // Scans all gradients for inf and NaN without writing them. The returned flags start as copies of
  // `found_inf`, so an overflow found earlier stays recorded. A `grad_scale` without a finite
  // inverse (such as 0) counts as an overflow. The default implementation returns nullopt, and the
  // scaler then scans the gradients itself.
  virtual std::optional<GradientScan> scan_gradients(const at::Tensor& found_inf,
                                                     const at::Tensor& grad_scale);

  // True if this optimizer unscales gradients inside its step. If false, the scaler treats it like
  // any other torch::optim::Optimizer.
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
// Optimizers of amp_ext::optim, and any other ScaledStep, unscale gradients and skip steps on their
// device. For any other torch::optim::Optimizer, the scaler unscales the gradients in place, and
// `step` waits for the GPU to learn whether it must skip the step. All errors are c10::Error.
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
  // most once between two updates, before the step. float16 gradients are refused, because small
  // values would vanish.
  void unscale_(torch::optim::Optimizer& optimizer);

  // Steps the optimizer if its gradients are finite, and skips the step otherwise. Call it at most
  // once per optimizer between two updates. Returns the result of the optimizer's step. Throws if
  // given a closure, unless scaling is disabled. If step or unscale_ fails when it may already have
  // changed gradients or parameters, both functions throw until `update` is called.
  at::Tensor step(torch::optim::Optimizer& optimizer,
                  const torch::optim::Optimizer::LossClosure& closure = nullptr);

  // Lowers the scale if a gradient overflowed in this iteration, and raises it after enough
  // iterations without overflow. With `new_scale`, a number or a tensor of one element on any
  // device, sets the scale instead.
  void update();
  void update(double new_scale);
  void update(const at::Tensor& new_scale);

  // Returns the scale, or 1 if scaling is disabled. Waits for the GPU.
  double get_scale() const;
  bool is_enabled() const;
  double get_growth_factor() const;
  void set_growth_factor(double factor);
  double get_backoff_factor() const;
  void set_backoff_factor(double factor);
  int64_t get_growth_interval() const;
  void set_growth_interval(int64_t interval);

  // Returns a state dict with the same entries as in Python: torch's five entries and, if
  // hysteresis is used, a sixth. The dict is empty if scaling is disabled.
  c10::IValue state_dict() const;
  // Loads a state dict of this class, of Python's amp_ext.GradScaler or of torch's GradScaler. The
  // limits of the scale stay as constructed. If this function throws, the scaler is unchanged.
  void load_state_dict(const c10::IValue& state_dict);

 private:
  struct State;

  // Returns the state. If the scaler was moved from, throws an error that names `operation`.
  State& checked(const char* operation) const;

  std::shared_ptr<State> state_;  // null after a move
};

// For torch::save(scaler, path) and torch::load(scaler, path).
AMP_EXT_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                        const GradScaler& scaler);
AMP_EXT_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                       GradScaler& scaler);

}  // namespace amp_ext
