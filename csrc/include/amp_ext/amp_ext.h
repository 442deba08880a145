// Mixed-precision training for LibTorch: a gradient scaler and fused optimizers, over the
// operations of ops.h. All errors are c10::Error.
#pragma once

#include <amp_ext/autocast.h>  // IWYU pragma: export
#include <amp_ext/ops.h>       // IWYU pragma: export
#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

namespace amp_ext {

class GradScaler;

using Tensors = std::map<std::string, at::Tensor>;

namespace optim {

template <typename Options>
class FusedOptimizer;

// Declares the setter and the getter of an option. Setters can be chained.
#define AMP_EXT_OPTION(Type, name, member)                                             \
  Derived& name(Type value) {                                                          \
    return this->change(#name, [value](Derived& options) { options.member = value; }); \
  }                                                                                    \
  const Type& name() const { return this->member; }

// Options of a parameter group that all optimizers share. Setters return the options class of the
// optimizer (CRTP).
template <typename Derived, typename Hyperparameters>
class OptionsOf : public torch::optim::OptimizerOptions {
 public:
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<Derived>(static_cast<const Derived&>(*this));
  }
  double get_lr() const override { return numbers_.lr; }
  void set_lr(double lr) override { this->lr(lr); }

  // Learning rate.
  AMP_EXT_OPTION(double, lr, numbers_.lr)
  // Weight decay. A step uses the product of this value and the learning rate.
  AMP_EXT_OPTION(double, weight_decay, numbers_.weight_decay)
  // Decay rates of the first and of the second moment of Adam. For Lion, decay rates of two
  // averages of the gradients; the step takes the sign of the first, and the state stores the
  // second.
  Derived& betas(std::tuple<double, double> value) {
    return change("betas", [value](Derived& options) {
      std::tie(options.numbers_.beta1, options.numbers_.beta2) = value;
    });
  }
  std::tuple<double, double> betas() const { return {numbers_.beta1, numbers_.beta2}; }
  // If true, maximizes the objective: steps along the gradient.
  AMP_EXT_OPTION(bool, maximize, numbers_.maximize)
  // If true, weight decay shrinks parameters, as in AdamW, instead of being added to gradients.
  AMP_EXT_OPTION(bool, decoupled_weight_decay, numbers_.decoupled_weight_decay)
  // If true, weight decay shrinks only elements that the update does not move away from 0. Needs
  // decoupled weight decay.
  AMP_EXT_OPTION(bool, cautious_weight_decay, numbers_.cautious_weight_decay)
  // Keeps a float32 master weight for every float16 and bfloat16 parameter. "split" stores only the
  // 16 bits that the parameter lacks. The parameter and these bits together give the float32 value
  // (for float16 parameters below 2^-16 in magnitude, only to within 2^-40). "split8" stores 8
  // bits, which give the float32 value to within 2^-15. Writing a parameter also changes its split
  // master weight. The option is read at a parameter's first step.
  AMP_EXT_OPTION(MasterWeights, master_weights, master_weights_)
  // Dtype of the buffers: at::kFloat, at::kBFloat16, or std::nullopt for the parameter's dtype. The
  // option is read at a parameter's first step.
  //
  // "8bit-bf16" stores first moments in 8 bits, as ratios to the square roots of the second
  // moments, and second moments in bfloat16. "8bit" also stores second moments in 8 bits, with an
  // exponent for each 32 elements of a row. Second moments stay in bfloat16 if the parameter has
  // fewer than 4096 elements, only one dimension, or rows whose length is not a multiple of 32, or
  // if it is not contiguous. With either name, SGD and Lion, which have no second moments, store
  // first moments as "8bit" stores second moments. amsgrad works with neither name.
  AMP_EXT_OPTION(StateDType, state_dtype, state_dtype_)
  // Rounding of low-precision values: "nearest" or "dither". If nullopt, only values that rounding
  // to nearest would freeze are dithered; if state_dtype is nullopt too, no value is dithered.
  AMP_EXT_OPTION(std::optional<std::string>, rounding, rounding_)
  // Clips the norm of the unscaled gradients of all groups inside the step; grad_norm() returns the
  // norm before clipping. If nullopt, the norm is neither computed nor clipped. Must be the same in
  // all groups.
  AMP_EXT_OPTION(std::optional<double>, max_grad_norm, max_grad_norm_)
  // Clips the elements of the unscaled gradients to this magnitude, after `max_grad_norm` was
  // applied. If nullopt, elements are not clipped.
  AMP_EXT_OPTION(std::optional<double>, clip_value, clip_value_)
  // Leaves elements unchanged if their gradient is inf or NaN. Must be the same in all groups.
  AMP_EXT_OPTION(bool, skip_nonfinite, skip_nonfinite_)
  // Writes the unscaled, clipped gradients back to grad().
  AMP_EXT_OPTION(bool, write_back_grads, numbers_.write_back_grads)

 protected:
  friend class FusedOptimizer<Derived>;
  using Formula = Hyperparameters;

  explicit OptionsOf(double lr) { numbers_.lr = lr; }

  Derived& change(const char* name, std::function<void(Derived&)> change) {
    change(static_cast<Derived&>(*this));
    changes_[name] = std::move(change);
    return static_cast<Derived&>(*this);
  }

  Group<Hyperparameters> numbers_;
  MasterWeights master_weights_ = true;
  StateDType state_dtype_ = at::kFloat;
  std::optional<std::string> rounding_;
  std::optional<double> max_grad_norm_, clip_value_;
  bool skip_nonfinite_ = false, amsgrad_ = false;
  // The options that were set, by name. A group takes the others from its optimizer.
  std::map<std::string, std::function<void(Derived&)>> changes_;
  bool is_of_group_ = false;  // false for the options of an optimizer
};

// Options of Adam, and of AdamW, whose weight decay is decoupled.
template <bool kIsAdamW>
class AMP_EXT_API AdamOptionsOf : public OptionsOf<AdamOptionsOf<kIsAdamW>, AdamHyperparameters> {
  using Derived = AdamOptionsOf;

 public:
  static constexpr const char* kName = kIsAdamW ? "AdamW" : "Adam";
  AdamOptionsOf() : OptionsOf<AdamOptionsOf, AdamHyperparameters>(1e-3) {
    this->numbers_.weight_decay = kIsAdamW ? 1e-2 : 0.0;
    this->numbers_.decoupled_weight_decay = kIsAdamW;
  }
  AdamOptionsOf(double lr) : AdamOptionsOf() { this->lr(lr); }  // NOLINT: implicit, as in torch

  // Term added to the square root of the second moment.
  AMP_EXT_OPTION(double, eps, numbers_.eps)
  // If true, divides by the square root of the largest second moment so far (AMSGrad).
  AMP_EXT_OPTION(bool, amsgrad, amsgrad_)
  // Lower bound of the bias-corrected second moment, applied before its square root is taken.
  AMP_EXT_OPTION(double, denominator_floor, numbers_.denominator_floor)
};
using AdamOptions = AdamOptionsOf<false>;
using AdamWOptions = AdamOptionsOf<true>;

class AMP_EXT_API SGDOptions : public OptionsOf<SGDOptions, SgdHyperparameters> {
  using Derived = SGDOptions;

 public:
  static constexpr const char* kName = "SGD";
  SGDOptions() : OptionsOf(1e-3) {}
  SGDOptions(double lr) : OptionsOf(1e-3) { this->lr(lr); }  // NOLINT: implicit, as in torch

  // Decay rate of the momentum buffer.
  AMP_EXT_OPTION(double, momentum, numbers_.momentum)
  // Fraction of the gradient that is left out of the momentum buffer, except at the first step.
  AMP_EXT_OPTION(double, dampening, numbers_.dampening)
  // Enables Nesterov momentum.
  AMP_EXT_OPTION(bool, nesterov, numbers_.nesterov)
};

// Weight decay is decoupled by default.
class AMP_EXT_API LionOptions : public OptionsOf<LionOptions, LionHyperparameters> {
  using Derived = LionOptions;

 public:
  static constexpr const char* kName = "Lion";
  LionOptions() : OptionsOf(1e-4) { numbers_.decoupled_weight_decay = true; }
  LionOptions(double lr) : LionOptions() { this->lr(lr); }  // NOLINT: implicit, as in torch
};

#undef AMP_EXT_OPTION

// Interface of the optimizers to a scaler.
class AMP_EXT_API ScaledOptimizer : public torch::optim::Optimizer {
 protected:
  using Optimizer::Optimizer;

  GradientOptions scaled_;  // inputs of a step() that the scaler calls

 private:
  friend class amp_ext::GradScaler;
  // False for a class of the user, whose step() gets unscaled gradients.
  virtual bool unscales_in_step() const = 0;
};

struct FusedParamState;

// The optimizers. A step reads groups, parameters and gradients when it is called. If a parameter
// was written since its last step, or its state was loaded, its float32 master weight becomes the
// parameter where it does not round to it.
template <typename Options>
class AMP_EXT_API FusedOptimizer : public ScaledOptimizer {
 public:
  explicit FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                          const Options& defaults = {});
  explicit FusedOptimizer(std::vector<at::Tensor> params, const Options& defaults = {})
      : FusedOptimizer(std::vector<torch::optim::OptimizerParamGroup>{{std::move(params)}},
                       defaults) {}

  // Hides torch's method, which since torch 2.13 drops the options of the group. A step refuses a
  // group that was added through a torch::optim::Optimizer&.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  // Updates all parameters that have a gradient. The closure re-evaluates the model with gradients
  // enabled and returns the loss, which `step` returns. Errors are thrown before anything is
  // written.
  //
  // A derived class may override step(). A scaler then unscales the gradients before it calls
  // step(), as for an optimizer of torch, and does not call step() after an overflow.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Returns the norm of the unscaled gradients at the last step, one float32 on the device of the
  // first gradient. Undefined without max_grad_norm.
  at::Tensor grad_norm() const { return grad_norm_; }

  // Returns one tensor per parameter: its float32 master weight, a joined copy if the master weight
  // is split, or the parameter itself if it has no master weight.
  std::vector<at::Tensor> master_params();

  // Serialization for torch::save and torch::load. The archive has the states as they are in
  // memory, and the hyperparameters of the groups, such as `lr`. `load` throws unless groups, and
  // dtypes and shapes of states, are those of this optimizer.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  using Formula = typename Options::Formula;

  bool unscales_in_step() const override { return typeid(*this) == typeid(FusedOptimizer); }
  static void check_options(const Options& options, const std::string& place);
  Options& options_of(size_t group);
  FusedParamState& state_of(const Options& options, size_t group, size_t index);
  Tensors saved_tensors(const Tensors& archived = {});

  at::Tensor grad_norm_;
};

// Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015.
using Adam = FusedOptimizer<AdamOptions>;
// Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
using AdamW = FusedOptimizer<AdamWOptions>;
// Plain, or with (Nesterov) momentum: Sutskever, Martens, Dahl and Hinton, "On the importance of
// initialization and momentum in deep learning", 2013.
using SGD = FusedOptimizer<SGDOptions>;
// Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2. Steps by the
// sign of an average. Compared with AdamW, `lr` is 3 to 10 times smaller and `weight_decay` is
// larger by the same factor.
using Lion = FusedOptimizer<LionOptions>;

// All optimizers, for which the library has code.
#define AMP_EXT_FOR_EACH_CLASS(X) X(Adam) X(AdamW) X(SGD) X(Lion)

}  // namespace optim

// Options of GradScaler. The hyperparameters are the factors and the interval by which the scale
// grows and shrinks, and its limits.
struct GradScalerOptions : LossScaleHyperparameters {
  double init_scale = 65536.0;
  bool enabled = true;  // if false, every method passes its inputs through
};

// Scales the loss so that float16 gradients neither vanish nor overflow. Methods and the order of
// calls are those of torch.amp.GradScaler in Python.
//
//   scaler.scale(loss).backward();
//   scaler.step(optimizer);
//   scaler.update();
//
// Optimizers of amp_ext::optim unscale gradients inside their step, and skip it on their device.
// For any other torch::optim::Optimizer, the scaler unscales the gradients in place, and `step`
// waits for the GPU to learn whether it must skip the step.
//
// Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
class AMP_EXT_API GradScaler {
 public:
  explicit GradScaler(const GradScalerOptions& options = {});
  GradScaler(GradScaler&&) = default;
  GradScaler& operator=(GradScaler&&) = default;

  // Returns the output times the scale. The first call moves the scale to the output's device.
  at::Tensor scale(const at::Tensor& output);

  // Unscales the gradients of an optimizer in place and checks them for inf and NaN. Call it at
  // most once between two updates, before the step. float16 gradients are refused, because small
  // values would vanish.
  void unscale_(torch::optim::Optimizer& optimizer);

  // Steps the optimizer if its gradients are finite, and skips the step otherwise. Call it at most
  // once per optimizer between two updates. Returns the result of the optimizer's step. Throws if
  // given a closure, unless scaling is disabled.
  at::Tensor step(torch::optim::Optimizer& optimizer,
                  const torch::optim::Optimizer::LossClosure& closure = nullptr);

  // Lowers the scale if a gradient overflowed in this iteration, and raises it after enough
  // iterations without overflow. With `new_scale`, sets the scale instead.
  void update(std::optional<double> new_scale = {});

  // Returns the scale, or 1 if scaling is disabled. Waits for the GPU.
  double get_scale() const;
  bool is_enabled() const { return options_.enabled; }

  // Returns the scaler's tensors, which have one element each: "scale", "growth_tracker" and
  // "hysteresis_tracker". Empty if scaling is disabled. torch::save and torch::load save and load
  // them.
  const Tensors& state() const { return state_; }

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  // Progress of an optimizer since the last update.
  struct Iteration {
    Stage stage = Stage::kReady;
    TensorList found_infs;  // one float32 for each device; not 0 if a gradient has inf or NaN
  };

  void check_has_scaled(const char* operation) const;

  GradScalerOptions options_;
  Tensors state_;
  bool has_scaled_ = false;  // whether the state is on the device of the outputs
  std::map<const torch::optim::Optimizer*, Iteration> iterations_;
};

// For torch::save(scaler, path) and torch::load(scaler, path).
AMP_EXT_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                        const GradScaler& scaler);
AMP_EXT_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                       GradScaler& scaler);

}  // namespace amp_ext
