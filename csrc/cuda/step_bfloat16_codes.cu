// The step kernels of bfloat16 parameters with moments in 8 bits. The sources of steps compile side
// by side.
#include "cuda/step.cuh"

namespace amp_ext::cuda {

template int step_all<WithOthers<BFloat16>::Type>(const StepLaunch&, uint32_t*, cudaStream_t,
                                                  int64_t&);

}  // namespace amp_ext::cuda
