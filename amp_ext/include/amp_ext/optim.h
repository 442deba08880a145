// The optimizers for LibTorch: torch::optim::Optimizers with one fused kernel each, and masters of
// 16-bit parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/grad_scaler.h>
#include <amp_ext/inspection.h>
#include <amp_ext/norm_guard.h>
#include <amp_ext/options.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace amp_ext {
class WeightAverages;
enum class Averaging;
}  // namespace amp_ext

namespace amp_ext::optim {

// Where the numbers of a tuple are kept.
template <typename... Numbers>
std::vector<double*> places_of(std::tuple<Numbers...>& numbers) {
  return std::apply([](Numbers&... each) { return std::vector<double*>{&each...}; }, numbers);
}

// Where an option is kept.
using OptionPlace = std::variant<double*, bool*, MasterWeights*, StateDType*, std::vector<double*>,
                                 std::optional<double>*, std::optional<std::string>*>;

// The options of a group that all optimizers have.
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

  // All options with their names in Python. What is written through these places does not count as
  // given: a setter says so.
  virtual std::vector<Option> options();

  // Whether an option was set, if only to what it was. A group takes the others from its optimizer.
  bool is_given(const char* name) const { return given_.count(name) != 0; }

  // Whether these options let numbers be dithered, whatever the dtypes of the parameters. All
  // states have a "step" then.
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
  bool are_defaults_ = false;  // of an optimizer, not of a group

  friend class FusedOptimizer;
};

// Sets and reads an option; setters can be chained.
#define AMP_EXT_OPTION(Type, name)       \
  Derived& name(Type value) {            \
    this->name##_ = std::move(value);    \
    this->given_.insert(#name);          \
    return static_cast<Derived&>(*this); \
  }                                      \
  const Type& name() const { return this->name##_; }

// The setters of these options, for the class of an optimizer's own.
template <typename Derived>
class AMP_EXT_API OptionsOf : public FusedOptions {
 public:
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<Derived>(static_cast<const Derived&>(*this));
  }

  // Learning rate.
  AMP_EXT_OPTION(double, lr)
  // Weight decay per step, before the learning rate.
  AMP_EXT_OPTION(double, weight_decay)
  // Ascends instead.
  AMP_EXT_OPTION(bool, maximize)
  // Keeps a float32 master of every float16 and bfloat16 parameter. "split": of 16 more bits, which
  // with the parameter are the float32 (of float16 from 2^-16 on, to 2^-40 below); it follows a
  // parameter that is written from outside. "split8": of 8 more bits, within 2^-15 of the float32.
  AMP_EXT_OPTION(MasterWeights, master_weights)
  // at::kFloat or at::kBFloat16, the dtype of the buffers, or std::nullopt for the parameter's.
  // "8bit-bf16": first moments in 8 bits, as ratios to the roots of the second, and these in
  // bfloat16. "8bit": second moments in 8 bits as well, with an exponent for each 32 elements of a
  // row; in bfloat16 where a parameter has less than 4096 elements, one dimension, rows that 32
  // does not divide, or is not contiguous. Both keep a first moment without a second one, as that
  // of SGD and Lion, in 8 bits with such exponents, or in bfloat16. Not with amsgrad.
  AMP_EXT_OPTION(StateDType, state_dtype)
  // "nearest" or "dither": how numbers are rounded that are stored in fewer bits. None dithers what
  // would freeze otherwise, unless there is no state_dtype.
  AMP_EXT_OPTION(std::optional<std::string>, rounding)
  // Norm to keep the unscaled gradients of all groups together below, inside the step; the norm is
  // then in `grad_norm()`. None measures and clips nothing. The same in all groups.
  AMP_EXT_OPTION(std::optional<double>, max_grad_norm)
  // Largest magnitude of an element of the unscaled gradients, after the norm.
  AMP_EXT_OPTION(std::optional<double>, clip_value)
  // Leaves every element alone whose gradient is inf or NaN. The same in all groups.
  AMP_EXT_OPTION(bool, skip_nonfinite)
  // Leaves the unscaled, clipped gradients in grad().
  AMP_EXT_OPTION(bool, write_back_grads)
};

// The options of both Adams.
template <typename Derived>
class AMP_EXT_API AdamOptionsOf : public OptionsOf<Derived> {
 public:
  using Betas = std::tuple<double, double>;

  // Decay per step of the first and of the second moment.
  AMP_EXT_OPTION(Betas, betas)
  // Added to the root of the second moment.
  AMP_EXT_OPTION(double, eps)
  // Divides by the largest second moment so far.
  AMP_EXT_OPTION(bool, amsgrad)
  // Least value of the corrected second moment, under the root.
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
  AdamOptions(double lr) { this->lr(lr); }  // NOLINT: converts, as torch's

  // Shrinks parameters, as AdamW does, instead of adding to gradients.
  AMP_EXT_OPTION(bool, decoupled_weight_decay)
};

class AMP_EXT_API AdamWOptions : public AdamOptionsOf<AdamWOptions> {
 public:
  AdamWOptions() {
    weight_decay_ = 1e-2;
    decoupled_weight_decay_ = true;
  }
  AdamWOptions(double lr) : AdamWOptions() { this->lr(lr); }  // NOLINT: converts, as torch's
};

class AMP_EXT_API SGDOptions : public OptionsOf<SGDOptions> {
  using Derived = SGDOptions;

 public:
  SGDOptions() = default;
  SGDOptions(double lr) { this->lr(lr); }  // NOLINT: converts, as torch's

  // Decay of the momentum buffer, per step.
  AMP_EXT_OPTION(double, momentum)
  // Share of the gradient that is kept out of the momentum buffer, except at the first step.
  AMP_EXT_OPTION(double, dampening)
  // Looks ahead along the momentum.
  AMP_EXT_OPTION(bool, nesterov)
  // Shrinks parameters instead of adding to gradients.
  AMP_EXT_OPTION(bool, decoupled_weight_decay)

  std::vector<Option> options() override;

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
  LionOptions(double lr) : LionOptions() { this->lr(lr); }  // NOLINT: converts, as torch's

  // Decay per step of the average in the step, and of the one that is kept.
  AMP_EXT_OPTION(Betas, betas)
  // If false, adds to gradients instead of shrinking parameters.
  AMP_EXT_OPTION(bool, decoupled_weight_decay)

  std::vector<Option> options() override;

 protected:
  Betas betas_ = {0.9, 0.99};
};

#undef AMP_EXT_OPTION

// The state of one parameter, by the keys of Python: "step", "master_param" or, split,
// "master_low_bf16", "exp_avg" or, in 8 bits, "exp_avg_q8h", ...
class AMP_EXT_API FusedParamState : public torch::optim::OptimizerParamState {
 public:
  explicit FusedParamState(at::Tensor param) : param_(std::move(param)) {}
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<FusedParamState>(*this);
  }

  // Undefined where there is none.
  at::Tensor get(const std::string& key) const;
  const std::vector<std::pair<std::string, at::Tensor>>& tensors() const { return tensors_; }

 private:
  friend class FusedOptimizer;

  at::Tensor param_;  // keeps another from taking its address, by which it is found
  std::vector<std::pair<std::string, at::Tensor>> tensors_;
  std::shared_ptr<const c10::IValue> others_;  // what else a load has found: a dict, or null
};

struct StateSpec;
struct ParamRef;
struct OptimizerClass;
class PlacedOptions;

// What all optimizers share. Errors are c10::Error with the texts of Python, thrown before anything
// is written.
//
// Groups take the options that they do not set themselves from the optimizer. In-place writes to
// states are always seen. Steps go on from a master that was written, unless its parameter was
// written, too: then the parameter goes before it wherever it is not the master, rounded.
class AMP_EXT_API FusedOptimizer : public torch::optim::Optimizer, public ScaledStep {
 public:
  ~FusedOptimizer() override;
  // What was moved from throws where a method of this class is called, until another is moved into
  // it.
  FusedOptimizer(FusedOptimizer&&) noexcept;
  FusedOptimizer& operator=(FusedOptimizer&&) noexcept;

  // Hides that of torch, which from 2.13 on drops the options of a group and checks nothing: a
  // group that was added by that one, through a torch::optim::Optimizer&, is refused when it is
  // used.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  // Updates all parameters that have a gradient. The closure evaluates the model again, with
  // gradients enabled, and returns the loss, which this returns. By one thread at a time.
  //
  // Where a launch is refused after others, each parameter has been stepped with its states or not
  // at all, and later steps are refused until a state dict is loaded.
  //
  // A class that derives from one of these may have a step of its own: a scaler unscales the
  // gradients before it and skips it after an overflow, as it does for any other optimizer.
  at::Tensor step(LossClosure closure = nullptr) override;

  at::Tensor step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf) override;
  std::optional<GradientScan> scan_gradients(const at::Tensor& found_inf,
                                             const at::Tensor& grad_scale) override;
  // Only of the classes here. One that derives from them returns true if its step is theirs.
  bool unscales_in_step() const override;

  // What moves along with the optimizer, and belongs to no other as long as this one lives. Null
  // after a move.
  std::shared_ptr<const void> identity() const;

  // Norm of the unscaled gradients at the last step, one float32, which later steps write anew.
  // Undefined without max_grad_norm, unless norms are tracked or guarded.
  at::Tensor grad_norm() const;

  // Lets a guard judge the norm of all gradients at every step, at the cost of a look where there
  // was none. Throws if it is that of another optimizer. Null: no guard.
  void norm_guard(std::shared_ptr<NormGuard> guard);
  std::shared_ptr<NormGuard> norm_guard() const;

  // Lets every step keep the norm of each gradient, at the cost of a look where there was none.
  void track_grad_norms(bool track);
  bool track_grad_norms() const;

  // Norms of the unscaled gradients of all parameters at the last step, one float32 for each in the
  // order of the groups, which later steps write anew: NaN where there was no gradient, inf where
  // it, or its norm in float32, was not finite. Undefined where they are not tracked.
  at::Tensor grad_norms() const;

  // What the coming step would do, found by taking it with a copy of one parameter after another;
  // nothing is stored. Between the backward pass and the step: gradients must be there that no step
  // has taken. Waits for a GPU. Gradients that carry a scale need `grad_scale`, as `step_scaled`;
  // without a `found_inf` they are looked at for overflows.
  Inspection inspect(const at::Tensor& grad_scale = {}, const at::Tensor& found_inf = {});

  // Lets the next step, also that of a scaler, leave in `inspection` what it does. None before it.
  void inspect_next();
  std::optional<Inspection> inspection() const;

  // Creates every state that a first step would create, and does not step.
  void init_state();

  // Makes the next step look up all states again. It is remembered which parameters were written
  // since their masters were.
  void rebuild();

  // The float32 master of every parameter, and parameters that have none themselves. Split masters
  // come as decoded copies.
  std::vector<at::Tensor> master_params();

  // Takes parameters that were changed through data(), behind their masters, over into them, at
  // once. Other changes are noticed by the next step. Split masters need none of it.
  void refresh_masters();

  // Python's state dict: {"state": {0: {"step": ..., ...}}, "param_groups": [{"lr": ..., "params":
  // [0, ...]}]}. Its tensors are those of the optimizer: save_state copies them.
  c10::IValue state_dict() const;

  // Takes state dicts of this class, of its namesakes in Python and in Python's torch.optim.
  // Moments and masters get the configured form, and options that torch does not have stay as
  // configured.
  // Entries that this class does not know come back in `state_dict()`.
  // Masters that are missing are taken from the parameters: load the model first.
  void load_state_dict(const c10::IValue& state_dict);

  // For torch::save and torch::load.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  FusedOptimizer(const OptimizerClass& kind,
                 const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 std::unique_ptr<FusedOptions> defaults);

 private:
  friend class WeightAverage;

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
  void track_step_applied();
  void average(Averaging averaging, WeightAverages& averages);
  void swap_back(WeightAverages& averages);
  void run_step(const at::Tensor& grad_scale, const at::Tensor& found_inf);

  std::shared_ptr<Impl> impl_;  // null after a move
};

// The class of one optimizer, constructed like those of torch::optim.
#define AMP_EXT_OPTIMIZER(Name)                                                       \
  class AMP_EXT_API Name : public FusedOptimizer {                                    \
   public:                                                                            \
    explicit Name(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, \
                  Name##Options defaults = {});                                       \
    explicit Name(std::vector<at::Tensor> params, Name##Options defaults = {});       \
  };

// Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015.
AMP_EXT_OPTIMIZER(Adam)
// Adam with decoupled weight decay: Loshchilov and Hutter, "Decoupled Weight Decay Regularization",
// 2019.
AMP_EXT_OPTIMIZER(AdamW)
// SGD, plain or with (Nesterov) momentum: Sutskever, Martens, Dahl and Hinton, "On the importance
// of initialization and momentum in deep learning", 2013.
AMP_EXT_OPTIMIZER(SGD)
// Steps by the sign of an average: Chen et al., "Symbolic Discovery of Optimization Algorithms",
// 2023, algorithm 2. `lr` is 3 to 10 times smaller than AdamW's and `weight_decay` as much larger.
AMP_EXT_OPTIMIZER(Lion)

#undef AMP_EXT_OPTIMIZER

}  // namespace amp_ext::optim
