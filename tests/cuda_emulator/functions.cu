// Calls every function that the emulator offers to kernels, and checks that it does what CUDA says.
#include <cmath>

#include "program.h"

struct Results {
  float values[32][5];  // of each lane
  int counts[5];
  unsigned rounds[2];
};

constexpr unsigned kAll = 0xffffffffu;

__global__ void call_all(Results* results) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < 32) {
    const auto value = static_cast<double>(i);
    float* const mine = results->values[i];
    mine[0] = static_cast<float>(__shfl_sync(kAll, value, 5));
    mine[1] = static_cast<float>(__shfl_sync(kAll, value, 9, 8));
    mine[2] = static_cast<float>(__shfl_down_sync(kAll, value, 3));
    const unsigned every_other = i % 2 == 0 ? 0x55555555u : 0xaaaaaaaau;
    mine[3] = static_cast<float>(__shfl_down_sync(every_other, i, i % 2 == 0 ? 2 : 4, 8));
    mine[4] = static_cast<float>(__shfl_xor_sync(0xfu << (i / 4 * 4), i, 2));
    __syncwarp();
  }
  int* const counts = results->counts;
  const int either = __syncthreads_or(i == 63) + 2 * __syncthreads_or(i == 64);
  if (i == 0) counts[0] = either;
  atomicAdd(counts + 1, i);
  atomicMin(counts + 2, -i);
  if (atomicExch(counts + 3, 1) == 0) atomicAdd(counts + 4, 1);
  if (atomicInc(results->rounds, 9) == 9) atomicAdd(results->rounds + 1, 1u);
  __threadfence();
}

// Checks a column of Results::values.
template <typename Expected>
bool each_lane(const Results& results, int column, const Expected& expected) {
  std::vector<float> actual;
  std::vector<float> wanted;
  for (int lane = 0; lane < 32; ++lane) {
    actual.push_back(results.values[lane][column]);
    wanted.push_back(static_cast<float>(expected(lane)));
  }
  if (equal(actual, wanted)) return true;
  std::fprintf(stderr, "in column %d\n", column);
  return false;
}

template <bool>
bool run() {
  Results results = {};
  launch(call_all, 1, 64, nullptr, &results);
  bool right = each_lane(results, 0, [](int) { return 5; });
  right &= each_lane(results, 1, [](int i) { return i / 8 * 8 + 1; });
  right &= each_lane(results, 2, [](int i) { return i > 28 ? i : i + 3; });
  right &= each_lane(results, 3, [](int i) {
    const int source = i + (i % 2 == 0 ? 2 : 4);
    return source / 8 == i / 8 ? source : i;
  });
  right &= each_lane(results, 4, [](int i) { return i ^ 2; });
  right &= equal({results.counts, results.counts + 5}, std::vector<int>{1, 2016, -63, 1, 1});
  right &= equal({results.rounds, results.rounds + 2}, std::vector<unsigned>{4, 6});

  right &= __half2float(__float2half_rn(1.0f / 3.0f)) == 0.333251953125f;
  right &= __bfloat162float(__float2bfloat16_rn(1.0f / 3.0f)) == 0.333984375f;
  right &= std::isinf(__half2float(__float2half_rn(65520.0f)));
  right &= min(int64_t{3}, 4) == 3 && max(2u, 5u) == 5u;
  return right;
}
