// One step of the parameters in some slots of a table: check_step(), prepare_step(), launch_step()
// and ParamTable::remember_step(). The first two may throw before anything is written.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/options.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "devices/dispatch.h"
#include "kernels.h"
#include "launches.h"
#include "optimizer/group_table.h"
#include "optimizer/param_table.h"

namespace amp_ext {

// Creates the states of an optimizer's parameters, and stores them in the optimizer's containers.
class AMP_EXT_API StateStore {
 public:
  virtual ~StateStore() = default;

  // Returns states in the formats that the options require, for parameters given by their indices
  // in the table. Stores nothing yet.
  virtual std::vector<ParamState> make(const std::vector<int64_t>& indices) = 0;

  // Stores the states that make() returned. Called once the step has passed all its checks.
  virtual void keep() = 0;
};

// What a step reads besides its slots and the options of their groups.
struct StepInputs {
  GradientOptions gradients;
  bool reads_norm = false;  // the step reads gradients.sum_of_squares
  OptionalTensor max_norm;  // one float64, another limit of the norm, which needs reads_norm
};

// The inputs of a step on one device. The tensors own the memory that `pointers` refers to.
struct AMP_EXT_API DeviceInputs {
  DeviceInputs(const at::Device& device, const StepInputs& inputs);

  at::Tensor grad_scale;
  at::Tensor found_inf;
  at::Tensor sum_of_squares;
  at::Tensor max_norm;
  GradientInputs pointers;
  float* grad_norm = nullptr;  // [1], the norm of the unscaled gradients is written here; or null
};

// A learning rate given as a tensor, in the form that the engine of one device reads.
struct LrOnDevice {
  at::Tensor on_device;  // one float32 on the device; undefined: `number` is used
  double number;
};

// The order in which a step updates the slots of a table: one chunk after another.
class AMP_EXT_API StepChunks {
 public:
  explicit StepChunks(std::vector<size_t> ends) : ends(std::move(ends)) {}
  virtual ~StepChunks() = default;

  // Called before the first launch of a chunk. Returns when its gradients can be read.
  virtual void begin(size_t chunk) = 0;
  // Called once all parameters of a chunk are updated.
  virtual void end(size_t chunk) = 0;

  // For each chunk, the index of the slot after its last one. The last number is the number of
  // slots.
  const std::vector<size_t> ends;
};

// The slots that one launch updates, with the arguments of the launch.
struct StepBatch {
  at::Device device;
  OptimizerKernel kernel;
  DeviceInputs inputs;
  size_t chunk = 0;  // index in StepChunks
  std::vector<ParamSlot*> slots;
  std::vector<std::optional<LrOnDevice>> lrs;  // [groups], nullopt if lr is not a tensor
  std::vector<KernelTensorArgs> all_args;      // [slots]
  std::unique_ptr<bool[]> is_launched;         // [slots], set by the launch
  bool is_skipped = false;                     // whether the host knows that the step is skipped
  float* step_applied = nullptr;               // [1], set to 1 or 0 by the launch; or null
};

// How far a step has come, in numbers of parameters.
struct StepOutcome {
  int64_t params = 0;           // parameters that the step updates
  int64_t stepped = 0;          // parameters updated with their states and step counters
  int64_t stepped_in_part = 0;  // parameters with dense copies that could not be copied back

  // Returns "3 of 8 parameters", or an empty string if no parameter was updated.
  std::string text() const;
};

// Throws if a scalar or an option of a step is invalid.
void check_options(const std::string& operation, const GroupTable& table,
                   const GradientOptions& options);

// Makes every check that can refuse a step. Missing states are created; the store keeps them only
// if all checks pass, otherwise the slots drop them, too. `is_of_scaler` is true if a scaler takes
// the step, so that gradients may carry its scale.
AMP_EXT_API void check_step(ParamTable& params, Slots slots, const GroupTable& table,
                            const GradientOptions& options, bool is_of_scaler, StateStore& store);

// Returns one batch for each device and kernel, of the slots that have a gradient. Allocates all
// that the launches need. Call check_step() first.
AMP_EXT_API std::vector<StepBatch> prepare_step(const ParamSlotChecks& checks, Slots slots,
                                                const GroupTable& table, const StepInputs& inputs,
                                                StepScratch& scratch);

// Launches the batches. If this throws, `outcome` says how far the step has come: each parameter
// was either updated together with its state and step counter or left unchanged, except where a
// dense copy could not be copied back. `chunks` may be null. It is not asked about chunks that the
// host knows to be skipped.
AMP_EXT_API void launch_step(const std::vector<StepBatch>& batches, GroupTable& table,
                             StepScratch& scratch, StepOutcome& outcome,
                             StepChunks* chunks = nullptr);

}  // namespace amp_ext
