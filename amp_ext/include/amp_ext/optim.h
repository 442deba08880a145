// Optimizers for LibTorch: subclasses of torch::optim::Optimizer that update many parameters per
// kernel launch and keep float32 master weights of 16-bit parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/grad_scaler.h>
#include <amp_ext/options.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace amp_ext {
class Plan;
struct GroupSettings;
}  // namespace amp_ext

namespace amp_ext::optim {

// Returns pointers to the numbers in a tuple.
template <typename... Numbers>
std::vector<double*> places_of(std::tuple<Numbers...>& numbers) {
  return std::apply([](Numbers&... each) { return std::vector<double*>{&each...}; }, numbers);
}

// Pointer to the member that stores an option.
using OptionPlace = std::variant<double*, bool*, MasterWeights*, StateDType*, std::vector<double*>,
                                 std::optional<double>*, std::optional<std::string>*>;

// Options of a parameter group that all optimizers share.
class AMP_EXT_API FusedOptions : public torch::optim::OptimizerOptions {
 public:
  struct Option {
    const char* name;
    OptionPlace place;
  };

  double get_lr() const override { return lr_; }
  void set_lr(double lr) override {
    lr_ = lr;
    given_.insert("lr");
  }

  // Returns all options with their Python names. Writing through the returned pointers does not
  // mark an option as given (see is_given); only setters do.
  virtual std::vector<Option> options();

  // True if the option was set explicitly, even to its default. Options that a group does not set
  // come from the defaults of its optimizer.
  bool is_given(const char* name) const { return given_.count(name) != 0; }

  // True if these options allow dithering for at least one dtype of parameters. If so, every
  // parameter's state has a "step" counter, because dithering depends on the step.
  bool dithers() const;

 protected:
  double lr_ = 1e-3;
  double weight_decay_ = 0.0;
  bool maximize_ = false;
  bool decoupled_weight_decay_ = false;
  MasterWeights master_weights_ = true;
  StateDType state_dtype_ = at::kFloat;
  std::optional<std::string> rounding_;
  std::optional<double> max_grad_norm_;
  std::optional<double> clip_value_;
  bool skip_nonfinite_ = false;
  bool write_back_grads_ = false;
  std::set<std::string> given_;
  bool are_defaults_ = false;  // true for the defaults of an optimizer, false for a group

  friend class FusedOptimizer;
};

// Declares the setter and getter of an option. Setters can be chained.
#define AMP_EXT_OPTION(Type, name)       \
  Derived& name(Type value) {            \
    this->name##_ = std::move(value);    \
    this->given_.insert(#name);          \
    return static_cast<Derived&>(*this); \
  }                                      \
  const Type& name() const { return this->name##_; }

// Setters of the options that all optimizers share. Each setter returns the options class of the
// optimizer (CRTP), so that setters of that class can follow in a chain.
template <typename Derived>
class AMP_EXT_API OptionsOf : public FusedOptions {
 public:
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<Derived>(static_cast<const Derived&>(*this));
  }

  // Learning rate.
  AMP_EXT_OPTION(double, lr)
  // Weight decay. A step uses the product of this value and the learning rate.
  AMP_EXT_OPTION(double, weight_decay)
  // If true, maximizes the objective: steps along the gradient.
  AMP_EXT_OPTION(bool, maximize)
  // Keeps a float32 master weight for every float16 and bfloat16 parameter. "split" stores only the
  // 16 bits that the parameter lacks. The parameter and these bits together give the float32 value
  // (for float16 parameters below 2^-16 in magnitude, only to within 2^-40). "split8" stores 8
  // bits, which give the float32 value to within 2^-15. Writing a parameter also changes its split
  // master weight.
  AMP_EXT_OPTION(MasterWeights, master_weights)
  // Dtype of the buffers: at::kFloat, at::kBFloat16, or std::nullopt for the parameter's dtype.
  //
  // "8bit-bf16" stores first moments in 8 bits, as ratios to the square roots of the second
  // moments, and second moments in bfloat16. "8bit" also stores second moments in 8 bits, with an
  // exponent for each 32 elements of a row. Second moments stay in bfloat16 if the parameter has
  // fewer than 4096 elements, only one dimension, or rows whose length is not a multiple of 32, or
  // if it is not contiguous. With either name, SGD and Lion, which have no second moments, store
  // first moments as "8bit" stores second moments. amsgrad works with neither name.
  AMP_EXT_OPTION(StateDType, state_dtype)
  // Rounding of low-precision values: "nearest" or "dither". If nullopt, only values that rounding
  // to nearest would freeze are dithered; if state_dtype is nullopt too, no value is dithered.
  AMP_EXT_OPTION(std::optional<std::string>, rounding)
  // Clips the norm of the unscaled gradients of all groups inside the step; `grad_norm()` returns
  // the norm before clipping. If nullopt, the norm is neither computed nor clipped. Must be the
  // same in all groups.
  AMP_EXT_OPTION(std::optional<double>, max_grad_norm)
  // Clips the elements of the unscaled gradients to this magnitude, after `max_grad_norm` was
  // applied. If nullopt, elements are not clipped.
  AMP_EXT_OPTION(std::optional<double>, clip_value)
  // Leaves elements unchanged if their gradient is inf or NaN. Must be the same in all groups.
  AMP_EXT_OPTION(bool, skip_nonfinite)
  // Writes the unscaled, clipped gradients back to grad().
  AMP_EXT_OPTION(bool, write_back_grads)
};

// Options of Adam and AdamW.
template <typename Derived>
class AMP_EXT_API AdamOptionsOf : public OptionsOf<Derived> {
 public:
  using Betas = std::tuple<double, double>;

  // Decay rates of the first and of the second moment.
  AMP_EXT_OPTION(Betas, betas)
  // Term added to the square root of the second moment.
  AMP_EXT_OPTION(double, eps)
  // If true, divides by the square root of the largest second moment so far (AMSGrad).
  AMP_EXT_OPTION(bool, amsgrad)
  // Lower bound of the bias-corrected second moment, applied before its square root is taken.
  AMP_EXT_OPTION(double, denominator_floor)

  std::vector<FusedOptions::Option> options() override {
    auto all = OptionsOf<Derived>::options();
    all.insert(all.end(), {{"betas", places_of(betas_)},
                           {"eps", &eps_},
                           {"amsgrad", &amsgrad_},
                           {"denominator_floor", &denominator_floor_}});
    return all;
  }

 protected:
  Betas betas_ = {0.9, 0.999};
  double eps_ = 1e-8;
  bool amsgrad_ = false;
  double denominator_floor_ = 0.0;
};

class AMP_EXT_API AdamOptions : public AdamOptionsOf<AdamOptions> {
  using Derived = AdamOptions;

 public:
  AdamOptions() = default;
  AdamOptions(double lr) { this->lr(lr); }  // NOLINT: implicit, as in torch

  // If true, weight decay shrinks parameters, as in AdamW, instead of being added to gradients.
  AMP_EXT_OPTION(bool, decoupled_weight_decay)
};

class AMP_EXT_API AdamWOptions : public AdamOptionsOf<AdamWOptions> {
 public:
  AdamWOptions() {
    weight_decay_ = 1e-2;
    decoupled_weight_decay_ = true;
  }
  AdamWOptions(double lr) : AdamWOptions() { this->lr(lr); }  // NOLINT: implicit, as in torch
};

class AMP_EXT_API SGDOptions : public OptionsOf<SGDOptions> {
  using Derived = SGDOptions;

 public:
  SGDOptions() = default;
  SGDOptions(double lr) { this->lr(lr); }  // NOLINT: implicit, as in torch

  // Decay rate of the momentum buffer.
  AMP_EXT_OPTION(double, momentum)
  // Fraction of the gradient that is left out of the momentum buffer, except at the first step.
  AMP_EXT_OPTION(double, dampening)
  // Enables Nesterov momentum.
  AMP_EXT_OPTION(bool, nesterov)
  // If true, weight decay shrinks parameters instead of being added to gradients.
  AMP_EXT_OPTION(bool, decoupled_weight_decay)

  std::vector<Option> options() override {
    auto all = FusedOptions::options();
    all.insert(all.end(),
               {{"momentum", &momentum_}, {"dampening", &dampening_}, {"nesterov", &nesterov_}});
    return all;
  }

 protected:
  double momentum_ = 0.0;
  double dampening_ = 0.0;
  bool nesterov_ = false;
};

class AMP_EXT_API LionOptions : public OptionsOf<LionOptions> {
  using Derived = LionOptions;

 public:
  using Betas = std::tuple<double, double>;

  LionOptions() {
    lr_ = 1e-4;
    decoupled_weight_decay_ = true;
  }
  LionOptions(double lr) : LionOptions() { this->lr(lr); }  // NOLINT: implicit, as in torch

  // Decay rates of two averages of the gradients. The step takes the sign of the average with
  // beta1, and the state stores the average with beta2.
  AMP_EXT_OPTION(Betas, betas)
  // If false, weight decay is added to gradients instead of shrinking parameters.
  AMP_EXT_OPTION(bool, decoupled_weight_decay)

  std::vector<Option> options() override {
    auto all = FusedOptions::options();
    all.push_back({"betas", places_of(betas_)});
    return all;
  }

 protected:
  Betas betas_ = {0.9, 0.99};
};

#undef AMP_EXT_OPTION

// State of one parameter, with the keys of the Python state: "step", "master_param" (split:
// "master_low_bf16", ...), "exp_avg" (in 8 bits: "exp_avg_q8h", ...), ...
class AMP_EXT_API FusedParamState : public torch::optim::OptimizerParamState {
 public:
  explicit FusedParamState(at::Tensor param) : param_(std::move(param)) {}
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<FusedParamState>(*this);
  }

  // Returns the tensor with this key, or an undefined tensor if there is none.
  at::Tensor get(const std::string& key) const;
  const std::vector<std::pair<std::string, at::Tensor>>& tensors() const { return tensors_; }

 private:
  friend class FusedOptimizer;

  // Keeps the parameter alive, because the state is found by the parameter's address.
  at::Tensor param_;
  std::vector<std::pair<std::string, at::Tensor>> tensors_;
  std::shared_ptr<const c10::IValue> others_;  // unknown entries of a loaded state: a dict, or null
};

struct StateSpec;
struct ParamRef;
struct OptimizerClass;
class PlacedOptions;

// Base of all optimizers. Errors are c10::Error with the same texts as in Python, thrown before
// anything is written.
//
// Options that a group does not set come from the optimizer's defaults. A step always notices
// in-place writes to states. If only a master weight was written, the step continues from the
// master weight. If both a master weight and its parameter were written, the parameter's value wins
// wherever the master weight does not round to that value.
class AMP_EXT_API FusedOptimizer : public torch::optim::Optimizer, public ScaledStep {
 public:
  ~FusedOptimizer() override;
  // A moved-from optimizer throws on use, until another optimizer is moved into it.
  FusedOptimizer(FusedOptimizer&&) noexcept;
  FusedOptimizer& operator=(FusedOptimizer&&) noexcept;

  // Hides torch's method, which since torch 2.13 drops the options of the group and checks nothing.
  // A group that was added through a torch::optim::Optimizer& is refused at its first use.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  // Updates all parameters that have a gradient. The closure re-evaluates the model with gradients
  // enabled and returns the loss, which `step` returns. Only one thread at a time may call `step`.
  //
  // If a kernel launch fails after others have succeeded, each parameter and its states are either
  // stepped or untouched, and later steps throw until a state dict is loaded.
  //
  // A derived class may override step(). A scaler then unscales the gradients before it calls
  // step(), as for any other optimizer, and does not call step() after an overflow.
  at::Tensor step(LossClosure closure = nullptr) override;

  at::Tensor step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override;
  std::optional<GradientScan> scan_gradients(const at::Tensor& found_inf,
                                             const at::Tensor& grad_scale) override;
  // True for the classes of this file. A derived class that keeps step() may return true as well.
  bool unscales_in_step() const override;

  // Returns an object that identifies the optimizer and moves with it; null after a move.
  std::shared_ptr<const void> identity() const;

  // Returns the norm of the unscaled gradients at the last step: one float32, which later steps
  // overwrite. Undefined unless max_grad_norm is set.
  at::Tensor grad_norm() const;

  // Creates every state that the first step would create, without stepping.
  void init_state();

  // Makes the next step look up all states again. The step still notices if a parameter was written
  // after its master weight.
  void rebuild();

  // Returns one tensor per parameter: its float32 master weight, a joined copy if the master weight
  // is split, or the parameter itself if it has no master weight.
  std::vector<at::Tensor> master_params();

  // Copies parameters that were changed through data() into their master weights now. The next step
  // notices other changes by itself. Split master weights don't need this call.
  void refresh_masters();

  // Returns a state dict in Python's format: {"state": {0: {"step": ..., ...}}, "param_groups":
  // [{"lr": ..., "params": [0, ...]}]}. The tensors are the optimizer's own; save_state copies
  // them.
  c10::IValue state_dict() const;

  // Loads a state dict of this class, or of the Python class with this name in amp_ext.optim or
  // torch.optim. Moments and master weights are converted to the configured format. Options that
  // torch does not have stay as configured. Unknown entries are preserved and returned by
  // `state_dict()`. Missing master weights are copied from the parameters, so load the model first.
  void load_state_dict(const c10::IValue& state_dict);

  // Serialization for torch::save and torch::load. `load` reads archives of amp_ext's optimizers.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  FusedOptimizer(const OptimizerClass& kind,
                 const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 std::unique_ptr<FusedOptions> defaults);

 private:
  struct Impl;
  struct Load;
  struct Operation;
  class Store;
  using StateMap = std::vector<std::pair<std::string, at::Tensor>>;

  Impl& checked(const char* operation) const;
  FusedOptions& options_of(size_t group);
  void check_options_type(const torch::optim::OptimizerOptions& options, size_t group) const;
  const FusedOptions& checked_options(size_t group) const;
  FusedParamState* state_of(const at::Tensor& param) const;
  std::vector<StateSpec> state_specs(const std::vector<PlacedOptions>& groups) const;
  std::vector<StateMap> init_states(const std::vector<StateSpec>& groups,
                                    const std::vector<ParamRef>& params) const;
  bool keep_states(const std::vector<ParamRef>& params, std::vector<StateMap> made);
  std::vector<PlacedOptions> checked_groups();
  void read_groups(GroupSettings& settings);
  void run_step(const at::Tensor& grad_scale, const at::Tensor& found_inf);

  std::shared_ptr<Impl> impl_;  // null after a move
};

// Calls X(class, hyperparameters) for each optimizer class. Adam: Kingma and Ba, "Adam: A Method
// for Stochastic Optimization", 2015. AdamW, Adam with decoupled weight decay: Loshchilov and
// Hutter, "Decoupled Weight Decay Regularization", 2019. SGD, plain or with (Nesterov) momentum:
// Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in deep
// learning", 2013. Lion, which steps by the sign of an average: Chen et al., "Symbolic Discovery of
// Optimization Algorithms", 2023, algorithm 2. Compared with AdamW, Lion's `lr` is 3 to 10 times
// smaller and its `weight_decay` is larger by the same factor.
#define AMP_EXT_FOR_EACH_OPTIMIZER_CLASS(X) X(Adam, Adam) X(AdamW, Adam) X(SGD, Sgd) X(Lion, Lion)

// Declares the class of one optimizer, with the constructors of torch's optimizers.
#define AMP_EXT_OPTIMIZER(Name, Formula)                                              \
  class AMP_EXT_API Name : public FusedOptimizer {                                    \
   public:                                                                            \
    explicit Name(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, \
                  Name##Options defaults = {});                                       \
    explicit Name(std::vector<at::Tensor> params, Name##Options defaults = {});       \
  };

AMP_EXT_FOR_EACH_OPTIMIZER_CLASS(AMP_EXT_OPTIMIZER)

#undef AMP_EXT_OPTIMIZER

}  // namespace amp_ext::optim
