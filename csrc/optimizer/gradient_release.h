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
#include <unordered_map>
#include <vector>

#include "devices/stream_order.h"
#include "optimizer/last_step.h"
#include "optimizer/param_table.h"
#include "optimizer/plan.h"
#include "optimizer/session.h"
#include "optimizer/step.h"

namespace amp_ext {

// The states of a parameter that its hook steps, and the warning that belongs to them.
class AMP_EXT_API HookStore : public StateStore {
 public:
  // Gives the warning of warning_of_write() about the parameter.
  virtual void warn_of_write() = 0;
};

// An iteration begins with the first hook of a backward pass and ends with end(). Every parameter
// has a table of its own, so a hook takes the same time in small and in large models.
class AMP_EXT_API GradientRelease {
 public:
  enum class Stage {
    kClosed,     // no parameter has been stepped in this iteration
    kOpen,       // hooks step parameters
    kCollected,  // collect() was called, and no parameter can be stepped before end()
  };

  // The inputs that the first hook of an iteration reads. All later hooks use them.
  struct Inputs {
    GroupSettings groups;
    at::Tensor grad_scale;           // one float32; undefined without a scaler
    bool tracks_grad_norms = false;  // each hook computes the norm of its gradient
  };

  // Results of the hooks of an iteration.
  struct Found {
    // For each device, one float32: the number of parameters that were not updated.
    std::vector<at::Tensor> skipped;
    std::vector<at::Tensor> first_nonfinites;  // for each device, see GradScanResult
    // Sums over all devices, see GradScanResult; undefined unless norms are tracked.
    at::Tensor sum_of_squares, squares_of_params;
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

  explicit GradientRelease(std::string optimizer) : optimizer_(std::move(optimizer)) {}

  // All methods below, except the constant ones, need a Lock.

  Stage stage() const { return stage_; }
  // Returns how far the iteration has come: "3 of 8 parameters".
  std::string progress() const;

  // Throws if an option needs all gradients at once: clipping by their norm, a guard of the norm,
  // or gradients that are written back.
  void check_options(const GroupSettings& groups, const Plan& owner) const;

  // Registers the parameters, and drops all states unless they are those of the last call.
  void register_params(const std::vector<ParamTable::Param>& params);

  // Begins an iteration.
  void begin(Inputs inputs);
  // Returns the specs of the groups' states, as the iteration has read them.
  const std::vector<optim::StateSpec>& specs() const { return inputs_.groups.specs; }

  // Returns the index of a parameter by its identity, or nullopt if it was not registered.
  std::optional<int64_t> find(const void* object) const;
  const ParamTable::Param& registered(int64_t index) const { return params_.at(index).registered; }

  // Drops the states of one parameter, or of all, which the next hooks take again.
  void forget(int64_t index) { params_.at(index).table.drop_slots(); }
  void forget();

  // This rank's shard of a DTensor parameter, and of its gradient.
  struct Shard {
    at::Tensor param, grad;
  };

  // Steps the parameter `index` if its gradient is finite, and frees the gradient. A parameter with
  // a partition needs its `shard`. `owner` is the plan of the optimizer. Throws if the parameter
  // has been stepped in this iteration, or an earlier hook has failed.
  void step(int64_t index, const at::Tensor& param, const std::optional<Shard>& shard, Plan& owner,
            HookStore& store);

  // Adds up what the hooks have found, after their work on all streams. Throws if a hook has
  // failed.
  Found collect();

  // Sets step_applied() of the optimizer's plan to 1 if no parameter was skipped, else to 0.
  void set_step_applied(Plan& owner) const;

  void end();

  // Ends an iteration whose batch is given up. Returns the warning about it, or "" if no parameter
  // was stepped.
  std::string give_up();

  // Errors of both languages. `operation` is "AdamW.step", for example.
  static void throw_wrong_scaler(const std::string& operation);
  static void throw_without_scaler(const std::string& operation);
  static void throw_needs_gradients(const std::string& operation);
  void throw_changed(const std::string& option, int64_t group) const;

 private:
  struct Param {
    Param(const std::string& optimizer, const ParamTable::Param& registered)
        : registered(registered), table({optimizer, {}, Naming::kGroups}) {}

    ParamTable::Param registered;
    ParamTable table;  // has this parameter only
    LastStep last_step;
    StepScratch scratch;  // of its own, because hooks may run on several streams
    bool is_stepped = false;
  };

  // What the hooks write on one device.
  struct OfDevice {
    explicit OfDevice(const at::Device& device) : device(device), order(device) {}

    at::Device device;
    StreamOrder order;
    at::Tensor flags;            // [params] float32, 1 for a gradient with inf or NaN
    at::Tensor first_nonfinite;  // see GradScanResult
    at::Tensor sums;       // [params] float64, sums of squares as the steps' clipping adds them up
    at::Tensor squares;    // [params] float64, NaN for parameters without a gradient
    at::Tensor skipped;    // set by collect()
    bool is_used = false;  // whether a hook of this iteration has used the device
  };

  void check_has_not_failed() const;
  void check_is_next(const Param& param) const;
  void take_param(Param& param, const at::Tensor& tensor, const std::optional<Shard>& shard);
  OfDevice& on_device(const at::Device& device);
  void scan(Param& param, int64_t index, const OfDevice& here) const;

  const std::string optimizer_;
  std::mutex mutex_;
  std::deque<Param> params_;
  std::unordered_map<const void*, int64_t> indices_;
  std::deque<OfDevice> devices_;
  Inputs inputs_{};
  Stage stage_ = Stage::kClosed;
  int64_t stepped_ = 0;
  bool has_failed_ = false;
};

}  // namespace amp_ext
