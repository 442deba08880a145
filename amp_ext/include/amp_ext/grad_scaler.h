// Dynamic loss scaling for training in float16, as torch.amp.GradScaler does in Python.
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

// Set one by one: GradScalerOptions().device(torch::kCPU).init_scale(1024).
struct GradScalerOptions {
  // Type of the device that trains: at::kCUDA or at::kCPU.
  TORCH_ARG(c10::DeviceType, device) = c10::DeviceType::CUDA;
  TORCH_ARG(double, init_scale) = 65536.0;
  // Factor after `growth_interval` clean iterations, above 1.
  TORCH_ARG(double, growth_factor) = 2.0;
  // Factor after an overflow, below 1.
  TORCH_ARG(double, backoff_factor) = 0.5;
  TORCH_ARG(int64_t, growth_interval) = 2000;
  // If false, every method passes through.
  TORCH_ARG(bool, enabled) = true;
  // What a backoff does not fall below, and a growth does not exceed.
  TORCH_ARG(double, min_scale) = 0.0;
  TORCH_ARG(double, max_scale) = std::numeric_limits<double>::infinity();
  // If false, the scale stays at init_scale; overflows are skipped as ever.
  TORCH_ARG(bool, dynamic) = true;
  // Number of overflows since the last growth of which the last backs off.
  TORCH_ARG(int64_t, hysteresis) = 1;
  // Updates skipped in a row until a warning names the first bad gradient.
  TORCH_ARG(int64_t, warn_after) = 10;
};

// What a look at all gradients of an optimizer has found.
struct GradientScan {
  std::vector<at::Tensor> found_infs;  // one float32 for each device: not 0 if one is inf or NaN
  // For each device one int64, the number of the first bad gradient among the parameters of all
  // groups, or what it was before, which is larger. An update of the scale reads and resets it.
  std::vector<at::Tensor> first_nonfinites;
};

// What an optimizer inherits that unscales gradients inside its step and skips it without a look
// from the host. A GradScaler finds it by dynamic_cast. The optimizers of amp_ext::optim are such.
class AMP_EXT_API ScaledStep {
 public:
  virtual ~ScaledStep();

  // Steps with gradients that carry `grad_scale` (one float32; undefined: they carry none); must
  // write nothing if `found_inf` (one float32, on the same device) is not 0.
  virtual at::Tensor step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) = 0;

  // Looks for inf and NaN in all gradients, which it does not write. `found_inf` is copied, not
  // written; a `grad_scale` without a finite inverse counts as an overflow. None, as by default:
  // the scaler looks itself.
  virtual std::optional<GradientScan> scan_gradients(const at::Tensor& found_inf,
                                                     const at::Tensor& grad_scale);

  // Whether it steps so. If not, it is any other torch::optim::Optimizer to a scaler.
  virtual bool unscales_in_step() const { return true; }
};

// Scales the loss so that float16 gradients neither vanish nor overflow. Methods, order of calls,
// state and messages are those of Python's amp_ext.GradScaler, whose documentation holds here too.
//
//   scaler.scale(loss).backward();
//   scaler.step(optimizer);
//   scaler.update();
//
// An optimizer of amp_ext::optim, or any other ScaledStep, unscales and skips on its device. Any
// other torch::optim::Optimizer has its gradients unscaled in place, and `step` waits for the GPU
// to learn whether to skip. Errors are c10::Error.
//
// Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
class AMP_EXT_API GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});
  ~GradScaler();
  // What was moved from throws where it is used, until another is moved into it.
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  // Multiplies by the scale; makes it where the first output is.
  at::Tensor scale(const at::Tensor& output);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  // Unscales an optimizer's gradients in place and looks for inf and NaN among them; once between
  // two updates, before its step. float16 gradients are refused: they would vanish.
  void unscale_(torch::optim::Optimizer& optimizer);

  // Steps an optimizer whose gradients are finite, and skips the step otherwise; once between two
  // updates. Returns what its step returned. Throws with a closure, unless scaling is disabled.
  // After an error of either that came when it may have written, both are refused until `update`.
  at::Tensor step(torch::optim::Optimizer& optimizer,
                  const torch::optim::Optimizer::LossClosure& closure = nullptr);

  // Lets the scale follow what the iteration found, or sets it: to one number, on any device.
  void update();
  void update(double new_scale);
  void update(const at::Tensor& new_scale);

  double get_scale() const;  // 1 if disabled; waits for a GPU
  bool is_enabled() const;
  double get_growth_factor() const;
  void set_growth_factor(double factor);
  double get_backoff_factor() const;
  void set_backoff_factor(double factor);
  int64_t get_growth_interval() const;
  void set_growth_interval(int64_t interval);

  // Whether the step before the last update was skipped, that of one optimizer or any; none if
  // there was none. Does not wait for a GPU, unless asked.
  std::optional<bool> last_step_skipped(const torch::optim::Optimizer* optimizer = nullptr,
                                        bool wait = false) const;
  ScalerStats stats(bool wait = false) const;

  // Python's state dict: torch's five entries, and one more with a hysteresis; empty if disabled.
  c10::IValue state_dict() const;
  // Takes those of Python and of torch's scaler as well. Limits stay as constructed. Where it
  // throws, nothing has been changed.
  void load_state_dict(const c10::IValue& state_dict);

 private:
  struct State;

  // Throws on behalf of a method where there is none.
  State& checked(const char* operation) const;

  std::unique_ptr<State> state_;  // null after a move
};

// For torch::save(scaler, path) and torch::load(scaler, path).
AMP_EXT_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                        const GradScaler& scaler);
AMP_EXT_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                       GradScaler& scaler);

}  // namespace amp_ext
