// Shuffles with a mask that names lanes which do not come.
#include "program.h"

template <bool kRepaired>
__global__ void sum(const float* values, float* result) {
  const float value = values[threadIdx.x];
  if (threadIdx.x >= 16) return;
  const unsigned mask = kRepaired ? 0x0000ffffu : 0xffffffffu;
  float total = value;
  for (int delta = 8; delta > 0; delta /= 2) total += __shfl_down_sync(mask, total, delta, 16);
  if (threadIdx.x == 0) *result = total;
}

template <bool kRepaired>
bool run() {
  const std::vector<float> values = multiples(32, 1.0f);
  std::vector<float> result = {0.0f};
  launch(sum<kRepaired>, 1, 32, nullptr, values.data(), result.data());
  return equal(result, {120.0f});
}
