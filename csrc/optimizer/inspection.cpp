// Inspects a coming step: takes it on a copy of each parameter, and measures how the copy changes.
#include "optimizer/inspection.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <amp_ext/ops.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "optimizer/masters.h"
#include "optimizer/moments.h"
#include "optimizer/scalars.h"

namespace amp_ext {

namespace {

// Number of elements that are converted to float64 and measured at a time.
constexpr int64_t kMeasuredAtOnce = int64_t{1} << 20;

// Returns a copy with the memory order in which a step visits the elements of the original.
at::Tensor copy_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const bool is_dense = tensor.is_non_overlapping_and_dense();
  return tensor.detach().clone(is_dense ? at::MemoryFormat::Preserve
                                        : at::MemoryFormat::Contiguous);
}

// Returns a slot with copies of all tensors that a step writes.
ParamSlot with_copies(const ParamSlot& slot, bool writes_grad) {
  ParamSlot copy = slot;
  const bool has_moved = copy.take_fingerprint(kParam);
  copy.current_param = c10::MaybeOwned<at::Tensor>::owned(copy_of(slot.param()));
  copy.is_sharded = false;
  copy.shard_of = c10::MaybeOwned<at::Tensor>();
  for (int list = 0; list < kSlotTensors; ++list) {
    if (list == kParam || (list == kGrad && !writes_grad)) continue;
    copy.owned[list] = copy_of(slot.owned[list]);
  }
  copy.args_are_current = copy.grad_is_current = false;
  copy.take_fingerprint(kParam);
  copy.param_of_master.reset();
  if (slot.has_current_master() && !has_moved) {
    SeenTensor::remember(copy.param_of_master, copy.param(), copy.version());
  }
  return copy;
}

// Returns the values to which a step adds its update: the master weight in float32 (joined with the
// parameter if it is a residual), or the parameter if it has no master weight.
at::Tensor decoded(const ParamSlot& slot) {
  switch (slot.master()) {
    case Master::kNone:
      return slot.param().detach();
    case Master::kFloat32:
      return slot.master_param();
    case Master::kResidual16:  // join_fp32 takes pairs of bytes instead of the slot's int16
                               // elements
      return join_fp32(slot.param().detach(), slot.master_param().unsqueeze(-1).view(at::kByte));
    default:
      return join_fp32(slot.param().detach(), slot.master_param());
  }
}

// Flattens the tensors and cuts each into slices. Calls a function with the first slice of each
// tensor, then with the second slice of each, and so on.
template <typename Function>
void for_each_part(const std::vector<at::Tensor>& tensors, const Function& function) {
  std::vector<at::Tensor> flat, parts(tensors.size());
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  const int64_t numel = flat.front().numel();
  for (int64_t begin = 0; begin < numel; begin += kMeasuredAtOnce) {
    const int64_t end = std::min(begin + kMeasuredAtOnce, numel);
    for (size_t i = 0; i < flat.size(); ++i) parts[i] = flat[i].slice(0, begin, end);
    function(parts);
  }
}

void add_squares(const at::Tensor& sum, const at::Tensor& numbers) {
  sum.add_(numbers.to(at::kDouble).square().sum());
}

// Measures how a step changed slot `before` to `after`. `weight` is decoded(before).
void measure(const ParamSlot& before, const at::Tensor& weight, const ParamSlot& after,
             const at::Tensor& sums) {
  sums.zero_();
  sums[kNumel].fill_(static_cast<double>(weight.numel()));
  for_each_part({weight, decoded(after), before.param().detach(), after.param()},
                [&](const std::vector<at::Tensor>& parts) {
                  const at::Tensor was = parts[0].to(at::kDouble);
                  const at::Tensor update = parts[1].to(at::kDouble) - was;
                  const at::Tensor largest = sums[kLargestUpdate];
                  largest.copy_(at::maximum(largest, update.abs().max()));
                  add_squares(sums[kSquares], was);
                  add_squares(sums[kUpdateSquares], update);
                  sums[kUnmoved].add_(parts[2].eq(parts[3]).sum());
                  sums[kUnmovedMaster].add_(parts[0].eq(parts[1]).sum());
                });
}

// Adds up the squares of the buffers of a slot, dequantized if necessary.
void measure_moments(const ParamSlotChecks& checks, const ParamSlot& slot, const at::Tensor& sums) {
  optim::Moments moments;
  for (int i = 0; i < slot.number_of_buffers; ++i) {
    moments[checks.code_name(slot, i)] = slot.owned[kBuffer0 + i];
    if (slot.format(i) != BufferFormat::kBlockwise8) continue;
    moments[checks.buffer_names.at(i) + "_exp"] = slot.owned[kExponents];
  }
  const at::ArrayRef<BufferDescription> buffers(checks.described, slot.number_of_buffers);
  for (const auto& [name, moment] : optim::dequantized_moments(moments, buffers)) {
    const auto& names = checks.buffer_names;
    const auto place = std::find(names.begin(), names.end(), name) - names.begin();
    for_each_part({moment}, [&, place = place](const std::vector<at::Tensor>& parts) {
      add_squares(sums[kMomentSquares0 + place], parts[0]);
    });
  }
}

// Returns a table with copies of all slots, in which scans and trials of steps note what they see.
ParamTable copy_of(const ParamTable& params) {
  ParamTable copy(params.checks());
  copy.replace_slots(params.slots());
  return copy;
}

// Takes a step with copies of one parameter's tensors, and measures it. Returns whether the step
// was applied, as one float32 on the parameter's device. `trial` is a table of its own.
at::Tensor try_slot(ParamTable& trial, const ParamSlot& slot, int64_t index, GroupTable& table,
                    const StepInputs& inputs, StateStore& store, const at::Tensor& sums) {
  trial.replace_slots({slot});
  if (slot.lacks_state()) trial.set_state(0, std::move(store.make({index}).at(0)));
  const ParamSlot before = trial.slots()[0];
  trial.checks().check_grad(before);
  trial.checks().check_tensors(before);
  ParamSlot& after = trial.slots()[0];
  after = with_copies(before, table.groups[slot.group].common->write_back_grads);
  const GradientOptions& options = inputs.gradients;
  trial.check_for_step(after, table,
                       options.grad_scale.has_value() || options.found_inf.has_value());
  StepScratch scratch;
  std::vector<StepBatch> batches = prepare_step(trial.checks(), after, table, inputs, scratch);
  const at::Tensor applied =
      at::zeros({}, at::TensorOptions(slot.param().device()).dtype(at::kFloat));
  batches.front().step_applied = applied.mutable_data_ptr<float>();
  at::Tensor weight = decoded(before);
  StepOutcome outcome;
  launch_step(batches, table, scratch, outcome);
  // A step first replaces a master that is out of date, so the update starts from the new master.
  if (after.refreshed_master.defined()) weight = after.refreshed_master;
  const at::Tensor measured = at::zeros({kInspectedSums}, sums.options().device(weight.device()));
  measure(before, weight, after, measured);
  measure_moments(trial.checks(), after, measured);
  sums.copy_(measured, /*non_blocking=*/true);
  return applied;
}

}  // namespace

std::vector<GradScanResult> scan_without_recording(const Plan& plan,
                                                   const OptionalTensor& grad_scale,
                                                   const optim::ClippingOptions& options) {
  const OutsideInferenceMode normal;
  ParamTable params = copy_of(plan.params());
  const StepNorms norms = plan.norms(options.max_grad_norm);
  StepScratch scratch;
  std::vector<GradScanResult> results;
  for (const GradScan& scan :
       scan_gradients(params, {{}, grad_scale, options.skip_nonfinite, norms}, scratch)) {
    results.push_back(scan.result);
  }
  return results;
}

InspectedStep inspect_step(const Plan& plan, GroupTable& table, GradientOptions options,
                           StateStore& store) {
  const at::NoGradGuard no_grad;
  const OutsideInferenceMode normal;
  check_options(plan.params().operation(), table, options);
  StepNorms norms = plan.norms(options.max_grad_norm, {options.sum_of_squares.has_value(), false});
  norms.each = NormSource::kNone;  // the norms that a step only reports are not inspected
  if (!norms.reads_total) norms.total = NormSource::kNone;
  {
    ParamTable params = copy_of(plan.params());
    GradScans scans = plan.scans();
    StepScratch scratch;
    scans.take(params, options, norms, scratch);
  }
  const StepInputs inputs{std::move(options), norms.reads_total, plan.outputs().guard()};
  const std::vector<ParamSlot>& slots = plan.params().slots();
  const at::Device device = slots.empty() ? at::Device(at::kCPU) : slots.front().param().device();
  InspectedStep found;
  found.sums = at::full({static_cast<int64_t>(slots.size()), kInspectedSums}, std::nan(""),
                        at::TensorOptions(device).dtype(at::kDouble));
  found.skipped = at::zeros({}, at::TensorOptions(device).dtype(at::kBool));
  ParamSlotChecks checks = plan.params().checks();
  checks.described = table.buffers;
  ParamTable trial(std::move(checks));
  for (size_t i = 0; i < slots.size(); ++i) {
    const ParamSlot& slot = slots[i];
    const optim::StateSpec& spec = plan.params().spec_of(slot);
    const std::string master =
        optim::key_of_master(spec.master_weights, slot.param().scalar_type());
    found.params.push_back({slot.group, slot.index_in_group, !master.empty(), spec.names()});
    if (!slot.has_grad()) continue;
    const auto index = static_cast<int64_t>(i);
    const at::Tensor applied =
        try_slot(trial, slot, index, table, inputs, store, found.sums[index]);
    found.skipped = to_device(applied, device).eq(0);
  }
  return found;
}

optim::Inspection InspectedStep::read() const {
  optim::Inspection inspection;
  inspection.skipped = skipped.item().toBool();
  const at::Tensor host = sums.to(at::kCPU);
  const auto numbers = host.accessor<double, 2>();
  for (size_t i = 0; i < params.size(); ++i) {
    const auto slot = numbers[static_cast<int64_t>(i)];
    const double numel = slot[kNumel];
    if (std::isnan(numel)) continue;
    const auto share = [&](InspectedSum sum) { return numel > 0.0 ? slot[sum] / numel : 0.0; };
    optim::ParamInspection param;
    param.group = params[i].group;
    param.index_in_group = params[i].index_in_group;
    param.norm = std::sqrt(slot[kSquares]);
    param.update_norm = std::sqrt(slot[kUpdateSquares]);
    param.ratio = param.update_norm == 0.0 ? 0.0 : param.update_norm / param.norm;
    param.largest_update = slot[kLargestUpdate];
    param.unmoved = share(kUnmoved);
    if (params[i].has_master) param.unmoved_master = share(kUnmovedMaster);
    const std::vector<std::string>& buffers = params[i].buffers;
    for (size_t j = 0; j < buffers.size(); ++j) {
      param.moment_norms.emplace_back(buffers[j], std::sqrt(slot[kMomentSquares0 + j]));
    }
    inspection.params.push_back(std::move(param));
  }
  return inspection;
}

}  // namespace amp_ext
