// Has a barrier in a branch that only some threads of the block take.
#include "program.h"

template <bool kRepaired>
__global__ void meet(int* met) {
  if (kRepaired || threadIdx.x < 16) {
    __syncthreads();
  }
  atomicAdd(met, 1);
}

template <bool kRepaired>
bool run() {
  std::vector<int> met = {0};
  launch(meet<kRepaired>, 3, 64, nullptr, met.data());
  return equal(met, {192});
}
