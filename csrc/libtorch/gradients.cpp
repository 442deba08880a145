// Clips gradients outside of a step, and finds tensors that contain inf or NaN.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <amp_ext/gradients.h>
#include <amp_ext/ops.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "tensors/to_device.h"

namespace amp_ext {

namespace {

// The tensors on one device, with their indices in the list of all tensors.
struct OnDevice {
  at::Device device;
  TensorList tensors;
  std::vector<size_t> indices;
};

std::vector<OnDevice> by_device(const TensorList& tensors) {
  std::vector<OnDevice> devices;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Device device = tensors[i].device();
    auto found = std::find_if(devices.begin(), devices.end(),
                              [&](const OnDevice& entry) { return entry.device == device; });
    if (found == devices.end()) found = devices.insert(found, {device, {}, {}});
    found->tensors.push_back(tensors[i]);
    found->indices.push_back(i);
  }
  return devices;
}

// Returns the names of tensors that contain inf or NaN, with the number of such elements in each.
// Skips integer tensors.
NonfiniteCounts counted(const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  const at::NoGradGuard no_grad;
  NonfiniteCounts counts;
  TensorList scanned;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) continue;
    at::Tensor dense = tensor.detach();
    if (dense.is_sparse()) dense = dense.coalesce();
    if (dense.layout() != at::kStrided) dense = dense.values();
    if (dense.is_complex()) dense = at::view_as_real(dense.resolve_conj());
    if (!dense.is_floating_point()) continue;
    scanned.push_back(dense.element_size() == 1 ? dense.to(at::kFloat) : dense);
    counts.emplace_back(name, 0);
  }
  for (const OnDevice& entry : by_device(scanned)) {
    const at::Tensor found = count_nonfinite(entry.tensors).cpu();
    for (size_t i = 0; i < entry.indices.size(); ++i) {
      counts[entry.indices[i]].second = found.const_data_ptr<int64_t>()[i];
    }
  }
  NonfiniteCounts bad;
  for (auto& count : counts) {
    if (count.second != 0) bad.push_back(std::move(count));
  }
  return bad;
}

}  // namespace

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           bool error_if_nonfinite) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!std::isnan(max_norm), "clip_grad_norm_: max_norm must be a number, got nan");
  TensorList grads;
  std::unordered_set<const void*> seen;
  bool some_in_float64 = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK(parameters[i].defined(), "clip_grad_norm_: parameters[", i,
                "] must be a tensor, got an undefined one");
    const at::Tensor& grad = parameters[i].grad();
    if (!grad.defined() || !seen.insert(parameters[i].unsafeGetTensorImpl()).second) continue;
    grads.push_back(grad);
    some_in_float64 |= grad.scalar_type() == at::kDouble;
  }
  const at::ScalarType dtype = some_in_float64 ? at::kDouble : at::kFloat;
  if (grads.empty()) return at::zeros({}, dtype);
  const std::vector<OnDevice> devices = by_device(grads);
  at::Tensor total;
  for (const OnDevice& entry : devices) {
    const auto options = at::TensorOptions(entry.device);
    const at::Tensor sum_of_squares = at::zeros({}, options.dtype(at::kDouble));
    check_finite_(entry.tensors, at::zeros({}, options.dtype(at::kFloat)), {}, sum_of_squares, {});
    const at::Tensor here = to_device(sum_of_squares, devices[0].device);
    total = total.defined() ? total + here : here;
  }
  const at::Tensor total_norm = total.sqrt().to(dtype);
  TORCH_CHECK(!error_if_nonfinite || total_norm.isfinite().item().toBool(),
              "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it "
              "cannot be clipped. To disable this error and scale the gradients by the non-finite "
              "norm anyway, set `error_if_nonfinite=False`");
  for (const OnDevice& entry : devices) {
    clip_grads_(entry.tensors, to_device(total_norm, entry.device), max_norm);
  }
  return total_norm;
}

NonfiniteCounts find_nonfinite(const torch::nn::Module& model, bool params) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& param : model.named_parameters()) {
    tensors.emplace_back(param.key(), params ? param.value() : param.value().grad());
  }
  if (params) {
    for (const auto& buffer : model.named_buffers()) {
      tensors.emplace_back(buffer.key(), buffer.value());
    }
  }
  return counted(tensors);
}

NonfiniteCounts find_nonfinite(const torch::optim::Optimizer& optimizer, bool params) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  const auto& groups = optimizer.param_groups();
  TORCH_CHECK(!groups.empty(),
              "find_nonfinite: the optimizer has no parameter groups. If it was moved from, pass "
              "the object that it was moved to.");
  for (size_t group = 0; group < groups.size(); ++group) {
    for (size_t i = 0; i < groups[group].params().size(); ++i) {
      const at::Tensor& param = groups[group].params()[i];
      if (!param.defined()) continue;
      tensors.emplace_back(c10::str("group ", group, ", param ", i), params ? param : param.grad());
    }
  }
  return counted(tensors);
}

}  // namespace amp_ext
