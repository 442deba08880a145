// Running statistics of the gradient norm, on the optimizer's device, for the NormGuards of Python
// and C++.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>

#include <cstdint>
#include <vector>

#include "elements/norm_guard.h"
#include "tensors/mirrored_bytes.h"

namespace amp_ext {

// The latest gradient norms, oldest first.
struct NormHistory {
  int64_t first_norm;  // position of norms[0] among all norms so far, counted from 1
  std::vector<double> norms;
  std::vector<bool> withheld;  // whether the step of each norm was skipped or clipped
};

class AMP_EXT_API NormStatistics {
 public:
  explicit NormStatistics(const NormGuardHyperparameters& hyperparameters);
  ~NormStatistics();
  NormStatistics(const NormStatistics&) = delete;
  NormStatistics& operator=(const NormStatistics&) = delete;

  const NormGuardHyperparameters hyperparameters;

  // Moves the statistics to a device, where later steps update them.
  void move_to(const at::Device& device);
  at::Device device() const { return bytes_.device(); }

  // Returns the bytes of a NormGuardMemory on `device`: the statistics themselves, or a copy
  // without the history if they are elsewhere.
  at::Tensor bytes_on(const at::Device& device) const;

  // Read the state after the last step that the device has finished. With `wait`, the host first
  // waits for all launched steps.
  NormSummary read(bool wait) const;
  NormHistory history(bool wait) const;
  bool last_step_skipped(bool wait) const { return read(wait).last_was_skipped != 0; }

  // Returns true once if recent norms are nearly equal, as after clipping before the step. The
  // caller then shows warning().
  bool must_warn();
  static const char* warning();

  // Restores the fields that NormSummary::for_each_field visits, and derives or resets the others.
  void load(const NormSummary& summary);

 private:
  void allocate(const at::Device& device);
  void fill(NormGuardMemory memory);

  at::Tensor bytes_;                 // a NormGuardMemory on device()
  at::Tensor mirror_;                // copy of bytes_ in host memory, updated by kernels
  std::vector<at::Tensor> retired_;  // bytes_ and mirror_ of earlier devices
  int64_t first_norm_ = 0;           // number of norms before the last load()
  bool has_warned_ = false;
};

}  // namespace amp_ext
