// One step of many parameters: checks their tensors, and launches the kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "devices/dispatch.h"
#include "kernels.h"
#include "launches.h"

namespace amp_ext {

// Indices of ParamTensors::tensors.
enum TensorPart { kParam, kGrad, kMaster, kStep, kExponents, kBuffer0 };
inline constexpr int kTensorParts = kBuffer0 + kMaxBuffers;

// The tensors that the step of one parameter uses. The caller keeps them alive until the step ends.
struct ParamTensors {
  std::array<const at::Tensor*, kTensorParts> tensors{};  // null: none
  int buffer_count = 0;
  int64_t group = 0;
  int64_t index = 0;  // index in the group or in the lists
  // Index of the shard's first element in the full tensor; dithered rounding depends on it.
  int64_t global_offset = 0;
  // Whether a float32 master was rounded to the parameter as it is now. Otherwise the step first
  // replaces each element of the master that does not round to the parameter.
  bool master_is_current = false;

  // The dtype and device of each tensor as one number, 0 without a tensor.
  std::array<uint32_t, kTensorParts> kinds{};

  void set(int part, const at::Tensor& tensor) {
    const c10::Device device = tensor.device();
    tensors[part] = &tensor;
    kinds[part] = 1U + static_cast<uint8_t>(tensor.scalar_type()) +
                  (static_cast<uint32_t>(static_cast<uint8_t>(device.type())) << 8U) +
                  (static_cast<uint32_t>(static_cast<uint8_t>(device.index())) << 16U);
  }
  void drop(int part) {
    tensors[part] = nullptr;
    kinds[part] = 0;
  }
  const at::Tensor& operator[](int part) const { return *tensors[part]; }
};

// How errors name a tensor: "grads[3]" (lists) or "grad of group 0, param 3" (optimizers).
enum class Naming { kLists, kGroups };

// Returns the name of a tensor that is no buffer; lists of buffers have names of their own.
std::string name_of_tensor(Naming naming, const std::string& name, int64_t group, int64_t index);

// The hyperparameters of the groups of a step, type-erased so that one step serves any optimizer.
// They stay in the memory of the caller.
struct StepGroups {
  struct Group {
    CommonHyperparameters* hyperparameters;
    OptionalTensor lr;  // the learning rate, if it is a tensor
    uint8_t dithered;   // values that may be dithered, as bits of KernelTensorArgs::dithered
  };

  const void* hyperparameters = nullptr;  // array of Hyperparameters, one for each group
  std::optional<OptimizerKernel> kernels[kMaxBuffers + 1];  // by the number of buffers
  const BufferDescription* buffers = nullptr;  // descriptions of all buffers of the formula
  bool writes_update = false;                  // kWritesUpdate of the formula
  std::vector<Group> groups;

  // Refers to `all`, which must outlive this object.
  template <typename Hyperparameters>
  void refer_to(std::vector<Hyperparameters>& all) {
    hyperparameters = all.data();
    for (int count = 0; count <= kMaxBuffers; ++count)
      kernels[count] = kernel_for<Hyperparameters>(count);
    buffers = Hyperparameters::kBuffers;
    writes_update = kWritesUpdate<Hyperparameters>;
    groups.clear();
    for (Hyperparameters& one : all) groups.push_back({&one, {}, dithered_numbers(one)});
  }
};

// A tensor whose layout or dtype kernels can't read, and the dense copy that kernels get instead.
struct DenseCopy {
  at::Tensor original;
  at::Tensor dense;
  bool written;    // the kernel writes `dense`, so it must be copied back
  size_t of_args;  // index of the parameter in its batch
};

// The numbers of parameters that a step has written so far.
struct AMP_EXT_API StepProgress {
  int64_t params = 0;           // parameters that the step updates
  int64_t stepped = 0;          // parameters updated with their states and step counters
  int64_t stepped_in_part = 0;  // parameters with dense copies that could not be copied back
  bool was_skipped = false;     // whether the host knew that the step writes nothing

  // Returns "3 of 8 parameters", or an empty string if no parameter was updated.
  std::string text() const;
};

// The parameters of one device and kernel, which one launch updates.
struct StepBatch {
  StepBatch(const at::Device& device, OptimizerKernel kernel) : device(device), kernel(kernel) {}

  at::Device device;
  OptimizerKernel kernel;
  std::vector<KernelTensorArgs> all_args;
  // Tensors that the launch writes, parameter by parameter. Their versions count up after a launch,
  // also if a GPU skips the step, which the host doesn't know.
  std::vector<c10::TensorImpl*> written;
  std::vector<size_t> written_ends;  // for each parameter, the end of its tensors in `written`
  std::vector<DenseCopy> copies;
  std::vector<std::pair<at::Tensor, at::Tensor>> stale_masters;  // with their parameters

  void clear();
};

// The inputs of a step on one device. The tensors own the memory that `pointers` refers to.
struct AMP_EXT_API DeviceInputs {
  DeviceInputs(const at::Device& device, const GradientOptions& options,
               const OptionalTensor& max_norm = {});

  at::Tensor grad_scale, found_inf, sum_of_squares, max_norm;
  GradientInputs pointers;
  float* grad_norm = nullptr;  // [1], the norm of the unscaled gradients is written here; or null
};

// The inputs and outputs of a step besides the tensors of its parameters.
struct StepInputs {
  GradientOptions gradients;
  OptionalTensor max_norm;  // one float64, another limit of the norm, which needs sum_of_squares
  // One float32, set to 1 if the step is applied and to 0 if it is skipped.
  OptionalTensor step_applied;
};

// One step. An object may be used for many steps, one after another, and keeps its memory.
class AMP_EXT_API Step {
 public:
  // `buffer_names` are the keys of buffers, or the names of lists.
  Step(std::string operation, Naming naming, std::vector<std::string> buffer_names)
      : operation_(std::move(operation)), naming_(naming), buffer_names_(std::move(buffer_names)) {}

  // Forgets all parameters.
  void clear();

  // Throws if kernels can't read a gradient.
  void check_grad(const at::Tensor& grad, int64_t group, int64_t index) const;

  // Checks the tensors of a parameter and adds them to the step. Throws if a kernel can't use them.
  void add(const ParamTensors& tensors, const StepGroups& groups);

  // Updates all parameters that were added. Nothing has been written if an error occurs before the
  // first launch. `progress` says how far a step has come that failed later.
  void run(StepGroups& groups, const StepInputs& inputs, StepScratch& scratch,
           StepProgress& progress);

 private:
  std::string name_of(const ParamTensors& tensors, int part, const StepGroups& groups) const;
  void check_tensors(const ParamTensors& tensors, const StepGroups& groups, Master master) const;
  void check_buffers(const ParamTensors& tensors, const StepGroups& groups, Master master) const;
  // Adds a parameter that differs from an earlier one only in its sizes and memory. Returns false
  // if there is none like it, or if a tensor is not contiguous.
  bool add_like_example(const ParamTensors& tensors, const StepGroups::Group& group);
  StepBatch& batch_of(const at::Device& device, OptimizerKernel kernel);

  std::string operation_;
  Naming naming_;
  std::vector<std::string> buffer_names_;
  std::vector<StepBatch> batches_;
  size_t in_use_ = 0;  // number of batches that have parameters
  // The dtypes, devices and keys of a parameter that passed all checks, with dense tensors and
  // without codes. A Step keeps a few such examples, but no tensor, from one step to the next.
  struct Example {
    std::array<uint32_t, kTensorParts> kinds;
    int64_t group;
    c10::DispatchKeySet keys;
    KernelTensorArgs args;  // the arguments of that parameter, whose addresses are not used
    c10::Device device;
    OptimizerKernel kernel;
    bool writes_grad;
    uint8_t dithered;  // StepGroups::Group::dithered of its group
    int count = 0;     // number of tensors, whose parts are in `parts`
    std::array<int8_t, kTensorParts> parts{};
    std::array<int64_t, kTensorParts> itemsizes{};  // bytes
  };
  std::vector<Example> examples_;
};

}  // namespace amp_ext
