// The plan of one optimizer: its tensors, which are checked again only when they change. The plan
// owns the states, and refers to parameters and gradients only during an operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/options.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "devices/dispatch.h"
#include "optimizer/grad_scan.h"
#include "optimizer/group_table.h"
#include "optimizer/last_step.h"
#include "optimizer/optimizer_description.h"
#include "optimizer/param_table.h"
#include "optimizer/step.h"
#include "optimizer/step_outputs.h"

namespace amp_ext {

// A plan lives as long as its optimizer. For each operation the owner, a Python optimizer,
// holds a `Lock` and passes the present parameters with take_param(). If they or the options of the
// groups differ from the registered ones, it registers them again. Then it calls scan() or step().
class AMP_EXT_API Plan {
 public:
  // Marks the plan as used by this thread. Throws if another operation is running, or an earlier
  // step failed after updating parameters. The error names `operation`. With `waits`, waits until
  // an operation of another thread has ended.
  class AMP_EXT_API Claim {
   public:
    Claim(Plan& plan, const char* operation, bool waits = false);
    ~Claim();
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

   private:
    Plan& plan_;
  };

  // The lock that a thread holds during an operation of the plan. Its end drops all references to
  // parameters and gradients, so that users can free them or call torch.utils.swap_tensors.
  class AMP_EXT_API Lock {
   public:
    // Throws like Claim.
    Lock(Plan& plan, const char* operation) : plan_(plan), claim_(plan, operation) {}
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    Plan& plan_;
    const Claim claim_;
    const int exceptions_ = std::uncaught_exceptions();
  };

  // The plan of a copied optimizer gets failure() of the original.
  explicit Plan(std::string optimizer, std::string failure = {});

  // Copies from an earlier plan of this optimizer which gradients still carry a loss scale, the
  // tracking of step_applied, and the number of steps, but no parameters or states.
  void take_over(const Plan& before);

  // Drops parameters and states; during an operation, when it ends. What the plan needs to
  // recognize unchanged parameters and scaled gradients is kept for the next register_params().
  void forget();

  // Registers the parameters, as ParamTable does, and forgets all that earlier steps left. Call it
  // during an operation.
  void register_params(std::vector<optim::StateSpec> specs,
                       const std::vector<ParamTable::Param>& params);

  const ParamTable& params() const { return params_; }
  ParamTable& params() { return params_; }
  const StepOutputs& outputs() const { return outputs_; }
  StepOutputs& outputs() { return outputs_; }
  const LastStep& last_step() const { return last_step_; }
  LastStep& last_step() { return last_step_; }

  // Returns where the sum of squares of a step comes from. A given sum is always read.
  NormSource norm_source(const std::optional<double>& max_grad_norm, bool is_given) const;

  // Scans all gradients for inf and NaN, and sums their squares if `sums_squares` is true or the
  // next step clips by the norm; with `skip_nonfinite`, the squares of finite elements only. See
  // GradScans::scan.
  std::vector<GradScanResult> scan(const at::Tensor& found_inf, const OptionalTensor& grad_scale,
                                   const optim::ClippingOptions& options,
                                   bool sums_squares = false);

  // Updates every parameter that has a gradient, with the hyperparameters of its group; `store`
  // initializes missing states. If found_inf is not 0, nothing is written. If a gradient changed
  // since scan(), the step scans all gradients again where it needs found_inf or a norm. Unless
  // `is_of_scaler`, the step throws if a gradient still carries the loss scale of an earlier step.
  //
  // If an error occurs before the first launch, nothing has been written. After a later error, each
  // parameter is as launch_step() says. If any was updated, no Lock can be taken any more.
  //
  // `max_norm` is one float64, another limit of the norm, which needs a sum of squares.
  // `chunks` may be null, which stands for one chunk.
  void step(GroupTable& table, GradientOptions options, StateStore& store, bool is_of_scaler,
            const OptionalTensor& max_norm = {}, StepChunks* chunks = nullptr);

  // The inputs of a step that depend on gradients, for a plan that steps copies of the parameters.
  struct CopiedStepInputs {
    OptionalTensor found_inf;
    OptionalTensor sum_of_squares;
  };
  // Checks the gradients as step() does, and scans them if step() would. Then another plan can step
  // copies of the parameters, and remember_copied_step() completes the step here.
  CopiedStepInputs prepare_copied_step(const GroupTable& table, GradientOptions options,
                                       bool is_of_scaler);
  // Remembers which gradients still carry the loss scale. `had_scale` is true if they had one.
  void remember_copied_step(bool had_scale);

  // Refuses all operations from now on, as after a step that came as far as `failure` says; empty:
  // no step has failed.
  void set_failure(std::string failure) { failure_ = std::move(failure); }
  // Returns how far a failed step came: "3 of 8 parameters"; else an empty string.
  const std::string& failure() const { return failure_; }
  // Returns failure() and what the user can do, for an error.
  std::string note_of_failure() const;

 private:
  void drop_slots();

  ParamTable params_;
  std::atomic<std::thread::id> user_{};  // the thread that holds a Lock, or thread::id()
  bool must_forget_ = false;             // whether the slots are dropped when the Lock ends
  std::string failure_;
  StepOutputs outputs_;
  GradScans scans_;
  LastStep last_step_;
  StepScratch scratch_;
};

}  // namespace amp_ext
