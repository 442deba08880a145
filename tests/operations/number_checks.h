// What is stored and loaded again of every kind of number, and what must come back. Read behind
// what an engine does it with: Block, RatioBlock and BlockwiseBlock, of kCount elements, Rounding
// and fill_phases, which fills in up to kPhases and returns where the first phase is.
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
      rounding = {fill_phases(static_cast<int64_t>(first), kCount, block.phases),
                  static_cast<uint32_t>(first * 2654435761u)};
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
      const uint32_t* const phases = fill_phases(static_cast<int64_t>(first), kCount, again.phases);
      again.store(dithers ? Rounding{phases, static_cast<uint32_t>(first)} : Rounding{});
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

// Phases of blocks that begin anywhere, also where the lower half of a place passes its largest.
void check_phases() {
  static uint32_t phases[kPhases];
  for (const int64_t origin : {int64_t{0}, (int64_t{1} << 35) - 300, (int64_t{1} << 62) + 5}) {
    for (int64_t first = origin; first < origin + 40; ++first) {
      const int64_t count = first % 3 == 0 ? kCount : 1 + first % 71;
      const uint32_t* const found = fill_phases(first, count, phases);
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t wanted = dither_phase(static_cast<uint64_t>(first + i));
        if (found[i] != wanted) fail("phase", 0.0f, 0.0f, found[i], wanted);
      }
    }
  }
}

// Moments in 8 bits.

bool is_same(float first, float second) {
  return bits_of(first) == bits_of(second) || (first != first && second != second);
}

// What dithers a block, other words at each call.
template <typename Block>
Rounding dithered(Block& block) {
  static uint32_t calls = 0;
  ++calls;
  return {fill_phases(calls * (kCount + 1), kCount, block.phases), calls * 2654435761u};
}

// A float's bits as a number of octaves: its logarithm in straight lines between powers of two.
double octaves_of(double number) {
  const int exponent = std::ilogb(number);
  return exponent + std::ldexp(number, -exponent) - 1;
}
double of_octaves(double octaves) {
  const double exponent = std::floor(octaves);
  return std::ldexp(octaves - exponent + 1, static_cast<int>(exponent));
}

// The place of a ratio among the codes, and the ratio of a place: the octaves of 132 - place and of
// ratio + 0.734375 sum up to those of 128 and 0.75.
double place_of(double ratio) { return 132 - of_octaves(6.5 - octaves_of(ratio + 0.734375)); }
double ratio_of(double place) { return of_octaves(6.5 - octaves_of(132 - place)) - 0.734375; }

void store_every_ratio(float unit, uint64_t stride, bool dithers) {
  static RatioBlock block;
  std::fill(std::begin(block.beside.units), std::end(block.beside.units), bits_of(unit));
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
      const double ratio = std::abs(static_cast<double>(stored)) / static_cast<double>(unit);
      if (std::isfinite(unit) && ratio < 0x1p128) {  // no inf as a float, nor NaN
        const double place = place_of(std::min(ratio, 16 - 0.734375));
        const double most = (dithers ? 1.0 : 0.5) + 1e-4;
        const double least = ratio_of(std::max(place - most, 0.0)) * static_cast<double>(unit);
        const double largest = ratio_of(std::min(place + most, 126.0)) * static_cast<double>(unit);
        const double found = std::abs(static_cast<double>(loaded));
        is_right = found >= least * (1 - 1e-6) && found <= largest * (1 + 1e-6) &&
                   std::signbit(loaded) == std::signbit(stored);
      }
      if (!is_right) fail("ratio", stored, loaded, block.codes[i], bits_of(unit));
    }
  }
}

// All codes beside every unit, under some words each.
void load_every_ratio() {
  static RatioBlock block;
  static RatioBlock again;
  for (uint32_t unit = bits_of(0x1p-64f); unit <= bits_of(0x1p64f); unit += 1u << 23) {
    std::fill(std::begin(block.beside.units), std::end(block.beside.units), unit);
    for (int64_t i = 0; i < kCount; ++i) block.codes[i] = static_cast<uint8_t>(i);
    block.load();
    again.beside = block.beside;
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::memcpy(again.values, block.loaded, sizeof again.values);
      again.store(repeat > 0 ? dithered(again) : Rounding{});
      for (int64_t i = 0; i < kCount; ++i) {
        const uint32_t wanted = block.codes[i] == 255 ? 127 : block.codes[i];  // NaN has no sign
        if (again.codes[i] != wanted) {
          fail("loaded ratio", block.loaded[i], float_of(unit), wanted, again.codes[i]);
        }
      }
    }
  }
}

// The unit of a ratio is the power of two below the root of every second moment, and that of the
// root itself: 2^-64 beside 0 and subnormal numbers, inf beside inf and NaN.
void check_units(uint64_t stride) {
  for (uint64_t bits = 0; bits < (1ull << 31); bits += stride) {
    const auto moment = static_cast<uint32_t>(bits);
    const float root = std::sqrt(float_of(moment));
    float wanted = 0x1p-64f;
    if (!std::isfinite(root)) {
      wanted = std::numeric_limits<float>::infinity();
    } else if (float_of(moment) >= 0x1p-126f) {
      wanted = std::ldexp(1.0f, std::ilogb(root));
    }
    const uint32_t found = unit_below_root(moment);
    if (found != bits_of(wanted)) fail("unit", float_of(moment), wanted, found, 0);
    const bool is_number = std::isfinite(root);
    if (is_number && unit_below(bits_of(root)) != found) fail("unit", root, wanted, found, 1);
  }
}

// The unit of a block and how far codes are apart around a number in it.
double unit_of(uint8_t exponent) { return std::ldexp(1.0, exponent - 127); }
template <typename Code>
double distance_at(double scaled) {
  if (std::is_same_v<Code, RootCode>) return std::ldexp(1.0, std::ilogb(scaled + 0.0625)) / 64;
  return (scaled < 0.25 ? 0.125 : scaled < 0.5 ? 0.25 : 0.5) / 32;
}

// A moment as a step hands it over to be stored: of a second one the root.
template <typename Code>
float handed_over(float moment) {
  return std::is_same_v<Code, RootCode> ? std::sqrt(moment) : moment;
}

// Every number in a block of its like or, if it is spread, of 32 exponents.
template <typename Code>
void store_every_blockwise(uint64_t stride, bool is_spread, bool dithers) {
  constexpr bool kIsRoot = std::is_same_v<Code, RootCode>;
  static BlockwiseBlock<Code> block;
  static float moments[kCount];
  const uint64_t blocks = (1ull << 32) / kCount / stride;
  for (uint64_t number = 0; number < blocks; ++number) {
    for (int64_t i = 0; i < kCount; ++i) {
      const uint64_t bits = is_spread ? number * stride + i * ((1ull << 32) / kCount)
                                      : (number * kCount + i) * stride;
      moments[i] = float_of(static_cast<uint32_t>(bits));
      block.values[i] = handed_over<Code>(moments[i]);
    }
    block.store(dithers ? dithered(block) : Rounding{});
    block.load();
    for (int64_t first = 0; first < kCount; first += kBlockSize) {
      bool is_finite = true;
      for (int64_t i = first; i < first + kBlockSize; ++i) {
        is_finite &= std::isfinite(block.values[i]);
      }
      const uint8_t exponent = block.exponents[first / kBlockSize];
      for (int64_t i = first; i < first + kBlockSize; ++i) {
        const float stored = moments[i];
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
          // The largest code of a momentum is a distance below 1, that of a root below 15/16; and
          // the least of a root is no 0.
          const double end = kIsRoot ? 0.9375 : 1.0;
          const bool is_at_end = scaled > end - 2 * distance || (kIsRoot && scaled < distance);
          // A sum with 1/16 is rounded by 2^-28, one with 1/8 by 2^-27; half a code is 2^-11, or
          // 2^-10.
          const double most = (dithers || is_at_end ? 1.0 : 0.5) * distance * (1 + 1.2e-5);
          const double error = std::abs(std::abs(static_cast<double>(root)) / unit - scaled);
          // Of the last unit, 2^64 or 2^126.
          const float largest = kIsRoot ? 0x1p64f * 0.9296875f : 0x1p126f * (1 - 0x1p-6f);
          const bool saturates = wanted >= static_cast<double>(largest);
          is_right = saturates ? std::abs(root) == largest : error <= most;
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

// All codes with all exponents that a block can have, beside the largest code in each.
template <typename Code>
void load_every_blockwise() {
  constexpr bool kIsRoot = std::is_same_v<Code, RootCode>;
  static BlockwiseBlock<Code> block;
  static BlockwiseBlock<Code> again;
  for (int exponent = kIsRoot ? 65 : 1; exponent <= (kIsRoot ? 191 : 253); ++exponent) {
    for (int64_t i = 0; i < kCount; ++i) {
      block.codes[i] = i % kBlockSize == 31 ? (kIsRoot ? 255 : 127) : i - i / kBlockSize;
      block.exponents[i / kBlockSize] = static_cast<uint8_t>(exponent);
    }
    block.load();
    for (int repeat = 0; repeat < 20; ++repeat) {
      for (int64_t i = 0; i < kCount; ++i) again.values[i] = handed_over<Code>(block.loaded[i]);
      again.store(repeat > 0 ? dithered(again) : Rounding{});
      for (int64_t i = 0; i < kCount; ++i) {
        // What is below 2^-126 counts as 0, as it does when it is stored.
        const int wanted = kIsRoot && block.loaded[i] < 0x1p-126f ? 0 : block.codes[i];
        if (again.codes[i] != wanted || again.exponents[i / kBlockSize] != exponent) {
          fail("loaded in a block", block.loaded[i], block.roots[i], block.codes[i],
               again.codes[i] << 8 | again.exponents[i / kBlockSize]);
        }
      }
    }
  }
}

template <typename Code>
void check_blocks(uint64_t stride) {
  for (const bool is_spread : {false, true}) {
    for (const bool dithers : {false, true}) {
      store_every_blockwise<Code>(stride, is_spread, dithers);
    }
  }
  load_every_blockwise<Code>();
}

void check_ratios(uint64_t stride) {
  for (const float unit :
       {0x1p-64f, 0x1p-25f, 1.0f, 0x1p63f, std::numeric_limits<float>::infinity()}) {
    for (const bool dithers : {false, true}) store_every_ratio(unit, stride, dithers);
  }
  load_every_ratio();
  check_units(stride);
}

int run(int count, char** arguments) {
  const uint64_t stride = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1;
  check_phases();
  check<BFloat16>(stride);
  check<Half>(stride);
  check_ratios(stride);
  check_blocks<RootCode>(stride);
  check_blocks<MomentumCode>(stride);
  return faults == 0 ? 0 : 1;
}

}  // namespace
