// Number formats of a parameter and its state: arrays and rounding. The engines load and store them
// in cpu/number.h and cuda/number.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "formats/buffer_descriptions.h"
#include "formats/moment_codes.h"
#include "formats/storage.h"

namespace amp_ext {

// Format of the elements of a buffer: a dtype or an 8-bit format.
enum class BufferFormat : uint8_t { kFloat32, kFloat64, kFloat16, kBFloat16, kRatio8, kBlockwise8 };

constexpr BufferFormat format_of(DType dtype) { return static_cast<BufferFormat>(dtype); }
static_assert(format_of(DType::kBFloat16) == BufferFormat::kBFloat16);

constexpr bool is_code(BufferFormat format) {
  return format == BufferFormat::kRatio8 || format == BufferFormat::kBlockwise8;
}

// Storage of a parameter's master: none, a float32 array, or a residual of 16 or 8 bits.
enum class Master : uint8_t { kNone, kFloat32, kResidual16, kResidual8 };

// Returns the 8-bit format of a buffer with this code, which must not be kNone.
constexpr BufferFormat format_of(BufferCode code) {
  return code == BufferCode::kRatio ? BufferFormat::kRatio8 : BufferFormat::kBlockwise8;
}

// Format of numbers in an array of Storage, rounded to nearest even or, with kMayDither, dithered.
template <typename Storage>
struct Plain {
  using Stored = Storage;
  static constexpr bool kMayDither = sizeof(Storage) == 2;
  static constexpr Master kMaster = Master::kNone;
  static constexpr BufferFormat kFormat = format_of(kDType<Storage>);
};

// A parameter with a float32 master: steps update the master and round it to the parameter.
template <typename Storage>
struct Mastered {
  using Stored = Storage;
  static constexpr bool kMayDither = false;
  static constexpr Master kMaster = Master::kFloat32;
};

// A parameter that is the upper part of its split master; the residual of kBits bits is the rest.
template <typename Storage, int kBits>
struct Split {
  using Stored = Storage;
  using Residual = std::conditional_t<kBits == 16, uint16_t, uint8_t>;
  static constexpr bool kMayDither = kBits == 8;
  static constexpr Master kMaster = kBits == 16 ? Master::kResidual16 : Master::kResidual8;
  // True if the residual is the difference of master and parameter (SplitHalf16), false if it has
  // the lower bits of the master (SplitMaster).
  static constexpr bool kIsDifference = std::is_same_v<Storage, Half> && kBits == 16;
};

// First moments in 8 bits, as ratios to the square roots of the stored second moments.
struct Ratio {
  static constexpr bool kMayDither = true;
  static constexpr BufferFormat kFormat = BufferFormat::kRatio8;
};

// Moments in 8 bits, with one exponent byte for each block of kBlockSize elements.
template <typename MomentCode>
struct Blockwise {
  using Code = MomentCode;
  static constexpr bool kMayDither = true;
  static constexpr BufferFormat kFormat = BufferFormat::kBlockwise8;
};

template <BufferCode code>
using FormatOfCode = std::conditional_t<
    code == BufferCode::kRatio, Ratio,
    std::conditional_t<code == BufferCode::kRoot, Blockwise<RootCode>,
                       std::conditional_t<code == BufferCode::kMagnitude, Blockwise<MomentumCode>,
                                          Plain<BFloat16>>>>;

// Formats of all buffers of a parameter. Uniform stores all in one dtype. Coded stores each in its
// 8-bit format if `codes` has that format, otherwise in bfloat16.
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
