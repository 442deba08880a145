// Forgets the elements behind the last whole pack.
#include "cuda/tensor_table.cuh"
#include "program.h"

template <bool kRepaired>
__global__ void twice(float* values, int64_t count) {
  const int64_t end = kRepaired ? count : count / 4 * 4;
  amp_ext::cuda::for_each_pack<4>(0, 0, end, [&](int64_t index, auto size) {
    for (float& value : amp_ext::cuda::pack_at<decltype(size)::value>(values, index).values) {
      value *= 2.0f;
    }
  });
}

template <bool kRepaired>
bool run() {
  std::vector<float> values = multiples(103, 1.0f);
  launch(twice<kRepaired>, 1, 64, nullptr, values.data(), int64_t{103});
  return equal(values, multiples(103, 2.0f));
}
