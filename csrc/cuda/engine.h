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

// Sets found_inf[0] to 1 if a gradient is inf or NaN, or grad_scale (may be null) has no finite
// inverse. One launch for each dtype.
int check_finite(const TensorRecord* records, int64_t count, const float* grad_scale,
                 float* found_inf, cudaStream_t stream);

// Multiplies gradients by inv_scale[0]; found_inf as above. One launch for each dtype.
int unscale(const TensorRecord* records, int64_t count, const float* inv_scale, float* found_inf,
            cudaStream_t stream);

// The scale backs off if one of the flags `found_infs[count]` is not 0.
int update_scale(const LossScaleHyperparameters& hyperparameters, const float* const* found_infs,
                 int64_t count, float* scale, int32_t* growth_tracker, cudaStream_t stream);

}  // namespace amp_ext::cuda
