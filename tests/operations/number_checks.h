// What is stored and loaded again of every kind of number, and what must come back. Read behind
// what an engine does it with: Block, RatioBlock and GroupBlock, of kCount elements, Rounding and
// fill_phases.
#pragma once

namespace {

int faults = 0;

void fail(const char* what, float stored, float loaded, uint32_t param, uint32_t low) {
  if (++faults <= 20) {
    std::printf("%s: %.9g (%08x) came back as %.9g (%08x) from %04x and %04x\n", what, stored,
                bits_of(stored), loaded, bits_of(loaded), param, low);
  }
}

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

// Moments in 8 bits.

bool is_same(float first, float second) {
  return bits_of(first) == bits_of(second) || (first != first && second != second);
}

// What dithers a block, other words at each call.
template <typename Block>
Rounding dithered(Block& block) {
  static uint32_t calls = 0;
  fill_phases(++calls * kCount, kCount, block.phases);
  return {block.phases, calls * 2654435761u};
}

// The place of a ratio among the codes, and the ratio of a place.
double place_of(double ratio) { return 134.9375 * ratio / (ratio + 0.5); }
double ratio_of(double place) { return place / (2 * 134.9375 - 2 * place); }

void store_every_ratio(float unit, uint64_t stride, bool dithers) {
  static RatioBlock block;
  std::fill(std::begin(block.roots.roots), std::end(block.roots.roots), unit);
  for (uint64_t first = 0; first < (1ull << 32); first += kCount * stride) {
    for (int64_t i = 0; i < kCount; ++i) {
      block.values[i] = float_of(static_cast<uint32_t>(first + i * stride));
    }
    block.store(dithers ? dithered(block) : Rounding{});
    block.load();
    for (int64_t i = 0; i < kCount; ++i) {
      const float stored = block.values[i];
      const float loaded = block.loaded[i];
      bool is_right = loaded != loaded;
      if (unit == 0.0f && std::isfinite(stored)) {
        is_right = loaded == 0.0f;
      } else if (std::isfinite(stored) && std::isfinite(unit)) {
        const double size = std::abs(static_cast<double>(stored));
        const double place = place_of(std::min(size / static_cast<double>(unit), 8.0));
        // Dithered by a whole place, or a little less.
        const double most = (!dithers ? 0.5 : place > 32.001 ? 0.9453125 : 1.0) + 1e-4;
        const double least = ratio_of(std::max(place - most, 0.0)) * static_cast<double>(unit);
        const double largest = ratio_of(std::min(place + most, 127.0)) * static_cast<double>(unit);
        const double found = std::abs(static_cast<double>(loaded));
        is_right = found >= least * (1 - 1e-6) && found <= largest * (1 + 1e-6) &&
                   (loaded == 0.0f || std::signbit(loaded) == std::signbit(stored));
      }
      if (!is_right) fail("ratio", stored, loaded, block.codes[i], bits_of(unit));
    }
  }
}

// All codes beside units of all sizes, under some words each.
void load_every_ratio() {
  static RatioBlock block;
  static RatioBlock again;
  for (uint32_t bits = 0; bits < 0x5fc00000u; bits += 0x00912345u) {
    // The least root of a positive second moment that can be stored, and larger ones.
    const float unit = bits == 0 ? 0x1p-74f : std::max(float_of(bits), 0x1p-74f);
    std::fill(std::begin(block.roots.roots), std::end(block.roots.roots), unit);
    for (int64_t i = 0; i < kCount; ++i) block.codes[i] = static_cast<uint8_t>(i);
    block.load();
    again.roots = block.roots;
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::memcpy(again.values, block.loaded, sizeof again.values);
      again.store(repeat > 0 ? dithered(again) : Rounding{});
      for (int64_t i = 0; i < kCount; ++i) {
        if (again.codes[i] != block.codes[i]) {
          fail("loaded ratio", block.loaded[i], unit, block.codes[i], again.codes[i]);
        }
      }
    }
  }
}

// The unit of a group and how far codes are apart around a number in it.
double unit_of(uint8_t exponent) { return std::ldexp(1.0, exponent - 127); }
template <typename Code>
double distance_at(double scaled) {
  constexpr double kRange = std::is_same_v<Code, RootCode> ? 64.0 : 32.0;
  const double octave = scaled < 0.25 ? 0.125 : scaled < 0.5 ? 0.25 : 0.5;
  return octave / kRange;
}

// Every number in a group of its like or, if it is spread, of 32 exponents.
template <typename Code>
void store_every_grouped(uint64_t stride, bool is_spread, bool dithers) {
  constexpr bool kIsRoot = std::is_same_v<Code, RootCode>;
  static GroupBlock<Code> block;
  const uint64_t blocks = (1ull << 32) / kCount / stride;
  for (uint64_t number = 0; number < blocks; ++number) {
    for (int64_t i = 0; i < kCount; ++i) {
      const uint64_t bits = is_spread ? number * stride + i * ((1ull << 32) / kCount)
                                      : (number * kCount + i) * stride;
      block.values[i] = float_of(static_cast<uint32_t>(bits));
    }
    block.store(dithers ? dithered(block) : Rounding{});
    block.load();
    for (int64_t first = 0; first < kCount; first += kGroupSize) {
      bool is_finite = true;
      for (int64_t i = first; i < first + kGroupSize; ++i) {
        // A negative second moment, which no step makes, counts as 0.
        is_finite &= std::isfinite(Code::measured(block.values[i]));
      }
      const uint8_t exponent = block.exponents[first / kGroupSize];
      for (int64_t i = first; i < first + kGroupSize; ++i) {
        const float stored = block.values[i];
        const float loaded = block.loaded[i];
        const float root = block.roots[i];
        bool is_right = loaded != loaded && exponent == 255 && block.codes[i] == 0;
        if (is_finite) {
          const double unit = unit_of(exponent);
          const double wanted =
              kIsRoot ? (stored < 0x1p-126f ? 0.0 : std::sqrt(static_cast<double>(stored)))
                      : std::abs(static_cast<double>(stored));
          const double scaled = wanted / unit;
          const double distance = distance_at<Code>(scaled);
          // The largest code is a distance below 1, and the least of a root is no 0.
          const bool is_at_end = scaled > 1 - 2 * distance || (kIsRoot && scaled < distance);
          // The root and its sum with 1/8 are rounded, by 2^-28 and 2^-27; half a code is 2^-10.
          const double most = (dithers || is_at_end ? 1.0 : 0.5) * distance * (1 + 1.2e-5);
          const double error = std::abs(std::abs(static_cast<double>(root)) / unit - scaled);
          const bool saturates = !kIsRoot && wanted >= 0x1p126;
          is_right = saturates ? std::abs(root) == 0x1p126f * (1 - 0x1p-6f) : error <= most;
          if (kIsRoot) {
            is_right &= (loaded > 0.0f) == (stored >= 0x1p-126f) && loaded == root * root;
          } else {
            is_right &= std::signbit(loaded) == std::signbit(stored) && is_same(loaded, root);
          }
        }
        if (!is_right)
          fail(kIsRoot ? "root" : "momentum", stored, loaded, block.codes[i], exponent);
      }
    }
  }
}

// All codes with all exponents that a group can have, beside the largest code in each.
template <typename Code>
void load_every_grouped() {
  constexpr bool kIsRoot = std::is_same_v<Code, RootCode>;
  static GroupBlock<Code> block;
  static GroupBlock<Code> again;
  for (int exponent = kIsRoot ? 65 : 1; exponent <= (kIsRoot ? 191 : 253); ++exponent) {
    for (int64_t i = 0; i < kCount; ++i) {
      block.codes[i] = i % kGroupSize == 31 ? (kIsRoot ? 255 : 127) : i - i / kGroupSize;
      block.exponents[i / kGroupSize] = static_cast<uint8_t>(exponent);
    }
    block.load();
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::memcpy(again.values, block.loaded, sizeof again.values);
      again.store(repeat > 0 ? dithered(again) : Rounding{});
      for (int64_t i = 0; i < kCount; ++i) {
        // What is below 2^-126 counts as 0, as it does when it is stored.
        const int wanted = kIsRoot && block.loaded[i] < 0x1p-126f ? 0 : block.codes[i];
        if (again.codes[i] != wanted || again.exponents[i / kGroupSize] != exponent) {
          fail("loaded in a group", block.loaded[i], block.roots[i], block.codes[i],
               again.codes[i] << 8 | again.exponents[i / kGroupSize]);
        }
      }
    }
  }
}

template <typename Code>
void check_groups(uint64_t stride) {
  for (const bool is_spread : {false, true}) {
    for (const bool dithers : {false, true}) {
      store_every_grouped<Code>(stride, is_spread, dithers);
    }
  }
  load_every_grouped<Code>();
}

void check_ratios(uint64_t stride) {
  for (const float unit :
       {0.0f, 0x1p-74f, 3.1e-8f, 1.0f, 0x1.8p40f, 0x1.fp63f, std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    for (const bool dithers : {false, true}) store_every_ratio(unit, stride, dithers);
  }
  load_every_ratio();
}

int run(int count, char** arguments) {
  const uint64_t stride = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1;
  check<BFloat16>(stride);
  check<Half>(stride);
  check_ratios(stride);
  check_groups<RootCode>(stride);
  check_groups<MomentumCode>(stride);
  return faults == 0 ? 0 : 1;
}

}  // namespace
