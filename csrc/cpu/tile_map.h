// Divides the elements of many tensors into tiles, and finds the tiles of a range of the work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "launches.h"

namespace amp_ext::cpu {

// Elements per tile. From 1K to 256K the time differs by a few percent only.
inline constexpr int64_t kTileSize = 8192;

// The elements [begin, end) of one tensor.
struct Tile {
  const KernelTensorArgs& args;
  int64_t index;          // index of the tensor in the launch
  int64_t index_of_tile;  // index of the tile among all tiles
  int64_t begin;
  int64_t end;
  int64_t end_ahead;  // end of the elements that may be prefetched; 0 if none may be
};

// Places tensors one after another on an axis of cost: the number of elements plus an overhead for
// starting a tensor. A thread processes the tiles that start in its range of the axis, so wherever
// the axis is cut, exactly one thread processes each tile.
class TileMap {
 public:
  // If `asks_ahead` is false, kernels may not prefetch.
  TileMap(const KernelTensorArgs* all_args, int64_t count, bool asks_ahead = true)
      : all_args_(all_args), asks_ahead_(asks_ahead), starts_(count + 1), first_tiles_(count + 1) {
    for (int64_t i = 0; i < count; ++i) {
      starts_[i + 1] = starts_[i] + kOverhead + all_args[i].numel;
      first_tiles_[i + 1] = first_tiles_[i] + (all_args[i].numel + kTileSize - 1) / kTileSize;
    }
  }

  int64_t total_cost() const { return starts_.back(); }
  int64_t number_of_tiles() const { return first_tiles_.back(); }

  // Calls visit(tile) for each tile that starts in [begin, end).
  template <typename Visit>
  void for_each_tile(int64_t begin, int64_t end, Visit&& visit) const {
    int64_t index = std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin() - 1;
    for (; index + 1 < static_cast<int64_t>(starts_.size()) && starts_[index] < end; ++index) {
      const KernelTensorArgs& args = all_args_[index];
      const int64_t skipped = std::max<int64_t>(begin - starts_[index], 0);
      int64_t in_tensor = (skipped + kTileSize - 1) / kTileSize;
      for (; in_tensor * kTileSize < args.numel && starts_[index] + in_tensor * kTileSize < end;
           ++in_tensor) {
        visit(Tile{args, index, first_tiles_[index] + in_tensor, in_tensor * kTileSize,
                   std::min((in_tensor + 1) * kTileSize, args.numel),
                   asks_ahead_ ? args.numel : 0});
      }
    }
  }

 private:
  static constexpr int64_t kOverhead = 64;

  const KernelTensorArgs* all_args_;  // [count], the tensors
  bool asks_ahead_;
  std::vector<int64_t> starts_;       // [count + 1], begin of each tensor on the axis of cost
  std::vector<int64_t> first_tiles_;  // [count + 1], index of each tensor's first tile
};

}  // namespace amp_ext::cpu
