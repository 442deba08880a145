// Compares the gradient norm of a step with the norms of earlier steps. The statistics are an
// exponentially weighted mean and variance, with equal weights while there are few norms.
//
// The formulas are those of Finch, "Incremental calculation of weighted mean and variance", 2009,
// section 9. Outliers are defined as by Kumar et al., "ZClip: Adaptive Spike Mitigation for LLM
// Pre-Training", 2025. Unlike ZClip, the statistics ignore outliers, and an outlier is clipped to
// the largest norm that is no outlier.
#pragma once

#include <amp_ext/hyperparameters.h>

#include <cstdint>
#include <limits>

#include "elements/mirror.h"
#include "elements/numeric.h"

namespace amp_ext {

// State of a guard after the norms that it has seen so far.
struct NormSummary : ReportStamps {
  int64_t norms = 0;         // number of norms so far, including inf and NaN
  int64_t entered = 0;       // number of norms that ever entered the statistics
  int64_t outliers = 0;      // number of norms at which the guard skipped or clipped
  int64_t nonfinite = 0;     // number of norms that were inf or NaN
  int64_t last_outlier = 0;  // position of the last outlier among all norms, from 1; 0: none yet
  // Number of outliers since a norm last entered the statistics. Norms above max_norm don't count.
  int64_t outliers_in_row = 0;
  int64_t last_was_skipped = 0;
  int64_t count = 0;  // number of norms in the statistics since they last restarted
  double mean = 0.0;
  double variance = 0.0;
  double last_norm = 0.0;
  double limit = std::numeric_limits<double>::infinity();  // a larger next norm is an outlier
  int64_t similar_norms = 0;  // number of consecutive norms that are close to similar_norm
  double similar_norm = 0.0;

  // Calls visit(name, &NormSummary::field) for the fields of a state dict.
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

// Memory of a guard on the device. Its mirror in host memory holds the summary and the history.
struct NormGuardMemory : NormSummary {
  NormGuardHyperparameters hyperparameters;
  NormGuardMemory* mirror = nullptr;
  double history[kHistory] = {};  // past norms; negative if the guard skipped or clipped
};

// Relative distance below which two norms are "similar". Many similar norms in a row mean that the
// gradients were clipped before the step.
inline constexpr double kSimilarity = 1e-4;
inline constexpr int64_t kManySimilarNorms = 64;

AMP_EXT_INLINE bool is_outlier(float norm, double limit) {
  return is_finite(norm) && static_cast<double>(norm) > limit;
}

// Returns the standard deviation of the norms, at least 1 % of their mean.
AMP_EXT_INLINE double deviation_of(const NormSummary& summary) {
  return larger(square_root(summary.variance), 0.01 * summary.mean);
}

// Returns the limit above which a norm is an outlier, according to the statistics alone.
AMP_EXT_INLINE double limit_of(const NormSummary& summary,
                               const NormGuardHyperparameters& hyperparameters) {
  if (summary.entered < hyperparameters.warmup_steps) {
    return std::numeric_limits<double>::infinity();
  }
  return summary.mean + hyperparameters.sigma_factor * deviation_of(summary);
}

// Returns the limit for the next norm. After patience - 1 outliers in a row, only max_norm is a
// limit, so that the statistics accept the next outlier.
AMP_EXT_INLINE double next_limit(const NormSummary& summary,
                                 const NormGuardHyperparameters& hyperparameters) {
  const double limit = limit_of(summary, hyperparameters);
  const bool yields = summary.outliers_in_row + 1 >= hyperparameters.patience;
  return !yields && limit < hyperparameters.max_norm ? limit : hyperparameters.max_norm;
}

AMP_EXT_INLINE void enter_statistics(double norm, const NormGuardHyperparameters& hyperparameters,
                                     NormSummary& summary) {
  if (norm > limit_of(summary, hyperparameters)) {  // an accepted outlier: restart at its level
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

// Counts the norm of a step, and adds it to the statistics unless it is an outlier or not finite.
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

// Counts the norm of a step and updates the mirror. `is_absent` is true if a scaler found an
// overflow or no parameter had a gradient.
AMP_EXT_INLINE void end_guarded_step(float norm, bool is_absent, bool was_skipped,
                                     NormGuardMemory& memory) {
  if (!is_absent) count_norm(norm, was_skipped, memory);
  memory.last_was_skipped = !is_absent && was_skipped ? 1 : 0;
  memory.started += 1;  // number of this step
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
