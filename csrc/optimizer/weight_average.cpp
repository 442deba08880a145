// Averages of the weights of one optimizer.
#include "optimizer/weight_average.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <unordered_map>

#include "optimizer/plan.h"
#include "tensors/moved.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

namespace {

constexpr const char* kOperation = "WeightAverage";

AverageHyperparameters hyperparameters_of(const AverageOptions& options) {
  return {options.decay.value_or(0.0), !options.decay.has_value(), options.warmup, options.every};
}

// A record of tensors in the layout of the average.
TensorRecord record_of(const AveragedWeight& weight, const at::Tensor& average,
                       std::vector<at::Tensor>& staged) {
  const auto memory = [&](const at::Tensor& tensor, at::ScalarType dtype) {
    if (tensor.scalar_type() == dtype && have_same_dense_layout(tensor, average)) {
      return const_cast<void*>(tensor.const_data_ptr());
    }
    staged.push_back(at::empty_strided(average.sizes(), average.strides(),
                                       tensor.options().dtype(dtype).requires_grad(false)));
    staged.back().copy_(tensor);
    return staged.back().mutable_data_ptr();
  };
  TensorRecord record;
  const bool has_master = weight.master.defined();
  const bool has_whole_master = has_master && weight.master.scalar_type() == at::kFloat;
  const at::Tensor& source = has_whole_master ? weight.master : weight.param;
  const at::ScalarType dtype =
      source.scalar_type() == at::kDouble ? at::kFloat : source.scalar_type();
  record.param = memory(source, dtype);
  record.param_dtype = *dtype_of(dtype);
  if (has_master && !has_whole_master) {
    const at::Tensor low = low_elements(weight.master);
    record.master = low.scalar_type() == at::kShort ? Master::kLow16 : Master::kLow8;
    record.master_param = memory(low, low.scalar_type());
  }
  record.buffers[0] = average.mutable_data_ptr();
  record.buffer_formats[0] = format_of(*dtype_of(average));
  record.dithered = average.scalar_type() == at::kBFloat16 ? kDithersParam : 0;
  record.numel = average.numel();
  record.first_element = weight.first_element;
  return record;
}

void set_version(const at::Tensor& tensor, int64_t version) {
  if (tensor.is_inference()) return;
  c10::VariableVersion counter = tensor.unsafeGetTensorImpl()->version_counter();
  counter.set_version(version);
}

}  // namespace

std::string wrong_in(const AverageOptions& options) {
  if (options.decay.has_value() && !(*options.decay >= 0.0 && *options.decay <= 1.0)) {
    return c10::str("decay must be from 0 to 1, got ", *options.decay);
  }
  if (options.warmup && !options.decay.has_value()) {
    return "warmup must be False where every weight counts the same, got True";
  }
  if (options.every < 1) return c10::str("every must be at least 1, got ", options.every);
  if (options.dtype != at::kFloat && options.dtype != at::kBFloat16) {
    return c10::str("dtype must be Float or BFloat16, got ", options.dtype);
  }
  return {};
}

void launch_average(const std::vector<AveragedWeight>& weights,
                    const std::vector<at::Tensor>& averages, const AverageOptions& options,
                    const at::Tensor& counters, const at::Tensor& has_landed,
                    StepScratch& scratch) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> staged;
  std::vector<TensorRecord> records;
  records.reserve(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    records.push_back(record_of(weights[i], averages[i], staged));
  }
  const at::Device device = counters.device();
  static_assert(sizeof(AverageCounters) == 2 * sizeof(int64_t));
  const AverageLaunch launch{
      records.data(), static_cast<int64_t>(records.size()), hyperparameters_of(options),
      reinterpret_cast<AverageCounters*>(counters.mutable_data_ptr<int64_t>()),
      has_landed.defined() ? has_landed.const_data_ptr<float>() : nullptr};
  engine_of(device).average(device, launch, scratch);
  for (const at::Tensor& average : averages) bump_version(average);
  bump_version(counters);
}

// A master that its parameter has left behind is what the next step would make of it. States of
// another dtype are not the parameter's any more.
std::vector<AveragedWeight> Plan::weights() const {
  std::vector<AveragedWeight> weights;
  weights.reserve(rows_.size());
  for (const Row& row : rows_) {
    const at::Tensor& param = row.param();
    at::Tensor master;
    if (row.state_dtype == param.scalar_type() && row.state_device == param.device()) {
      master = row.master_param();
    }
    if (master.defined() && row.master() == Master::kFloat32 && !row.has_fresh_master()) {
      master = refreshed_master(param, master);
    }
    weights.push_back(
        {row.object, param, std::move(master), row.first_element, row.group, row.index_in_group});
  }
  return weights;
}

WeightAverages::WeightAverages(AverageOptions options) : options_(std::move(options)) {
  const std::string wrong = wrong_in(options_);
  TORCH_CHECK_VALUE(wrong.empty(), kOperation, ": ", wrong);
}

void WeightAverages::check(const Average& average, const AveragedWeight& weight) const {
  const at::Tensor& param = weight.param;
  TORCH_CHECK(param.scalar_type() == average.param_dtype &&
                  param.sizes().equals(average.tensor.sizes()) &&
                  param.device() == average.tensor.device(),
              kOperation, ": param of group ", weight.group, ", param ", weight.index_in_group,
              " must be ", average.param_dtype, " of sizes ", average.tensor.sizes(), " on ",
              average.tensor.device(), ", as when its average began, got ", param.scalar_type(),
              " of sizes ", param.sizes(), " on ", param.device());
}

void WeightAverages::list(const std::vector<AveragedWeight>& weights) {
  bool are_listed = weights.size() == averages_.size();
  for (size_t i = 0; are_listed && i < weights.size(); ++i) {
    are_listed = averages_[i].object == weights[i].object;
  }
  if (are_listed) {
    for (size_t i = 0; i < weights.size(); ++i) check(averages_[i], weights[i]);
    return;
  }
  const OutsideInferenceMode normal;
  std::unordered_map<const void*, const Average*> before;
  for (const Average& average : averages_) before[average.object] = &average;
  std::vector<Average> listed;
  std::vector<OfDevice> devices;
  for (const AveragedWeight& weight : weights) {
    const at::Tensor& param = weight.param;
    const auto known = before.find(weight.object);
    if (known != before.end()) {
      check(*known->second, weight);
      listed.push_back(*known->second);
    } else {
      const std::string name =
          c10::str("param of group ", weight.group, ", param ", weight.index_in_group);
      check_is_plain(kOperation, name, param);
      check_device(kOperation, name, param.device());
      TORCH_CHECK(dtype_of(param).has_value(), kOperation, ": ", name,
                  " must be Float, Double, Half or BFloat16, got ", param.scalar_type());
      at::Tensor average =
          at::empty_like(param, param.options().dtype(options_.dtype).requires_grad(false));
      listed.push_back({weight.object, param.scalar_type(), average.copy_(param)});
    }
    auto place = std::find_if(devices.begin(), devices.end(),
                              [&](const OfDevice& one) { return one.device == param.device(); });
    if (place == devices.end()) {
      place = devices.insert(place, {param.device(), {}, {}});
      for (const OfDevice& one : devices_) {
        if (one.device == param.device()) place->counters = one.counters;
      }
      if (!place->counters.defined()) {
        place->counters = at::zeros({2}, at::TensorOptions(param.device()).dtype(at::kLong));
        if (!devices_.empty()) place->counters.copy_(devices_.front().counters);
      }
      scratch_.make_room(param.device());
    }
    place->indices.push_back(static_cast<int64_t>(listed.size()) - 1);
  }
  averages_ = std::move(listed);
  devices_ = std::move(devices);
  ++listings_;
}

void WeightAverages::take(const std::vector<AveragedWeight>& weights, const at::Tensor& has_landed,
                          int64_t step) {
  list(weights);
  if (step == last_step_ || !has_landed.defined()) return;
  last_step_ = step;
  for (const OfDevice& one : devices_) {
    const at::Tensor landed = moved(has_landed, one.device);
    if (devices_.size() == 1) {
      launch_average(weights, averages(), options_, one.counters, landed, scratch_);
      continue;
    }
    std::vector<AveragedWeight> here;
    std::vector<at::Tensor> averages_here;
    for (const int64_t index : one.indices) {
      here.push_back(weights[index]);
      averages_here.push_back(averages_[index].tensor);
    }
    launch_average(here, averages_here, options_, one.counters, landed, scratch_);
  }
}

void WeightAverages::swap_in(const std::vector<AveragedWeight>& weights) {
  const at::NoGradGuard no_grad;
  check_not_swapped("WeightAverage.swap");
  list(weights);
  std::vector<Replaced> replaced;  // all that may fail comes before the first write
  for (const AveragedWeight& weight : weights) {
    replaced.push_back({weight.param, weight.param.detach().clone(), version_of(weight.param)});
  }
  for (const AveragedWeight& weight : weights) {
    const at::Tensor& low = weight.master;
    if (!low.defined() || low.scalar_type() == at::kFloat) continue;
    replaced.push_back({low, low.clone(), version_of(low)});
  }
  replaced_ = std::move(replaced);
  is_swapped_ = true;
  try {
    for (size_t i = 0; i < replaced_.size(); ++i) {
      if (i < averages_.size()) {
        replaced_[i].tensor.copy_(averages_[i].tensor);
      } else {
        replaced_[i].tensor.zero_();  // so that the master is the parameter
      }
    }
  } catch (...) {
    swap_out();
    throw;
  }
}

bool WeightAverages::swap_out() {
  const at::NoGradGuard no_grad;
  if (!is_swapped_) return false;
  for (const Replaced& one : replaced_) one.tensor.copy_(one.saved);
  for (const Replaced& one : replaced_) set_version(one.tensor, one.version);
  replaced_.clear();
  is_swapped_ = false;
  return true;
}

void WeightAverages::check_not_swapped(const std::string& operation) const {
  TORCH_CHECK(!is_swapped_, operation,
              ": parameters must hold the weights in training, got their averages: leave "
              "WeightAverage.swap() first");
}

std::vector<at::Tensor> WeightAverages::averages() const {
  std::vector<at::Tensor> tensors;
  tensors.reserve(averages_.size());
  for (const Average& average : averages_) tensors.push_back(average.tensor);
  return tensors;
}

at::Tensor WeightAverages::counters() const {
  return devices_.empty() ? at::Tensor() : devices_.front().counters;
}

void WeightAverages::load(const std::string& operation, const std::vector<at::Tensor>& averages,
                          const at::Tensor& counters) {
  const at::NoGradGuard no_grad;
  check_not_swapped(operation);
  TORCH_CHECK_VALUE(averages.size() == averages_.size(), operation, ": averages must be of ",
                    averages_.size(), " parameters, got ", averages.size());
  for (size_t i = 0; i < averages.size(); ++i) {
    TORCH_CHECK_VALUE(averages[i].sizes().equals(averages_[i].tensor.sizes()), operation,
                      ": averages[", i, "] must be of sizes ", averages_[i].tensor.sizes(),
                      ", got ", averages[i].sizes());
  }
  TORCH_CHECK_VALUE(counters.numel() == 2 && !counters.is_floating_point(), operation,
                    ": counters must be two whole numbers, got ", counters.numel(), " of ",
                    counters.scalar_type());
  for (size_t i = 0; i < averages.size(); ++i) averages_[i].tensor.copy_(averages[i]);
  for (const OfDevice& one : devices_) one.counters.copy_(counters);
}

}  // namespace amp_ext
