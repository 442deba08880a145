// The CUDA engine: launches on a stream, without a word to the host. All return a cudaError_t.
#pragma once

#include <cstdint>

#include "cuda/platform.h"
#include "functors/loss_scale.h"
#include "multi_tensor.h"

namespace amp_ext::cuda {

// One launch for each combination of dtypes, as far as the tensors fit into a kernel's arguments.
// `block_counter` is one zero on the device, and zero again afterwards; launches that run at the
// same time need one each.
int step(const StepLaunch& launch, uint32_t* block_counter, cudaStream_t stream);

// Where the sum of squares goes, and what taking it needs.
struct SumOutputs {
  double* sum_of_squares = nullptr;   // [1], added to; null: no sum is wanted
  double* tile_sums = nullptr;        // [number_of_tiles()], scratch
  uint32_t* block_counter = nullptr;  // [1], as in step
};

// Tiles of all gradients together.
int64_t number_of_tiles(const TensorRecord* records, int64_t count);

// Sets found_inf[0] to 1 if a gradient is inf or NaN, or grad_scale (may be null) has no finite
// inverse. One launch for each dtype. Sums are taken in a fixed order.
int look(const TensorRecord* records, int64_t count, const float* grad_scale, float* found_inf,
         const SumOutputs& sums, cudaStream_t stream);

// Multiplies gradients in place, unless the factor is 1. found_inf (may be null) as above, for the
// gradients before and for the factor. One launch for each dtype.
int multiply(const TensorRecord* records, int64_t count, const MultiplyInputs& inputs,
             float* found_inf, cudaStream_t stream);

// Adds the number of infs and NaNs of each gradient to counts[count].
int count_nonfinite(const TensorRecord* records, int64_t count, int64_t* counts,
                    cudaStream_t stream);

// The scale backs off if one of the flags `found_infs[count]` is not 0.
int update_scale(const LossScaleHyperparameters& hyperparameters, const float* const* found_infs,
                 int64_t count, float* scale, int32_t* growth_tracker, cudaStream_t stream);

}  // namespace amp_ext::cuda
