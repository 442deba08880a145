// An average of weights over the steps of an optimizer that have landed.
//
// Exponential: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992,
// with the weights of torch.optim.swa_utils.get_ema_multi_avg_fn. Equal: Izmailov et al.,
// "Averaging Weights Leads to Wider Optima and Better Generalization", 2018. While it warms up, the
// decay grows as in TensorFlow's ExponentialMovingAverage.
#pragma once

#include <cstdint>

#include "elements/numeric.h"

namespace amp_ext {

struct AverageHyperparameters {
  double decay = 0.999;   // of the average, each time
  bool is_equal = false;  // every weight counts the same, in place of the decay
  bool warms_up = false;  // the decay is (1 + n) / (10 + n) after n averages, as long as it is less
  int64_t every = 1;      // an average is taken at each such step, of those that have landed
};

// What an average has seen, on its device.
struct AverageCounters {
  int64_t steps;     // that have landed
  int64_t averages;  // that were taken
};

// What one step means for an average.
struct AverageStep {
  bool step_applied;
  bool is_taken;
  bool is_first;  // the average becomes the weight
  Interpolation<float> towards_weight;
  uint64_t number;  // of the average, from 1

  static AMP_EXT_INLINE AverageStep of(const AverageHyperparameters& hyperparameters,
                                       const AverageCounters& counters, bool step_applied) {
    const auto before = static_cast<double>(counters.averages);
    double decay = hyperparameters.decay;
    if (hyperparameters.warms_up) {
      const double limit = (1.0 + before) / (10.0 + before);
      decay = limit < decay ? limit : decay;
    }
    if (hyperparameters.is_equal) decay = before / (before + 1.0);
    const double weight = hyperparameters.is_equal ? 1.0 / (before + 1.0) : 1.0 - decay;
    return {step_applied, step_applied && (counters.steps + 1) % hyperparameters.every == 0,
            counters.averages == 0, Interpolation<float>::of(weight, decay),
            static_cast<uint64_t>(counters.averages + 1)};
  }

  template <typename V>
  AMP_EXT_INLINE V operator()(V average, V weight) const {
    return select(is_first, weight, towards_weight(average, weight));
  }

  // Where the first element of a tensor stands for the dither of a narrow average, which hashes the
  // place: it is elsewhere at each average. The sequence by which parameters are dithered would do
  // worse here: an average goes back and forth between two numbers, each time by a small share of
  // what lies between, and by a sequence that remembers the last time it ends up to 40 % of the way
  // off, where hashes are right in the mean. Eight neighbours still share out one unit.
  AMP_EXT_INLINE int64_t dither_place(int64_t global_offset) const {
    constexpr uint64_t kStride = 0x9E3779B97F4A7C18u;      // eight times an odd number
    constexpr uint64_t kPlaces = (uint64_t{1} << 62) - 1;  // so that places behind it are numbers
    return static_cast<int64_t>((static_cast<uint64_t>(global_offset) + number * kStride) &
                                kPlaces);
  }

  AMP_EXT_INLINE void advance(AverageCounters& counters) const {
    if (step_applied) ++counters.steps;
    if (is_taken) ++counters.averages;
  }
};

}  // namespace amp_ext
