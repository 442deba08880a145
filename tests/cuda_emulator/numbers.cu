// Stores and loads numbers of every kind as kernels do, from every STRIDE-th float32, from every
// pair of parts and from every code of 8 bits. Exits with 1 after naming what is wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "cuda/number.cuh"

namespace {

using namespace amp_ext;  // NOLINT(build/namespaces)

constexpr int64_t kCount = 512;
constexpr int64_t kPhases = kCount;
constexpr int kPack = 8;

struct Rounding {
  const uint32_t* phases = nullptr;  // null: to nearest
  uint32_t offset = 0;

  cuda::Rounding of(int64_t index) const {
    return {phases != nullptr, phases == nullptr ? 0 : phases[index] + offset};
  }
};

const uint32_t* fill_phases(int64_t first, int64_t count, uint32_t* phases) {
  for (int64_t i = 0; i < count; ++i) phases[i] = dither_phase(static_cast<uint64_t>(first + i));
  return phases;
}

// A block of numbers in memory, rounded to nearest and, where that is another thing, dithered.
template <typename Storage, int kBits>
struct Block {
  using Kind = Split<Storage, kBits>;
  alignas(16) float values[kCount];
  alignas(16) float loaded[kCount];
  alignas(16) Storage params[kCount];
  alignas(16) typename Kind::Low lows[kCount];
  alignas(16) uint32_t phases[kPhases];

  cuda::Numbers<Kind> numbers() { return {params, lows}; }
  void store(const Rounding& rounding) {
    for (int64_t i = 0; i < kCount; i += kPack) {
      auto pack = numbers().template load<kPack>(i);
      for (int k = 0; k < kPack; ++k) pack.store(values[i + k], k, rounding.of(i + k));
      numbers().store(pack, i);
    }
  }
  void load() {
    for (int64_t i = 0; i < kCount; i += kPack) {
      const auto pack = numbers().template load<kPack>(i);
      for (int k = 0; k < kPack; ++k) loaded[i + k] = pack.load(k);
    }
  }
};

// The units of ratios, by the bits of powers of two.
struct Units {
  uint32_t units[kCount];
};

struct RatioBlock {
  alignas(16) float values[kCount];
  alignas(16) float loaded[kCount];
  alignas(16) uint8_t codes[kCount];
  alignas(16) uint32_t phases[kPhases];
  Units beside;

  cuda::Numbers<Ratio> numbers() { return {codes}; }
  void store(const Rounding& rounding) {
    for (int64_t i = 0; i < kCount; i += kPack) {
      auto pack = numbers().load<kPack>(i);
      for (int k = 0; k < kPack; ++k) {
        pack.store(values[i + k], k, rounding.of(i + k), beside.units[i + k]);
      }
      numbers().store(pack, i);
    }
  }
  void load() {
    for (int64_t i = 0; i < kCount; i += kPack) {
      const auto pack = numbers().load<kPack>(i);
      for (int k = 0; k < kPack; ++k) loaded[i + k] = pack.load(k, beside.units[i + k]);
    }
  }
};

template <typename Block>
__global__ void store_blocks(Block* block, Rounding rounding) {
  const int64_t i = static_cast<int64_t>(threadIdx.x) * kPack;
  auto pack = block->numbers().template load<kPack>(i);
  float moments[kPack];
  for (int k = 0; k < kPack; ++k) moments[k] = block->values[i + k];
  pack.choose_unit(moments, [&](int k) { return rounding.of(i + k); });
  for (int k = 0; k < kPack; ++k) pack.store(moments[k], k, rounding.of(i + k));
  block->numbers().store(pack, i);
}

// Threads that have a block store it together.
template <typename Code>
struct BlockwiseBlock {
  alignas(16) float values[kCount];
  alignas(16) float loaded[kCount];
  alignas(16) float roots[kCount];
  alignas(16) uint8_t codes[kCount];
  alignas(16) uint8_t exponents[kCount / kBlockSize];
  alignas(16) uint32_t phases[kPhases];

  cuda::Numbers<Blockwise<Code>> numbers() { return {codes, exponents}; }
  void store(const Rounding& rounding) {
    cuda::launch(store_blocks<BlockwiseBlock>, 1, kCount / kPack, nullptr, this, rounding);
  }
  void load() {
    for (int64_t i = 0; i < kCount; i += kPack) {
      const auto pack = numbers().template load<kPack>(i);
      for (int k = 0; k < kPack; ++k) {
        loaded[i + k] = pack.load(k);
        roots[i + k] = pack.root(k);
      }
    }
  }
};

}  // namespace

#include "../operations/number_checks.h"

int main(int count, char** arguments) { return run(count, arguments); }
