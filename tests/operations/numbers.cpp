// Stores and loads numbers of every kind as the engine of one instruction set does, from every
// STRIDE-th float32 and from every pair of parts.
//
// Compiled as vectors.cpp. Exits with 77 where the processor lacks the instructions, and with 1
// after naming what is wrong.
#include <cstdio>
#include <cstdlib>

#include "instructions.h"
// Only now, the vectors:
#include "cpu/number.h"

namespace {

using namespace amp_ext;  // NOLINT(build/namespaces)
using namespace amp_ext::cpu::AMP_EXT_ISA;

constexpr int64_t kCount = 512;
int faults = 0;

void fail(const char* what, float stored, float loaded, uint32_t param, uint32_t low) {
  if (++faults <= 20) {
    std::printf("%s: %.9g (%08x) came back as %.9g (%08x) from %04x and %04x\n", what, stored,
                bits_of(stored), loaded, bits_of(loaded), param, low);
  }
}

// A block of numbers in memory, rounded to nearest and, where that is another thing, dithered.
template <typename Storage, int kBits>
struct Block {
  using Kind = Split<Storage, kBits>;
  alignas(64) float values[kCount];
  alignas(64) float loaded[kCount];
  alignas(64) Storage params[kCount];
  alignas(64) typename Kind::Low lows[kCount];
  alignas(64) uint32_t phases[kCount];

  Numbers<Kind> numbers() { return Numbers<Kind>::at(params, lows, 0); }
  void store(const Rounding& rounding) { numbers().round(values, kCount, rounding); }
  void load() {
    for (int64_t i = 0; i < kCount; i += kLanes<float>) {
      amp_ext::store(loaded + i, numbers().template load<Vector<float>>(i));
    }
  }
};

// How far a number may be from the master that was stored. Infinite where that is beyond the dtype.
template <typename Storage, int kBits>
double bound(double size, bool dithers) {
  const double infinity = std::numeric_limits<double>::infinity();
  if (std::is_same_v<Storage, BFloat16>) {
    if (kBits == 16) return 0.0;
    if (size > 0x1.fffep127) return infinity;  // beyond the largest of 24 bits
    return std::max(size, 0x1p-126) * (dithers ? 0x1p-15 : 0x1p-16);
  }
  if (size >= (kBits == 16 ? 65504.0 : 65503.9)) return infinity;
  if (kBits == 16) return size >= 0x1p-16 ? 0.0 : 0x1p-40;
  return std::max(size, 0x1p-14) * (dithers ? 0x1p-17 : 0x1p-18);
}

template <typename Storage, int kBits>
void store_every(uint64_t stride, bool dithers) {
  static Block<Storage, kBits> block;
  for (uint64_t first = 0; first < (1ull << 32); first += kCount * stride) {
    for (int64_t i = 0; i < kCount; ++i) {
      block.values[i] = float_of(static_cast<uint32_t>(first + i * stride));
    }
    Rounding rounding;
    if (dithers) {
      fill_phases(static_cast<int64_t>(first), kCount, block.phases);
      rounding = {block.phases, static_cast<uint32_t>(first * 2654435761u)};
    }
    block.store(rounding);
    block.load();
    for (int64_t i = 0; i < kCount; ++i) {
      const float stored = block.values[i];
      const float loaded = block.loaded[i];
      const double error = std::abs(static_cast<double>(stored) - static_cast<double>(loaded));
      const double size = std::abs(static_cast<double>(stored));
      const bool is_right = stored != stored ? loaded != loaded
                            : std::isinf(stored)
                                ? loaded == stored
                                : loaded == loaded && error <= bound<Storage, kBits>(size, dithers);
      if (!is_right) {
        fail(dithers ? "dithered" : "nearest", stored, loaded, block.params[i].bits, block.lows[i]);
      }
    }
  }
}

// What was loaded is stored as it was, under any dither: an element that no step changes stays.
template <typename Storage, int kBits>
void load_every(uint64_t stride) {
  static Block<Storage, kBits> block;
  static Block<Storage, kBits> again;
  constexpr uint64_t kAll = 1ull << (16 + kBits);
  for (uint64_t first = 0; first < kAll; first += kCount * stride) {
    for (int64_t i = 0; i < kCount; ++i) {
      const uint64_t both = (first + i * stride) % kAll;
      block.params[i].bits = static_cast<uint16_t>(both >> kBits);
      block.lows[i] = static_cast<typename Split<Storage, kBits>::Low>(both);
    }
    block.load();
    for (const bool dithers : {false, true}) {
      std::memcpy(again.values, block.loaded, sizeof again.values);
      fill_phases(static_cast<int64_t>(first), kCount, again.phases);
      again.store(dithers ? Rounding{again.phases, static_cast<uint32_t>(first)} : Rounding{});
      again.load();
      for (int64_t i = 0; i < kCount; ++i) {
        const float stored = block.loaded[i];
        const float loaded = again.loaded[i];
        // Parts that make more than the largest master come from no master.
        const bool is_beyond = std::is_same_v<Storage, Half> && std::abs(stored) >= 65503.9f;
        const bool is_same = stored == loaded || (stored != stored && loaded != loaded);
        if (!is_same && !is_beyond) {
          fail("loaded", stored, loaded, block.params[i].bits, block.lows[i]);
        }
      }
    }
  }
}

template <typename Storage>
void check(uint64_t stride) {
  store_every<Storage, 16>(stride, false);
  store_every<Storage, 8>(stride, false);
  store_every<Storage, 8>(stride, true);
  load_every<Storage, 16>(stride);
  load_every<Storage, 8>(1);
}

}  // namespace

int main(int count, char** arguments) {
  if (LACKS_INSTRUCTIONS) return 77;
  const uint64_t stride = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1;
  check<BFloat16>(stride);
  check<Half>(stride);
  return faults == 0 ? 0 : 1;
}
