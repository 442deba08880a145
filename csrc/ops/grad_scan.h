// A scan of gradients for inf and NaN, and for the sum of their squares.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/options.h>

#include <cstdint>
#include <vector>

#include "devices/dispatch.h"
#include "launches.h"

namespace amp_ext {

// A scan, which only reads gradients. An object may be used for many scans.
class AMP_EXT_API GradScan {
 public:
  // The gradients of one device and partition, and what was found in them.
  struct Part {
    at::Device device;
    int64_t partition;
    std::vector<KernelTensorArgs> all_args = {};
    std::vector<at::Tensor> copies = {};  // dense copies of gradients with gaps in memory
    at::Tensor found_inf = {};            // one float32
    at::Tensor first_nonfinite = {};  // one int64, lowered to the number of the first such gradient
    at::Tensor sum_of_squares = {};   // one float64; undefined if it is not asked for
  };

  void clear() { parts_.clear(); }
  // Adds a gradient that kernels can read. `number` identifies it in first_nonfinite.
  void add(const at::Tensor& grad, int64_t number, int64_t partition = 0);
  std::vector<Part>& parts() { return parts_; }

  // Scans the gradients. found_inf becomes a copy of the given flag (0 without one), and is set to
  // 1 if a gradient has inf or NaN or the scale has no finite inverse. With `skip_nonfinite`, sums
  // the squares of finite elements only.
  void run(const OptionalTensor& found_inf, const OptionalTensor& grad_scale, bool sums_squares,
           bool skip_nonfinite, StepScratch& scratch);

  // Returns the sum of squares over all parts, or an undefined tensor if there are none.
  at::Tensor sum_of_squares() const;

 private:
  std::vector<Part> parts_;
};

}  // namespace amp_ext
