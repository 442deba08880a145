// The statistics by which a guard judges the norm of a step, on the device of an optimizer. The
// guards of both languages hold one.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>

#include <cstdint>
#include <vector>

#include "elements/norm_guard.h"
#include "tensors/mirrored_bytes.h"

namespace amp_ext {

// The last norms, oldest first, and whether the step was skipped or its gradients clipped.
struct NormHistory {
  int64_t first_norm;  // its number
  std::vector<double> norms;
  std::vector<bool> withheld;
};

class AMP_EXT_API NormStatistics {
 public:
  explicit NormStatistics(const NormGuardHyperparameters& hyperparameters);
  ~NormStatistics();
  NormStatistics(const NormStatistics&) = delete;
  NormStatistics& operator=(const NormStatistics&) = delete;

  const NormGuardHyperparameters hyperparameters;

  // Steps.

  // Keeps them on this device from here on.
  void move_to(const at::Device& device);
  at::Device device() const { return bytes_.device(); }

  // The bytes of a NormGuardMemory on a device: a copy without the history, unless it is kept
  // there.
  at::Tensor bytes_on(const at::Device& device) const;

  // Answers, as of the last step that the device has finished. To `wait` is for all steps that were
  // launched.
  NormSummary read(bool wait) const;
  NormHistory history(bool wait) const;
  bool last_step_skipped(bool wait) const { return read(wait).last_was_skipped != 0; }

  // Whether to warn that all norms are the same: someone else clips the gradients. Once is enough.
  bool must_warn();
  static const char* warning();

  // State dicts. Of what is loaded, the fields count that a NormSummary names, and the rest
  // follows.
  void load(const NormSummary& summary);

 private:
  void allocate(const at::Device& device);
  void fill(NormGuardMemory memory);

  at::Tensor bytes_;                 // of a NormGuardMemory
  at::Tensor mirror_;                // likewise, in host memory
  std::vector<at::Tensor> retired_;  // the same of other devices
  int64_t first_norm_ = 0;           // before the oldest that is remembered
  bool has_warned_ = false;
};

}  // namespace amp_ext
