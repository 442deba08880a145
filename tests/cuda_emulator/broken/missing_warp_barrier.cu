// Hands a number to the next lane of the warp through shared memory, without __syncwarp in between.
#include "program.h"

struct Line {
  float values[64];
};

template <bool kRepaired>
__global__ void shift(float* values) {
  AMP_EXT_SHARED(Line, line);
  const unsigned i = threadIdx.x;
  line.values[i] = values[i];
  if (kRepaired) __syncwarp();
  if (i % 32 > 0) values[i] = line.values[i - 1] + 1.0f;
}

template <bool kRepaired>
bool run() {
  std::vector<float> values = multiples(64, 1.0f);
  launch(shift<kRepaired>, 1, 64, nullptr, values.data());
  return equal(values, multiples(64, 1.0f));
}
