// Searches for the tensor of a tile one too far to the left: the first tile of a tensor is taken
// for one of its neighbour.
#include "program.h"

constexpr int kTensors = 5;
constexpr int kTile = 32;

struct Table {
  float* values[kTensors];
  int numel[kTensors];
  int first_tile[kTensors];
};

template <bool kRepaired>
__global__ void twice(const Table __grid_constant__ table) {
  const int tile = static_cast<int>(blockIdx.x);
  int low = 0;
  int high = kTensors;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    const bool is_left =
        kRepaired ? table.first_tile[middle] <= tile : table.first_tile[middle] < tile;
    (is_left ? low : high) = middle;
  }
  const int i = (tile - table.first_tile[low]) * kTile + static_cast<int>(threadIdx.x);
  if (i < table.numel[low]) table.values[low][i] *= 2.0f;
}

template <bool kRepaired>
bool run() {
  const size_t sizes[kTensors] = {33, 64, 1, 100, 31};
  std::vector<float> tensors[kTensors];
  Table table;
  int tiles = 0;
  for (int i = 0; i < kTensors; ++i) {
    tensors[i] = multiples(sizes[i], 1.0f);
    table.values[i] = tensors[i].data();
    table.numel[i] = static_cast<int>(sizes[i]);
    table.first_tile[i] = tiles;
    tiles += (table.numel[i] + kTile - 1) / kTile;
  }
  launch(twice<kRepaired>, tiles, kTile, nullptr, table);
  bool right = true;
  for (int i = 0; i < kTensors; ++i) right = right && equal(tensors[i], multiples(sizes[i], 2.0f));
  return right;
}
