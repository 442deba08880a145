// Loads 16 bytes from an address that is no multiple of 16.
#include "cuda/tensor_table.cuh"
#include "program.h"

template <bool kRepaired>
__global__ void twice(float* values) {
  auto& pack = amp_ext::cuda::pack_at<4>(values + (kRepaired ? 4 : 1), 4 * threadIdx.x);
  for (float& value : pack.values) value *= 2.0f;
}

template <bool kRepaired>
bool run() {
  std::vector<amp_ext::cuda::Pack<float, 4>> memory(33);
  for (auto& pack : memory) pack = {{1.0f, 1.0f, 1.0f, 1.0f}};
  launch(twice<kRepaired>, 1, 32, nullptr, &memory[0].values[0]);
  return equal({memory[0].values[0], memory[32].values[3]}, std::vector<float>{1.0f, 2.0f});
}
