// What an optimizer of the C++ interface keeps from step to step.
#pragma once

#include <amp_ext/optim.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "libtorch/optimizer_kind.h"
#include "libtorch/values.h"
#include "optimizer/plan.h"
#include "optimizer/states.h"
#include "tensors/python_names.h"

namespace amp_ext::optim {

struct FusedOptimizer::Impl {
  explicit Impl(const OptimizerKind& kind_of_optimizer) : kind(kind_of_optimizer) {}

  const OptimizerKind& kind;
  std::unique_ptr<Plan> plan;
  RoundedParams rounded_params;                   // of the last plan, for the next one
  ScaledGrads scaled_grads;                       // likewise
  std::vector<Kept> kept;                         // by group, when the plan was made
  std::vector<std::pair<size_t, size_t>> places;  // by number in the plan: group, index in it
  size_t state_count = 0;                         // likewise
  // By number, of parameters whose states are in codes. Only contiguous ones have blocks.
  std::map<int64_t, bool> were_contiguous;
  std::shared_ptr<StepProgress> progress;  // of the last plan
  at::Tensor grad_norm;
  std::vector<Dict> other_entries;  // by group, of the state dict that was loaded
  Dict other_states = new_dict();   // of it likewise, which belong to no parameter
  std::mutex mutex;                 // of the next one
  std::optional<std::thread::id> user;
};

// How errors call a parameter.
inline std::string place(size_t group, size_t index) {
  return c10::str("group ", group, ", param ", index);
}

}  // namespace amp_ext::optim
