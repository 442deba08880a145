// Runs launches on the engine of a device. Here are threads; streams are in dispatch_cuda.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "elements/loss_scale.h"
#include "launches.h"

namespace amp_ext {

// Device memory that step kernels need, kept by the caller so that two optimizers on two streams
// never share it. Empty on the CPU.
class StepScratch {
 public:
  // Takes the memory that kernels on this device need: a launch then takes none.
  void make_room(const at::Device& device);

  // One counter on `device`, zero between launches.
  uint32_t* block_counter(const at::Device& device);

 private:
  std::unordered_map<at::Device, at::Tensor> counters_;
};

// Whether kernels work on the memory of this device, which the host then never reads. In the build
// for tests that runs them on the CPU (AMP_EXT_CUDA_EMULATOR), they work on CPU tensors.
bool uses_cuda_engine(const at::Device& device);

// Throws unless an engine for this device was built and its driver can run it.
void check_device(const std::string& operation, const std::string& name, const at::Device& device);

// Whether the host can tell without waiting that the step does nothing.
bool host_knows_of_skip(const at::Device& device, const GradientInputs& inputs);

// What runs launches on one type of device.
class DeviceEngine {
 public:
  virtual ~DeviceEngine() = default;

  // Where this throws, the records whose is_launched is set are stepped, and the others are not.
  virtual void step(const at::Device& device, const StepLaunch& launch,
                    StepScratch& scratch) const = 0;
  // Lets the guard of a step count its norm, after all launches that read it.
  virtual void end_guarded_step(const at::Device& device, const GradientInputs& inputs) const = 0;
  virtual void scan(const at::Device& device, const GradScanLaunch& launch,
                    StepScratch& scratch) const = 0;
  // Multiplies gradients in place; a factor of 1 writes nothing. found_inf and first_nonfinite (may
  // be null) as in a look, for the gradients before and for the factor. is_launched[records.size()]
  // as in a step.
  virtual void multiply(const at::Device& device, const std::vector<KernelTensorArgs>& all_args,
                        const MultiplyInputs& inputs, float* found_inf, int64_t* first_nonfinite,
                        bool* is_launched) const = 0;
  // Adds the number of infs and NaNs of each gradient to counts[records.size()].
  virtual void count_nonfinite(const at::Device& device,
                               const std::vector<KernelTensorArgs>& all_args,
                               int64_t* counts) const = 0;
  // Adds to wrong[3] how many roots, reciprocals and quotients of the fast path are not rounded to
  // nearest. An engine that computes them by instructions of IEEE 754 has none.
  virtual void count_division_errors(const at::Device& /*device*/, int64_t /*stride*/,
                                     int64_t* /*wrong*/) const {}
  virtual void average(const at::Device& device, const AverageLaunch& launch,
                       StepScratch& scratch) const = 0;
  // The scale backs off if one of the flags, of any number, is not 0.
  virtual void update_scale(const at::Device& device, const ScaleUpdate& update,
                            const std::vector<OverflowFlag>& flags) const = 0;
};

const DeviceEngine& engine_of(const at::Device& device);

#if defined(AMP_EXT_WITH_CUDA)
const DeviceEngine& cuda_engine();
// Throws if the driver is too old for the kernels.
void check_driver(const std::string& operation);
#endif

// The instruction set of the CPU engine: "plain", "avx2" or "avx512".
AMP_EXT_API const char* cpu_isa();

}  // namespace amp_ext
