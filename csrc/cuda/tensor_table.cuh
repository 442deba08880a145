// The tensors of one launch as arguments of a kernel, and how its blocks share them out.
#pragma once

#include "cuda/platform.h"
#include "launches.h"

namespace amp_ext::cuda {

inline constexpr int kThreads = 256;

// Elements of a tile, the work of one block. A tensor of a million keeps all multiprocessors busy.
inline constexpr int64_t kTileSize = 4096;

// Bytes of a kernel's arguments, on drivers of CUDA 12.1 and later and on older ones.
inline constexpr int kLargeArguments = 32764;
inline constexpr int kSmallArguments = 4096;

// Which of both the driver takes.
inline bool driver_takes_large_arguments() {
  static const bool large = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12010;
  }();
  return large;
}

// As many tensors of `kPointers` pointers each as fit into `kBytes`.
template <int kPointers, int kBytes>
struct TensorTable {
  static constexpr int kBytesPerTensor =
      kPointers * sizeof(void*) + sizeof(float*) + sizeof(int64_t) + 2 * sizeof(int32_t);
  static constexpr int kCapacity =
      (kBytes - 2 * static_cast<int>(sizeof(int64_t))) / kBytesPerTensor;

  void* pointers[kPointers][kCapacity];
  float* step[kCapacity];
  int64_t numel[kCapacity];
  int32_t first_tile[kCapacity];  // how many tiles the tensors before have
  int32_t group[kCapacity];
  int32_t count;
  int32_t tiles;

  void clear() {
    count = 0;
    tiles = 0;
  }

  bool is_full() const { return count == kCapacity; }

  // Adds a tensor; its pointers are for the caller to fill in.
  int add(const TensorRecord& record, int32_t record_group) {
    const int index = count++;
    step[index] = record.step;
    numel[index] = record.numel;
    first_tile[index] = tiles;
    group[index] = record_group;
    tiles += static_cast<int32_t>((record.numel + kTileSize - 1) / kTileSize);
    return index;
  }

  // One block at least: it advances the steps of tensors without elements.
  int64_t blocks() const { return tiles > 0 ? tiles : 1; }

  // The tensor whose tile this block has: the last that starts at or before it.
  __device__ int tensor_of(int32_t tile) const {
    int low = 0;
    int high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_tile[middle] <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// Some neighbouring elements, moved in accesses of up to 16 bytes.
template <typename Storage, int kCount>
struct alignas(kCount * sizeof(Storage) < 16 ? kCount * sizeof(Storage) : 16) Pack {
  Storage values[kCount];
};

template <int kCount, typename Storage>
__device__ __forceinline__ Pack<Storage, kCount>& pack_at(Storage* elements, int64_t index) {
  return *reinterpret_cast<Pack<Storage, kCount>*>(elements + index);
}

// Elements from `first` on until a 16-byte boundary.
template <typename Storage>
__device__ __forceinline__ int64_t elements_to_boundary(const Storage* first) {
  const auto address = reinterpret_cast<uintptr_t>(first);
  return static_cast<int64_t>((16 - address % 16) % 16 / sizeof(Storage));
}

template <typename Storage>
__device__ __forceinline__ bool is_at_boundary(const Storage* first) {
  return reinterpret_cast<uintptr_t>(first) % 16 == 0;
}

// Walks [begin, end) with all threads of a block: single elements up to `aligned`, then packs, then
// the single elements left over. visit(index, count) has the count as an integral constant.
template <int kCount, typename Visit>
__device__ __forceinline__ void for_each_pack(int64_t begin, int64_t aligned, int64_t end,
                                              const Visit& visit) {
  const int64_t packs_end = aligned + (end - aligned) / kCount * kCount;
  for (int64_t i = begin + threadIdx.x; i < aligned; i += blockDim.x) {
    visit(i, std::integral_constant<int, 1>());
  }
  for (int64_t i = aligned + threadIdx.x * kCount; i < packs_end; i += blockDim.x * kCount) {
    visit(i, std::integral_constant<int, kCount>());
  }
  for (int64_t i = packs_end + threadIdx.x; i < end; i += blockDim.x) {
    visit(i, std::integral_constant<int, 1>());
  }
}

// An element in the type it is computed in, and back.
__device__ __forceinline__ float load(float value) { return value; }
__device__ __forceinline__ double load(double value) { return value; }
__device__ __forceinline__ float load(Half value) { return load_as_float(value); }
__device__ __forceinline__ float load(BFloat16 value) { return load_as_float(value); }

template <typename T>
__device__ __forceinline__ void store(T value, T& stored) {
  stored = value;
}
__device__ __forceinline__ void store(float value, Half& stored) { store_float(value, stored); }
__device__ __forceinline__ void store(float value, BFloat16& stored) { store_float(value, stored); }

}  // namespace amp_ext::cuda
