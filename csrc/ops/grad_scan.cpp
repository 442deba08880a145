// Launches scans of gradients.
#include "ops/grad_scan.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops/scalars.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

void GradScan::add(const at::Tensor& grad, int64_t number, int64_t partition) {
  const at::Device device = grad.device();
  const auto is_of = [&](const Part& part) {
    return part.device == device && part.partition == partition;
  };
  auto part = std::find_if(parts_.begin(), parts_.end(), is_of);
  if (part == parts_.end()) part = parts_.insert(part, Part{device, partition});
  const bool is_dense = grad.is_non_overlapping_and_dense();
  if (!is_dense) part->copies.push_back(grad.contiguous());
  const at::Tensor& dense = is_dense ? grad : part->copies.back();
  part->all_args.push_back(gradient_args(dense, const_cast<void*>(dense.const_data_ptr()), number));
}

void GradScan::run(const OptionalTensor& found_inf, const OptionalTensor& grad_scale,
                   bool sums_squares, bool skip_nonfinite, StepScratch& scratch) {
  const at::NoGradGuard no_grad;
  for (Part& part : parts_) {
    const auto float32 = at::TensorOptions(part.device).dtype(at::kFloat);
    part.found_inf = found_inf.has_value()
                         ? found_inf->to(part.device, at::kFloat,
                                         /*non_blocking=*/!part.device.is_cpu(), /*copy=*/true)
                         : at::zeros({}, float32);
    if (sums_squares) part.sum_of_squares = at::zeros({}, float32.dtype(at::kDouble));
  }
  for (Part& part : parts_) {
    const at::Tensor scale =
        grad_scale.has_value() ? scalar_on(part.device, *grad_scale) : at::Tensor();
    const at::Tensor &first = part.first_nonfinite, &sum = part.sum_of_squares;
    const GradScanLaunch launch{part.all_args.data(),
                                static_cast<int64_t>(part.all_args.size()),
                                float_data(scale),
                                part.found_inf.mutable_data_ptr<float>(),
                                first.defined() ? first.mutable_data_ptr<int64_t>() : nullptr,
                                sum.defined() ? sum.mutable_data_ptr<double>() : nullptr,
                                skip_nonfinite};
    backend_of(part.device).scan(part.device, launch, scratch);
  }
}

at::Tensor GradScan::sum_of_squares() const {
  at::Tensor total;
  for (const Part& part : parts_) {
    total = total.defined() ? total.add(to_device(part.sum_of_squares, total.device()))
                            : part.sum_of_squares;
  }
  return total;
}

}  // namespace amp_ext
