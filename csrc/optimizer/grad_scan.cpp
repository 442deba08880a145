// Scans all gradients of a table, and decides which scans a step uses.
#include "optimizer/grad_scan.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <utility>

#include "optimizer/scalars.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

namespace {

// Returns the scan of the device and partition of a slot; adds one if there is none yet.
GradScan& scan_of(std::vector<GradScan>& scans, const ParamTable& params, const ParamSlot& slot,
                  const GradScanInputs& inputs) {
  const at::Device device = slot.grad().device();
  for (GradScan& scan : scans) {
    const GradScanResult& result = scan.result;
    if (result.found_inf.device() == device && result.partition == slot.partition) return scan;
  }
  GradScan& scan = scans.emplace_back();
  const auto float32 = at::TensorOptions(device).dtype(at::kFloat);
  scan.result.partition = slot.partition;
  scan.result.found_inf = inputs.found_inf.has_value()
                              ? inputs.found_inf->to(device, at::kFloat,
                                                     /*non_blocking=*/!device.is_cpu(),
                                                     /*copy=*/true)
                              : at::zeros({}, float32);
  if (inputs.sums_squares) {
    scan.result.sum_of_squares = at::zeros({}, float32.dtype(at::kDouble));
  }
  scan.all_args.reserve(params.slots().size());
  return scan;
}

// Adds a gradient to a scan, or a copy of a gradient with gaps in memory.
void add_gradient(GradScan& scan, const at::Tensor& grad, int64_t index) {
  const bool is_dense = grad.is_non_overlapping_and_dense();
  if (!is_dense) scan.contiguous_copies.push_back(grad.contiguous());
  const at::Tensor& dense = is_dense ? grad : scan.contiguous_copies.back();
  scan.all_args.push_back(gradient_args(dense, const_cast<void*>(dense.const_data_ptr()), index));
}

// Prepares the scans of all gradients, one for each device and partition.
std::vector<GradScan> prepare_scans(ParamTable& params, const GradScanInputs& inputs) {
  check_scalar(params.operation(), "found_inf", inputs.found_inf);
  check_scalar(params.operation(), "grad_scale", inputs.grad_scale);
  std::vector<ParamSlot>& slots = params.slots();
  std::vector<GradScan> scans;
  for (size_t index = 0; index < slots.size(); ++index) {
    if (index + kTensorsAhead < slots.size()) slots[index + kTensorsAhead].prefetch_grad();
    if (index + kStoragesAhead < slots.size())
      slots[index + kStoragesAhead].prefetch_grad_storage();
    ParamSlot& slot = slots[index];
    if (!slot.has_grad()) {
      slot.seen_grad.reset();
      continue;
    }
    params.checks().check_grad(slot);
    GradScan& scan = scan_of(scans, params, slot, inputs);
    slot.see_grad();
    add_gradient(scan, slot.grad(), static_cast<int64_t>(index));
  }
  return scans;
}

void launch_scan(GradScan& scan, const GradScanInputs& inputs, StepScratch& scratch) {
  const GradScanResult& result = scan.result;
  const at::Device device = result.found_inf.device();
  const at::Tensor scale =
      inputs.grad_scale.has_value() ? scalar_on(device, *inputs.grad_scale) : at::Tensor();
  int64_t* const first_nonfinite = result.first_nonfinite.defined()
                                       ? result.first_nonfinite.mutable_data_ptr<int64_t>()
                                       : nullptr;
  const GradScanLaunch launch{scan.all_args.data(), static_cast<int64_t>(scan.all_args.size()),
                              float_data(scale),    result.found_inf.mutable_data_ptr<float>(),
                              first_nonfinite,      double_data(result.sum_of_squares),
                              inputs.skip_nonfinite};
  engine_of(device).scan(device, launch, scratch);
  scan.all_args.clear();
  scan.contiguous_copies.clear();
}

}  // namespace

void scan_only_gradient(const ParamTable& params, int64_t index, const GradScanResult& result,
                        const GradScanInputs& inputs, StepScratch& scratch) {
  const ParamSlot& slot = params.slots().front();
  params.checks().check_grad(slot);
  GradScan scan{result};
  add_gradient(scan, slot.grad(), index);
  launch_scan(scan, inputs, scratch);
}

std::vector<GradScan> scan_gradients(ParamTable& params, const GradScanInputs& inputs,
                                     StepScratch& scratch) {
  std::vector<GradScan> scans = prepare_scans(params, inputs);
  for (GradScan& scan : scans) launch_scan(scan, inputs, scratch);
  return scans;
}

std::vector<GradScanResult> GradScans::scan(ParamTable& params, const GradScanInputs& inputs,
                                            StepScratch& scratch) {
  const at::NoGradGuard no_grad;
  scans_.clear();  // if this scan fails, no step may use an earlier one
  std::vector<GradScan> scans = prepare_scans(params, inputs);
  std::vector<GradScanResult> results;
  for (GradScan& scan : scans) {
    scan.result.first_nonfinite = first_nonfinite_on(scan.result.found_inf.device());
    results.push_back(scan.result);
  }
  for (GradScan& scan : scans) launch_scan(scan, inputs, scratch);
  if (!params.is_partitioned()) scans_ = std::move(scans);
  return results;
}

at::Tensor GradScans::first_nonfinite_on(const at::Device& device) {
  for (const at::Tensor& first : first_nonfinites_) {
    if (first.device() == device) return first;
  }
  const OutsideInferenceMode normal;
  const auto options = at::TensorOptions(device).dtype(at::kLong);
  first_nonfinites_.push_back(at::full({}, kNoTensor, options));
  return first_nonfinites_.back();
}

bool GradScans::has_sums() const {
  return !scans_.empty() && scans_.front().result.sum_of_squares.defined();
}

// Columns: what the step needs; a norm is "given" if the caller passed its sum of squares. Rows:
// what the last scan() left. Entries: whether the step scans the gradients itself.
//
//   last scan()               nothing   found_inf   norm, given   norm, not given
//   none                      no        no          no            yes
//   without sums of squares   no        no          no            yes
//   with sums of squares      no        no          no            no
//   a gradient changed since  no        yes         yes           yes
std::vector<GradScan> GradScans::take(ParamTable& params, GradientOptions& options, NormSource norm,
                                      StepScratch& scratch) {
  const bool needs_norm = norm != NormSource::kNone;
  std::vector<GradScan> scans;
  std::swap(scans, scans_);
  const bool is_out_of_date = !scans.empty() && !params.gradients_are_as_seen();
  const bool are_new = is_out_of_date
                           ? needs_norm || options.found_inf.has_value()
                           : norm == NormSource::kNewScan || norm == NormSource::kAllRanks;
  if (is_out_of_date) scans.clear();
  if (are_new) {
    scans = scan_gradients(params, {{}, {}, options.skip_nonfinite, needs_norm}, scratch);
  }
  const bool adds_squares = needs_norm && !options.sum_of_squares.has_value();
  for (const GradScan& scan : scans) {
    const at::Device device = scans.front().result.found_inf.device();
    if (adds_squares) {
      const at::Tensor here = to_device(scan.result.sum_of_squares, device);
      options.sum_of_squares =
          options.sum_of_squares.has_value() ? options.sum_of_squares->add(here) : here;
    }
    if (are_new && options.found_inf.has_value()) {
      const at::Tensor here = to_device(scan.result.found_inf, device);
      options.found_inf = scalar_on(device, *options.found_inf).add(here);
    }
  }
  return scans;
}

}  // namespace amp_ext
