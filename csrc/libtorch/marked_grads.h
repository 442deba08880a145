// The gradients that were there when a call of a scaler failed, told from later ones.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "tensors/tensor_memory.h"

namespace amp_ext {

// Calls visit(param, number) for the parameters of all groups.
template <typename Visit>
void for_each_param(const torch::optim::Optimizer& optimizer, const Visit& visit) {
  int64_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) visit(param, number++);
  }
}

class MarkedGrads {
 public:
  explicit MarkedGrads(const torch::optim::Optimizer& optimizer) {
    for_each_param(optimizer, [&](const at::Tensor& param, int64_t) {
      params_.insert(param.unsafeGetTensorImpl());
      if (!param.grad().defined()) return;
      grads_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(param.grad().getIntrusivePtr()),
                        version_of(param.grad())});
    });
  }

  // Whether the optimizer has one of them, written since or not.
  bool has_any_of(const torch::optim::Optimizer& optimizer) const {
    bool found = false;
    for_each_param(optimizer, [&](const at::Tensor& param, int64_t) {
      found |= mark_of(param.grad()) != nullptr;
    });
    return found;
  }

  // Whether the optimizer has these and no others, as they were.
  bool are_all_of(const torch::optim::Optimizer& optimizer) const {
    bool all = true;
    for_each_param(optimizer, [&](const at::Tensor& param, int64_t) {
      if (!param.grad().defined()) return;
      const Mark* const mark = mark_of(param.grad());
      all &= mark != nullptr && mark->version == version_of(param.grad());
    });
    return all;
  }

  // Whether a parameter has a gradient that was not there itself.
  bool has_others(const torch::optim::Optimizer& optimizer) const {
    bool found = false;
    for_each_param(optimizer, [&](const at::Tensor& param, int64_t) {
      found |= param.grad().defined() && params_.count(param.unsafeGetTensorImpl()) == 0;
    });
    return found;
  }

 private:
  // A weak reference keeps another gradient from taking its address unnoticed.
  struct Mark {
    c10::weak_intrusive_ptr<c10::TensorImpl> grad;
    int64_t version;
  };

  const Mark* mark_of(const at::Tensor& grad) const {
    for (const Mark& mark : grads_) {
      if (grad.defined() && mark.grad._unsafe_get_target() == grad.unsafeGetTensorImpl()) {
        return &mark;
      }
    }
    return nullptr;
  }

  std::vector<Mark> grads_;
  std::unordered_set<const void*> params_;
};

}  // namespace amp_ext
