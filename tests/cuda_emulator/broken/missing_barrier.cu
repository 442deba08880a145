// Reads what another thread of the block writes, without a barrier in between. Threads that run in
// order give the right result.
#include "program.h"

struct Line {
  float values[64];
};

template <bool kRepaired>
__global__ void shift(float* values) {
  AMP_EXT_SHARED(Line, line);
  const unsigned i = threadIdx.x;
  line.values[i] = values[i];
  if (kRepaired) __syncthreads();
  if (i > 0) values[i] = line.values[i - 1] + 1.0f;
}

template <bool kRepaired>
bool run() {
  std::vector<float> values = multiples(64, 1.0f);
  launch(shift<kRepaired>, 1, 64, nullptr, values.data());
  return equal(values, multiples(64, 1.0f));
}
