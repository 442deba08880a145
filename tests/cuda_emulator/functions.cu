// Calls every function that the emulator offers to kernels, and checks that it does what CUDA says.
#include <cmath>

#include "program.h"

struct Results {
  float values[32][16];  // of each lane
  int counts[16];
};

constexpr unsigned kAll = 0xffffffffu;

__global__ void call_all(Results* results) {
  const int i = static_cast<int>(threadIdx.x);
  const auto value = static_cast<double>(i);
  if (i < 32) {
    float* const mine = results->values[i];
    mine[0] = static_cast<float>(__shfl_sync(kAll, value, 5));
    mine[1] = static_cast<float>(__shfl_sync(kAll, value, 9, 8));
    mine[2] = static_cast<float>(__shfl_up_sync(kAll, value, 3));
    mine[3] = static_cast<float>(__shfl_up_sync(kAll, value, 3, 8));
    mine[4] = static_cast<float>(__shfl_down_sync(kAll, value, 3));
    mine[5] = static_cast<float>(__shfl_down_sync(kAll, value, 3, 8));
    mine[6] = static_cast<float>(__shfl_xor_sync(kAll, value, 17));
    mine[7] = static_cast<float>(__shfl_xor_sync(kAll, value, 9, 8));
    mine[8] = static_cast<float>(__ballot_sync(kAll, i == 3 || i == 20));
    mine[9] = static_cast<float>(__any_sync(kAll, i == 3) + 2 * __any_sync(kAll, i == 33));
    mine[10] = static_cast<float>(__all_sync(kAll, i < 32) + 2 * __all_sync(kAll, i < 31));
    if (i % 2 == 0) {
      mine[11] = static_cast<float>(__shfl_xor_sync(0x55555555u, i, 2));
    } else {
      mine[11] = static_cast<float>(__shfl_xor_sync(0xaaaaaaaau, i, 4));
    }
    __syncwarp();
  }
  int* const counts = results->counts;
  const int count = __syncthreads_count(i % 3 == 0);
  const int either = __syncthreads_or(i == 63) + 2 * __syncthreads_or(i == 64);
  const int both = __syncthreads_and(i < 64) + 2 * __syncthreads_and(i < 63);
  if (i == 0) {
    counts[0] = count;
    counts[1] = either;
    counts[2] = both;
  }
  atomicAdd(counts + 3, i);
  atomicSub(counts + 4, 1);
  atomicMin(counts + 5, -i);
  atomicMax(counts + 6, i);
  atomicOr(counts + 7, 1 << i % 8);
  atomicAnd(counts + 8, ~(1 << i % 8));
  atomicCAS(counts + 9, i, i + 1000);
  if (atomicExch(counts + 10, 1) == 0) atomicAdd(counts + 11, 1);
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
  results.counts[8] = 0xfff;
  launch(call_all, 1, 64, nullptr, &results);
  bool right = each_lane(results, 0, [](int) { return 5; });
  right &= each_lane(results, 1, [](int i) { return i / 8 * 8 + 1; });
  right &= each_lane(results, 2, [](int i) { return i < 3 ? i : i - 3; });
  right &= each_lane(results, 3, [](int i) { return i % 8 < 3 ? i : i - 3; });
  right &= each_lane(results, 4, [](int i) { return i > 28 ? i : i + 3; });
  right &= each_lane(results, 5, [](int i) { return i % 8 > 4 ? i : i + 3; });
  right &= each_lane(results, 6, [](int i) { return i ^ 17; });
  right &= each_lane(results, 7, [](int i) { return (i ^ 9) / 8 > i / 8 ? i : i ^ 9; });
  right &= each_lane(results, 8, [](int) { return (1 << 3) + (1 << 20); });
  right &= each_lane(results, 9, [](int) { return 1; });
  right &= each_lane(results, 10, [](int) { return 1; });
  right &= each_lane(results, 11, [](int i) { return i ^ (i % 2 == 0 ? 2 : 4); });
  const std::vector<int> counts = {22, 1, 1, 2016, -64, -63, 63, 0xff, 0xf00};
  right &= equal({results.counts, results.counts + 9}, counts);
  right &= results.counts[9] >= 1000 && results.counts[11] == 1;

  right &= __half2float(__float2half_rn(1.0f / 3.0f)) == 0.333251953125f;
  right &= __bfloat162float(__float2bfloat16_rn(1.0f / 3.0f)) == 0.333984375f;
  right &= std::isinf(__half2float(__float2half_rn(65520.0f)));
  right &= min(int64_t{3}, 4) == 3 && max(2u, 5u) == 5u;
  return right;
}
