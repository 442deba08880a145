// Writes past the end of a shared array: its last thread has no neighbour.
#include "program.h"

struct Line {
  float values[64];
};

template <bool kRepaired>
__global__ void shift(float* values) {
  AMP_EXT_SHARED(Line, line);
  const unsigned i = threadIdx.x;
  if (!kRepaired || i + 1 < blockDim.x) line.values[i + 1] = values[i];
  __syncthreads();
  if (i > 0) values[i] = line.values[i];
}

template <bool kRepaired>
bool run() {
  std::vector<float> values(64, 3.0f);
  launch(shift<kRepaired>, 1, 64, nullptr, values.data());
  return equal(values, std::vector<float>(64, 3.0f));
}
