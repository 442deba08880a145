// The step kernels of bfloat16 parameters. One file for each dtype: they compile side by side.
#include "cuda/step.cuh"

namespace amp_ext::cuda {

template int step_params<BFloat16>(const StepLaunch&, uint32_t*, cudaStream_t, int64_t&);

}  // namespace amp_ext::cuda
