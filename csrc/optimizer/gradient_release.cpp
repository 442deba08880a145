// Steps parameters from the hooks of a backward pass, and collects what the hooks have found.
#include "optimizer/gradient_release.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "optimizer/scalars.h"

namespace amp_ext {

namespace {

constexpr const char* kWrongScaler =
    ": the gradients of this optimizer are released with another scaler, or without one. Pass this "
    "scaler when you release them.";

}  // namespace

void ReleaseOptions::read(const std::string& optimizer,
                          const optim::OptimizerDescription& description,
                          const std::vector<const optim::GroupOptions*>& groups) {
  GroupSettings::read(optimizer, description, groups);
  for (size_t index = 0; index < groups.size(); ++index) {
    const auto group = static_cast<int64_t>(index);
    for (const optim::OptionDescription& option : description.options) {
      if (option.type > optim::OptionType::kFlag) continue;  // not a number
      const OptionalTensor& lr = table.groups[index].lr;
      if (option.type == optim::OptionType::kLearningRate && lr.has_value()) {
        numbers.push_back(
            {group, option.name, static_cast<double>(version_of(*lr)), lr->unsafeGetTensorImpl()});
        continue;
      }
      for (size_t i = 0; i < std::max<size_t>(option.fields.size(), 1); ++i)
        numbers.push_back({group, option.name, groups[index]->number(option, i)});
    }
  }
}

// The claim comes first, because it refuses a thread that already holds it. A loaded state dict
// replaces the plan, so hooks of the old plan need the mutex as well.
GradientRelease::Lock::Lock(GradientRelease& release, Plan& plan)
    : release_(release), claim_(plan, "backward", /*waits=*/true), lock_(release.mutex_) {}

GradientRelease::Lock::~Lock() {
  const bool is_failing = std::uncaught_exceptions() > exceptions_;
  if (is_failing && release_.is_open()) release_.stage_ = Stage::kFailed;
}

std::string GradientRelease::progress() const {
  return c10::str(stepped_, " of ", params_.size(), " parameters");
}

void GradientRelease::check_options(const ReleaseOptions& options, const Plan& owner) const {
  const char* const start = ": gradients can't be released with ";
  TORCH_CHECK(!options.clipping.max_grad_norm.has_value(), optimizer_, start,
              "max_grad_norm, which needs all gradients at once. Set it to None, and clip single "
              "elements with clip_value.");
  for (const GroupTable::Entry& group : options.table.groups) {
    TORCH_CHECK(!group.common->write_back_grads, optimizer_, start,
                "write_back_grads, which needs gradients that stay. Set it to False.");
  }
  if (!is_open()) return;
  const auto [before, now] = std::mismatch(options_.numbers.begin(), options_.numbers.end(),
                                           options.numbers.begin(), options.numbers.end());
  if (before == options_.numbers.end()) return;  // groups may have been added
  TORCH_CHECK(false, optimizer_, ".step: ", before->option, " of group ", before->group,
              " changed after ", progress(),
              " had been stepped with its old value. Change options between step() and backward(), "
              "and step schedulers after step().");
}

void GradientRelease::begin(ReleaseOptions options, const Plan& owner) {
  const OptionalTensor& scale = options.scale;
  TORCH_CHECK(scaler_ == nullptr || scale.has_value(), optimizer_,
              ": the gradients are not scaled. Call scaler.scale(loss).backward() with the scaler "
              "with which they are released.");
  const int64_t version = scale.has_value() ? version_of(*scale) : 0;
  const bool was_updated = scaler_ == nullptr || stage_ != Stage::kCollected ||
                           !scale->is_same(*options_.scale) || version != version_of_scale_;
  TORCH_CHECK(was_updated, optimizer_,
              ": a gradient arrived after step(), before the scaler's update(). Call "
              "scaler.update() after each scaler.step().");
  stage_ = Stage::kClosed;
  check_options(options, owner);
  options_ = std::move(options);
  version_of_scale_ = version;
  for (Param& param : params_) param.is_stepped = false;
  stepped_ = 0;
  stage_ = Stage::kOpen;
}

void GradientRelease::register_params(const std::vector<ParamTable::Param>& params) {
  const auto is_same = [](const Param& known, const ParamTable::Param& param) {
    return known.registered == param;
  };
  if (std::equal(params_.begin(), params_.end(), params.begin(), params.end(), is_same)) return;
  params_.clear();
  indices_.clear();
  results_.clear();
  for (const ParamTable::Param& param : params) {
    indices_.emplace(param.object, static_cast<int64_t>(params_.size()));
    params_.emplace_back(optimizer_, param);
  }
}

std::optional<int64_t> GradientRelease::find(const void* object) const {
  const auto found = indices_.find(object);
  return found == indices_.end() ? std::nullopt : std::optional(found->second);
}

void GradientRelease::check_has_not_failed() const {
  TORCH_CHECK(stage_ != Stage::kFailed, optimizer_,
              ": an earlier hook of this iteration failed after ", progress(),
              " had been stepped. Call optimizer.zero_grad(), then run backward() again.");
}

void GradientRelease::check_is_next(const Param& param) const {
  const ParamTable::Param& place = param.registered;
  check_has_not_failed();
  TORCH_CHECK(!param.is_stepped && stage_ == Stage::kOpen, optimizer_, ": group ", place.group,
              ", param ", place.index_in_group, " got another gradient after ", progress(),
              " had been stepped in this iteration. Run all but its last backward() inside "
              "release.paused(). End an iteration with step() (with a scaler, update()), or with "
              "optimizer.zero_grad() if its batch is given up.");
}

// Passes the present tensors to the table, which registers the parameter again if it must.
void GradientRelease::take_param(Param& param, const at::Tensor& tensor,
                                 const std::optional<Shard>& shard) {
  const auto is_taken = [&] {
    return !param.table.slots().empty() && param.table.take_param(0, tensor);
  };
  if (!param.table.has_specs(options_.specs) || !is_taken()) {
    param.table.drop_slots();
    param.table.register_params(options_.specs, {param.registered});
    is_taken();
  }
  if (shard.has_value()) param.table.set_shard(0, shard->param, shard->grad);
}

void GradientRelease::forget(Plan& owner) {
  const Lock lock(*this, owner);
  for (Param& param : params_) param.table.drop_slots();
}

GradScanResult GradientRelease::new_results(const at::Device& device) const {
  const OutsideInferenceMode normal;
  const auto count = static_cast<int64_t>(params_.size());
  const auto float32 = at::TensorOptions(device).dtype(at::kFloat);
  return {at::zeros({count}, float32), at::full({}, kNoTensor, float32.dtype(at::kLong))};
}

// Returns what the hooks write on a device. Hooks may run on several streams, but a backward pass
// starts after the work of the stream on which it was called, and that stream goes on after all
// hooks. Only tensors that are new in a backward pass must be waited for.
GradScanResult GradientRelease::results_on(const at::Device& device) {
  for (const GradScanResult& each : results_) {
    if (each.found_inf.device() == device) return each;
  }
  results_.push_back(new_results(device));
  if (!device.is_cpu()) {
    const c10::impl::VirtualGuardImpl streams(device.type());
    streams.synchronizeStream(streams.getStream(device));
  }
  return results_.back();
}

void GradientRelease::step(int64_t index, const at::Tensor& tensor,
                           const std::optional<Shard>& shard, Plan& owner, StateStore& store) {
  const at::NoGradGuard no_grad;
  Param& param = params_.at(index);
  check_is_next(param);
  const auto released = c10::make_scope_exit([&] { param.table.release_params(); });
  take_param(param, tensor, shard);
  ParamSlot& slot = param.table.slots().front();
  if (!slot.has_grad()) return;
  TORCH_CHECK(!slot.grad().requires_grad(), optimizer_,
              ": released gradients can't be part of a graph. Call backward() without "
              "create_graph=True, or release.remove() first.");
  StepInputs inputs;
  inputs.gradients.skip_nonfinite = options_.clipping.skip_nonfinite;
  if (options_.grad_scale.has_value()) {
    GradScanResult here = results_on(slot.param().device());
    here.found_inf = here.found_inf.select(0, index);
    inputs.gradients.grad_scale = options_.grad_scale;
    inputs.gradients.found_inf = here.found_inf;
    scan_only_gradient(param.table, index, here,
                       {{}, options_.grad_scale, options_.clipping.skip_nonfinite, false},
                       param.scratch);
  }
  check_step(param.table, slot, options_.table, inputs.gradients,
             /*is_of_scaler=*/options_.grad_scale.has_value(), store);
  const std::vector<StepBatch> batches =
      prepare_step(param.table.checks(), slot, options_.table, inputs, param.scratch);
  StepOutcome outcome;
  try {
    launch_step(batches, options_.table, param.scratch, outcome);
    ParamTable::remember_step(slot, options_.grad_scale.has_value(), /*are_as_seen=*/false);
  } catch (...) {
    owner.set_failure(outcome.text());
    throw;
  }
  tensor.unsafeGetTensorImpl()->mutable_grad().reset();
  param.is_stepped = true;
  ++stepped_;
}

GradientRelease::HookResults GradientRelease::collect(Plan& owner) {
  const Lock lock(*this, owner);
  if (!is_open()) return {};
  check_has_not_failed();
  const OutsideInferenceMode normal;
  HookResults found;
  for (GradScanResult& here : results_) {
    found.skipped.push_back(here.found_inf.sum());
    found.first_nonfinites.push_back(here.first_nonfinite);
    here = new_results(here.found_inf.device());
  }
  skipped_ = found.skipped;
  stage_ = Stage::kCollected;
  return found;
}

void GradientRelease::complete(Plan& owner) {
  const Lock lock(*this, owner);
  const at::Tensor applied = owner.outputs().step_applied();
  if (stage_ == Stage::kCollected && applied.defined() && stepped_ > 0) {
    const at::NoGradGuard no_grad;
    at::Tensor skipped = at::zeros({}, applied.options());
    for (const at::Tensor& each : skipped_) skipped = skipped + to_device(each, applied.device());
    applied.copy_(skipped.eq(0), /*non_blocking=*/true);
  }
  if (scaler_ == nullptr) stage_ = Stage::kClosed;
}

std::string GradientRelease::give_up(Plan& owner) {
  const Lock lock(*this, owner);
  if (!is_open()) return {};
  stage_ = Stage::kClosed;
  for (GradScanResult& here : results_) here = new_results(here.found_inf.device());
  if (stepped_ == 0) return {};
  return c10::str(optimizer_, ".zero_grad: the iteration ended without step(). ", progress(),
                  " had been stepped in its backward pass and stay so.");
}

void GradientRelease::check_scaler(const void* scaler, const std::string& method) const {
  TORCH_CHECK(scaler == scaler_, "GradScaler.", method, kWrongScaler);
  if (method == "unscale_") throw_needs_gradients("GradScaler.unscale_");
}

void GradientRelease::check_caller_of_step(bool has_scale, bool has_scan) const {
  TORCH_CHECK(scaler_ != nullptr || !has_scale, optimizer_, ".step", kWrongScaler);
  TORCH_CHECK(scaler_ == nullptr || has_scan, optimizer_,
              ".step: the gradients of this optimizer are released with a scaler, which did not "
              "call this step. Call scaler.step(optimizer) with that scaler.");
}

void GradientRelease::throw_needs_gradients(const std::string& operation) {
  TORCH_CHECK(false, operation,
              " needs all gradients at once, but this optimizer releases them during backward(). "
              "Call remove() of the release first.");
}

}  // namespace amp_ext
