// The step kernels of bfloat16 parameters with float32 buffers.
#include "cuda/step.cuh"

namespace amp_ext::cuda {

template int step_all<WithFloat32<BFloat16>>(const StepLaunch&, int64_t, uint32_t*, cudaStream_t,
                                             int64_t&);

}  // namespace amp_ext::cuda
