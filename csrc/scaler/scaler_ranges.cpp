// One row for each number of a scaler.
#include "scaler/scaler_ranges.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace amp_ext {

namespace {

constexpr double kLargestFloat = std::numeric_limits<float>::max();
constexpr double kLargestInt32 = std::numeric_limits<int32_t>::max();
constexpr double kLargestInt64 = 0x1p63;  // as double has it
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kEpsilon = std::numeric_limits<double>::epsilon();

struct ScalerRange {
  const char* name;
  double least, largest;  // both included
  bool is_int;
  const char* words;
};

constexpr const char* kScaleWords = "a number from 0 to 3.4e+38";  // 0 is where backoffs may end

constexpr ScalerRange kScalerRanges[] = {
    {"init_scale", 0.0, kLargestFloat, false, kScaleWords},
    {"new_scale", 0.0, kLargestFloat, false, kScaleWords},
    {"scale", 0.0, kLargestFloat, false, kScaleWords},
    {"min_scale", 0.0, kInfinity, false, "a number of at least 0"},
    {"max_scale", 0.0, kInfinity, false, "a number of at least 0"},
    {"growth_factor", 1.0 + kEpsilon, std::numeric_limits<double>::max(), false,
     "a finite number above 1"},
    {"backoff_factor", std::numeric_limits<double>::denorm_min(), 1.0 - kEpsilon / 2, false,
     "a number above 0 and below 1"},
    {"growth_interval", 1.0, kLargestInt64, true, "an int from 1 to 9.22e+18"},
    {"hysteresis", 1.0, kLargestInt32, true, "an int from 1 to 2.15e+09"},
    {"warn_after", 1.0, kLargestInt64, true, "an int from 1 to 9.22e+18"},
    {"_growth_tracker", 0.0, kLargestInt32, true, "an int from 0 to 2.15e+09"},
    {"_hysteresis_tracker", 0.0, kLargestInt32, true, "an int from 0 to 2.15e+09"}};

}  // namespace

std::string wanted_of_scaler(const std::string& name, double value) {
  for (const ScalerRange& range : kScalerRanges) {
    if (name != range.name) continue;
    const bool fits = value >= range.least && value <= range.largest &&
                      (!range.is_int || value == std::floor(value));
    return fits ? "" : range.words;
  }
  TORCH_CHECK(false, "wanted_of_scaler: name must be that of a number of a scaler, got ", name);
}

}  // namespace amp_ext
