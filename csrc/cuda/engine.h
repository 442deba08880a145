// The CUDA engine. Its launches return a cudaError_t and never wait for the device.
#pragma once

#include <amp_ext/export.h>

#include <cstdint>

#include "cuda/platform.h"
#include "formulas/loss_scale.h"
#include "judge_norm.h"
#include "launches.h"

namespace amp_ext::cuda {

// Returns the version from cudaDriverGetVersion, or 0. CUDA 12.1 (12010) is the first that accepts
// arguments as large as these kernels have.
AMP_EXT_API int driver_version();
inline constexpr int kLeastDriverVersion = 12010;

// Launches one kernel for each combination of dtypes, or several if tensors do not fit into its
// arguments. `block_counter` points to device memory that is zero before and after the launch;
// launches that may overlap need different counters.
AMP_EXT_API int step(const StepLaunch& launch, uint32_t* block_counter, cudaStream_t stream);

// Judges the norm of a step by those of earlier steps.
AMP_EXT_API int judge_norm(const GradientInputs& inputs, NormJudgement* judgement, float* skips,
                           cudaStream_t stream);

// Device memory for a sum of squares.
struct SumScratch {
  double* tile_sums = nullptr;        // [number_of_tiles()]
  uint32_t* block_counter = nullptr;  // [1], the counter of step()
};

// Returns the number of tiles of all gradients together.
AMP_EXT_API int64_t number_of_tiles(const KernelTensorArgs* all_args, int64_t count);

// Scans gradients with at least one launch for each dtype. Sums are taken in a fixed order.
AMP_EXT_API int scan(const GradScanLaunch& launch, const SumScratch& scratch, cudaStream_t stream);

// Multiplies gradients in place, unless the factor is 1. found_inf and first_nonfinite (may be
// null) report inf and NaN as in a scan; found_inf also reports a factor that is inf or NaN. There
// is at least one launch for each dtype, which sets is_launched[i] to true for its gradients.
AMP_EXT_API int multiply(const KernelTensorArgs* all_args, int64_t count,
                         const MultiplyInputs& inputs, float* found_inf, int64_t* first_nonfinite,
                         bool* is_launched, cudaStream_t stream);

// Adds the number of infs and NaNs in each gradient to counts[count].
AMP_EXT_API int count_nonfinite(const KernelTensorArgs* all_args, int64_t count, int64_t* counts,
                                cudaStream_t stream);

// Adds to wrong[3] how many square roots, reciprocals and quotients of the fast path are not
// rounded to nearest. Tries every `stride`-th of 2^24 roots, 2^23 reciprocals and 10^8 quotients.
AMP_EXT_API int count_division_errors(int64_t stride, int64_t* wrong, cudaStream_t stream);

// Launches one kernel for each pair of number formats, or several. The last kernel advances the
// counters. For `block_counter`, see step().
AMP_EXT_API int average(const AverageLaunch& launch, cudaStream_t stream);

// Largest number of overflow flags (one per optimizer and device) that one launch reads.
inline constexpr int kMaxFlags = 128;

// Updates the loss scale, which backs off if any of flags[count] is set. For more than kMaxFlags
// flags, `earlier_overflow` points to a zero on the device.
AMP_EXT_API int update_scale(const ScaleUpdate& update, const OverflowFlag* flags, int64_t count,
                             int32_t* earlier_overflow, cudaStream_t stream);

}  // namespace amp_ext::cuda
