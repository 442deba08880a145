// An average of weights over the applied (not skipped) steps of an optimizer.
//
// Exponential averages: Polyak and Juditsky, "Acceleration of stochastic approximation by
// averaging", 1992, with the weights of torch.optim.swa_utils.get_ema_multi_avg_fn. Equal weights:
// Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", 2018. The
// decay warms up as in TensorFlow's ExponentialMovingAverage.
#pragma once

#include <cstdint>

#include "elements/numeric.h"

namespace amp_ext {

struct AverageHyperparameters {
  double decay = 0.999;   // weight of the old average at each update
  bool is_equal = false;  // average all weights equally, without the decay
  bool warms_up = false;  // limit the decay to (1 + n) / (10 + n) after n averages
  int64_t every = 1;      // average after every `every`-th applied step
};

// Counters of an average, on its device.
struct AverageCounters {
  int64_t steps;     // number of applied steps
  int64_t averages;  // number of averages taken
};

// Decides whether an optimizer step updates an average, and holds the constants of the update.
struct AverageStep {
  bool step_applied;
  bool is_taken;  // true if this step is averaged
  bool is_first;  // true for the first average, a copy of the weight
  Interpolation<float> towards_weight;
  uint64_t number;  // number of this average, from 1

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

  // Returns the index that a tensor's first element has in the dithering of an average. It differs
  // at each average, because an average moves by small fractions of the distance between two
  // storable values. The thresholds of a Weyl sequence would let it settle up to 40 % of that
  // distance off.
  AMP_EXT_INLINE int64_t dither_place(int64_t global_offset) const {
    constexpr uint64_t kStride = 0x9E3779B97F4A7C18u;      // eight times an odd number
    constexpr uint64_t kPlaces = (uint64_t{1} << 62) - 1;  // leaves room to add an index
    return static_cast<int64_t>((static_cast<uint64_t>(global_offset) + number * kStride) &
                                kPlaces);
  }

  AMP_EXT_INLINE void advance(AverageCounters& counters) const {
    if (step_applied) ++counters.steps;
    if (is_taken) ++counters.averages;
  }
};

}  // namespace amp_ext
