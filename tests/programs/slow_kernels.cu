// Kernels that are right and slow, for scripts/check_machine_code.py: each has one fault, and none
// when it is repaired.
#include "cuda/gradients.cuh"

using amp_ext::cuda::for_each_pack;
using amp_ext::cuda::is_nonfinite;
using amp_ext::cuda::pack_at;
using EightBlocks = amp_ext::cuda::Shape<256, 4096, 8, 1>;

// Looks at elements where they are: they are loaded one by one.
template <bool kRepaired>
__global__ void __launch_bounds__(256, 8)
    narrow_loads(float* values, int64_t aligned, int64_t end, int* found) {
  bool any = false;
  for_each_pack<EightBlocks, 4>(0, aligned, end, [&](int64_t index, auto size, auto) {
    const auto& in_place = pack_at<decltype(size)::value>(values, index);
    if constexpr (kRepaired) {
      const auto copy = in_place;
      for (const float value : copy.values) any |= is_nonfinite(value);
    } else {
      for (const float& value : in_place.values) any |= is_nonfinite(value);
    }
  });
  if (any) *found = 1;
}

// Stores those elements that it has changed.
template <bool kRepaired>
__global__ void __launch_bounds__(256, 8)
    narrow_stores(float* values, int64_t aligned, int64_t end, float factor) {
  for_each_pack<EightBlocks, 4>(0, aligned, end, [&](int64_t index, auto size, auto) {
    auto& in_place = pack_at<decltype(size)::value>(values, index);
    auto copy = in_place;
    for (float& value : copy.values) value = value > 0.0f ? value * factor : value;
    if constexpr (kRepaired) {
      in_place = copy;
    } else {
      for (int i = 0; i < decltype(size)::value; ++i) {
        if (copy.values[i] > 0.0f) in_place.values[i] = copy.values[i];
      }
    }
  });
}

// Leaves the compiler to unroll the loop over the elements behind the last pack.
template <bool kRepaired>
__global__ void __launch_bounds__(256, 8)
    unrolled(float* values, int64_t aligned, int64_t end, float factor) {
  for_each_pack<EightBlocks, 4>(0, 0, aligned, [&](int64_t index, auto size, auto) {
    auto copy = pack_at<decltype(size)::value>(values, index);
    for (float& value : copy.values) value *= factor;
    pack_at<decltype(size)::value>(values, index) = copy;
  });
#pragma unroll(kRepaired ? 1 : 4)
  for (int64_t i = aligned + threadIdx.x; i < end; i += 256) values[i] *= factor;
}

// Adds the sum of a pack to each of its elements, all of which are kept until it is known.
template <int kCount>
__device__ void add_sums(float* values, int64_t end) {
  for_each_pack<EightBlocks, kCount>(0, 0, end / kCount * kCount,
                                     [&](int64_t index, auto size, auto) {
                                       auto copy = pack_at<decltype(size)::value>(values, index);
                                       float sum = 0.0f;
#pragma unroll
                                       for (const float value : copy.values) sum += value;
#pragma unroll
                                       for (float& value : copy.values) value += sum;
                                       pack_at<decltype(size)::value>(values, index) = copy;
                                     });
}

// Has more elements in a pack than eight blocks have registers for.
template <bool kRepaired>
__global__ void __launch_bounds__(256, 8) spilled(float* values, int64_t end) {
  add_sums<kRepaired ? 4 : 64>(values, end);
}

// The same with the registers that it takes.
template <bool kRepaired>
__global__ void __launch_bounds__(256) few_blocks(float* values, int64_t end) {
  add_sums<kRepaired ? 4 : 64>(values, end);
}

#define BOTH(kernel, ...)                                      \
  template __global__ void kernel<false>(float*, __VA_ARGS__); \
  template __global__ void kernel<true>(float*, __VA_ARGS__);
BOTH(narrow_loads, int64_t, int64_t, int*)
BOTH(narrow_stores, int64_t, int64_t, float)
BOTH(unrolled, int64_t, int64_t, float)
BOTH(spilled, int64_t)
BOTH(few_blocks, int64_t)
