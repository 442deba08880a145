// Judges the norm of the gradients of a step by the norms of the steps before, and keeps their
// statistics: mean and variance with exponential weights, which are those of all norms while these
// are few.
//
// Finch, "Incremental calculation of weighted mean and variance", 2009, section 9. Which norms are
// outliers follows Kumar et al., "ZClip: Adaptive Spike Mitigation for LLM Pre-Training", 2025, who
// clip an outlier to another value than the limit and let that enter: here none does.
#pragma once

#include <amp_ext/hyperparameters.h>

#include <cstdint>
#include <limits>

#include "elements/mirror.h"
#include "elements/numeric.h"

namespace amp_ext {

// What is known after a number of norms.
struct NormSummary : ReportStamps {
  int64_t norms = 0;            // of steps, from 1, with those that are not finite
  int64_t entered = 0;          // the statistics, these and earlier ones
  int64_t outliers = 0;         // by which a step was skipped or its gradients clipped
  int64_t nonfinite = 0;        // norms
  int64_t last_outlier = 0;     // the number of its norm; 0: there was none
  int64_t outliers_in_row = 0;  // of those that are not above max_norm
  int64_t last_was_skipped = 0;
  int64_t count = 0;  // of norms in these statistics
  double mean = 0.0;
  double variance = 0.0;
  double last_norm = 0.0;
  double limit = std::numeric_limits<double>::infinity();  // above which the next is an outlier
  int64_t similar_norms = 0;                               // in a row, to similar_norm
  double similar_norm = 0.0;

  // Calls visit(name, &NormSummary::field) for what a state dict has, from which all else follows.
  template <typename Visit>
  static void for_each_field(const Visit& visit) {
    visit("norms", &NormSummary::norms);
    visit("entered", &NormSummary::entered);
    visit("outliers", &NormSummary::outliers);
    visit("nonfinite", &NormSummary::nonfinite);
    visit("last_outlier", &NormSummary::last_outlier);
    visit("outliers_in_row", &NormSummary::outliers_in_row);
    visit("count", &NormSummary::count);
    visit("mean", &NormSummary::mean);
    visit("variance", &NormSummary::variance);
    visit("last_norm", &NormSummary::last_norm);
  }
};

// What a guard keeps on a device, and in part once more in host memory.
struct NormGuardMemory : NormSummary {
  NormGuardHyperparameters hyperparameters;
  NormGuardMemory* mirror = nullptr;
  double history[kHistory] = {};  // norms; negative: the step was skipped, or gradients clipped
};

// Norms this near to each other, by their share, are not those of gradients: someone has clipped.
inline constexpr double kSimilarity = 1e-4;
inline constexpr int64_t kManySimilarNorms = 64;

AMP_EXT_INLINE bool is_outlier(float norm, double limit) {
  return is_finite(norm) && static_cast<double>(norm) > limit;
}

// Standard deviation of the norms, and at least 1 % of their mean.
AMP_EXT_INLINE double deviation_of(const NormSummary& summary) {
  return larger(square_root(summary.variance), 0.01 * summary.mean);
}

// Above which a norm is an outlier of these statistics.
AMP_EXT_INLINE double limit_of(const NormSummary& summary,
                               const NormGuardHyperparameters& hyperparameters) {
  if (summary.entered < hyperparameters.warmup_steps) {
    return std::numeric_limits<double>::infinity();
  }
  return summary.mean + hyperparameters.sigma_factor * deviation_of(summary);
}

// The limit of the next norm. The last outlier of so many in a row is none: it begins a new level.
AMP_EXT_INLINE double next_limit(const NormSummary& summary,
                                 const NormGuardHyperparameters& hyperparameters) {
  const double limit = limit_of(summary, hyperparameters);
  const bool yields = summary.outliers_in_row + 1 >= hyperparameters.patience;
  return !yields && limit < hyperparameters.max_norm ? limit : hyperparameters.max_norm;
}

AMP_EXT_INLINE void enter_statistics(double norm, const NormGuardHyperparameters& hyperparameters,
                                     NormSummary& summary) {
  if (norm > limit_of(summary, hyperparameters)) {  // a new level
    const double ratio = summary.mean > 0.0 ? norm / summary.mean : 0.0;
    summary.variance = summary.variance * (ratio * ratio);
    summary.mean = norm;
    summary.count = 1;
  } else {
    summary.count += 1;
    const double weight = larger(2.0 / (static_cast<double>(hyperparameters.window) + 1.0),
                                 1.0 / static_cast<double>(summary.count));
    const double difference = norm - summary.mean;
    summary.mean += weight * difference;
    summary.variance = (1.0 - weight) * (summary.variance + weight * (difference * difference));
  }
  summary.entered += 1;
  summary.outliers_in_row = 0;
}

// Counts the norm of a step, which was skipped or not.
AMP_EXT_INLINE void count_norm(float norm, bool was_skipped, NormGuardMemory& memory) {
  const NormGuardHyperparameters& hyperparameters = memory.hyperparameters;
  const double value = is_finite(norm) ? norm : std::numeric_limits<double>::infinity();
  const bool is_out = is_outlier(norm, memory.limit);
  memory.history[memory.norms % kHistory] = is_out || was_skipped ? -value : value;
  memory.norms += 1;
  memory.last_norm = value;
  if (!is_finite(norm)) {
    memory.nonfinite += 1;
    return;
  }
  const double apart = larger(value - memory.similar_norm, memory.similar_norm - value);
  const bool is_similar = value > 0.0 && apart <= kSimilarity * memory.similar_norm;
  memory.similar_norms = is_similar ? memory.similar_norms + 1 : 1;
  if (!is_similar) memory.similar_norm = value;
  if (is_out) {
    memory.outliers += 1;
    memory.last_outlier = memory.norms;
    if (value <= hyperparameters.max_norm) memory.outliers_in_row += 1;
  } else {
    enter_statistics(value, hyperparameters, memory);
  }
  memory.limit = next_limit(memory, hyperparameters);
}

// Ends a step. There is no norm to count after an overflow, by which a scaler goes, and where no
// parameter had a gradient.
AMP_EXT_INLINE void end_guarded_step(float norm, bool is_absent, bool was_skipped,
                                     NormGuardMemory& memory) {
  if (!is_absent) count_norm(norm, was_skipped, memory);
  memory.last_was_skipped = !is_absent && was_skipped ? 1 : 0;
  memory.started += 1;  // the number of this step
  memory.finished = memory.started;
  NormGuardMemory* const mirror = memory.mirror;
  write_mirror(mirror, memory.started, [&] {
    copy_words(&memory, mirror, 2, sizeof(NormSummary) / sizeof(int64_t), 1);
    if (memory.norms > 0) {
      const int64_t newest = (memory.norms - 1) % kHistory;
      copy_words(memory.history + newest, mirror->history + newest, 0, 1, 1);
    }
  });
}

}  // namespace amp_ext
