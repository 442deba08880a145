// What steps need to know of the tensors of one optimizer: checked when it changes, and pointed to
// ever after. States are owned; parameters and gradients only during an operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "devices/dispatch.h"
#include "kernels.h"
#include "launches.h"
#include "optimizer/row.h"
#include "optimizer/row_checks.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

// How far the last step has come, if it failed when some of its launches or copies were made.
struct AMP_EXT_API StepProgress {
  int64_t params = 0;           // that are to be stepped
  int64_t stepped = 0;          // with their states and counters
  int64_t stepped_in_part = 0;  // whose copies could not all be written back
  bool has_failed = false;      // amid this; false if nothing has been written

  std::string text() const;
};

// What a look found on one device, in the parameters of one partition.
struct LookResult {
  at::Tensor found_inf;        // one float32
  at::Tensor first_nonfinite;  // one int64, the index of the first parameter, or kNoTensor
  at::Tensor sum_of_squares;   // one float64, or undefined if none was wanted
  int64_t partition = 0;
};

// The parameters of a plan as they were when their masters were last rounded to them, by what their
// owner knows them by. It outlives the plan: who writes a master has written what comes next, also
// where another plan takes it.
struct RoundedParams {
  struct Entry {
    SeenTensor param;
    Fingerprint fingerprint;
  };
  std::unordered_map<const void*, Entry> entries;
};

// The gradients that steps with a scale took, by what the owner of their parameters knows these by.
// They carry the scale until somebody writes them. It outlives the plan as well.
struct ScaledGrads {
  struct Entry {
    SeenTensor grad;
    const void* data;
  };
  std::unordered_map<const void*, Entry> entries;
};

// Where the states of an optimizer's parameters come from, and are kept.
class AMP_EXT_API StateStore {
 public:
  virtual ~StateStore() = default;

  // Makes the states of parameters, given by their indices in the plan, as the options want them:
  // nothing is kept yet.
  virtual std::vector<ParamState> make(const std::vector<int64_t>& indices) = 0;

  // Keeps what was made. The step that asked for it refuses nothing any more, and writes now.
  virtual void keep() = 0;
};

class AMP_EXT_API Plan {
 public:
  // `buffer_names` are the keys of the buffers, or the names of their lists, in the order in which
  // ParamState holds them.
  Plan(std::string operation, std::vector<std::string> buffer_names,
       Naming naming = Naming::kGroups);

  // Adds parameter `index_in_group` of a group. `object` is what its owner knows it by.
  // Returns its index in the plan.
  int64_t add_param(int64_t group, int64_t index_in_group, const void* object);

  // Adds a parameter that other ranks have parts of, with the number of its partition, 0 if every
  // rank has all of it. Its row works on what `set_shard` hands over.
  int64_t add_sharded_param(int64_t group, int64_t index_in_group, const void* object,
                            int64_t partition);

  int64_t number_of_params() const { return static_cast<int64_t>(rows_.size()); }
  // Whether that is the parameter at this index, and in this group.
  bool is_param(int64_t index, int64_t group, const void* object) const {
    return index < number_of_params() && rows_[index].object == object &&
           rows_[index].group == group;
  }

  // Hands over the tensor that a parameter is now: before the operations, until `let_go`; the
  // caller keeps it alive. Its gradient is `param.grad()`, or the one that is given.
  void take_param(int64_t index, const at::Tensor& param);
  void take_param(int64_t index, const at::Tensor& param, at::Tensor explicit_grad);

  // Hands over this rank's part of a parameter and of its gradient, which may be undefined, too.
  void set_shard(int64_t index, at::Tensor param, at::Tensor grad);

  // Says where the first element of a parameter stands in the whole of which it is a part: 0 unless
  // it is told. What is dithered depends on it.
  void set_first_element(int64_t index, int64_t first_element);

  // Hands over the state of a parameter, which later steps update in place.
  void set_state(int64_t index, ParamState state);

  // What a plan of the same parameters has left, and what this one leaves to the next.
  void set_rounded_params(const RoundedParams& rounded);
  RoundedParams rounded_params() const;
  void set_scaled_grads(const ScaledGrads& scaled);
  ScaledGrads scaled_grads() const;

  // Reads the gradients, while nothing else replaces them; the next operation works on these.
  // Returns the parameters that have one but no state yet, or changed their dtype or device since
  // they got it.
  std::vector<int64_t> read_grads();

  // Drops all references to parameters and gradients: between operations they belong to others,
  // who may want to free or swap them.
  void let_go();

  // Looks for inf and NaN in all gradients, and sums their squares if the step will want that:
  // with `skip_nonfinite` only those of finite elements. Returns a result for each device that
  // holds a gradient: a copy of `found_inf` there, set to 1 where something was found, and the
  // plan's own first_nonfinite, which is lowered, for an update of the scale to read and reset.
  // Partitions are looked at apart. What one rank finds in its shards is not the whole: the step
  // that follows takes found_inf and sum_of_squares from its options then, and never looks itself.
  std::vector<LookResult> check_finite(const at::Tensor& found_inf,
                                       const OptionalTensor& grad_scale, bool sum_squares,
                                       bool skip_nonfinite);

  // Whether one of the gradients that the last look saw was written or replaced since.
  bool gradients_were_written();

  // One step of every parameter that has a gradient, with the hyperparameters of its group. States
  // that parameters lack are made through the store, if there is one. With a
  // found_inf other than 0 nothing is written at all. A gradient that changed since `check_finite`
  // is looked at again. A step that neither has a scale nor comes from a scaler refuses gradients
  // that an earlier one took with a scale, and that were not written since.
  //
  // Where this throws before the first launch, nothing has been written. Where it throws later,
  // each parameter has been stepped with its state and counter, or neither.
  template <typename Hyperparameters>
  void step(const std::vector<Group<Hyperparameters>>& groups, const GradientOptions& options,
            StateStore* store = nullptr) {
    std::vector<Hyperparameters> hyperparameters(groups.begin(), groups.end());
    GroupTable table{
        hyperparameters.data(), &kernel_for<Hyperparameters>, &takes_format<Hyperparameters>, {}};
    for (size_t i = 0; i < groups.size(); ++i) {
      table.groups.push_back(
          {&hyperparameters[i], groups[i].lr_tensor, dithered_numbers(hyperparameters[i])});
    }
    run_step(table, options, store);
  }

  // Of the last step. It outlives the plan.
  const std::shared_ptr<StepProgress>& progress() const { return progress_; }

 private:
  // A look at the gradients of one device and partition.
  struct Look {
    LookResult result;
    std::vector<TensorRecord> records;
  };

  // The hyperparameters of all groups, whatever their type.
  struct GroupTable {
    struct Entry {
      CommonHyperparameters* common;
      OptionalTensor lr;  // where it is a tensor
      uint8_t dithered;   // as in a record, whatever the dtypes
    };
    const void* hyperparameters;  // [groups]
    std::optional<OptimizerKernel> (*kernel)(int buffers);
    TakesFormat* takes_format;
    std::vector<Entry> groups;
  };

  // What a step reads from one device; keeps it alive.
  struct DeviceInputs {
    at::Tensor grad_scale;
    at::Tensor found_inf;
    at::Tensor sum_of_squares;
    GradientInputs pointers;
    float* grad_norm;  // [1], or null
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
    std::vector<Row*> rows;
    DeviceInputs inputs;
    std::vector<std::optional<LrOnDevice>> lrs;  // [groups], where they are tensors
    bool is_skipped;                             // as the host knows already
    std::vector<TensorRecord> records;
    std::unique_ptr<bool[]> is_launched;  // [records]
  };

  void run_step(GroupTable& table, const GradientOptions& options, StateStore* store);
  void check_with_states(const GroupTable& table, const GradientOptions& options,
                         StateStore& store);
  void check_step(const GroupTable& table, const GradientOptions& options);
  std::vector<Look> looks_for_step(const GradientOptions& options, bool& is_new);
  bool needs_look(const GradientOptions& options, bool is_stale) const;
  std::vector<Batch> batches();
  DeviceInputs inputs_on(const at::Device& device, const GradientOptions& options,
                         const std::vector<Look>& looks, bool looks_are_new) const;
  static std::vector<std::optional<LrOnDevice>> lrs_on(const at::Device& device,
                                                       const GroupTable& table);
  void make_room(Batch& batch, const GroupTable& table) const;
  void step_batch(const Batch& batch, GroupTable& table);
  void finish_batch(const Batch& batch, std::exception_ptr failure);
  std::vector<Look> look(const OptionalTensor& found_inf, const OptionalTensor& grad_scale,
                         bool sum_squares, bool skip_nonfinite);
  Look& look_of(std::vector<Look>& looks, const Row& row, const OptionalTensor& found_inf,
                bool sum_squares) const;
  at::Tensor first_nonfinite_on(const at::Device& device);
  bool is_partitioned() const;
  bool gradients_are_as_seen() const;
  OptimizerKernel kernel_of(const Row& row, const GroupTable& table) const;
  void check_groups(const GroupTable& table, const std::optional<double>& max_grad_norm) const;
  void check_row(Row& row, const GroupTable& table);
  void follow_own_memory(const Row& row);
  void check_memory();
  bool reaches_written_memory(const at::Tensor& grad) const;
  void remember_masters();
  void remember_scaled_grads(bool are_as_seen);

  RowChecks checks_;
  std::vector<Row> rows_;
  bool memory_is_checked_ = false;
  std::unordered_set<const void*> written_storages_;  // as of the last check
  std::vector<Look> looks_;                           // of check_finite, for the step that follows
  std::vector<at::Tensor> first_nonfinites_;          // one for each device
  StepScratch scratch_;
  std::shared_ptr<StepProgress> progress_ = std::make_shared<StepProgress>();
};

}  // namespace amp_ext
