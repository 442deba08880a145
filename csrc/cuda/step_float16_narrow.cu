// The step kernels of float16 parameters with bfloat16 buffers.
#include "cuda/step.cuh"

namespace amp_ext::cuda {

template int step_all<WithBFloat16<Half>>(const StepLaunch&, int64_t, uint32_t*, cudaStream_t,
                                          int64_t&);

}  // namespace amp_ext::cuda
