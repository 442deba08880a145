// Steps each parameter during the backward pass, as soon as its gradient is complete. The gradient
// is then freed, so that the gradients of a model never exist all at once.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/options.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "optimizer/grad_scan.h"
#include "optimizer/param_table.h"
#include "optimizer/plan.h"
#include "optimizer/session.h"
#include "optimizer/step.h"

namespace amp_ext {

// The options that the first hook of an iteration reads. All later hooks use them.
struct AMP_EXT_API ReleaseOptions : GroupSettings {
  struct Number {
    int64_t group;
    const char* option;
    double value;  // the version counter, if the option is a tensor
    const void* tensor = nullptr;

    bool operator==(const Number& other) const {
      const auto all = [](const Number& number) {
        return std::tie(number.group, number.option, number.value, number.tensor);
      };
      return all(*this) == all(other);
    }
  };
  std::vector<Number> numbers;  // options of all groups, which must not change in the iteration
  // The loss scale, one float32 that each update of the scaler writes; nullopt without a scaler.
  OptionalTensor scale;
  OptionalTensor grad_scale;  // `scale`, or a copy of it on the device of the parameters

  void read(const std::string& optimizer, const optim::OptimizerDescription& description,
            const std::vector<const optim::GroupOptions*>& groups) override;
};

// An iteration begins with the first hook of a backward pass. It ends with the step, or with a
// scaler, by the update of the scale. Every parameter has a table of its own, so a hook takes the
// same time in small and in large models.
class AMP_EXT_API GradientRelease {
 public:
  // Results of the hooks of an iteration.
  struct HookResults {
    // For each device, one float32: the number of parameters that were not updated.
    std::vector<at::Tensor> skipped;
    std::vector<at::Tensor> first_nonfinites;  // for each device, see GradScanResult
  };

  // The lock of one operation. Waits for other hooks and for other operations of the plan. Later
  // hooks of the iteration throw if an exception leaves the operation.
  class AMP_EXT_API Lock {
   public:
    Lock(GradientRelease& release, Plan& plan);
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    GradientRelease& release_;
    const Plan::Claim claim_;
    const std::lock_guard<std::mutex> lock_;
    const int exceptions_ = std::uncaught_exceptions();
  };

  // `scaler` is the identity of the scaler that scales the losses, or null.
  GradientRelease(std::string optimizer, const void* scaler)
      : optimizer_(std::move(optimizer)), scaler_(scaler) {}

  // Throws if an option needs all gradients at once: clipping by their norm, or gradients that are
  // written back. During an iteration, throws if an option has changed.
  void check_options(const ReleaseOptions& options, const Plan& owner) const;
  // Throws unless a scaler is that of the constructor, and its `method` can do without gradients.
  void check_scaler(const void* scaler, const std::string& method) const;
  // Throws unless a step is called by that scaler, or without a scaler if there is none.
  void check_caller_of_step(bool has_scale, bool has_scan) const;
  static void throw_needs_gradients(const std::string& operation);

  // The methods below, except the constant ones, need a Lock. `owner` is the plan of the optimizer.

  // True from the first hook of an iteration to collect() or give_up().
  bool is_open() const { return stage_ == Stage::kOpen || stage_ == Stage::kFailed; }

  // Registers the parameters, and drops all states unless they are those of the last call.
  void register_params(const std::vector<ParamTable::Param>& params);

  // Begins an iteration.
  void begin(ReleaseOptions options, const Plan& owner);
  // Returns the specs of the groups' states, as the iteration has read them.
  const std::vector<optim::StateSpec>& specs() const { return options_.specs; }

  // Returns the index of a parameter by its identity, or nullopt if it was not registered.
  std::optional<int64_t> find(const void* object) const;
  const ParamTable::Param& registered(int64_t index) const { return params_.at(index).registered; }
  const ParamTable& table(int64_t index) const { return params_.at(index).table; }

  // Drops the state of a parameter, which step() then takes again.
  void forget(int64_t index) { params_.at(index).table.drop_slots(); }

  // This rank's shard of a DTensor parameter, and of its gradient.
  struct Shard {
    at::Tensor param, grad;
  };

  // Steps the parameter `index` if its gradient is finite, and frees the gradient. A parameter with
  // a partition needs its `shard`. Throws if the parameter has been stepped in this iteration, or
  // an earlier hook has failed.
  void step(int64_t index, const at::Tensor& param, const std::optional<Shard>& shard, Plan& owner,
            StateStore& store);

  // The methods below take a Lock.

  // Drops the states of all parameters, which the next hooks take again.
  void forget(Plan& owner);

  // Adds up what the hooks have found, and ends their part of the iteration, if one is open. Throws
  // if a hook has failed.
  HookResults collect(Plan& owner);

  // Completes the step of the optimizer. Sets step_applied() of its plan to 1 if no parameter was
  // skipped, else to 0.
  void complete(Plan& owner);

  // Ends an iteration whose batch is given up. Returns the warning about it, or "" if no parameter
  // was stepped.
  std::string give_up(Plan& owner);

 private:
  enum class Stage {
    kClosed,     // no parameter has been stepped in this iteration
    kOpen,       // hooks step parameters
    kFailed,     // a hook or collect() has failed
    kCollected,  // no parameter can be stepped before the update of the scale
  };

  struct Param {
    Param(const std::string& optimizer, const ParamTable::Param& registered)
        : registered(registered), table({optimizer, {}, Naming::kGroups}) {}

    ParamTable::Param registered;
    ParamTable table;     // has this parameter only
    StepScratch scratch;  // of its own, because hooks may run on several streams
    bool is_stepped = false;
  };

  std::string progress() const;  // how far the iteration has come: "3 of 8 parameters"
  void check_has_not_failed() const;
  void check_is_next(const Param& param) const;
  void take_param(Param& param, const at::Tensor& tensor, const std::optional<Shard>& shard);
  GradScanResult new_results(const at::Device& device) const;
  GradScanResult results_on(const at::Device& device);

  const std::string optimizer_;
  const void* const scaler_;
  std::mutex mutex_;
  std::deque<Param> params_;
  std::unordered_map<const void*, int64_t> indices_;
  // Results that hooks write, one for each device. found_inf has one element for each parameter.
  std::vector<GradScanResult> results_;
  ReleaseOptions options_;
  int64_t version_of_scale_ = 0;     // at the begin; each update of the scaler changes it
  std::vector<at::Tensor> skipped_;  // see HookResults
  Stage stage_ = Stage::kClosed;
  int64_t stepped_ = 0;
};

}  // namespace amp_ext
