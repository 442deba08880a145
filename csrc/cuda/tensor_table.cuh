// The tensors of one launch as kernel arguments, and their division among the blocks.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/platform.h"
#include "launches.h"

namespace amp_ext::cuda {

// Division of a kernel's work into blocks (one per tile) and packs.
template <int kThreadsOfBlock, int kElementsOfTile, int kBlocksAtOnce, int kPacksAtOnce,
          int kElementsOfSmallTile = kElementsOfTile>
struct Shape {
  static constexpr int kThreads = kThreadsOfBlock;
  static constexpr int kTileSize = kElementsOfTile;  // elements of a block
  static constexpr int kBlocks = kBlocksAtOnce;  // blocks for which a multiprocessor has registers
  static constexpr int kPacks = kPacksAtOnce;    // packs that a thread loads before it uses one

  // Returns the number of elements per block in a launch of `elements` in total. Smaller tiles keep
  // more multiprocessors busy if there is less than one tile for each block that runs at once.
  static constexpr int32_t tile_size_of(int64_t elements) {
    return elements < int64_t{132} * kBlocks * kTileSize ? kElementsOfSmallTile : kTileSize;
  }
};

inline constexpr int kThreads = 256;

// Bytes of arguments that a kernel may have from CUDA 12.1 on.
inline constexpr int kArgumentBytes = 32764;

// The columns of a TensorTable that only kernels with dithering need.
template <bool kMayDither, int kCapacity>
struct DitherColumns {
  static constexpr int kBytesPerTensor = sizeof(int64_t) + sizeof(int32_t);

  int64_t global_offset[kCapacity];
  int32_t dithered[kCapacity];

  void add(int index, const KernelTensorArgs& args) {
    global_offset[index] = args.global_offset;
    dithered[index] = args.dithered;
  }
};
template <int kCapacity>
struct DitherColumns<false, kCapacity> {
  static constexpr int kBytesPerTensor = 0;
  void add(int /*index*/, const KernelTensorArgs& /*args*/) {}
};

// A table of as many tensors with `kPointers` pointers each as fit into `kBytes`, cut into tiles.
template <int kPointers, int kBytes, bool kMayDither = false>
struct TensorTable {
  static constexpr int kBytesPerTensor = kPointers * sizeof(void*) + sizeof(float*) +
                                         sizeof(int64_t) + 2 * sizeof(int32_t) +
                                         DitherColumns<kMayDither, 1>::kBytesPerTensor;
  static constexpr int kCapacity =
      (kBytes - 3 * static_cast<int>(sizeof(int64_t))) / kBytesPerTensor;

  void* pointers[kPointers][kCapacity];
  float* step[kCapacity];
  int64_t numel[kCapacity];
  int32_t first_tile[kCapacity];  // index of the tensor's first tile
  int32_t group[kCapacity];
  DitherColumns<kMayDither, kCapacity> dither;
  int32_t count;
  int32_t tiles;
  int32_t tile_size;  // elements per tile

  void clear(int32_t elements_of_tile) {
    count = 0;
    tiles = 0;
    tile_size = elements_of_tile;
  }

  bool is_full() const { return count == kCapacity; }

  // Adds a tensor and returns its index. The caller fills in its pointers.
  int add(const KernelTensorArgs& args, int32_t record_group) {
    const int index = count++;
    step[index] = args.step;
    numel[index] = args.numel;
    first_tile[index] = tiles;
    group[index] = record_group;
    dither.add(index, args);
    tiles += static_cast<int32_t>(tiles_of(index));
    return index;
  }

  // Returns the number of blocks: one for each tile, and one if all tensors are empty.
  int64_t blocks() const { return std::max(tiles, 1); }

  AMP_EXT_INLINE int64_t tiles_of(int tensor) const {
    return (numel[tensor] + tile_size - 1) / tile_size;
  }

  // Return the begin and the end of a tile, as element indices in the tensor of the tile.
  __device__ int64_t begin_of(int32_t tile, int tensor) const {
    return static_cast<int64_t>(tile - first_tile[tensor]) * tile_size;
  }
  __device__ int64_t end_of(int64_t begin, int tensor) const {
    return min(begin + tile_size, numel[tensor]);
  }

  // Returns the tensor of a tile: the last one that starts at or before this tile.
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

// Consecutive elements that are moved in accesses of up to 16 bytes.
template <typename Storage, int kCount>
struct alignas(kCount * sizeof(Storage) < 16 ? kCount * sizeof(Storage) : 16) Pack {
  Storage values[kCount];
};

template <int kCount, typename Storage>
__device__ __forceinline__ Pack<Storage, kCount>& pack_at(Storage* elements, int64_t index) {
  return *reinterpret_cast<Pack<Storage, kCount>*>(elements + index);
}

// Returns the number of elements from `first` to the next 16-byte boundary.
template <typename Storage>
__device__ __forceinline__ int64_t elements_to_boundary(const Storage* first) {
  const auto address = reinterpret_cast<uintptr_t>(first);
  return static_cast<int64_t>((16 - address % 16) % 16 / sizeof(Storage));
}

template <typename Storage>
__device__ __forceinline__ bool is_at_boundary(const Storage* first) {
  return reinterpret_cast<uintptr_t>(first) % 16 == 0;
}

// Visits [begin, end) with all threads of a block: single elements up to `aligned`, then packs,
// then the remaining single elements. visit(index, count, packs) receives the elements per pack and
// the number of packs, which are kThreads packs apart, as integral constants. Loops are not
// unrolled, because most of a kernel would then be loops over single elements.
template <typename Shape, int kCount, typename Visit>
__device__ __forceinline__ void for_each_pack(int64_t begin, int64_t aligned, int64_t end,
                                              const Visit& visit) {
  using One = std::integral_constant<int, 1>;
  using Count = std::integral_constant<int, kCount>;
  using Packs = std::integral_constant<int, Shape::kPacks>;
  constexpr int kStride = Shape::kThreads * kCount;
  const int64_t packs_end = aligned + (end - aligned) / kCount * kCount;
#pragma unroll 1
  for (int64_t i = begin + threadIdx.x; i < aligned; i += Shape::kThreads) visit(i, One(), One());
  int64_t i = aligned + threadIdx.x * kCount;
#pragma unroll 1
  for (; i + (Packs::value - 1) * kStride < packs_end; i += Packs::value * kStride) {
    visit(i, Count(), Packs());
  }
  if constexpr (Packs::value > 1) {
#pragma unroll 1
    for (; i < packs_end; i += kStride) visit(i, Count(), One());
  }
#pragma unroll 1
  for (i = packs_end + threadIdx.x; i < end; i += Shape::kThreads) visit(i, One(), One());
}

// Convert an element to the type of the computation and back, as those of platform.h do.
__device__ __forceinline__ float load(float value) { return value; }
__device__ __forceinline__ double load(double value) { return value; }

template <typename T>
__device__ __forceinline__ void store(T value, T& stored) {
  stored = value;
}

// Counts this block as finished with reading memory that the last block overwrites. Returns how
// many blocks were counted before.
__device__ __forceinline__ uint32_t count_block(uint32_t* block_counter) {
  __threadfence();
  return atomicInc(block_counter, gridDim.x - 1);
}

}  // namespace amp_ext::cuda
