// The table of the valid ranges of the numbers of a GradScaler and of statistics of norms.
#include "scaler/scaler_ranges.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace amp_ext {

namespace {

constexpr double kLargestFloat = std::numeric_limits<float>::max();
constexpr double kLargestInt32 = std::numeric_limits<int32_t>::max();
constexpr double kLargestInt64 = 0x1p63;  // 2^63 - 1 rounded to double
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kEpsilon = std::numeric_limits<double>::epsilon();
constexpr double kLargest = std::numeric_limits<double>::max();
constexpr double kLeast = std::numeric_limits<double>::denorm_min();  // smallest number above 0

struct Range {
  const char* name;
  double least, largest;  // smallest and largest valid value
  bool is_int;
  const char* words;  // the range as errors print it
};

constexpr const char* kCountWords = "an int from 0 to 9.22e+18";
// A scale of 0 is valid, since repeated backoffs may end there.
constexpr const char* kScaleWords = "a number from 0 to 3.4e+38";

constexpr Range kRanges[] = {
    {"init_scale", 0.0, kLargestFloat, false, kScaleWords},
    {"new_scale", 0.0, kLargestFloat, false, kScaleWords},
    {"scale", 0.0, kLargestFloat, false, kScaleWords},
    {"min_scale", 0.0, kInfinity, false, "a number of at least 0"},
    {"max_scale", 0.0, kInfinity, false, "a number of at least 0"},
    {"growth_factor", 1.0 + kEpsilon, kLargest, false, "a finite number above 1"},
    {"backoff_factor", kLeast, 1.0 - kEpsilon / 2, false, "a number above 0 and below 1"},
    {"growth_interval", 1.0, kLargestInt64, true, "an int from 1 to 9.22e+18"},
    {"hysteresis", 1.0, kLargestInt32, true, "an int from 1 to 2.15e+09"},
    {"warn_after", 1.0, kLargestInt64, true, "an int from 1 to 9.22e+18"},
    {"_growth_tracker", 0.0, kLargestInt32, true, "an int from 0 to 2.15e+09"},
    {"_hysteresis_tracker", 0.0, kLargestInt32, true, "an int from 0 to 2.15e+09"},
    {"sigma_factor", kLeast, kLargest, false, "a finite number above 0"},
    {"window", 1.0, kLargestInt64, true, "an int from 1 to 9.22e+18"},
    {"warmup_steps", 1.0, kLargestInt64, true, "an int from 1 to 9.22e+18"},
    {"max_norm", kLeast, kInfinity, false, "a number above 0"},
    {"patience", 1.0, kLargestInt64, true, "an int from 1 to 9.22e+18"},
    {"norms", 0.0, kLargestInt64, true, kCountWords},
    {"entered", 0.0, kLargestInt64, true, kCountWords},
    {"outliers", 0.0, kLargestInt64, true, kCountWords},
    {"nonfinite", 0.0, kLargestInt64, true, kCountWords},
    {"last_outlier", 0.0, kLargestInt64, true, kCountWords},
    {"outliers_in_row", 0.0, kLargestInt64, true, kCountWords},
    {"count", 0.0, kLargestInt64, true, kCountWords},
    {"mean", 0.0, kLargest, false, "a finite number of at least 0"},
    {"variance", 0.0, kLargest, false, "a finite number of at least 0"},
    {"last_norm", 0.0, kInfinity, false, "a number of at least 0"}};

}  // namespace

std::string wanted_of_scaler(const std::string& name, double value) {
  for (const Range& range : kRanges) {
    if (name != range.name) continue;
    const bool fits = value >= range.least && value <= range.largest &&
                      (!range.is_int || value == std::floor(value));
    return fits ? "" : range.words;
  }
  TORCH_CHECK(false, "wanted_of_scaler: name must be an option or an entry of a scaler, got ",
              name);
}

}  // namespace amp_ext
