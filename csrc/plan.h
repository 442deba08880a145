// What steps need to know of the tensors of one optimizer: checked when it changes, and pointed to
// ever after. States are owned; parameters and gradients only during an operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>
#include <c10/util/MaybeOwned.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "dispatch.h"
#include "kernel_list.h"
#include "launches.h"
#include "tensor_memory.h"

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
  at::Tensor first_nonfinite;  // one int64, the number of the first parameter, or kNoTensor
  at::Tensor sum_of_squares;   // one float64, or undefined if none was wanted
  int64_t partition = 0;
};

// The state of one parameter. An undefined tensor stands for one that the optimizer does not keep.
struct ParamState {
  // exp_avg, ...: of the parameter's shape; in 8 bits int8 for ratios to the second moment, uint8
  // for groups, in the order of the parameter's memory
  std::vector<at::Tensor> buffers;
  at::Tensor master_param;  // float32, of the parameter's shape, or the lower part of one
  at::Tensor step;          // float32, one element
  at::Tensor exponents;     // uint8, one for each group of the buffer in groups
};

// How messages name a tensor: "exp_avgs[3]" in a list, "exp_avg of group 0, param 3" in an
// optimizer.
enum class Naming { kLists, kGroups };

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

// Where the master does not round to its parameter, the parameter has been changed behind it: there
// the master becomes the parameter. Returns what it becomes.
at::Tensor refreshed_master(const at::Tensor& param, const at::Tensor& master_param);

class AMP_EXT_API Plan {
 public:
  // `buffer_names` are the keys of the buffers, or the names of their lists, in the order in which
  // ParamState holds them.
  Plan(std::string operation, std::vector<std::string> buffer_names,
       Naming naming = Naming::kGroups);

  // Adds parameter number `index_in_group` of a group. `object` is what its owner knows it by.
  // Returns its number in the plan.
  int64_t add_param(int64_t group, int64_t index_in_group, const void* object);

  // Adds a parameter that other ranks have parts of, with the number of its partition, 0 if every
  // rank has all of it. Its row works on what `set_shard` hands over.
  int64_t add_sharded_param(int64_t group, int64_t index_in_group, const void* object,
                            int64_t partition);

  int64_t number_of_params() const { return static_cast<int64_t>(rows_.size()); }
  // Whether that is the parameter of this number, and in this group.
  bool is_param(int64_t number, int64_t group, const void* object) const {
    return number < number_of_params() && rows_[number].object == object &&
           rows_[number].group == group;
  }

  // Hands over the tensor that a parameter is now: before the operations, until `let_go`; the
  // caller keeps it alive. Its gradient is `param.grad()`, or the one that is given.
  void take_param(int64_t number, const at::Tensor& param);
  void take_param(int64_t number, const at::Tensor& param, at::Tensor explicit_grad);

  // Hands over this rank's part of a parameter and of its gradient, which may be undefined, too.
  void set_shard(int64_t number, at::Tensor param, at::Tensor grad);

  // Says where the first element of a parameter stands in the whole of which it is a part: 0 unless
  // it is told. What is dithered depends on it.
  void set_first_element(int64_t number, int64_t first_element);

  // Hands over the state of a parameter, which later steps update in place.
  void set_state(int64_t number, ParamState state);

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

  // One step of every parameter that has a gradient, with the hyperparameters of its group. With a
  // found_inf other than 0 nothing is written at all. A gradient that changed since `check_finite`
  // is looked at again. A step that neither has a scale nor comes from a scaler refuses gradients
  // that an earlier one took with a scale, and that were not written since.
  //
  // Where this throws before the first launch, nothing has been written. Where it throws later,
  // each parameter has been stepped with its state and counter, or neither.
  template <typename Hyperparameters>
  void step(const std::vector<Group<Hyperparameters>>& groups, const GradientOptions& options) {
    std::vector<Hyperparameters> hyperparameters(groups.begin(), groups.end());
    GroupTable table{
        hyperparameters.data(), &kernel_for<Hyperparameters>, &takes_format<Hyperparameters>, {}};
    for (size_t i = 0; i < groups.size(); ++i) {
      table.groups.push_back(
          {&hyperparameters[i], groups[i].lr_tensor, dithered_numbers(hyperparameters[i])});
    }
    run_step(table, options);
  }

  // Of the last step. It outlives the plan.
  const std::shared_ptr<StepProgress>& progress() const { return progress_; }

 private:
  enum List { kParam, kGrad, kMaster, kStep, kExponents, kBuffer0 };
  static constexpr int kLists = kBuffer0 + kMaxBuffers;

  // A tensor whose memory a kernel can't walk, and room for the dense copy that it walks instead.
  struct Staged {
    at::Tensor original;
    at::Tensor dense;
    bool written;
  };

  struct Row {
    const void* object;
    // Only until let_go, as the gradient. A reference of our own would cost more than the rest.
    c10::MaybeOwned<at::Tensor> current_param;
    std::array<at::Tensor, kLists> owned;       // by List; none for kParam
    std::optional<SeenTensor> param_of_master;  // the parameter that the master was last rounded to
    bool master_is_fresh = false;               // at the start of this step
    bool is_sharded = false;
    bool record_is_current = false;
    bool grad_is_current = false;  // the gradient in the record is
    bool writes_grad = false;
    bool seen_grad_is_scaled = false;  // a step took it with a scale, and left it as it was
    at::ScalarType state_dtype = at::ScalarType::Undefined;  // the parameter's at set_state
    at::Device state_device = at::kCPU;                      // likewise
    int number_of_buffers = 0;
    std::optional<OptimizerKernel> kernel;
    std::array<Fingerprint, kLists> fingerprints;
    TensorRecord record;
    std::optional<SeenTensor> seen_grad;  // the one that the last look or step with a scale saw
    const void* seen_grad_data = nullptr;
    std::vector<Staged> staged;
    at::Tensor refreshed_master;  // what a master becomes that its parameter has left behind
    at::Tensor explicit_grad;
    c10::MaybeOwned<at::Tensor> shard_of;  // the parameter of a shard
    int64_t partition = 0;
    int64_t first_element = 0;
    uint8_t narrow = 0;   // the numbers in 16 or 8 bits, as in `dithered` of a record
    uint8_t dithers = 0;  // those among them that are always dithered, if any is
    int64_t group;
    int64_t index_in_group;

    const at::Tensor& tensor(int list) const { return list == kParam ? param() : owned[list]; }
    const at::Tensor& param() const { return *current_param; }
    const at::Tensor& grad() const { return owned[kGrad]; }
    const at::Tensor& master_param() const { return owned[kMaster]; }
    bool has_grad() const { return grad().defined(); }
    int64_t version() const;
    int64_t grad_version() const;
    Master master() const;
    bool has_split_master() const {
      return master() == Master::kLow16 || master() == Master::kLow8;
    }
    bool has_fresh_master() const;
    // Whether the gradient is the one that was seen, and was not written since.
    bool grad_is_as_seen() const;
    void see_grad();
    // Where much else has run since the last step, each tensor and its storage is a miss of the
    // caches, for which checks would wait one after the other.
    AMP_EXT_INLINE void prefetch_tensors() const {
      for (int list = 0; list < kLists; ++list) {
        if (tensor(list).defined()) prefetch(tensor(list).unsafeGetTensorImpl());
      }
    }
    AMP_EXT_INLINE void prefetch_storages() const {
      for (int list = 0; list < kLists; ++list) {
        if (tensor(list).defined()) prefetch(storage_of(tensor(list)));
      }
      if (seen_grad.has_value()) prefetch(seen_grad->storage._unsafe_get_target());
    }
    // Of a buffer, by its dtype; that of the parameter for one that there is not.
    BufferFormat format(int buffer) const;
    bool has_codes() const { return is_code(format(0)); }
  };

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
    bool (*takes_format)(BufferFormat first, int buffers);
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

  void run_step(GroupTable& table, const GradientOptions& options);
  void check_step(const GroupTable& table, const GradientOptions& options);
  void check_carries_no_scale(const Row& row) const;
  std::vector<Look> looks_for_step(const GradientOptions& options, StepScratch& scratch,
                                   bool& is_new);
  bool needs_look(const GradientOptions& options, bool is_stale) const;
  std::vector<Batch> batches();
  DeviceInputs inputs_on(const at::Device& device, const GradientOptions& options,
                         const std::vector<Look>& looks, bool looks_are_new) const;
  static std::vector<std::optional<LrOnDevice>> lrs_on(const at::Device& device,
                                                       const GroupTable& table);
  void make_room(Batch& batch, const GroupTable& table) const;
  void step_batch(const Batch& batch, GroupTable& table, StepScratch& scratch);
  void finish_batch(const Batch& batch, std::exception_ptr failure);
  std::vector<Look> look(const OptionalTensor& found_inf, const OptionalTensor& grad_scale,
                         bool sum_squares, bool skip_nonfinite, StepScratch& scratch);
  Look& look_of(std::vector<Look>& looks, const Row& row, const OptionalTensor& found_inf,
                bool sum_squares) const;
  at::Tensor first_nonfinite_on(const at::Device& device);
  bool is_partitioned() const;
  bool gradients_are_as_seen() const;
  OptimizerKernel kernel_of(const Row& row, const GroupTable& table) const;
  void check_groups(const GroupTable& table, const std::optional<double>& max_grad_norm) const;
  void check_row(Row& row, const GroupTable& table);
  static bool leave_lazy_clone(Row& row, int list);
  static bool take_fingerprint(Row& row, int list);
  static bool take_new_grad(Row& row);
  void check_grad(const Row& row) const;
  void check_tensors(const Row& row, const GroupTable& table) const;
  void check_buffers(const Row& row, const GroupTable& table) const;
  void check_memory();
  bool reaches_written_memory(const at::Tensor& grad) const;
  static void fill_record(Row& row);
  static void mark_written(Row& row);
  static void copy_back(const Row& row, bool skip_nonfinite);
  void remember_masters();
  void remember_scaled_grads(bool are_as_seen);
  static std::string low_name(const Row& row);
  std::string code_name(const Row& row, int buffer) const;
  std::string name_of(const Row& row, int list) const;

  std::string operation_;
  std::vector<std::string> buffer_names_;
  Naming naming_;
  std::vector<Row> rows_;
  bool memory_is_checked_ = false;
  std::unordered_set<const void*> written_storages_;  // as of the last check
  std::vector<Look> looks_;                           // of check_finite, for the step that follows
  std::vector<at::Tensor> first_nonfinites_;          // one for each device
  StepScratch scratch_;
  std::shared_ptr<StepProgress> progress_ = std::make_shared<StepProgress>();
};

}  // namespace amp_ext
