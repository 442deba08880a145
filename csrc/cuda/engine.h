// The CUDA engine: launches on a stream, without a word to the host. All return a cudaError_t.
#pragma once

#include <cstdint>

#include "cuda/platform.h"
#include "elements/loss_scale.h"
#include "launches.h"

namespace amp_ext::cuda {

// As cudaDriverGetVersion gives it: 12010 for CUDA 12.1, the first that takes the arguments of
// these kernels.
int driver_version();
inline constexpr int kLeastDriverVersion = 12010;

// One launch for each combination of dtypes, as far as the tensors fit into a kernel's arguments.
// `block_counter` is one zero on the device, and zero again afterwards; launches that run at the
// same time need one each.
int step(const StepLaunch& launch, uint32_t* block_counter, cudaStream_t stream);

// Lets the guard of a step count its norm where no launch of the step does.
int end_guarded_step(const GradientInputs& inputs, cudaStream_t stream);

// What taking a sum of squares needs.
struct SumScratch {
  double* tile_sums = nullptr;        // [number_of_tiles()]
  uint32_t* block_counter = nullptr;  // [1], as in step
  // [count], zero before and after; only where the squares of tensors are wanted.
  uint32_t* tensor_counters = nullptr;
};

// Tiles of all gradients together.
int64_t number_of_tiles(const KernelTensorArgs* all_args, int64_t count);

// One launch for each dtype. Sums are taken in a fixed order.
int scan(const GradScanLaunch& launch, const SumScratch& scratch, cudaStream_t stream);

// Multiplies gradients in place, unless the factor is 1. found_inf and first_nonfinite (may be
// null) as in a look, for the gradients before and for the factor. One launch for each dtype, which
// sets is_launched[count], all false before, for its gradients.
int multiply(const KernelTensorArgs* all_args, int64_t count, const MultiplyInputs& inputs,
             float* found_inf, int64_t* first_nonfinite, bool* is_launched, cudaStream_t stream);

// Adds the number of infs and NaNs of each gradient to counts[count].
int count_nonfinite(const KernelTensorArgs* all_args, int64_t count, int64_t* counts,
                    cudaStream_t stream);

// Adds to wrong[3] how many roots, reciprocals and quotients of the fast path are not rounded to
// nearest on this device. Tries every `stride`-th of 2^24, 2^23 and 10^8 operands.
int count_division_errors(int64_t stride, int64_t* wrong, cudaStream_t stream);

// One launch for each pair of kinds, as far as the tensors fit into a kernel's arguments; the last
// one advances the counters. `block_counter` as in step.
int average(const AverageLaunch& launch, uint32_t* block_counter, cudaStream_t stream);

// Flags that one launch looks at: one for each optimizer and device.
inline constexpr int kMaxFlags = 128;

// The scale backs off if one of flags[count] is set. More than kMaxFlags of them need
// `earlier_overflow`, a zero on the device.
int update_scale(const ScaleUpdate& update, const OverflowFlag* flags, int64_t count,
                 int32_t* earlier_overflow, cudaStream_t stream);

}  // namespace amp_ext::cuda
