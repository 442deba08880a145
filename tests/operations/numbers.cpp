// Stores and loads numbers of every kind as the engine of one instruction set does, from every
// STRIDE-th float32, from every pair of parts and from every code of 8 bits.
//
// Compiled as vectors.cpp. Exits with 77 where the processor lacks the instructions, and with 1
// after naming what is wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "instructions.h"
// Only now, the vectors:
#include "cpu/number.h"

namespace {

using namespace amp_ext;  // NOLINT(build/namespaces)
using namespace amp_ext::cpu::AMP_EXT_ISA;

constexpr int64_t kCount = 512;
constexpr int64_t kPhases = kCount + kBesidePhases;

// A block of numbers in memory, rounded to nearest and, where that is another thing, dithered.
template <typename Storage, int kBits>
struct Block {
  using Kind = Split<Storage, kBits>;
  alignas(64) float values[kCount];
  alignas(64) float loaded[kCount];
  alignas(64) Storage params[kCount];
  alignas(64) typename Kind::Low lows[kCount];
  alignas(64) uint32_t phases[kPhases];

  Numbers<Kind> numbers() { return Numbers<Kind>::at(params, lows, 0); }
  void store(const Rounding& rounding) { numbers().round(values, kCount, rounding); }
  void load() {
    for (int64_t i = 0; i < kCount; i += kLanes<float>) {
      amp_ext::store(loaded + i, numbers().template load<Vector<float>>(i));
    }
  }
};

// The units of ratios, by the bits of powers of two.
struct Units {
  alignas(64) uint32_t units[kCount];

  Vector<uint32_t> unit(int64_t index) const { return load_bits<Vector<uint32_t>>(units + index); }
};

struct RatioBlock {
  alignas(64) float values[kCount];
  alignas(64) float loaded[kCount];
  alignas(64) uint8_t codes[kCount];
  alignas(64) uint32_t phases[kPhases];
  Units beside;

  Numbers<Ratio> numbers() { return Numbers<Ratio>::at(codes, nullptr, 0); }
  void store(const Rounding& rounding) { numbers().round(values, kCount, rounding, beside); }
  void load() {
    for (int64_t i = 0; i < kCount; i += kLanes<float>) {
      amp_ext::store(loaded + i, numbers().load(i, beside));
    }
  }
};

template <typename Code>
struct BlockwiseBlock {
  alignas(64) float values[kCount];
  alignas(64) float loaded[kCount];
  alignas(64) float roots[kCount];
  alignas(64) uint8_t codes[kCount];
  alignas(64) uint8_t exponents[kCount / kBlockSize];
  alignas(64) uint32_t phases[kPhases];

  Numbers<Blockwise<Code>> numbers() { return Numbers<Blockwise<Code>>::at(codes, exponents, 0); }
  void store(const Rounding& rounding) { numbers().round(values, kCount, rounding); }
  void load() {
    for (int64_t i = 0; i < kCount; i += kLanes<float>) {
      amp_ext::store(loaded + i, numbers().template load<Vector<float>>(i));
      amp_ext::store(roots + i, numbers().root(i));
    }
  }
};

}  // namespace

#include "number_checks.h"

int main(int count, char** arguments) { return LACKS_INSTRUCTIONS ? 77 : run(count, arguments); }

AMP_EXT_END_TARGET
