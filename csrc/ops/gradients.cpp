// Operations over lists of gradients: checks the lists and runs the engines.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <amp_ext/ops.h>

#include <memory>
#include <string>
#include <utility>

#include "devices/dispatch.h"
#include "launches.h"
#include "ops/scalars.h"

namespace amp_ext {

namespace {

void check_gradients(const char* operation, const char* list, const TensorList& grads,
                     const at::Device& device, bool are_written = false) {
  for (size_t i = 0; i < grads.size(); ++i) {
    const std::string name = c10::str(list, "[", i, "]");
    check_is_plain(operation, name, grads[i]);
    TORCH_CHECK(dtype_of(grads[i]).has_value(), operation, ": ", name,
                " must be Float, Double, Half or BFloat16, got ", grads[i].scalar_type());
    TORCH_CHECK(grads[i].device() == device, operation, ": ", name, " must be on ", device,
                ", got ", grads[i].device());
    if (are_written) check_can_be_written(operation, name, grads[i]);
  }
}

// Kernel arguments of tensors that are only read.
struct DenseReads {
  TensorList copies;  // the tensors, or dense copies of those with gaps
  std::vector<KernelTensorArgs> all_args;

  explicit DenseReads(const TensorList& tensors) {
    for (const at::Tensor& tensor : tensors) {
      copies.push_back(tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous());
      all_args.push_back(gradient_args(tensor, const_cast<void*>(copies.back().const_data_ptr()),
                                       static_cast<int64_t>(all_args.size())));
    }
  }
};

// Multiplies checked gradients in place; gradients with gaps in memory go through dense copies. If
// a launch fails, gradients of earlier launches stay multiplied, and the error gives their number.
void multiply(const char* operation, const TensorList& grads, const at::Device& device,
              const MultiplyInputs& inputs, float* found_inf, int64_t* first_nonfinite) {
  const at::NoGradGuard no_grad;
  TensorList memory;  // the gradients, or dense copies of those with gaps
  std::vector<KernelTensorArgs> all_args;
  for (const at::Tensor& grad : grads) {
    at::Tensor dense = grad;
    if (!grad.is_non_overlapping_and_dense()) {
      dense = at::empty(grad.sizes(), grad.options().requires_grad(false));
      dense.copy_(grad);
    }
    all_args.push_back(
        gradient_args(grad, dense.mutable_data_ptr(), static_cast<int64_t>(all_args.size())));
    memory.push_back(std::move(dense));
  }
  const auto is_launched = std::make_unique<bool[]>(grads.size());
  int64_t multiplied = 0;
  const auto write_back = [&] {
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!is_launched[i]) continue;
      if (!memory[i].is_same(grads[i])) grads[i].copy_(memory[i]);
      bump_version(grads[i]);
      ++multiplied;
    }
  };
  try {
    backend_of(device).multiply(device, all_args, inputs, found_inf, first_nonfinite,
                                is_launched.get());
  } catch (c10::Error& error) {
    write_back();
    if (multiplied == 0) throw;
    error.add_context(c10::str(operation, ": the call failed after changing ", multiplied, " of ",
                               grads.size(),
                               " gradients. Call zero_grad() and run backward() again."));
    throw;
  }
  if (device.is_cpu() && inputs.factor() == 1.0f) return;  // a factor of 1 writes nothing
  write_back();
}

}  // namespace

void check_finite_(const TensorList& tensors, const at::Tensor& found_inf,
                   const OptionalTensor& grad_scale, const OptionalTensor& sum_of_squares,
                   const OptionalTensor& first_nonfinite) {
  const char* const operation = "check_finite_";
  const at::Device device = device_of(operation, "found_inf", found_inf);
  check_number(operation, "found_inf", found_inf, at::kFloat, device);
  const float* const scale =
      number_data<float>(operation, "grad_scale", grad_scale, at::kFloat, device);
  double* const sum =
      number_data<double>(operation, "sum_of_squares", sum_of_squares, at::kDouble, device);
  int64_t* const first =
      number_data<int64_t>(operation, "first_nonfinite", first_nonfinite, at::kLong, device);
  check_gradients(operation, "tensors", tensors, device);
  const DenseReads reads(tensors);
  if (sum != nullptr) sum_of_squares->zero_();
  StepScratch scratch;
  const GradScanLaunch launch{reads.all_args.data(),
                              static_cast<int64_t>(reads.all_args.size()),
                              scale,
                              found_inf.mutable_data_ptr<float>(),
                              first,
                              sum,
                              /*skip_nonfinite=*/false};
  backend_of(device).scan(device, launch, scratch);
}

at::Tensor count_nonfinite(const TensorList& tensors) {
  const char* const operation = "count_nonfinite";
  const auto count = static_cast<int64_t>(tensors.size());
  if (count == 0) return at::zeros({0}, at::TensorOptions().dtype(at::kLong));
  const at::Device device = device_of(operation, "tensors[0]", tensors[0]);
  check_gradients(operation, "tensors", tensors, device);
  const at::Tensor counts = at::zeros({count}, at::TensorOptions(device).dtype(at::kLong));
  backend_of(device).count_nonfinite(device, DenseReads(tensors).all_args,
                                     counts.mutable_data_ptr<int64_t>());
  return counts;
}

at::Tensor count_division_errors(const at::Device& device, int64_t stride) {
  const char* const operation = "count_division_errors";
  check_device(operation, "device", device);
  TORCH_CHECK(stride >= 1, operation, ": stride must be at least 1, got ", stride);
  const at::Tensor wrong = at::zeros({3}, at::TensorOptions(device).dtype(at::kLong));
  backend_of(device).count_division_errors(device, stride, wrong.mutable_data_ptr<int64_t>());
  return wrong;
}

void unscale_(const TensorList& grads, const at::Tensor& inv_scale, const at::Tensor& found_inf,
              const OptionalTensor& first_nonfinite) {
  const char* const operation = "unscale_";
  const at::Device device = device_of(operation, "found_inf", found_inf);
  check_number(operation, "found_inf", found_inf, at::kFloat, device);
  check_number(operation, "inv_scale", inv_scale, at::kFloat, device);
  check_gradients(operation, "grads", grads, device, /*are_written=*/true);
  MultiplyInputs inputs;
  inputs.inv_scale = inv_scale.const_data_ptr<float>();
  multiply(operation, grads, device, inputs, found_inf.mutable_data_ptr<float>(),
           number_data<int64_t>(operation, "first_nonfinite", first_nonfinite, at::kLong, device));
}

void clip_grads_(const TensorList& grads, const at::Tensor& total_norm, double max_norm) {
  const char* const operation = "clip_grads_";
  const at::Device device = device_of(operation, "total_norm", total_norm);
  const bool is_wide = total_norm.scalar_type() == at::kDouble;
  check_number(operation, "total_norm", total_norm, is_wide ? at::kDouble : at::kFloat, device);
  check_gradients(operation, "grads", grads, device, /*are_written=*/true);
  TensorList narrow, wide;
  for (const at::Tensor& grad : grads) {
    (is_wide && grad.scalar_type() == at::kDouble ? wide : narrow).push_back(grad);
  }
  const at::Tensor norm = total_norm.to(at::kFloat);
  MultiplyInputs inputs;
  inputs.total_norm = norm.const_data_ptr<float>();
  inputs.max_norm = max_norm;
  multiply(operation, narrow, device, inputs, nullptr, nullptr);
  if (wide.empty()) return;
  // Float64 gradients are clipped in float64, as torch does.
  const at::NoGradGuard no_grad;
  const at::Tensor inverse = (total_norm.reshape({}) + 1e-6).reciprocal();
  const at::Tensor coefficient = (inverse * max_norm).clamp_max(1.0);
  if (coefficient.is_cpu() && coefficient.item().toDouble() == 1.0) return;
  for (const at::Tensor& grad : wide) grad.mul_(coefficient);
}

}  // namespace amp_ext
