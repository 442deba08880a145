// The step kernels of bfloat16 parameters with 8-bit moments.
#include "cuda/step.cuh"

namespace amp_ext::cuda {

template int step_all<WithOthers<BFloat16>::Type>(const StepLaunch&, int64_t, uint32_t*,
                                                  cudaStream_t, int64_t&);

}  // namespace amp_ext::cuda
