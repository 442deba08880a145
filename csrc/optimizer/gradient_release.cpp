// Steps parameters from the hooks of a backward pass, and collects what the hooks have found.
#include "optimizer/gradient_release.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "optimizer/scalars.h"

namespace amp_ext {

namespace {

// Drops the references to the parameter and its gradient when a hook ends.
struct Releases {
  explicit Releases(ParamTable& table) : table(table) {}
  ~Releases() { table.release_params(); }
  Releases(const Releases&) = delete;
  Releases& operator=(const Releases&) = delete;

  ParamTable& table;
};

}  // namespace

// The claim comes first, because it refuses a thread that already holds it. A loaded state dict
// replaces the plan, so hooks of the old plan need the mutex as well.
GradientRelease::Lock::Lock(GradientRelease& release, Plan& plan)
    : release_(release), claim_(plan, "backward", /*waits=*/true), lock_(release.mutex_) {}

GradientRelease::Lock::~Lock() {
  if (std::uncaught_exceptions() > exceptions_) release_.has_failed_ = true;
}

std::string GradientRelease::progress() const {
  return c10::str(stepped_, " of ", params_.size(), " parameters");
}

void GradientRelease::check_options(const GroupSettings& groups, const Plan& owner) const {
  const char* const start = ": gradients can't be released with ";
  TORCH_CHECK(owner.outputs().guard() == nullptr, optimizer_, start,
              "a norm_guard, which needs all gradients at once. Remove the guard.");
  TORCH_CHECK(!groups.clipping.max_grad_norm.has_value(), optimizer_, start,
              "max_grad_norm, which needs all gradients at once. Set it to None, and clip single "
              "elements with clip_value.");
  for (const GroupTable::Entry& group : groups.table.groups) {
    TORCH_CHECK(!group.common->write_back_grads, optimizer_, start,
                "write_back_grads, which needs gradients that stay. Set it to False.");
  }
}

void GradientRelease::begin(Inputs inputs) {
  inputs_ = std::move(inputs);
  for (Param& param : params_) param.is_stepped = false;
  for (OfDevice& device : devices_) device.is_used = false;
  stepped_ = 0;
  has_failed_ = false;
  stage_ = Stage::kOpen;
}

void GradientRelease::register_params(const std::vector<ParamTable::Param>& params) {
  const auto is_same = [](const Param& known, const ParamTable::Param& param) {
    const ParamTable::Param& one = known.registered;
    return one.object == param.object && one.group == param.group &&
           one.index_in_group == param.index_in_group && one.partition == param.partition &&
           one.global_offset == param.global_offset;
  };
  if (std::equal(params_.begin(), params_.end(), params.begin(), params.end(), is_same)) return;
  params_.clear();
  indices_.clear();
  devices_.clear();
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
  TORCH_CHECK(!has_failed_, optimizer_, ": an earlier hook of this iteration failed after ",
              progress(),
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
  if (!param.table.is_for(inputs_.groups.specs) || !is_taken()) {
    param.table.drop_slots();
    param.last_step.forget_sample();
    param.table.register_params(inputs_.groups.specs, {param.registered});
    is_taken();
  }
  if (shard.has_value()) param.table.set_shard(0, shard->param, shard->grad);
}

void GradientRelease::forget() {
  for (Param& param : params_) param.table.drop_slots();
}

GradientRelease::OfDevice& GradientRelease::on_device(const at::Device& device) {
  auto found = std::find_if(devices_.begin(), devices_.end(),
                            [&](const OfDevice& each) { return each.device == device; });
  OfDevice& here = found == devices_.end() ? devices_.emplace_back(device) : *found;
  if (here.is_used) {
    here.order.enter();
    return here;
  }
  here.order.begin();
  const auto count = static_cast<int64_t>(params_.size());
  const auto float32 = at::TensorOptions(device).dtype(at::kFloat);
  const auto float64 = float32.dtype(at::kDouble);
  const OutsideInferenceMode normal;
  if (!here.flags.defined()) {
    here.flags = at::zeros({count}, float32);
    here.first_nonfinite = at::full({}, kNoTensor, float32.dtype(at::kLong));
  }
  here.flags.zero_();
  here.sums = inputs_.tracks_grad_norms ? at::zeros({count}, float64) : at::Tensor();
  here.squares =
      inputs_.tracks_grad_norms ? at::full({count}, std::nan(""), float64) : at::Tensor();
  here.order.begun();
  here.is_used = true;
  return here;
}

void GradientRelease::step(int64_t index, const at::Tensor& tensor,
                           const std::optional<Shard>& shard, Plan& owner, HookStore& store) {
  const at::NoGradGuard no_grad;
  Param& param = params_.at(index);
  check_is_next(param);
  const Releases references(param.table);
  take_param(param, tensor, shard);
  ParamSlot& slot = param.table.slots().front();
  if (!slot.has_grad()) return;
  TORCH_CHECK(!slot.grad().requires_grad(), optimizer_,
              ": released gradients can't be part of a graph. Call backward() without "
              "create_graph=True, or release.remove() first.");
  if (param.last_step.find_uncounted_write(param.table).has_value()) store.warn_of_write();
  OfDevice& here = on_device(slot.param().device());
  const bool has_scaler = inputs_.grad_scale.defined();
  StepInputs inputs;
  inputs.gradients.skip_nonfinite = inputs_.groups.clipping.skip_nonfinite;
  if (has_scaler) {
    inputs.gradients.grad_scale = inputs_.grad_scale;
    inputs.gradients.found_inf = here.flags.select(0, index);
  }
  if (has_scaler || inputs_.tracks_grad_norms) scan(param, index, here);
  check_step(param.table, slot, inputs_.groups.table, inputs.gradients, store);
  const std::vector<StepBatch> batches =
      prepare_step(param.table.checks(), slot, inputs_.groups.table, inputs, param.scratch);
  StepOutcome outcome;
  try {
    launch_step(batches, inputs_.groups.table, param.scratch, outcome);
    ParamTable::remember_step(slot, has_scaler, /*are_as_seen=*/false);
    param.last_step.remember(param.table);
  } catch (...) {
    owner.set_failure(outcome.text());
    throw;
  }
  tensor.unsafeGetTensorImpl()->mutable_grad().reset();
  param.is_stepped = true;
  ++stepped_;
}

void GradientRelease::scan(Param& param, int64_t index, const OfDevice& here) const {
  const ParamSlot& slot = param.table.slots().front();
  param.table.checks().check_grad(slot);
  const bool is_dense = slot.grad().is_non_overlapping_and_dense();
  const at::Tensor dense = is_dense ? slot.grad() : slot.grad().contiguous();
  const KernelTensorArgs args =
      gradient_args(dense, const_cast<void*>(dense.const_data_ptr()), index);
  const bool has_scaler = inputs_.grad_scale.defined();
  const at::Tensor scale = has_scaler ? scalar_on(here.device, inputs_.grad_scale) : at::Tensor();
  double* const sums = double_data(here.sums);
  const GradScanLaunch launch{
      &args,
      1,
      float_data(scale),
      here.flags.mutable_data_ptr<float>() + index,
      has_scaler ? here.first_nonfinite.mutable_data_ptr<int64_t>() : nullptr,
      sums == nullptr ? nullptr : sums + index,
      inputs_.groups.clipping.skip_nonfinite,
      double_data(here.squares)};
  engine_of(here.device).scan(here.device, launch, param.scratch);
}

GradientRelease::Found GradientRelease::collect() {
  check_has_not_failed();
  const at::NoGradGuard no_grad;
  const OutsideInferenceMode normal;
  Found found;
  for (OfDevice& here : devices_) {
    if (!here.is_used) continue;
    here.order.join();
    here.skipped = here.flags.sum();
    found.skipped.push_back(here.skipped);
    found.first_nonfinites.push_back(here.first_nonfinite);
    if (inputs_.tracks_grad_norms && !found.sum_of_squares.defined()) {
      found.sum_of_squares = here.sums.sum();
      found.squares_of_params = here.squares;
    } else if (inputs_.tracks_grad_norms) {
      const at::Device first = found.squares_of_params.device();
      found.sum_of_squares = found.sum_of_squares + to_device(here.sums.sum(), first);
      found.squares_of_params = at::where(found.squares_of_params.isnan(),
                                          to_device(here.squares, first), found.squares_of_params);
    }
    here.order.end();
  }
  stage_ = Stage::kCollected;
  return found;
}

void GradientRelease::set_step_applied(Plan& owner) const {
  const at::Tensor applied = owner.outputs().step_applied();
  if (!applied.defined() || stepped_ == 0) return;
  const at::NoGradGuard no_grad;
  at::Tensor skipped = at::zeros({}, applied.options());
  for (const OfDevice& here : devices_) {
    if (here.is_used) skipped = skipped + to_device(here.skipped, applied.device());
  }
  applied.copy_(skipped.eq(0), /*non_blocking=*/true);
}

void GradientRelease::end() {
  stage_ = Stage::kClosed;
  has_failed_ = false;
  inputs_ = {};
}

std::string GradientRelease::give_up() {
  if (stage_ != Stage::kOpen) return {};
  end();
  if (stepped_ == 0) return {};
  return c10::str(optimizer_, ".zero_grad: the iteration ended without step(). ", progress(),
                  " had been stepped in its backward pass and stay so.");
}

void GradientRelease::throw_wrong_scaler(const std::string& operation) {
  TORCH_CHECK(false, operation,
              ": the gradients of this optimizer are released with another scaler, or without one. "
              "Pass this scaler when you release them.");
}

void GradientRelease::throw_without_scaler(const std::string& operation) {
  TORCH_CHECK(false, operation,
              ": the gradients of this optimizer are released with a scaler, which did not call "
              "this step. Call scaler.step(optimizer) with that scaler.");
}

void GradientRelease::throw_needs_gradients(const std::string& operation) {
  TORCH_CHECK(false, operation,
              " needs all gradients at once, but this optimizer releases them during backward(). "
              "Call remove() of the release first.");
}

void GradientRelease::throw_changed(const std::string& option, int64_t group) const {
  TORCH_CHECK(false, optimizer_, ".step: ", option, " of group ", group, " changed after ",
              progress(),
              " had been stepped with its old value. Change options between step() and backward(), "
              "and step schedulers after step().");
}

}  // namespace amp_ext
