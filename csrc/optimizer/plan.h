// The plan of one optimizer: its tensors, which are checked again only when they change. The plan
// owns the states, and refers to parameters and gradients only during an operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "devices/dispatch.h"
#include "kernels.h"
#include "launches.h"
#include "optimizer/grad_scan.h"
#include "optimizer/group_table.h"
#include "optimizer/inspection.h"
#include "optimizer/norm_statistics.h"
#include "optimizer/param_table.h"
#include "optimizer/states.h"

namespace amp_ext {

// Throws an error that names `operation` if the parameters currently hold the averages.
void check_weights_are_in(const std::string& operation, bool is_swapped);

// Creates the states of an optimizer's parameters, and stores them in the optimizer's containers.
class AMP_EXT_API StateStore {
 public:
  virtual ~StateStore() = default;

  // Returns states in the formats that the options require, for parameters given by their indices
  // in the plan. Stores nothing yet.
  virtual std::vector<ParamState> make(const std::vector<int64_t>& indices) = 0;

  // Stores the states that make() returned. Called once the step has passed all its checks.
  virtual void keep() = 0;
};

// A plan lives as long as its optimizer. For each operation the owner, a Python or C++ optimizer,
// holds a `Lock` and passes the present parameters with take_param(). If they or the options of the
// groups differ from the registered ones, it registers them again. Then it calls scan() or step().
class AMP_EXT_API Plan {
 public:
  // The lock that a thread holds during an operation of the plan. Its end drops all references to
  // parameters and gradients, so that users can free them or call torch.utils.swap_tensors.
  class AMP_EXT_API Lock {
   public:
    // Throws if another operation is running, an earlier step failed after updating parameters, or
    // averages are swapped in. The error names `operation`.
    Lock(Plan& plan, const char* operation);
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    Plan& plan_;
    const int exceptions_ = std::uncaught_exceptions();
  };

  // Creates an optimizer's plan. The plan of a copied optimizer gets failure() of the original.
  explicit Plan(std::string optimizer, std::string failure = {});

  // Creates the plan of a list operation, for one step. Errors name the lists of buffers.
  Plan(std::string operation, std::vector<std::string> buffer_lists);

  // Copies from an earlier plan of this optimizer which gradients still carry a loss scale, the
  // guard, the tracking of norms and step_applied, and the number of steps, but no parameters or
  // states.
  void take_over(const Plan& before);

  // Sets the guard that compares the gradient norm of each step with earlier norms; null: no guard.
  void set_guard(std::shared_ptr<NormStatistics> guard);
  bool is_guarded() const { return guard_ != nullptr; }

  // Sets whether each step computes the norm of every single gradient. Throws during an operation.
  void set_tracks_grad_norms(bool tracks);
  bool tracks_grad_norms() const { return tracks_grad_norms_; }

  // Returns which norms a step wants and where their sums come from, if the caller gives these.
  StepNorms norms(const std::optional<double>& max_grad_norm, const KnownSums& given = {}) const;

  // Drops parameters and states; during an operation, when it ends. What the plan needs to
  // recognize unchanged parameters and scaled gradients is kept for the next register_params().
  void forget();

  // Registers the parameters, as ParamTable does, and forgets all that earlier steps left. Call it
  // during an operation.
  void register_params(std::vector<optim::StateSpec> specs,
                       const std::vector<ParamTable::Param>& params);

  const ParamTable& params() const { return params_; }
  ParamTable& params() { return params_; }

  // Scans all gradients for inf and NaN, and sums their squares if the next step needs a norm; with
  // `skip_nonfinite`, the squares of finite elements only. Returns one result for each device and
  // partition. Its found_inf is a copy of `found_inf`, set to 1 if inf or NaN was found. Its
  // first_nonfinite belongs to the plan: scans lower it, the update of the loss scale resets it.
  // The next step reuses the results if no gradient changes. With shards they cover only this rank:
  // the caller combines them over the ranks and passes found_inf and sums of squares to the step.
  std::vector<GradScanResult> scan(const at::Tensor& found_inf, const OptionalTensor& grad_scale,
                                   const optim::ClippingOptions& options);

  // Scans like scan(), starting from a found_inf of 0, but stores nothing for the next step or for
  // an update of the loss scale. For inspections.
  std::vector<GradScanResult> scan_without_recording(const OptionalTensor& grad_scale,
                                                     const optim::ClippingOptions& options) const;

  // Updates every parameter that has a gradient, with the hyperparameters of its group; `store`
  // initializes missing states. If found_inf is not 0, nothing is written. If a gradient changed
  // since scan(), the step scans all gradients again where it needs found_inf or a norm. Without
  // grad_scale and found_inf, the step throws if a gradient still carries the loss scale of an
  // earlier step.
  //
  // If an error occurs before the first launch, nothing has been written. After a later error, each
  // parameter was either updated together with its state and step counter or left unchanged, except
  // where a dense copy could not be copied back. If any was updated, no Lock can be taken any more.
  void step(GroupTable& table, GradientOptions options, StateStore& store,
            const at::Tensor& squares_of_params = {});

  // Returns what such a step would do, by stepping copies of one parameter at a time. It changes no
  // tensor and only calls make() of the store. It throws the errors of a step, except for memory
  // that is shared between parameters.
  InspectedStep inspect(GroupTable& table, GradientOptions options, StateStore& store) const;

  // Finds a 16-bit CPU parameter that was written without a change of its version counter, such as
  // through .data: the next step would undo the write from the float32 master. Compares a few
  // elements of one parameter per step. Returns its index, but only the first time.
  std::optional<int64_t> find_uncounted_write();
  // Returns the warning about such a write to the parameter that is called `param`.
  std::string warning_of_write(const std::string& param) const;

  // Throws if there are no gradients, or if the last step already used them.
  void check_is_before_step() const;

  // Returns how far a failed step came: "3 of 8 parameters have been stepped"; else "".
  const std::string& failure() const { return failure_; }
  // Returns failure() and what the user can do, for an error.
  std::string note_of_failure() const;

  // Returns the norm of all unscaled gradients at the last step; undefined if it needed no norm.
  at::Tensor grad_norm() const { return has_grad_norm_ ? grad_norm_ : at::Tensor(); }
  // Marks that averages are in the parameters, so that no Lock can be taken. Operations without a
  // Lock call check_not_swapped_in().
  void set_swapped_in(bool is_swapped_in) { is_swapped_in_ = is_swapped_in; }
  void check_not_swapped_in(const std::string& operation) const;
  // Makes every step from now on set step_applied().
  void track_step_applied() { tracks_step_applied_ = true; }
  // Returns one float32 on the device of the first parameter: 1 if the last step was applied, 0 if
  // it was skipped or found no gradient. Undefined before the first step that is tracked.
  at::Tensor step_applied() const { return step_applied_; }
  // Returns the number of steps so far, applied or skipped.
  int64_t steps() const { return steps_; }
  // Returns the norm of each unscaled gradient, [params] float32; undefined if not tracked.
  at::Tensor grad_norms() const { return has_grad_norms_ ? grad_norms_ : at::Tensor(); }

 private:
  // The parameter that find_uncounted_write() compares with its master before the next step.
  struct MasterSample {
    size_t slot;             // index of the slot
    int64_t master_version;  // version counter of the master after the last step
  };

  // How far a step has come, in numbers of parameters.
  struct Progress {
    int64_t params = 0;           // parameters that the step updates
    int64_t stepped = 0;          // parameters updated with their states and step counters
    int64_t stepped_in_part = 0;  // parameters with dense copies that could not be copied back

    std::string text() const;
  };

  // Inputs of a step on one device. The tensors own the memory that `pointers` refers to.
  struct DeviceInputs {
    at::Tensor grad_scale;
    at::Tensor found_inf;
    at::Tensor sum_of_squares;
    at::Tensor guard;
    GradientInputs pointers;
    float* grad_norm;     // [1], the norm of the unscaled gradients is written here; or null
    float* step_applied;  // [1], set to 1 or 0 by the step; or null
  };

  // A learning rate given as a tensor, in the form that the engine of one device reads.
  struct LrOnDevice {
    at::Tensor on_device;  // one float32 on the device; undefined: `number` is used
    double number;
  };

  // The slots that one launch updates, with the arguments of the launch.
  struct Batch {
    at::Device device;
    OptimizerKernel kernel;
    std::vector<ParamSlot*> slots;
    DeviceInputs inputs;
    std::vector<std::optional<LrOnDevice>> lrs;  // [groups], nullopt if lr is not a tensor
    bool is_skipped;                             // whether the host knows that the step is skipped
    std::vector<KernelTensorArgs> all_args;      // [slots]
    std::unique_ptr<bool[]> is_launched;         // [slots], set by the launch
  };

  void drop_slots();
  void take_norms(GradientOptions& options);
  at::Tensor take_step_applied(const std::vector<Batch>& batches);
  void write_norms(const GradientOptions& options, const std::vector<GradScan>& scans,
                   const at::Tensor& squares_of_params, bool is_written);
  void check_with_states(const GroupTable& table, const GradientOptions& options,
                         StateStore& store);
  void check_inputs(const GradientOptions& options) const;
  std::vector<GradScan> scans_for_step(const GradientOptions& options, bool has_squares_of_params,
                                       bool& is_new);
  std::vector<Batch> batches();
  DeviceInputs inputs_on(const at::Device& device, const GradientOptions& options,
                         const std::vector<GradScan>& scans, bool freshly_scanned) const;
  static std::vector<std::optional<LrOnDevice>> lrs_on(const at::Device& device,
                                                       const GroupTable& table);
  void make_room(Batch& batch, const GroupTable& table) const;
  void step_batch(const Batch& batch, GroupTable& table, bool ends_guarded);
  void finish_batch(const Batch& batch, std::exception_ptr failure);
  std::vector<GradScan> scan_grads(const OptionalTensor& found_inf,
                                   const OptionalTensor& grad_scale,
                                   const optim::ClippingOptions& options);
  GradScan& scan_of(std::vector<GradScan>& scans, const ParamSlot& slot,
                    const OptionalTensor& found_inf, const optim::ClippingOptions& options) const;
  at::Tensor first_nonfinite_on(const at::Device& device);
  void check_groups(const GroupTable& table, const std::optional<double>& max_grad_norm) const;
  void choose_sample();
  void become_trial_of(const Plan& plan);
  void try_slot(const ParamSlot& slot, int64_t index, GroupTable& table,
                const GradientOptions& options, StateStore& store, const at::Tensor& sums);

  ParamTable params_;
  std::atomic<std::thread::id> user_{};  // the thread that holds a Lock, or thread::id()
  bool must_forget_ = false;             // whether the slots are dropped when the Lock ends
  bool is_swapped_in_ = false;
  std::string failure_;
  bool has_grad_norm_ = false;   // whether grad_norm_ is of the last step
  bool has_grad_norms_ = false;  // whether grad_norms_ is of the last step
  at::Tensor grad_norm_;
  at::Tensor grad_norms_;
  std::shared_ptr<NormStatistics> guard_;
  // Earlier guards on a GPU, kept alive because a captured CUDA graph may still write to them.
  std::vector<std::shared_ptr<NormStatistics>> retired_guards_;
  bool tracks_grad_norms_ = false;
  bool counts_norms_ = true;  // whether the guard counts the norms of steps; false for a trial
  bool tracks_step_applied_ = false;
  at::Tensor step_applied_;
  int64_t steps_ = 0;                         // number of steps so far, applied or skipped
  std::vector<GradScan> scans_;               // results of scan(), for the next step
  std::vector<at::Tensor> first_nonfinites_;  // GradScanResult::first_nonfinite of each device
  StepScratch scratch_;
  Progress progress_;  // progress of the current or last step
  std::optional<MasterSample> sample_;
  bool finds_writes_ = true;  // false once find_uncounted_write() has reported a write
};

}  // namespace amp_ext
