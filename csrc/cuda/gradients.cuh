// The kernels that work on gradients alone: scanning, multiplying in place, counting infs and NaNs.
#pragma once

#include <type_traits>

#include "cuda/engine.h"
#include "cuda/tensor_table.cuh"
#include "element.h"
#include "formats/storage.h"
#include "launches.h"

namespace amp_ext::cuda {

template <typename Storage>
inline constexpr int kPackSize = 16 / static_cast<int>(sizeof(Storage));

// Shape in which a thread loads four packs before it uses any of them. Smaller tiles need more sums
// over a block: on an H100, 4096 elements with one or two packs take up to 1.7 times as long.
using GradientShape = Shape<kThreads, 16384, 4, 4>;

// Returns the first index from `begin` on at a 16-byte boundary, or `end` if that comes first.
template <typename Storage>
__device__ int64_t first_pack(const Storage* grad, int64_t begin, int64_t end) {
  const int64_t first = begin + elements_to_boundary(grad + begin);
  return first < end ? first : end;
}

// The gradients of one launch. Kernels have up to 80 bytes of other arguments.
using GradientTable = TensorTable<1, kArgumentBytes - 80>;

// The part of a gradient that this block works on.
template <typename StorageType>
struct GradientTile {
  using Storage = StorageType;

  Storage* grad;
  int32_t index;  // index by which the tensor is reported
  int64_t begin;
  int64_t end;

  __device__ explicit GradientTile(const GradientTable& table) {
    const auto tile = static_cast<int32_t>(blockIdx.x);
    const int tensor = table.tensor_of(tile);
    grad = static_cast<Storage*>(table.pointers[0][tensor]);
    index = table.group[tensor];  // without hyperparameters, the index of the tensor
    begin = table.begin_of(tile, tensor);
    end = table.end_of(begin, tensor);
  }

  // Calls visit(pack, in_place) for each pack: a copy of the elements, which the compiler loads at
  // once, and a reference to them in memory.
  template <typename Visit>
  __device__ void for_each(const Visit& visit) const {
    for_each_pack<GradientShape, kPackSize<Storage>>(
        begin, first_pack(grad, begin, end), end, [&](int64_t index, auto count, auto packs) {
          constexpr int kCount = decltype(count)::value;
          constexpr int kPacks = decltype(packs)::value;
          Pack<Storage, kCount> copies[kPacks];
#pragma unroll
          for (int i = 0; i < kPacks; ++i) {
            copies[i] = pack_at<kCount>(grad, index + i * kThreads * kCount);
          }
#pragma unroll
          for (int i = 0; i < kPacks; ++i) {
            visit(copies[i], pack_at<kCount>(grad, index + i * kThreads * kCount));
          }
        });
  }
};

// Flags with which a block reports inf and NaN.
struct GradScanOutputs {
  float* found_inf;          // [1], set to 1 if inf or NaN is found; if null, nothing is reported
  int64_t* first_nonfinite;  // [1], lowered to the tensor's index; or null
};

// Reports tensor `index` if a thread of the block has found inf or NaN.
inline __device__ void report(bool found, int32_t index, const GradScanOutputs& outputs) {
  if (!__syncthreads_or(found) || threadIdx.x != 0) return;
  atomicExch(outputs.found_inf, 1.0f);
  if (outputs.first_nonfinite == nullptr) return;
  atomicMin(reinterpret_cast<long long*>(outputs.first_nonfinite), static_cast<long long>(index));
}

// Returns to each thread of a block the sum over all its threads, added in a fixed order.
template <typename T>
__device__ T block_sum(T value) {
  constexpr int kWarps = kThreads / 32;
  using Values = T[kWarps];
  AMP_EXT_SHARED(Values, warp_sums);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_down_sync(0xffffffffu, value, offset);
  __syncthreads();  // threads may still read the previous sum
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = warp_sums[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) sum += warp_sums[warp];
  return sum;
}

struct GradScanArguments {
  GradientTable table;
  const float* grad_scale;
  GradScanOutputs outputs;
  double* sum_of_squares;
  SumScratch scratch;
  bool skip_nonfinite;
};

// Returns the sum of the squares of a tile, computed in T.
template <typename T, typename Tile>
__device__ T tile_sum_of_squares(const Tile& tile, bool skip_nonfinite = false) {
  T sum = 0;
  tile.for_each([&](const auto& pack, auto&) {
#pragma unroll
    for (const auto stored : pack.values) {
      const T value = load(stored);
      sum += skip_nonfinite && !is_finite(value) ? T(0) : value * value;
    }
  });
  return block_sum(sum);
}

// Returns the sum of the squares of a tile, in float64 if the range of float32 is too small.
template <typename Tile>
__device__ double careful_sum_of_squares(const Tile& tile) {
  if constexpr (!std::is_same_v<typename Tile::Storage, double>) {
    const float sum = tile_sum_of_squares<float>(tile);
    if (sum >= 1e-20f && is_finite(sum)) return sum;
  }
  return tile_sum_of_squares<double>(tile);
}

// Returns to each thread of a block the sum of `count` tile sums, added in a fixed order.
inline __device__ double sum_of_tiles(const double* sums, int64_t count) {
  double total = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    total += *static_cast<const volatile double*>(sums + i);
  }
  return block_sum(total);
}

template <typename Storage, bool kSumSquares>
__global__ void __launch_bounds__(kThreads, GradientShape::kBlocks)
    scan_kernel(const GradScanArguments __grid_constant__ arguments) {
  const GradScanOutputs& outputs = arguments.outputs;
  if (blockIdx.x == 0 && threadIdx.x == 0 && StepDecision::read({arguments.grad_scale}).skip) {
    atomicExch(outputs.found_inf, 1.0f);
  }
  const GradientTile<Storage> tile(arguments.table);
  double sum = 0.0;
  bool is_usual = false;  // all threads of the block have the same value
  if constexpr (kSumSquares) {
    sum = careful_sum_of_squares(tile);
    // A finite sum proves that there is no inf or NaN. An infinite sum may also be an overflow.
    is_usual = is_finite(sum);
    if (!is_usual && arguments.skip_nonfinite) sum = tile_sum_of_squares<double>(tile, true);
  }
  if (!is_usual) {
    bool found = false;
    tile.for_each([&](const auto& pack, auto&) {
#pragma unroll
      for (const auto value : pack.values) found |= is_nonfinite(value);
    });
    report(found, tile.index, outputs);
  }
  if constexpr (kSumSquares) {
    const SumScratch& scratch = arguments.scratch;
    bool is_last = false;
    if (threadIdx.x == 0) {
      scratch.tile_sums[blockIdx.x] = sum;
      is_last = count_block(scratch.block_counter) == gridDim.x - 1;
    }
    if (!__syncthreads_or(is_last)) return;
    __threadfence();
    const double total = sum_of_tiles(scratch.tile_sums, gridDim.x);
    if (threadIdx.x == 0) *arguments.sum_of_squares += total;
  }
}

struct MultiplyArguments {
  GradientTable table;
  MultiplyInputs inputs;
  GradScanOutputs outputs;
};

template <typename Storage>
__global__ void __launch_bounds__(kThreads, GradientShape::kBlocks)
    multiply_kernel(const MultiplyArguments __grid_constant__ arguments) {
  using T = typename ComputeType<Storage>::type;
  const float factor = arguments.inputs.factor();
  const GradScanOutputs& outputs = arguments.outputs;
  if (factor == 1.0f && outputs.found_inf == nullptr) return;
  const bool bad_factor = blockIdx.x == 0 && threadIdx.x == 0 && !is_finite(factor);
  if (bad_factor && outputs.found_inf != nullptr) atomicExch(outputs.found_inf, 1.0f);
  const GradientTile<Storage> tile(arguments.table);
  bool found = false;
  tile.for_each([&](auto& pack, auto& in_place) {
#pragma unroll
    for (auto& value : pack.values) {
      found |= is_nonfinite(value);
      store(load(value) * static_cast<T>(factor), value);
    }
    if (factor != 1.0f) in_place = pack;
  });
  if (outputs.found_inf != nullptr) report(found, tile.index, outputs);
}

struct CountArguments {
  GradientTable table;
  unsigned long long* counts;  // [count], by the index of the tensor
};

template <typename Storage>
__global__ void __launch_bounds__(kThreads, GradientShape::kBlocks)
    count_kernel(const CountArguments __grid_constant__ arguments) {
  const GradientTile<Storage> tile(arguments.table);
  unsigned found = 0;
  tile.for_each([&](const auto& pack, auto&) {
#pragma unroll
    for (const auto value : pack.values) found += is_nonfinite(value) ? 1 : 0;
  });
  const unsigned sum = block_sum(found);
  if (threadIdx.x == 0 && sum != 0) {
    atomicAdd(arguments.counts + tile.index, static_cast<unsigned long long>(sum));
  }
}

// Launches a kernel over the gradients of dtype Storage, with as many tables as they need. The
// caller sets all fields of `arguments` except `table`. Sets is_launched[i], if not null, for each
// gradient whose kernel was launched.
template <typename Storage, typename Kernel, typename Arguments>
int launch_gradients(Kernel kernel, const KernelTensorArgs* all_args, int64_t count,
                     Arguments& arguments, cudaStream_t stream, bool* is_launched = nullptr) {
  static_assert(sizeof(Arguments) <= kArgumentBytes);
  GradientTable& table = arguments.table;
  int64_t in_table[GradientTable::kCapacity];  // index of each tensor in all_args
  const auto flush = [&]() -> int {
    const int error = launch(kernel, table.blocks(), kThreads, stream, arguments);
    if (error != 0) return error;
    for (int k = 0; is_launched != nullptr && k < table.count; ++k) is_launched[in_table[k]] = true;
    table.clear(GradientShape::kTileSize);
    return 0;
  };
  table.clear(GradientShape::kTileSize);
  for (int64_t i = 0; i < count; ++i) {
    if (all_args[i].grad_dtype != kDType<Storage>) continue;
    if (table.is_full()) {
      if (const int error = flush()) return error;
    }
    in_table[table.count] = i;
    table.pointers[0][table.add(all_args[i], all_args[i].group)] = all_args[i].grad;
  }
  return table.count > 0 ? flush() : 0;
}

}  // namespace amp_ext::cuda
