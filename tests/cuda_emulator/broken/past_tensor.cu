// Writes past the end of a tensor: the last block forgets that the tensor ends within it.
#include "program.h"

template <bool kRepaired>
__global__ void fill(float* values, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (!kRepaired || i < count) values[i] = 2.0f * static_cast<float>(i);
}

template <bool kRepaired>
bool run() {
  std::vector<float> values(100);
  launch(fill<kRepaired>, 2, 64, nullptr, values.data(), 100);
  return equal(values, multiples(100, 2.0f));
}
