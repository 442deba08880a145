// Shuffles from a lane that its mask does not name.
#include "program.h"

template <bool kRepaired>
__global__ void take_first(float* values) {
  if (threadIdx.x < 16) return;
  values[threadIdx.x] = __shfl_sync(0xffff0000u, values[threadIdx.x], kRepaired ? 16 : 0);
}

template <bool kRepaired>
bool run() {
  std::vector<float> values = multiples(32, 1.0f);
  launch(take_first<kRepaired>, 1, 32, nullptr, values.data());
  return equal({values[0], values[31]}, std::vector<float>{0.0f, 16.0f});
}
