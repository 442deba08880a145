// The kinds of numbers that a parameter and its state consist of: the arrays that hold them, and
// how they are rounded. An engine loads a number as the type that is computed in, and stores it:
// cpu/number.h and cuda/number.cuh.
#pragma once

#include <cstdint>

#include "storage.h"

namespace amp_ext {

// What a parameter has beside its own array.
enum class Master : uint8_t { kNone, kFloat32 };

// An array of Storage, rounded to nearest even.
template <typename Storage>
struct Plain {
  using Stored = Storage;
  static constexpr Master kMaster = Master::kNone;
};

// A parameter that is computed in a float32 master: its own array has the master, rounded.
template <typename Storage>
struct Mastered {
  using Stored = Storage;
  static constexpr Master kMaster = Master::kFloat32;
};

// A buffer that a kernel does not have.
struct Absent {};

}  // namespace amp_ext
