// WeightAverage of the C++ interface, which averages the weights of an optimizer.
#include "optimizer/weight_average.h"

#include <ATen/ops/zeros.h>
#include <amp_ext/weight_average.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "libtorch/optimizer_impl.h"
#include "libtorch/values.h"
#include "tensors/tensor_memory.h"

namespace amp_ext::optim {

struct WeightAverage::Impl {
  FusedOptimizer& optimizer;
  WeightAverages averages;
  std::vector<at::Tensor> params;  // kept alive, so that no other tensor gets their addresses

  at::Tensor counters() const {
    const at::Tensor counters = averages.counters();
    return counters.defined() ? counters : at::zeros({2}, at::kLong);
  }

  // Registers the optimizer's present parameters, if they changed since the last call.
  void register_weights() {
    const std::vector<at::Tensor> now = params_now();
    const bool are_registered =
        std::equal(now.begin(), now.end(), params.begin(), params.end(),
                   [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
    if (!are_registered) ask("register_average", &WeightAverages::register_weights);
  }

  std::vector<at::Tensor> params_now() const {
    std::vector<at::Tensor> now;
    for (const auto& group : optimizer.param_groups()) {
      now.insert(now.end(), group.params().begin(), group.params().end());
    }
    return now;
  }

  Plan& plan() const { return *optimizer.checked("WeightAverage").plan; }

  // Calls a method with the optimizer's weights, and updates `params` if the parameters changed.
  void ask(const char* name, AverageMethod method) {
    const int64_t before = averages.registrations();
    optimizer.average(name, [&](Plan& plan, const MastersByParam& masters) {
      (averages.*method)(plan, masters);
    });
    if (averages.registrations() != before) params = params_now();
  }
};

WeightAverage::WeightAverage(FusedOptimizer& optimizer, AverageOptions options)
    : impl_(new Impl{optimizer, WeightAverages(std::move(options)), {}}) {
  update();
  impl_->plan().outputs().track_step_applied();
}

WeightAverage::~WeightAverage() = default;
WeightAverage::WeightAverage(WeightAverage&&) noexcept = default;

void WeightAverage::update() { impl_->ask("take_average", &WeightAverages::take); }

void WeightAverage::restart() { impl_->ask("restart_average", &WeightAverages::restart); }

std::vector<at::Tensor> WeightAverage::averages() const {
  impl_->register_weights();
  return impl_->averages.averages();
}

at::Tensor WeightAverage::n_averaged() const { return impl_->counters()[1]; }

WeightAverage::Swapped::Swapped(WeightAverage& average) : impl_(average.impl_) {
  impl_->ask("swap_average", &WeightAverages::swap_in);
}
WeightAverage::Swapped::~Swapped() {
  try {
    impl_->averages.swap_out(impl_->plan());
  } catch (const c10::Error& error) {
    TORCH_WARN(error.what_without_backtrace());
  } catch (const std::exception& error) {
    TORCH_WARN(error.what());
  }
}
WeightAverage::Swapped WeightAverage::swap() { return Swapped(*this); }

c10::IValue WeightAverage::state_dict() const {
  impl_->averages.check_not_swapped("WeightAverage.state_dict");
  auto averages = new_list(), joined = new_list();
  for (const at::Tensor& average : this->averages()) averages.push_back(average);
  for (const int64_t index : impl_->averages.joined()) joined.push_back(index);
  auto state_dict = new_dict();
  state_dict.insert("averages", averages);
  state_dict.insert("steps", impl_->counters()[0]);
  state_dict.insert("n_averaged", impl_->counters()[1]);
  if (!joined.empty()) state_dict.insert("joined", joined);
  return state_dict;
}

void WeightAverage::load_state_dict(const c10::IValue& state_dict) {
  const char* const operation = "WeightAverage.load_state_dict";
  const OutsideInferenceMode normal;
  const Dict dict = dict_of(operation, state_dict);
  std::vector<at::Tensor> averages;
  const c10::IValue listed_averages = entry_of(operation, dict, "averages");
  for (const c10::IValue& average : elements_of(listed_averages)) {
    TORCH_CHECK(average.isTensor(), operation, ": averages[", averages.size(),
                "] must be a tensor, got ", shown(average));
    averages.push_back(average.toTensor());
  }
  const auto whole = [&](const char* name, const c10::IValue& value) {
    if (value.isInt()) return value.toInt();
    const bool is_whole = value.isTensor() && value.toTensor().numel() == 1 &&
                          at::isIntegralType(value.toTensor().scalar_type(), /*includeBool=*/false);
    TORCH_CHECK(is_whole, operation, ": ", name, " must be a whole number, got ", shown(value));
    return value.toTensor().item().toLong();
  };
  const int64_t steps = whole("steps", entry_of(operation, dict, "steps"));
  const int64_t n_averaged = whole("n_averaged", entry_of(operation, dict, "n_averaged"));
  std::vector<int64_t> joined;
  if (const auto registered = find(dict, "joined"); registered.has_value()) {
    for (const c10::IValue& index : elements_of(*registered))
      joined.push_back(whole("joined", index));
  }
  impl_->averages.check_not_swapped(operation);
  impl_->register_weights();
  impl_->averages.load(operation, averages, steps, n_averaged, joined);
}

}  // namespace amp_ext::optim
