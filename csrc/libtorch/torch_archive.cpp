// Reads archives of torch::optim's Adam, AdamW and SGD with torch's own classes.
#include "libtorch/torch_archive.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <type_traits>
#include <utility>

#include "libtorch/values.h"

namespace amp_ext::optim {

namespace {

template <typename Options>
Dict group_of(const Options& options) {
  auto group = new_dict();
  group.insert("lr", options.lr());
  group.insert("weight_decay", options.weight_decay());
  if constexpr (std::is_same_v<Options, torch::optim::SGDOptions>) {
    group.insert("momentum", options.momentum());
    group.insert("dampening", options.dampening());
    group.insert("nesterov", options.nesterov());
  } else {
    const auto [beta1, beta2] = options.betas();
    group.insert("betas", c10::ivalue::Tuple::create(beta1, beta2));
    group.insert("eps", options.eps());
    group.insert("amsgrad", options.amsgrad());
  }
  return group;
}

template <typename State>
Dict entries_of(const State& state) {
  auto entries = new_dict();
  const auto insert = [&](const char* key, const at::Tensor& tensor) {
    if (tensor.defined()) entries.insert(key, tensor);
  };
  if constexpr (std::is_same_v<State, torch::optim::SGDParamState>) {
    insert("momentum_buffer", state.momentum_buffer());
  } else {
    entries.insert("step", static_cast<double>(state.step()));
    insert("exp_avg", state.exp_avg());
    insert("exp_avg_sq", state.exp_avg_sq());
    insert("max_exp_avg_sq", state.max_exp_avg_sq());
  }
  return entries;
}

// Loads an archive into an optimizer of torch::optim over the same parameters, and returns the
// state dict of that optimizer in Python's layout.
template <typename Optimizer, typename Options, typename State>
c10::IValue read_by(torch::serialize::InputArchive& archive,
                    const std::vector<torch::optim::OptimizerParamGroup>& param_groups) {
  std::vector<torch::optim::OptimizerParamGroup> same;
  for (const auto& group : param_groups) same.emplace_back(group.params());
  Optimizer optimizer(same, Options(0.0));
  optimizer.load(archive);
  auto groups = new_list();
  auto states = new_dict();
  int64_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    const Dict read = group_of(static_cast<const Options&>(group.options()));
    auto params = new_list();
    for (const at::Tensor& param : group.params()) {
      const auto state = optimizer.state().find(param.unsafeGetTensorImpl());
      if (state != optimizer.state().end()) {
        states.insert(number, entries_of(static_cast<const State&>(*state->second)));
      }
      params.push_back(number++);
    }
    read.insert("params", params);
    groups.push_back(read);
  }
  auto state_dict = new_dict();
  state_dict.insert("state", states);
  state_dict.insert("param_groups", groups);
  return state_dict;
}

}  // namespace

std::optional<c10::IValue> read_torch_archive(
    const std::string& name, torch::serialize::InputArchive& archive,
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups) {
  torch::serialize::InputArchive groups;
  if (!archive.try_read("param_groups", groups)) return {};
  namespace theirs = torch::optim;
  if (name == "Adam") {
    return read_by<theirs::Adam, theirs::AdamOptions, theirs::AdamParamState>(archive,
                                                                              param_groups);
  }
  if (name == "AdamW") {
    return read_by<theirs::AdamW, theirs::AdamWOptions, theirs::AdamWParamState>(archive,
                                                                                 param_groups);
  }
  if (name == "SGD") {
    return read_by<theirs::SGD, theirs::SGDOptions, theirs::SGDParamState>(archive, param_groups);
  }
  return {};
}

}  // namespace amp_ext::optim
