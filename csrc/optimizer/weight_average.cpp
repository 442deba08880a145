// Creates and updates averages of weights, and swaps them with the parameters.
#include "optimizer/weight_average.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <exception>
#include <unordered_map>
#include <utility>

#include "tensors/autocast_cache.h"
#include "tensors/tensor_memory.h"
#include "tensors/to_device.h"

namespace amp_ext {

namespace {

constexpr const char* kOperation = "WeightAverage";

AverageHyperparameters hyperparameters_of(const AverageOptions& options) {
  return {options.decay.value_or(0.0), !options.decay.has_value(), options.warmup, options.every};
}

// Returns the kernel arguments of a weight and its average. A weight whose layout differs from the
// average's is copied.
KernelTensorArgs args_of(const AveragedWeight& weight, const at::Tensor& average,
                         std::vector<at::Tensor>& contiguous_copies) {
  const auto memory = [&](const at::Tensor& tensor, at::ScalarType dtype) {
    if (tensor.scalar_type() == dtype && have_same_dense_layout(tensor, average)) {
      return const_cast<void*>(tensor.const_data_ptr());
    }
    contiguous_copies.push_back(at::empty_strided(
        average.sizes(), average.strides(), tensor.options().dtype(dtype).requires_grad(false)));
    contiguous_copies.back().copy_(tensor);
    return contiguous_copies.back().mutable_data_ptr();
  };
  KernelTensorArgs args;
  const bool has_master = weight.master.defined();
  const bool has_fp32_master = has_master && weight.master.scalar_type() == at::kFloat;
  const at::Tensor& source = has_fp32_master ? weight.master : weight.param;
  const at::ScalarType dtype =
      source.scalar_type() == at::kDouble ? at::kFloat : source.scalar_type();
  args.param = memory(source, dtype);
  args.param_dtype = *dtype_of(dtype);
  if (has_master && !has_fp32_master) {
    const at::Tensor residual = residual_elements(weight.master);
    args.master = residual.scalar_type() == at::kShort ? Master::kResidual16 : Master::kResidual8;
    args.master_param = memory(residual, residual.scalar_type());
  }
  args.buffers[0] = average.mutable_data_ptr();
  args.buffer_formats[0] = format_of(*dtype_of(average));
  args.dithered = average.scalar_type() == at::kBFloat16 ? kDithersParam : 0;
  args.numel = average.numel();
  args.global_offset = weight.global_offset;
  return args;
}

bool are_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes().equals(b.sizes()) &&
         a.device() == b.device();
}

std::string described(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " of sizes ", tensor.sizes(), " on ", tensor.device());
}

std::string name_of(const AveragedWeight& weight) {
  return c10::str("param of group ", weight.group, ", param ", weight.index_in_group);
}

// Returns an error text if the options are invalid; empty if they are valid.
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

// Launches one update of averages that are dense and all on one device. Float64 weights, and
// weights whose layout differs from their averages', are copied first. An undefined `step_applied`
// means that the step was applied.
void launch_average(const std::vector<AveragedWeight>& weights,
                    const std::vector<at::Tensor>& averages, const AverageOptions& options,
                    const at::Tensor& counters, const at::Tensor& step_applied,
                    StepScratch& scratch) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> contiguous_copies;
  std::vector<KernelTensorArgs> all_args;
  all_args.reserve(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    all_args.push_back(args_of(weights[i], averages[i], contiguous_copies));
  }
  const at::Device device = counters.device();
  static_assert(sizeof(AverageCounters) == 2 * sizeof(int64_t));
  const AverageLaunch launch{
      all_args.data(), static_cast<int64_t>(all_args.size()), hyperparameters_of(options),
      reinterpret_cast<AverageCounters*>(counters.mutable_data_ptr<int64_t>()),
      step_applied.defined() ? step_applied.const_data_ptr<float>() : nullptr};
  engine_of(device).average(device, launch, scratch);
  for (const at::Tensor& average : averages) bump_version(average);
  bump_version(counters);
}

// Returns the weights to average. An out-of-date master is corrected as the next step would correct
// it. A state whose dtype or shape no longer fits the parameter is ignored.
std::vector<AveragedWeight> weights_in(Plan& plan, const MastersByParam& masters) {
  const ParamTable& params = plan.params();
  std::vector<AveragedWeight> weights;
  weights.reserve(params.slots().size());
  for (size_t i = 0; i < params.slots().size(); ++i) {
    const ParamSlot& slot = params.slots()[i];
    const at::Tensor& param = slot.param();
    at::Tensor master;
    if (!slot.lacks_state()) {
      master = slot.master_param();
    } else if (const auto kept = masters.find(static_cast<int64_t>(i)); kept != masters.end()) {
      master = kept->second;
    }
    if (master.defined() && !master.sizes().equals(param.sizes())) master.reset();
    if (master.defined() && master.scalar_type() == at::kFloat && !slot.has_current_master()) {
      master = refreshed_master(param, master);
    }
    weights.push_back({slot.object, param, std::move(master), slot.global_offset, slot.group,
                       slot.index_in_group});
  }
  return weights;
}

}  // namespace

WeightAverages::WeightAverages(AverageOptions options) : options_(std::move(options)) {
  const std::string wrong = wrong_in(options_);
  TORCH_CHECK_VALUE(wrong.empty(), kOperation, ": ", wrong);
}

bool WeightAverages::fits(const Average& average, const AveragedWeight& weight) {
  const at::Tensor& param = weight.param;
  return param.scalar_type() == average.param_dtype &&
         param.sizes().equals(average.tensor.sizes()) && param.device() == average.tensor.device();
}

void WeightAverages::check(const Average& average, const AveragedWeight& weight) const {
  TORCH_CHECK(fits(average, weight), kOperation, ": ", name_of(weight), " was ",
              average.param_dtype, " of sizes ", average.tensor.sizes(), " on ",
              average.tensor.device(), " when its average began, and is now ",
              described(weight.param), ". Call restart() to begin a new average.");
}

// Returns the entry of a device. Adds an entry with counters of 0 if the device has none.
WeightAverages::DeviceAverages& WeightAverages::on_device(std::vector<DeviceAverages>& devices,
                                                          const at::Device& device) {
  const auto place = std::find_if(devices.begin(), devices.end(),
                                  [&](const DeviceAverages& one) { return one.device == device; });
  if (place != devices.end()) return *place;
  return devices.emplace_back(
      DeviceAverages{device, at::zeros({2}, at::TensorOptions(device).dtype(at::kLong)), {}});
}

void WeightAverages::register_weights(Plan& plan, const MastersByParam& masters) {
  set_weights(weights_in(plan, masters));
}

// If `begins_anew` is true, an average that no longer fits its weight is replaced by a new average.
void WeightAverages::set_weights(const std::vector<AveragedWeight>& weights, bool begins_anew) {
  bool are_registered = weights.size() == averages_.size();
  for (size_t i = 0; are_registered && i < weights.size(); ++i) {
    are_registered = averages_[i].object == weights[i].object;
    if (are_registered && begins_anew) are_registered = fits(averages_[i], weights[i]);
  }
  if (are_registered) {
    for (size_t i = 0; i < weights.size(); ++i) check(averages_[i], weights[i]);
    return;
  }
  const OutsideInferenceMode normal;
  std::unordered_map<const void*, const Average*> before;
  for (const Average& average : averages_) before[average.object] = &average;
  std::vector<Average> registered;
  std::vector<DeviceAverages> devices;
  std::vector<AveragedWeight> new_weights;
  std::vector<at::Tensor> new_averages;
  for (const AveragedWeight& weight : weights) {
    const at::Tensor& param = weight.param;
    const auto known = before.find(weight.object);
    if (known != before.end() && !(begins_anew && !fits(*known->second, weight))) {
      check(*known->second, weight);
      registered.push_back(*known->second);
    } else {
      const std::string name = name_of(weight);
      check_is_plain(kOperation, name, param);
      check_device(kOperation, name, param.device());
      TORCH_CHECK(dtype_of(param).has_value(), kOperation, ": ", name,
                  " must be Float, Double, Half or BFloat16, got ", param.scalar_type());
      new_weights.push_back(weight);
      new_averages.push_back(
          at::empty_like(param, param.options().dtype(options_.dtype).requires_grad(false)));
      registered.push_back({weight.object, param.scalar_type(), new_averages.back(),
                            /*has_joined=*/last_step_.has_value()});
    }
    on_device(devices, param.device())
        .indices.push_back(static_cast<int64_t>(registered.size()) - 1);
  }
  for (DeviceAverages& each : devices) {
    const auto known =
        std::find_if(devices_.begin(), devices_.end(),
                     [&](const DeviceAverages& one) { return one.device == each.device; });
    if (known != devices_.end()) {
      each.counters = known->counters;
    } else if (!devices_.empty()) {
      each.counters.copy_(devices_.front().counters);
    }
    scratch_.make_room(each.device);
  }
  begin(new_weights, new_averages);
  averages_ = std::move(registered);
  devices_ = std::move(devices);
  ++registrations_;
}

void WeightAverages::take(Plan& plan, const MastersByParam& masters) {
  const std::vector<AveragedWeight> weights = weights_in(plan, masters);
  set_weights(weights);
  const bool is_new = last_step_.has_value() && *last_step_ != plan.last_step().number();
  last_step_ = plan.last_step().number();
  if (!is_new) return;
  begin_joined(weights);
  if (plan.outputs().step_applied().defined()) {
    launch(devices_, weights, averages(), options_, plan.outputs().step_applied());
  }
}

void WeightAverages::launch(const std::vector<DeviceAverages>& devices,
                            const std::vector<AveragedWeight>& weights,
                            const std::vector<at::Tensor>& averages, const AverageOptions& options,
                            const at::Tensor& step_applied) {
  for (const DeviceAverages& one : devices) {
    const at::Tensor applied =
        step_applied.defined() ? to_device(step_applied, one.device) : step_applied;
    if (devices.size() == 1) {
      launch_average(weights, averages, options, one.counters, applied, scratch_);
      continue;
    }
    std::vector<AveragedWeight> here;
    std::vector<at::Tensor> averages_here;
    for (const int64_t index : one.indices) {
      here.push_back(weights[index]);
      averages_here.push_back(averages[index]);
    }
    launch_average(here, averages_here, options, one.counters, applied, scratch_);
  }
}

// Sets averages to the weights, in the averages' dtype. Launches an update with counters of 0,
// because the first update of an average copies the weight.
void WeightAverages::begin(const std::vector<AveragedWeight>& weights,
                           const std::vector<at::Tensor>& averages) {
  AverageOptions options = options_;
  options.every = 1;
  std::vector<DeviceAverages> devices;
  for (size_t i = 0; i < averages.size(); ++i) {
    on_device(devices, averages[i].device()).indices.push_back(static_cast<int64_t>(i));
  }
  launch(devices, weights, averages, options, {});
}

void WeightAverages::begin_joined(const std::vector<AveragedWeight>& weights) {
  const std::vector<int64_t> indices = joined();
  if (indices.empty()) return;
  std::vector<AveragedWeight> weights_of_joined;
  std::vector<at::Tensor> averages;
  for (const int64_t index : indices) {
    weights_of_joined.push_back(weights[index]);
    averages.push_back(averages_[index].tensor);
  }
  begin(weights_of_joined, averages);
  for (const int64_t index : indices) averages_[index].has_joined = false;
}

void WeightAverages::restart(Plan& plan, const MastersByParam& masters) {
  check_not_swapped("WeightAverage.restart");
  const std::vector<AveragedWeight> weights = weights_in(plan, masters);
  set_weights(weights, /*begins_anew=*/true);
  begin(weights, averages());
  for (Average& average : averages_) average.has_joined = false;
  for (const DeviceAverages& one : devices_) one.counters.zero_();
  last_step_ = plan.last_step().number();
}

void WeightAverages::swap_in(Plan& plan, const MastersByParam& masters) {
  check_not_swapped("WeightAverage.swap");
  const std::vector<AveragedWeight> weights = weights_in(plan, masters);
  set_weights(weights);
  try {
    write_averages(weights);
    plan.set_swapped_in(true);
  } catch (...) {
    swap_out(plan);
    throw;
  }
}

// Saves the parameters and residuals, and overwrites them with the averages.
void WeightAverages::write_averages(const std::vector<AveragedWeight>& weights) {
  const at::NoGradGuard no_grad;
  std::vector<Replaced> replaced;  // everything that may fail happens before the first write
  const auto save = [&](const at::Tensor& tensor, const void* object, const std::string& name) {
    replaced.push_back({tensor, tensor.detach().clone(), version_of(tensor), object, name});
  };
  for (const AveragedWeight& weight : weights) save(weight.param, weight.object, name_of(weight));
  for (const AveragedWeight& weight : weights) {
    const at::Tensor& residual = weight.master;
    if (!residual.defined() || residual.scalar_type() == at::kFloat) continue;
    save(residual, nullptr, name_of(weight));
  }
  replaced_ = std::move(replaced);
  is_swapped_ = true;
  for (size_t i = 0; i < replaced_.size(); ++i) {
    if (i < averages_.size()) {
      replaced_[i].tensor.copy_(averages_[i].tensor);
    } else {
      replaced_[i].tensor.zero_();  // a residual of 0: the master equals the parameter
    }
  }
  clear_autocast_cache();
}

void WeightAverages::swap_out(Plan& plan) {
  if (!is_swapped_) return;
  const at::NoGradGuard no_grad;
  std::exception_ptr failure;
  for (const Replaced& one : replaced_) {
    try {
      TORCH_CHECK(are_alike(one.tensor, one.saved), "WeightAverage.swap: ", one.name, " was ",
                  described(one.saved), " before the swap and is now ", described(one.tensor),
                  ", so it was not restored. Convert the model outside the swap.");
      one.tensor.copy_(one.saved);
    } catch (...) {
      if (failure == nullptr) failure = std::current_exception();
    }
  }
  // Reads versions after all writes, because views of one tensor share one version counter.
  std::unordered_map<const void*, int64_t> writes;  // by parameter: how often the swap wrote it
  for (const Replaced& one : replaced_) {
    if (one.object != nullptr) writes[one.object] = version_of(one.tensor) - one.version;
  }
  replaced_.clear();
  is_swapped_ = false;
  plan.params().forget_writes(writes);
  plan.set_swapped_in(false);
  clear_autocast_cache();
  if (failure != nullptr) std::rethrow_exception(failure);
}

void WeightAverages::check_not_swapped(const std::string& operation) const {
  check_weights_are_in(operation, is_swapped_);
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

std::vector<int64_t> WeightAverages::joined() const {
  std::vector<int64_t> indices;
  for (size_t i = 0; i < averages_.size(); ++i) {
    if (averages_[i].has_joined) indices.push_back(static_cast<int64_t>(i));
  }
  return indices;
}

void WeightAverages::load(const std::string& operation, const std::vector<at::Tensor>& averages,
                          int64_t steps, int64_t n_averaged, const std::vector<int64_t>& joined) {
  const at::NoGradGuard no_grad;
  check_not_swapped(operation);
  TORCH_CHECK_VALUE(n_averaged >= 0, operation, ": n_averaged must be at least 0, got ",
                    n_averaged);
  TORCH_CHECK_VALUE(n_averaged <= steps, operation, ": n_averaged must be at most ", steps,
                    ", the number of applied steps, got ", n_averaged);
  TORCH_CHECK_VALUE(averages.size() == averages_.size(), operation, ": averages must be of ",
                    averages_.size(), " parameters, got ", averages.size());
  for (size_t i = 0; i < averages.size(); ++i) {
    const std::string name = c10::str("averages[", i, "]");
    check_is_plain(operation, name, averages[i]);
    check_device(operation, name, averages[i].device());
    TORCH_CHECK_TYPE(averages[i].is_floating_point(), operation, ": ", name,
                     " must be floating-point numbers, got ", averages[i].scalar_type());
    TORCH_CHECK_VALUE(averages[i].sizes().equals(averages_[i].tensor.sizes()), operation, ": ",
                      name, " must be of sizes ", averages_[i].tensor.sizes(), ", got ",
                      averages[i].sizes());
  }
  for (const int64_t index : joined) {
    TORCH_CHECK_VALUE(index >= 0 && index < static_cast<int64_t>(averages_.size()), operation,
                      ": joined must be indices of the ", averages_.size(), " parameters, got ",
                      index);
  }
  const at::Tensor counters = at::tensor({steps, n_averaged}, at::kLong);
  for (size_t i = 0; i < averages.size(); ++i) {
    averages_[i].tensor.copy_(averages[i]);
    averages_[i].has_joined = false;
  }
  for (const int64_t index : joined) averages_[index].has_joined = true;
  for (const DeviceAverages& one : devices_) one.counters.copy_(counters);
}

}  // namespace amp_ext
