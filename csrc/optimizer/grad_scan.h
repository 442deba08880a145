// Scans of the gradients, and the norms that a step takes from them.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/options.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "devices/dispatch.h"
#include "launches.h"
#include "optimizer/param_table.h"

namespace amp_ext {

// Result of a scan of the gradients of one partition on one device.
struct GradScanResult {
  at::Tensor found_inf;        // one float32; not 0 if a gradient contains inf or NaN
  at::Tensor first_nonfinite;  // one int64, index of the first such parameter, or kNoTensor
  at::Tensor sum_of_squares;   // one float64; undefined if no norm is needed
  int64_t partition = 0;
};

// A scan of the gradients of one device and partition.
struct GradScan {
  GradScanResult result;
  std::vector<KernelTensorArgs> all_args;
  std::vector<at::Tensor> contiguous_copies;  // copies of gradients with gaps in memory
};

// The source of the sum of squares from which a step computes the norm of all gradients. A given
// sum comes first, then kAllRanks if parameters are sharded, then the last scan, then a new scan.
enum class NormSource {
  kNone,      // the step needs no norm
  kGiven,     // the caller has the sum from a scaler, or has added it up over the ranks
  kLastScan,  // the last scan of the gradients
  kNewScan,   // a scan by the step itself
  // The sums must be added up over the ranks first, because no rank has all gradients. The caller
  // then passes the total.
  kAllRanks,
};

// Decides where the sum of squares of a step comes from, for every caller. The arguments are
// whether the step needs the norm, whether the caller gives the sum, whether the last scan has it,
// and whether parameters are sharded such that no rank has all gradients.
inline NormSource source_of_norm(bool is_needed, bool is_given, bool was_scanned,
                                 bool is_partitioned) {
  if (!is_needed) return NormSource::kNone;
  if (is_given) return NormSource::kGiven;
  if (is_partitioned) return NormSource::kAllRanks;
  return was_scanned ? NormSource::kLastScan : NormSource::kNewScan;
}

// Inputs of a scan of the gradients.
struct GradScanInputs {
  OptionalTensor found_inf;   // the flag before the scan; nullopt stands for 0
  OptionalTensor grad_scale;  // the scale that the gradients carry, if any
  bool skip_nonfinite;        // leave elements that are inf or NaN out of the sum
  bool sums_squares;          // compute the sum of squares
};

// Scans the gradient of a table that has one parameter, with the scale and skip_nonfinite of
// `inputs`. Writes into the tensors of `result`, which other gradients may share: `index` counts
// the parameter among all of the optimizer.
void scan_only_gradient(const ParamTable& params, int64_t index, const GradScanResult& result,
                        const GradScanInputs& inputs, StepScratch& scratch);

// Scans all gradients of a table. The results have no first_nonfinite.
std::vector<GradScan> scan_gradients(ParamTable& params, const GradScanInputs& inputs,
                                     StepScratch& scratch);

// The scans of an optimizer's gradients. The next step uses their results if no gradient changes.
class AMP_EXT_API GradScans {
 public:
  // Scans all gradients for inf and NaN. Returns one result for each device and partition. Its
  // found_inf is a copy of the given flag, set to 1 if inf or NaN was found. Its first_nonfinite
  // belongs to this object: scans lower it, the update of the loss scale resets it. With shards the
  // results cover only this rank: the caller combines them over the ranks and passes found_inf and
  // sums of squares to the step.
  std::vector<GradScanResult> scan(ParamTable& params, const GradScanInputs& inputs,
                                   StepScratch& scratch);

  // Returns the scans that a step uses, and forgets them. These are the scans of scan(). If they
  // lack a sum that the step needs, or a gradient has changed since, the gradients are scanned
  // again, or there are no scans if the step needs none. Puts the sum of squares into the options,
  // unless it is given. The flags of new scans are added to the found_inf of the options, if there
  // is one.
  std::vector<GradScan> take(ParamTable& params, GradientOptions& options, NormSource norm,
                             StepScratch& scratch);

  // True if the last scan has summed the squares.
  bool has_sums() const;

  // Forgets the last scan. reset() also drops the tensors of first_nonfinite.
  void forget() { scans_.clear(); }
  void reset() { *this = {}; }

 private:
  at::Tensor first_nonfinite_on(const at::Device& device);

  std::vector<GradScan> scans_;
  std::vector<at::Tensor> first_nonfinites_;  // GradScanResult::first_nonfinite of each device
};

}  // namespace amp_ext
