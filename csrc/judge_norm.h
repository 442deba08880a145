// Judges the gradient norm of a step by the norms of earlier steps, for NormGuard of Python. The
// statistics are an exponentially weighted mean and variance, with equal weights while there are
// few norms.
//
// The formulas are those of Finch, "Incremental calculation of weighted mean and variance", 2009,
// section 9. Outliers are defined as by Kumar et al., "ZClip: Adaptive Spike Mitigation for LLM
// Pre-Training", 2025. Unlike ZClip, the statistics ignore outliers, and an outlier is clipped to
// the largest norm that is no outlier.
#pragma once

#include <limits>

#include "element.h"

namespace amp_ext {

// The numbers of a guard, a float64 tensor on its device. amp_ext/optim/norm_guard.py lists the
// same names in this order, and explains the counts.
struct NormJudgement {
  double number;  // number of judged steps; `end` repeats it, to notice an incomplete copy
  double norms, entered, outliers, nonfinite, last_outlier, outliers_in_row, count;
  double mean, variance, last_norm;
  double limit;                        // a larger next norm is an outlier
  double last_was_skipped;             // 1 or 0
  double similar_norms, similar_norm;  // how many norms in a row are close to which
  double end;
  double max_norm_of_step;  // limit to which the step clips the norm, inf for none
  // Options; `clips` is 1 to clip the gradients of outliers to the limit, 0 to skip the step.
  double sigma_factor, window, warmup_steps, max_norm, patience, clips;
};

// A constant, because device code can't call functions of the host.
inline constexpr double kInfinite = std::numeric_limits<double>::infinity();

// Returns the limit above which a norm is an outlier, according to the statistics alone.
AMP_EXT_INLINE double limit_of_statistics(const NormJudgement& known) {
  if (known.entered < known.warmup_steps) return kInfinite;
  const double deviation = larger(square_root(known.variance), 0.01 * known.mean);
  return known.mean + known.sigma_factor * deviation;
}

AMP_EXT_INLINE void enter_statistics(double norm, NormJudgement& known) {
  if (norm > limit_of_statistics(known)) {  // an accepted outlier: restart at its level
    const double ratio = known.mean > 0.0 ? norm / known.mean : 0.0;
    known.variance = known.variance * (ratio * ratio);
    known.mean = norm;
    known.count = 1.0;
  } else {
    known.count += 1.0;
    const double weight = larger(2.0 / (known.window + 1.0), 1.0 / known.count);
    const double difference = norm - known.mean;
    known.mean += weight * difference;
    known.variance = (1.0 - weight) * (known.variance + weight * (difference * difference));
  }
  known.entered += 1.0;
  known.outliers_in_row = 0.0;
}

// Judges a finite norm, and enters it into the statistics if it is no outlier.
AMP_EXT_INLINE void judge_finite_norm(double norm, NormJudgement& known) {
  // Many norms in a row this close mean that the gradients were clipped before the step.
  const double apart = larger(norm - known.similar_norm, known.similar_norm - norm);
  const bool is_similar = norm > 0.0 && apart <= 1e-4 * known.similar_norm;
  known.similar_norms = is_similar ? known.similar_norms + 1.0 : 1.0;
  if (!is_similar) known.similar_norm = norm;
  if (norm <= known.limit) return enter_statistics(norm, known);
  known.outliers += 1.0;
  known.last_outlier = known.norms;
  if (norm <= known.max_norm) known.outliers_in_row += 1.0;
  known.last_was_skipped = 1.0 - known.clips;
  if (known.clips != 0.0) known.max_norm_of_step = known.limit;
}

// Sets `skips` to 1 if the step must write nothing, else to 0. A step after an overflow, or without
// a sum of squares, has no norm.
AMP_EXT_INLINE void judge_norm(const GradientInputs& inputs, NormJudgement& judgement,
                               float& skips) {
  const StepDecision step = StepDecision::read(inputs);
  NormJudgement known = judgement;
  known.max_norm_of_step = kInfinite;
  known.last_was_skipped = 0.0;
  if (inputs.sum_of_squares != nullptr && !step.skip) {
    known.norms += 1.0;
    known.last_norm = step.grad_norm;
    if (is_finite(step.grad_norm)) {
      judge_finite_norm(step.grad_norm, known);
    } else {
      known.last_norm = kInfinite;
      known.nonfinite += 1.0;
      known.last_was_skipped = inputs.skip_nonfinite ? 0.0 : 1.0;
    }
  }
  skips = step.skip || known.last_was_skipped != 0.0 ? 1.0f : 0.0f;
  // After patience - 1 outliers in a row, the statistics accept the next one as a new level.
  const double limit = limit_of_statistics(known);
  const bool yields = known.outliers_in_row + 1.0 >= known.patience;
  known.limit = !yields && limit < known.max_norm ? limit : known.max_norm;
  known.number += 1.0;
  known.end = known.number;
  judgement = known;
}

}  // namespace amp_ext
