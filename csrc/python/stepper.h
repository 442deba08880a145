// The compiled half of the class Stepper in amp_ext/optim/stepper.py: collects the tensors and
// options of a step or a scan from the dicts of a Python optimizer, and runs it.
//
// Each step reads groups, gradients and states anew, so every change of them counts. The walk over
// the parameters follows one pointer after another (parameter, dict of its state, tensors of the
// dict, their storages), and most of them are not in the cache. So it takes blocks of parameters in
// passes: each pass follows one pointer further, and prefetches what the next reads.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/grad_scan.h"
#include "ops/muon.h"
#include "ops/step.h"
#include "python/module.h"
#include "tensors/tensor_memory.h"

namespace amp_ext::python {

namespace py = pybind11;

// The options of a group that decide about its states and about all gradients together.
struct GroupFormat {
  enum class Masters : uint8_t { kNone, kFloat32, kSplit, kSplit8 };

  Masters masters = Masters::kFloat32;
  at::ScalarType moments = at::ScalarType::Undefined;  // Undefined: the parameter's
  bool is_coded = false;                               // moments in 8 bits
  bool codes_roots = false;                            // second moments in 8 bits, too
  int buffer_count = 0;
  bool formula_counts = false;  // the formula needs the number of the step
  bool dithers = false;
  std::optional<double> max_grad_norm;
  bool skip_nonfinite = false;

  bool counts_steps() const { return formula_counts || dithers; }
};

// The names of an optimizer's options and states as interned Python strings, which are never freed,
// and the hyperparameters of the groups that were read last.
class OptionReader {
 public:
  struct Key {
    PyObject* name = nullptr;
    int8_t part = 0;  // TensorPart
    int8_t form = 0;  // for masters and buffers: which of the keys of this part
  };

  virtual ~OptionReader() = default;
  // Reads the options of one more group. Returns false if an option is missing, has a wrong type or
  // is out of range, so that Python must check the groups.
  virtual bool read(PyObject* group, GroupFormat& format, OptionalTensor& lr) = 0;
  // Leaves out one group, which has another formula.
  virtual void skip() = 0;
  virtual void clear() = 0;
  // Refers to the hyperparameters of the groups that were read.
  virtual void put_into(StepGroups& groups) = 0;

  std::vector<Key> keys;
  PyObject* params = nullptr;  // the key of a group's parameters
  const BufferDescription* buffers = nullptr;
  int buffer_count = 0;
};

// Returns the formula whose hyperparameters have this name: "AdamHyperparameters".
std::unique_ptr<OptionReader> formula_named(const std::string& hyperparameters);

// The second formula of an optimizer, Muon, for the groups that have algorithm="muon".
struct MuonFormula {
  explicit MuonFormula(const std::string& optimizer);

  PyObject* algorithm;  // interned: "algorithm"
  std::unique_ptr<OptionReader> reader;
  MuonStep step;
  StepGroups groups;
  std::vector<MuonOptions> options;  // one for each group
  OptionalTensor skipped_matrices;   // one int64
};

// A parameter of a step: its place in the groups.
struct ParamPlace {
  PyObject* object;
  int32_t group;
  int32_t index;   // in the group
  int64_t number;  // among the parameters of all groups
};

// The facts about a parameter that may be a DTensor. The groups then have its local shard, and the
// gradient is this one. A DTensor has a version counter besides that of its shard.
struct Shard {
  int64_t partition = 0;      // parameters whose squares are added over the same ranks share one
  int64_t global_offset = 0;  // index of the first element in the full tensor
  bool is_dtensor = false;
  bool has_blocks = false;  // whether moments of the full tensor can be quantized in blocks
  OptionalTensor grad;
  int64_t version = 0;
  int64_t grad_version = 0;
};

// Takes the steps of one Python optimizer. Its memory, which the next step reuses, is the only
// thing that stays between steps, except for what a step can't read: to which parameters float32
// masters were rounded, which gradients still carry the loss scale, and what the last scan has
// found. (Step also keeps the dtypes and devices of usual parameters, to make fewer checks.)
class CompiledStepper {
 public:
  // What a step is asked to do.
  struct Inputs {
    OptionalTensor grad_scale, found_inf, sum_of_squares;
    OptionalTensor max_norm;    // one float64, another limit of the norm
    bool is_of_scaler = false;  // gradients may carry the scale that a scaler has used before
  };

  // Muon has groups of two formulas: its own, and Adam's.
  CompiledStepper(std::string optimizer, const std::string& hyperparameters);

  // Updates the parameters that have a gradient: all of them, or those in `params`. Returns how
  // many there were. Or, if nothing was done, a list: the places (group, index) of the parameters
  // whose states are missing or have another format than the options ask for; an empty list if the
  // options or the parameters can't be read. With `trusts_states`, formats are not compared with
  // options. `shards` is empty or has one element for each parameter of the groups.
  py::object step(const py::object& state, const py::object& param_groups, const py::object& params,
                  Inputs inputs, const std::vector<Shard>& shards, bool trusts_states);

  // Scans gradients for inf and NaN without writing them. Returns for each device and partition a
  // tuple (found_inf, first_nonfinite, partition, sum_of_squares), or None if the options or the
  // parameters can't be read. The next step of all parameters uses the sum, which is None unless a
  // norm is wanted, if no gradient has changed by then.
  py::object scan(const py::object& param_groups, const py::object& params,
                  const OptionalTensor& found_inf, const OptionalTensor& grad_scale,
                  bool sums_squares, const std::vector<Shard>& shards);

  // True if a gradient that the last scan read was written or replaced since.
  bool gradients_were_written(const py::object& param_groups, const std::vector<Shard>& shards);

  // Checks gradients that another optimizer steps copies of, as step() does, and remembers that
  // they still carry the loss scale.
  void check_grads(const py::object& param_groups, bool is_of_scaler,
                   const std::vector<Shard>& shards, const py::object& params);
  void mark_scaled(const py::object& param_groups, const std::vector<Shard>& shards);

  void forget_scan();
  // Forgets to which parameters masters were rounded, so that the next step compares them.
  void forget_masters();

  bool tracks_step_applied = false;
  // Norm of the unscaled gradients of the last step, and whether it was applied; None or float32.
  OptionalTensor grad_norm, step_applied;
  // Number of matrices that steps of Muon have left as they were, one int64; None before the first.
  OptionalTensor skipped_matrices() const {
    return muon_ == nullptr ? std::nullopt : muon_->skipped_matrices;
  }
  std::string progress;  // how far the last step came, if it failed: "3 of 8 parameters"

 private:
  // Holds the stepper for one call, because its memory serves one thread at a time.
  class Claim;
  // Keeps the tensors of a step alive while it runs without the GIL.
  class WithoutGil;

  // A parameter on its way through the passes of a block.
  struct Collected {
    const ParamPlace* place;
    const at::Tensor* param;
    const at::Tensor* grad;  // null: nothing to do
    PyObject* entries;       // the dict of its state, or null
    const OptionReader* formula;
    bool is_readable;  // whether its state is a dict of tensors, one for each part
    std::array<PyObject*, kTensorParts> found;
    std::array<int8_t, kTensorParts> forms;
  };

  // What is known of a float32 master: the parameter to which it was rounded.
  struct MasterSeen {
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> master;
    std::optional<SeenTensor> param;
    const void* data = nullptr;
    uint64_t layout = 0;
  };

  bool read_groups(const py::object& param_groups);
  bool read_group(PyObject* group);
  void place_params(const py::object& params);
  // Returns false if a parameter is no tensor that kernels can read.
  bool collect(const py::object& state, bool trusts_states, py::list& incomplete);
  bool collect_block(Collected* block, const ParamPlace* places, size_t count, PyObject* states,
                     Py_ssize_t& position);
  void take_entries(Collected& one);
  ParamTensors tensors_of(const Collected& one) const;
  // True if the state has the formats that the options ask for.
  bool fits_options(const Collected& one, const ParamTensors& tensors) const;
  void add(const Collected& one, ParamTensors& tensors);
  // Collects the gradients alone. Returns false if a parameter is no tensor that kernels can read.
  bool collect_grads(const py::object& param_groups, const py::object& params,
                     const std::vector<Shard>& shards);
  // Returns the gradient of a parameter, or null.
  const at::Tensor* grad_of(const ParamPlace& place) const;
  int64_t version_of_param(const ParamPlace& place, const at::Tensor& param) const;
  int64_t version_of_grad(const ParamPlace& place, const at::Tensor& grad) const;
  // Throws if a gradient still carries the loss scale of an earlier step.
  void check_carries_no_scale();
  // Takes the sum of squares of the last scan where the step needs it. If a gradient has changed
  // since, scans again, and adds what that finds to found_inf.
  void scan_if_needed(GradientOptions& options, bool wants_norm);
  void remember_scaled();
  void remember_masters();
  // Returns a hash of the address and the version of each gradient, with the parameter's number.
  std::vector<std::pair<int64_t, uint64_t>> hashes_of_grads() const;
  at::Tensor& first_nonfinite_on(const at::Device& device);
  void clear();

  const std::string optimizer_;
  const std::unique_ptr<MuonFormula> muon_;  // or null
  const std::unique_ptr<OptionReader> reader_;
  Step step_;
  GradScan scan_;
  StepScratch scratch_;
  std::atomic<bool> is_in_use_{false};

  // Valid during a call.
  StepGroups groups_;
  std::vector<GroupFormat> formats_;
  std::vector<const OptionReader*> formulas_;  // the formula of each group
  std::vector<OptionalTensor> lrs_;
  std::vector<py::object> lists_;  // the parameters of each group, as lists or tuples
  std::vector<ParamPlace> places_;
  std::vector<const at::Tensor*> grads_;  // of the parameters in grad_places_
  std::vector<const ParamPlace*> grad_places_;
  std::vector<PyObject*> objects_;  // parameters and states of the step
  // A float32 master of the step.
  struct MasterOfStep {
    const ParamPlace* place;
    const c10::TensorImpl* param;
    PyObject* object;
    bool is_current;
  };
  std::vector<MasterOfStep> masters_;
  const std::vector<Shard>* shards_ = nullptr;
  int64_t numel_ = 0;
  bool is_on_cpu_ = true;
  static constexpr int kPredicted = 8;
  // The keys of the last parameter's state, and the formula whose keys these are.
  OptionReader::Key predicted_[kPredicted];
  const OptionReader* predicted_for_ = nullptr;

  // Stays between calls.
  std::vector<MasterSeen> seen_;    // by ParamPlace::number
  std::vector<SeenTensor> scaled_;  // gradients that the last step with a loss scale left scaled
  std::vector<std::pair<int64_t, uint64_t>> scanned_;  // the gradients of the last scan
  OptionalTensor scanned_sum_;
  std::vector<at::Tensor> first_nonfinites_;  // one for each device
};

}  // namespace amp_ext::python
