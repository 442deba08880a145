// The step kernels of float64 parameters.
#include "cuda/step.cuh"

namespace amp_ext::cuda {

template int step_all<CombinationsFor<double>::Type>(const StepLaunch&, int64_t, uint32_t*,
                                                     cudaStream_t, int64_t&);

}  // namespace amp_ext::cuda
