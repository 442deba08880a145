// The step kernels of float32 parameters. For parallel builds, step kernels are in several sources.
#include "cuda/step.cuh"

namespace amp_ext::cuda {

template int step_all<CombinationsFor<float>::Type>(const StepLaunch&, int64_t, uint32_t*,
                                                    cudaStream_t, int64_t&);

}  // namespace amp_ext::cuda
