// Has a barrier in either branch: as many for each thread, but not the same.
#include "program.h"

template <bool kRepaired>
__global__ void meet(int* met) {
  if (kRepaired || threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  atomicAdd(met, 1);
}

template <bool kRepaired>
bool run() {
  std::vector<int> met = {0};
  launch(meet<kRepaired>, 1, 64, nullptr, met.data());
  return equal(met, {64});
}
