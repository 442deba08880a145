// Adds to a shared number that nobody has set to zero.
#include "program.h"

template <bool kRepaired>
__global__ void sum(const float* values, float* result) {
  AMP_EXT_SHARED(float, total);
  if (kRepaired) {
    if (threadIdx.x == 0) total = 0.0f;
    __syncthreads();
  }
  atomicAdd(&total, values[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) *result = total;
}

template <bool kRepaired>
bool run() {
  const std::vector<float> values = multiples(64, 1.0f);
  std::vector<float> result = {0.0f};
  launch(sum<kRepaired>, 1, 64, nullptr, values.data(), result.data());
  return equal(result, {2016.0f});
}
