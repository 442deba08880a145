// Runs launches on the engine of a device: on the CPU in torch's threads, on a GPU in torch's
// current stream (dispatch_cuda.cpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "formulas/loss_scale.h"
#include "judge_norm.h"
#include "launches.h"

namespace amp_ext {

// Device memory that step kernels need; empty on the CPU. Every optimizer has its own, because
// optimizers may run on different streams.
class StepScratch {
 public:
  // Allocates the memory for `device` in advance, so that launches do not allocate.
  void make_room(const at::Device& device);

  // Returns a counter on `device`, which is zero between launches.
  uint32_t* block_counter(const at::Device& device);

 private:
  std::unordered_map<at::Device, at::Tensor> counters_;
};

// True if CUDA kernels work on the memory of this device. The test build that emulates CUDA
// (AMP_EXT_CUDA_EMULATOR) uses CPU tensors.
bool uses_cuda(const at::Device& device);

// Throws unless an engine for this device was built and its driver can run it.
void check_device(const std::string& operation, const std::string& name, const at::Device& device);

// True if the host can tell without waiting that the step will be skipped.
bool host_knows_of_skip(const at::Device& device, const GradientInputs& inputs);

// The launches of one type of device.
class Backend {
 public:
  virtual ~Backend() = default;

  // If an exception is thrown, exactly the tensors whose is_launched is set have been stepped.
  virtual void step(const at::Device& device, const StepLaunch& launch,
                    StepScratch& scratch) const = 0;
  // Judges the norm of a step by those of earlier steps.
  virtual void judge_norm(const at::Device& device, const GradientInputs& inputs,
                          NormJudgement* judgement, float* skips) const = 0;
  virtual void scan(const at::Device& device, const GradScanLaunch& launch,
                    StepScratch& scratch) const = 0;
  // Multiplies gradients in place; a factor of 1 writes nothing. found_inf and first_nonfinite (may
  // be null) report inf and NaN as in a scan; found_inf also reports a factor of inf or NaN.
  // is_launched[all_args.size()] is set as in `step`.
  virtual void multiply(const at::Device& device, const std::vector<KernelTensorArgs>& all_args,
                        const MultiplyInputs& inputs, float* found_inf, int64_t* first_nonfinite,
                        bool* is_launched) const = 0;
  // Adds the number of infs and NaNs in each gradient to counts[all_args.size()].
  virtual void count_nonfinite(const at::Device& device,
                               const std::vector<KernelTensorArgs>& all_args,
                               int64_t* counts) const = 0;
  // Adds to wrong[3] how many square roots, reciprocals and quotients of the fast path are inexact.
  virtual void count_division_errors(const at::Device& /*device*/, int64_t /*stride*/,
                                     int64_t* /*wrong*/) const {}
  virtual void average(const at::Device& device, const AverageLaunch& launch) const = 0;
  // Updates the loss scale, which backs off if any flag is not 0. Takes any number of flags.
  virtual void update_scale(const at::Device& device, const ScaleUpdate& update,
                            const std::vector<OverflowFlag>& flags) const = 0;
};

AMP_EXT_API const Backend& backend_of(const at::Device& device);

#if defined(AMP_EXT_WITH_CUDA)
const Backend& cuda_backend();
// Throws if the driver is too old for the kernels.
void check_driver(const std::string& operation);
#endif

// Returns the instruction set of the CPU engine: "plain", "avx2" or "avx512".
AMP_EXT_API const char* cpu_isa();

}  // namespace amp_ext
