// Cuts the elements of many tensors into tiles, and hands out ranges of tiles of even cost.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "launches.h"

namespace amp_ext::cpu {

// Elements of a tile. Any size from 1K to 256K is within a few percent.
inline constexpr int64_t kTileSize = 8192;

// Elements [begin, end) of one tensor.
struct Tile {
  const KernelTensorArgs& args;
  int64_t index;          // of the record
  int64_t index_of_tile;  // among all tiles
  int64_t begin;
  int64_t end;
  int64_t end_ahead;  // of the elements that may be asked for before they are needed
};

// Tensors stand behind each other on one axis of cost: each takes its elements and an overhead that
// stands for the work of starting it. A tile belongs to the range in which it starts, so that
// any cut of the axis gives each tile to one thread, whatever the number of threads.
class TileMap {
 public:
  // Without `asks_ahead` no element of a tile may be asked for before it is needed.
  TileMap(const KernelTensorArgs* all_args, int64_t count, bool asks_ahead = true)
      : all_args_(all_args), asks_ahead_(asks_ahead), starts_(count + 1), first_tiles_(count + 1) {
    for (int64_t i = 0; i < count; ++i) {
      starts_[i + 1] = starts_[i] + kOverhead + all_args[i].numel;
      first_tiles_[i + 1] = first_tiles_[i] + (all_args[i].numel + kTileSize - 1) / kTileSize;
    }
  }

  int64_t total_cost() const { return starts_.back(); }
  int64_t number_of_tiles() const { return first_tiles_.back(); }
  // Tiles of the records before that one.
  int64_t tiles_before(int64_t index) const { return first_tiles_[index]; }

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

  const KernelTensorArgs* all_args_;  // [count]
  bool asks_ahead_;
  std::vector<int64_t> starts_;       // [count + 1], on the axis of cost
  std::vector<int64_t> first_tiles_;  // [count + 1], indices of tiles
};

}  // namespace amp_ext::cpu
