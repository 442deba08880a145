// The step kernels of float32 parameters. The kernels have several sources, for parallel builds.
#include "cuda/step.cuh"

namespace amp_ext::cuda {

template int step_all<CombinationsFor<float>::Type>(const StepLaunch&, uint32_t*, cudaStream_t,
                                                    int64_t&);

}  // namespace amp_ext::cuda
