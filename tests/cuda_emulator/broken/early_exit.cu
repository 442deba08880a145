// Lets the threads behind the end of a tensor leave before a barrier that the others wait at.
#include "program.h"

template <bool kRepaired>
__global__ void any_negative(const float* values, int count, int* found) {
  const int i = static_cast<int>(threadIdx.x);
  if (!kRepaired && i >= count) return;
  if (__syncthreads_or(i < count && values[i] < 0.0f) && i == 0) *found = 1;
}

template <bool kRepaired>
bool run() {
  std::vector<float> values(50, 1.0f);
  values[49] = -1.0f;
  std::vector<int> found = {0};
  launch(any_negative<kRepaired>, 1, 64, nullptr, values.data(), 50, found.data());
  return equal(found, {1});
}
