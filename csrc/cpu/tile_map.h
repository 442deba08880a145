// Cuts the elements of many tensors into tiles, and hands out ranges of tiles of even cost.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "multi_tensor.h"

namespace amp_ext::cpu {

// Elements of a tile. Any size from 1K to 256K is within a few percent.
inline constexpr int64_t kTileSize = 8192;

// Tensors stand behind each other on one axis of cost: each takes its elements and an overhead that
// stands for the work of starting it. A tile belongs to the range in which it starts, so that
// any cut of the axis gives each tile to one thread, whatever the number of threads.
class TileMap {
 public:
  TileMap(const TensorRecord* records, int64_t count) : records_(records), starts_(count + 1) {
    for (int64_t i = 0; i < count; ++i) starts_[i + 1] = starts_[i] + kOverhead + records[i].numel;
  }

  int64_t total_cost() const { return starts_.back(); }

  // Calls visit(record, first element, end element) for each tile that starts in [begin, end).
  template <typename Visit>
  void for_each_tile(int64_t begin, int64_t end, Visit&& visit) const {
    auto start = std::upper_bound(starts_.begin(), starts_.end(), begin) - 1;
    for (; start + 1 < starts_.end() && *start < end; ++start) {
      const TensorRecord& record = records_[start - starts_.begin()];
      const int64_t skipped = std::max<int64_t>(begin - *start, 0);
      int64_t first = (skipped + kTileSize - 1) / kTileSize * kTileSize;
      for (; first < record.numel && *start + first < end; first += kTileSize) {
        visit(record, first, std::min(first + kTileSize, record.numel));
      }
    }
  }

 private:
  static constexpr int64_t kOverhead = 256;

  const TensorRecord* records_;  // [count]
  std::vector<int64_t> starts_;  // [count + 1], on the axis of cost
};

}  // namespace amp_ext::cpu
