// Compares the roots and quotients of formulas/fast_division.h with those of IEEE 754, because no
// standard specifies the GPU's approximations.
#include <algorithm>
#include <cmath>

#include "cuda/engine.h"
#include "cuda/tensor_table.cuh"
#include "formats/dither.h"
#include "formulas/fast_division.h"

namespace amp_ext::cuda {

namespace {

constexpr int64_t kRoots = int64_t{1} << 24;  // every mantissa, with an even and an odd exponent
constexpr int64_t kReciprocals = int64_t{1} << 23;  // every mantissa
constexpr int64_t kQuotients = 100'000'000;  // pairs from the range that the fast path divides
constexpr int kBlocks = 2048;

struct CheckArguments {
  int64_t stride;
  unsigned long long* wrong;  // [3], numbers of wrong roots, reciprocals, quotients
};

// Returns a float32 in [2^least, 2^(least + count)) with the low bits of `hash` as its mantissa.
__device__ float number_of(uint32_t hash, uint32_t exponent_hash, int least, uint32_t count) {
  const uint32_t exponent = 127 + least + exponent_hash % count;
  return float_of((exponent << 23) | (hash & 0x7fffffu));
}

__global__ void __launch_bounds__(kThreads)
    check_division_kernel(const CheckArguments __grid_constant__ arguments) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = arguments.stride * gridDim.x * kThreads;
  unsigned long long wrong[3] = {};
#pragma unroll 1
  for (int64_t i = first * arguments.stride; i < kQuotients; i += step) {
    const auto place = static_cast<uint32_t>(i);
    const float value = float_of(0x3f800000u + place);
    if (i < kRoots) wrong[0] += root_from(value, Seeds::inverse_root(value)) != std::sqrt(value);
    if (i < kReciprocals) wrong[1] += fast_reciprocal<Seeds>(value) != 1.0f / value;
    const uint32_t hash = dither_hash(place, 1u);
    const uint32_t other = dither_hash(place, 2u);
    const float denominator = number_of(hash, hash >> 24, -40, 100);
    const float numerator = number_of(other, other >> 24, -20, 60);
    const float quotient =
        quotient_from(numerator, denominator, fast_reciprocal<Seeds>(denominator));
    wrong[2] += quotient != numerator / denominator;
  }
  for (int i = 0; i < 3; ++i) {
    if (wrong[i] != 0) atomicAdd(arguments.wrong + i, wrong[i]);
  }
}

}  // namespace

int count_division_errors(int64_t stride, int64_t* wrong, cudaStream_t stream) {
  const CheckArguments arguments{stride, reinterpret_cast<unsigned long long*>(wrong)};
  const int64_t tried = (kQuotients + stride - 1) / stride;
  const int64_t blocks = std::min<int64_t>(kBlocks, (tried + kThreads - 1) / kThreads);
  return launch(check_division_kernel, blocks, kThreads, stream, arguments);
}

}  // namespace amp_ext::cuda
