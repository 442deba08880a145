// What steps need to know of the tensors of one optimizer: checked when it changes, and pointed to
// ever after. States are owned; parameters and gradients only during an operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "devices/dispatch.h"
#include "kernels.h"
#include "launches.h"
#include "optimizer/group_table.h"
#include "optimizer/inspection.h"
#include "optimizer/norm_statistics.h"
#include "optimizer/param_slot.h"
#include "optimizer/param_slot_checks.h"
#include "optimizer/states.h"
#include "optimizer/weight_average.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

// What a look found on one device, in the parameters of one partition.
struct GradScanResult {
  at::Tensor found_inf;        // one float32
  at::Tensor first_nonfinite;  // one int64, the index of the first parameter, or kNoTensor
  at::Tensor sum_of_squares;   // one float64, or undefined if none was wanted
  // One float64 for each parameter of the plan, NaN where no gradient was looked at; undefined if
  // the norm of each gradient is not wanted.
  at::Tensor squares_of_params;
  int64_t partition = 0;
};

// Where the states of an optimizer's parameters come from, and are kept.
class AMP_EXT_API StateStore {
 public:
  virtual ~StateStore() = default;

  // Makes the states of parameters, given by their indices in the plan, as the options want them:
  // nothing is kept yet.
  virtual std::vector<ParamState> make(const std::vector<int64_t>& indices) = 0;

  // Keeps the states that were made. The step that asked for them can't be refused any more.
  virtual void keep() = 0;
};

// A plan lives as long as its optimizer. One operation of it is a `Use`, in which the owner says
// what the groups keep now and takes each of their parameters. If parameters or groups differ from
// the listed ones, the owner lists them anew. Then comes one look or one step.
class AMP_EXT_API Plan {
 public:
  // A parameter to list.
  struct Param {
    int64_t group;
    int64_t index_in_group;
    const void* object;  // the identity of the parameter
    // Of a DTensor the number of its partition, 0 if it is replicated: its row works on the shard
    // that `set_shard` hands over.
    std::optional<int64_t> partition = {};
    // Where the first element of a shard stands in the whole tensor: dithering depends on it.
    int64_t global_offset = 0;
  };

  // The time in which one thread works with a plan. At its end the plan drops all references to
  // parameters and gradients: between operations they belong to others, who may want to free or
  // swap them.
  class AMP_EXT_API Lock {
   public:
    // Throws on behalf of an operation if another use has not ended, a step has failed amid its
    // launches, or the parameters are lent.
    Lock(Plan& plan, const char* operation);
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    Plan& plan_;
    const int exceptions_ = std::uncaught_exceptions();
  };

  // Of an optimizer, by its name; and how a step of which it is a copy has failed, if one did.
  explicit Plan(std::string optimizer, std::string failure = {});

  // Of lists of tensors, for one step, with the names of the lists of buffers.
  Plan(std::string operation, std::vector<std::string> buffer_lists);

  // Takes over from the plan of the same optimizer which gradients still carry a scale, its guard,
  // whether its norms are tracked and its landings followed, and how many steps it has seen, and
  // nothing else: its states are gone.
  void take_over(const Plan& before);

  // The guard that judges the norm of the gradients at each step; null: none does.
  void set_guard(std::shared_ptr<NormStatistics> guard);
  bool is_guarded() const { return guard_ != nullptr; }

  // Whether every step keeps the norm of each gradient. Throws if it is set within a use.
  void set_tracks_grad_norms(bool tracks);
  bool tracks_grad_norms() const { return tracks_grad_norms_; }

  // Whether a step goes by the norm of all gradients.
  bool reads_norm(const std::optional<double>& max_grad_norm) const {
    return max_grad_norm.has_value() || is_guarded();
  }
  // Whether a look sums squares: the step goes by the norm, or shows it.
  bool wants_norm(const std::optional<double>& max_grad_norm) const {
    return reads_norm(max_grad_norm) || tracks_grad_norms_;
  }

  // Drops parameters and states, at the end of the use if there is one. Fingerprints of parameters
  // are remembered for the next listing.
  void forget();

  // In a use: forgets, and lists parameters that have no states yet, and what each group lets them
  // keep.
  void register_params(std::vector<optim::StateSpec> specs, const std::vector<Param>& params);

  int64_t number_of_params() const { return static_cast<int64_t>(slots_.size()); }
  // Group of the parameter at an index, and its index there.
  std::pair<int64_t, int64_t> place_of(int64_t index) const {
    return {slots_.at(index).group, slots_.at(index).index_in_group};
  }
  // Whether the groups that were listed kept the same states.
  bool is_for(const std::vector<optim::StateSpec>& specs) const { return specs == specs_; }
  // Whether that is the parameter at this index, and in this group.
  bool is_param(int64_t index, int64_t group, const void* object) const {
    return index < number_of_params() && slots_[index].object == object &&
           slots_[index].group == group;
  }
  bool has_shards() const { return has_shards_; }
  // Whether parameters are sharded such that no rank alone knows the norm of all gradients.
  bool is_partitioned() const;

  // In a use: takes the tensor that a parameter is now, which the caller keeps alive, with its
  // gradient or the one that is given. Returns whether its present states still fit it.
  bool take_param(int64_t index, const at::Tensor& param);
  void take_param(int64_t index, const at::Tensor& param, at::Tensor grad);

  // In a use: takes this rank's part of a parameter that was taken, and of its gradient, which may
  // be undefined.
  void set_shard(int64_t index, at::Tensor param, at::Tensor grad);

  // Looks for inf and NaN in all gradients, and sums their squares if the step will want that:
  // with `skip_nonfinite` only those of finite elements. Returns a result for each device that
  // holds a gradient: a copy of `found_inf` there, set to 1 where something was found, and the
  // plan's own first_nonfinite, which is lowered, for an update of the scale to read and reset.
  // Partitions are looked at apart. What one rank finds in its shards is not the whole: the step
  // that follows is given found_inf and the sums of squares then, and never looks itself.
  std::vector<GradScanResult> scan(const at::Tensor& found_inf, const OptionalTensor& grad_scale,
                                   const optim::ClippingOptions& options);

  // The same for an inspection: no step goes by it, nor does an update of the scale.
  std::vector<GradScanResult> scan_without_recording(const OptionalTensor& grad_scale,
                                                     const optim::ClippingOptions& options) const;

  // Whether one of the gradients that the last look saw was written or replaced since.
  bool gradients_were_written() const;

  // One step of every parameter that has a gradient, with the hyperparameters of its group. States
  // that parameters lack are made through the store. With a found_inf other than 0 nothing is
  // written at all. A gradient that changed since `look` is looked at again. A step that neither
  // has a scale nor comes from a scaler refuses gradients that an earlier one took with a scale,
  // and that were not written since. The step of an optimizer writes the norm into `grad_norm`.
  //
  // Where this throws before the first launch, nothing has been written. Where it throws later,
  // each parameter has been stepped with its state and counter, or neither; and if one has, later
  // uses are refused.
  void step(GroupTable& table, GradientOptions options, StateStore& store,
            const at::Tensor& squares_of_params = {});

  // What such a step would do, by taking it with a copy of one parameter after another. Nothing is
  // written or kept: of the store, states are made, and none is kept. What a step refuses is
  // refused here, but for memory that parameters share.
  InspectedStep inspect(GroupTable& table, GradientOptions options, StateStore& store) const;

  // In a use, before a step: the index of a 16-bit parameter on the CPU that was written since the
  // last step in a way that torch does not count, so that the step will undo the write. Each step
  // compares a few elements of one parameter with its float32 master. Returns an index once.
  std::optional<int64_t> find_uncounted_write();
  // The warning of it, given the name of the parameter.
  std::string warning_of_write(const std::string& param) const;

  bool has_grads() const { return outer_slots_with_grad()[0] != nullptr; }

  // Throws if there are no gradients, or the last step has taken them.
  void check_is_before_step() const;

  // How far the step came that has failed; empty if none has.
  const std::string& failure() const { return failure_; }
  // The same with what to do, for an error.
  std::string note_of_failure() const;

  // Norm of the unscaled gradients at the last step; undefined where none was wanted.
  at::Tensor grad_norm() const { return has_grad_norm_ ? grad_norm_ : at::Tensor(); }
  // Masters as optimizers keep them for parameters, by the indices of these.
  using MastersByParam = std::unordered_map<int64_t, at::Tensor>;
  // In a use: 16-bit parameters of whose states no step has told the plan.
  std::vector<int64_t> params_without_state() const;
  // Throws, before the use of a swap begins, if averages are in the parameters already.
  void check_before(Averaging averaging) const;
  // In a use: lets averages do something with the weights on this rank, given the masters of
  // parameters without a state. A swap lends the parameters to the averages, which are in them
  // until its end. Meanwhile no use begins, and `check_not_swapped_in` throws on behalf of what is
  // no use.
  void average(Averaging averaging, WeightAverages& averages, const MastersByParam& masters);
  // Does nothing if the averages are in no parameters.
  void swap_out(WeightAverages& averages);
  void check_not_swapped_in(const std::string& operation) const;
  // Lets every step from now on leave `step_applied`.
  void track_step_applied() { tracks_step_applied_ = true; }
  // One float32 on the device of the first parameter: 1 if the last step was taken, 0 if it was
  // skipped or found no gradient. Undefined before the first step that was followed.
  at::Tensor step_applied() const { return step_applied_; }
  // The norm of each, [parameters] float32; undefined where they are not tracked.
  at::Tensor grad_norms() const { return has_grad_norms_ ? grad_norms_ : at::Tensor(); }

 private:
  // A parameter as it was when its master was last rounded to it. It is kept over a new listing:
  // a parameter that is as it was then has not been written, so a master that has been counts.
  struct RoundedParam {
    SeenTensor param;
    Fingerprint fingerprint;
  };

  // The parameter whose elements are compared with its master before the next step.
  struct MasterSample {
    size_t slot;
    int64_t master_version;
  };

  // A gradient that a step with a scale took. It carries the scale until somebody writes it.
  struct ScaledGrad {
    SeenTensor grad;
    const void* data;
  };

  // How far a step has come.
  struct Progress {
    int64_t params = 0;           // that are to be stepped
    int64_t stepped = 0;          // with their states and counters
    int64_t stepped_in_part = 0;  // whose copies could not all be written back

    std::string text() const;
  };

  // A look at the gradients of one device and partition.
  struct GradScan {
    GradScanResult result;
    std::vector<KernelTensorArgs> all_args;
  };

  // What a step reads from one device; keeps it alive.
  struct DeviceInputs {
    at::Tensor grad_scale;
    at::Tensor found_inf;
    at::Tensor sum_of_squares;
    at::Tensor guard;
    GradientInputs pointers;
    float* grad_norm;     // [1], or null
    float* step_applied;  // [1], or null
  };

  // A learning rate as the engine of one device reads it: from there, or a number.
  struct LrOnDevice {
    at::Tensor on_device;
    double number;
  };

  // The rows that one launch updates, and all that it needs.
  struct Batch {
    at::Device device;
    OptimizerKernel kernel;
    std::vector<ParamSlot*> slots;
    DeviceInputs inputs;
    std::vector<std::optional<LrOnDevice>> lrs;  // [groups], where they are tensors
    bool is_skipped;                             // as the host knows already
    std::vector<KernelTensorArgs> all_args;
    std::unique_ptr<bool[]> is_launched;  // [records]
  };

  void add_slot(const Param& param);
  void set_state(int64_t index, ParamState state);
  std::vector<AveragedWeight> weights(const MastersByParam& masters) const;
  void swap_in(WeightAverages& averages, const std::vector<AveragedWeight>& weights);
  void forget_writes(const SwapEnd& end);
  void drop_slots();
  void let_go();
  std::unordered_map<const void*, RoundedParam> rounded_params() const;
  std::unordered_map<const void*, ScaledGrad> scaled_grads() const;
  void take_norms(GradientOptions& options);
  static at::Tensor sum_over_scans(const std::vector<GradScan>& scans, const at::Device& device);
  at::Tensor take_step_applied(const std::vector<Batch>& batches);
  void write_norms(const GradientOptions& options, const std::vector<GradScan>& scans,
                   const at::Tensor& squares_of_params, bool is_written);
  void check_with_states(const GroupTable& table, const GradientOptions& options,
                         StateStore& store);
  void check_inputs(const GradientOptions& options) const;
  void check_step(const GroupTable& table, const GradientOptions& options);
  std::vector<GradScan> scans_for_step(const GradientOptions& options, bool has_squares_of_params,
                                       bool& is_new);
  bool needs_scan(const GradientOptions& options, bool has_squares_of_params,
                  bool is_out_of_date) const;
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
  bool gradients_are_as_seen() const;
  OptimizerKernel kernel_of(const ParamSlot& slot, const GroupTable& table) const;
  void check_groups(const GroupTable& table, const std::optional<double>& max_grad_norm) const;
  void check_slot(ParamSlot& slot, const GroupTable& table);
  void follow_own_memory(const ParamSlot& slot);
  void check_memory();
  bool reaches_written_memory(const at::Tensor& grad) const;
  void remember_masters();
  void choose_sample();
  void remember_scaled_grads(bool are_as_seen);
  void remember_step();
  std::array<const ParamSlot*, 2> outer_slots_with_grad() const;
  void become_trial_of(const Plan& plan);
  void try_slot(const ParamSlot& slot, int64_t index, GroupTable& table,
                const GradientOptions& options, StateStore& store, const at::Tensor& sums);
  void measure_moments(const ParamSlot& slot, const at::Tensor& sums) const;

  ParamSlotChecks checks_;
  std::atomic<std::thread::id> user_{};  // the thread in a use
  bool must_forget_ = false;             // at the end of it
  bool is_swapped_in_ = false;
  std::string failure_;
  // By Param::object, as of the rows that were dropped last.
  std::unordered_map<const void*, RoundedParam> rounded_params_;
  std::unordered_map<const void*, ScaledGrad> scaled_grads_;
  bool has_grad_norm_ = false;   // whether the last step wanted grad_norm_
  bool has_grad_norms_ = false;  // whether it wanted grad_norms_
  at::Tensor grad_norm_;
  at::Tensor grad_norms_;
  std::shared_ptr<NormStatistics> guard_;
  // Those before it on a GPU: a captured graph writes to them as long as it is replayed.
  std::vector<std::shared_ptr<NormStatistics>> retired_guards_;
  bool tracks_grad_norms_ = false;
  bool counts_norms_ = true;  // whether a step lets the guard count its norm
  bool tracks_step_applied_ = false;
  at::Tensor step_applied_;
  int64_t steps_ = 0;                    // that have come to their end, taken or skipped
  std::vector<optim::StateSpec> specs_;  // by group, when the rows were listed
  std::vector<ParamSlot> slots_;
  bool has_shards_ = false;
  bool memory_is_checked_ = false;
  std::unordered_set<const void*> written_storages_;  // as of the last check
  std::vector<GradScan> scans_;                       // of `look`, for the step that follows
  // The first and the last gradient that the last step took.
  std::array<std::optional<SeenTensor>, 2> stepped_grads_;
  std::vector<at::Tensor> first_nonfinites_;  // one for each device
  StepScratch scratch_;
  Progress progress_;  // of the last step
  std::optional<MasterSample> sample_;
  bool finds_writes_ = true;  // until the first is found
};

}  // namespace amp_ext
