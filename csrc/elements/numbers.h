// The kinds of numbers that a parameter and its state consist of: the arrays that hold them, and
// how they are rounded. An engine loads a number as the type that is computed in, and stores it:
// cpu/number.h and cuda/number.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "elements/buffer_descriptions.h"
#include "elements/moment_codes.h"
#include "elements/storage.h"

namespace amp_ext {

// What a buffer's elements are: numbers of a dtype, or 8-bit codes.
enum class BufferFormat : uint8_t { kFloat32, kFloat64, kFloat16, kBFloat16, kRatio8, kBlockwise8 };

constexpr BufferFormat format_of(DType dtype) { return static_cast<BufferFormat>(dtype); }
static_assert(format_of(DType::kBFloat16) == BufferFormat::kBFloat16);

constexpr bool is_code(BufferFormat format) {
  return format == BufferFormat::kRatio8 || format == BufferFormat::kBlockwise8;
}

// What a parameter has beside its own array.
enum class Master : uint8_t { kNone, kFloat32, kLow16, kLow8 };

// The code of a buffer that may be in one.
constexpr BufferFormat format_of(BufferCode code) {
  return code == BufferCode::kRatio ? BufferFormat::kRatio8 : BufferFormat::kBlockwise8;
}

// An array of Storage, rounded to nearest even.
template <typename Storage>
struct Plain {
  using Stored = Storage;
  static constexpr Master kMaster = Master::kNone;
  static constexpr BufferFormat kFormat = format_of(kDType<Storage>);
};

// A parameter that is computed in a float32 master: its own array has the master, rounded.
template <typename Storage>
struct Mastered {
  using Stored = Storage;
  static constexpr Master kMaster = Master::kFloat32;
};

// A parameter that is the upper part of its master; the lower part, of kBits, is an array beside
// it.
template <typename Storage, int kBits>
struct Split {
  using Stored = Storage;
  using Residual = std::conditional_t<kBits == 16, uint16_t, uint8_t>;
  static constexpr Master kMaster = kBits == 16 ? Master::kLow16 : Master::kLow8;
  // Whether the lower part is a difference (SplitHalf16), not bits of the magnitude (SplitMaster).
  static constexpr bool kIsDifference = std::is_same_v<Storage, Half> && kBits == 16;
};

// First moments in 8 bits: their ratios to the second moments beside them, as these are stored.
struct Ratio {
  static constexpr BufferFormat kFormat = BufferFormat::kRatio8;
};

// Moments in 8 bits with a byte beside them for each block of kBlockSize elements.
template <typename MomentCode>
struct Blockwise {
  using Code = MomentCode;
  static constexpr BufferFormat kFormat = BufferFormat::kBlockwise8;
};

template <BufferCode code>
using FormatOfCode = std::conditional_t<
    code == BufferCode::kRatio, Ratio,
    std::conditional_t<code == BufferCode::kRoot, Blockwise<RootCode>,
                       std::conditional_t<code == BufferCode::kMagnitude, Blockwise<MomentumCode>,
                                          Plain<BFloat16>>>>;

// How the buffers of a parameter are kept: each in the kind that goes with the code that it may
// take. All in one dtype, or in these codes.
template <typename Storage>
struct Uniform {
  static constexpr bool kAreCoded = false;
  template <BufferCode code>
  using NumberFormat = Plain<Storage>;
};
template <Codes codes>
struct Coded {
  static constexpr bool kAreCoded = true;
  static constexpr Codes kCodes = codes;
  template <BufferCode code>
  using NumberFormat = FormatOfCode<is_among(code, codes) ? code : BufferCode::kNone>;
};

}  // namespace amp_ext
