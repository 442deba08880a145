// Scans all gradients of a plan, and decides which scans a step uses.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <utility>

#include "optimizer/plan.h"
#include "optimizer/scalars.h"

namespace amp_ext {

StepNorms norms_of_step(const NormSettings& settings, const KnownSums& given,
                        const KnownSums& scanned, bool is_partitioned) {
  const auto source = [&](bool is_wanted, bool KnownSums::* sum) {
    if (!is_wanted) return NormSource::kNone;
    if (given.*sum) return NormSource::kGiven;
    if (is_partitioned) return NormSource::kAllRanks;
    return scanned.*sum ? NormSource::kLastScan : NormSource::kNewScan;
  };
  const bool reads_total = settings.max_grad_norm.has_value() || settings.is_guarded;
  return {reads_total, source(reads_total || settings.tracks_grad_norms, &KnownSums::total),
          source(settings.tracks_grad_norms, &KnownSums::each)};
}

at::Tensor sum_of_squares_on(const at::Device& device, const GradientOptions& options,
                             const std::vector<GradScan>& scans) {
  if (options.sum_of_squares.has_value()) {
    return to_device(*options.sum_of_squares, device).to(at::kDouble);
  }
  at::Tensor sum;
  for (const GradScan& scan : scans) {
    const at::Tensor here = to_device(scan.result.sum_of_squares, device);
    sum = sum.defined() ? sum.add(here) : here;
  }
  return sum;
}

StepNorms Plan::norms(const std::optional<double>& max_grad_norm, const KnownSums& given) const {
  KnownSums scanned{};
  if (!scans_.empty()) {
    const GradScanResult& last = scans_.front().result;
    scanned = {last.sum_of_squares.defined(), last.squares_of_params.defined()};
  }
  return norms_of_step({max_grad_norm, is_guarded(), tracks_grad_norms_}, given, scanned,
                       params_.is_partitioned());
}

std::vector<GradScanResult> Plan::scan(const at::Tensor& found_inf,
                                       const OptionalTensor& grad_scale,
                                       const optim::ClippingOptions& options) {
  const at::NoGradGuard no_grad;
  scans_.clear();  // if this scan fails, no step may use an earlier one
  scans_ = scan_grads(found_inf, grad_scale, options);
  std::vector<GradScanResult> results;
  for (GradScan& scan : scans_) {
    scan.result.first_nonfinite = first_nonfinite_on(scan.result.found_inf.device());
    scan.all_args.clear();
    results.push_back(scan.result);
  }
  if (params_.is_partitioned()) scans_.clear();
  return results;
}

at::Tensor Plan::first_nonfinite_on(const at::Device& device) {
  for (const at::Tensor& first : first_nonfinites_) {
    if (first.device() == device) return first;
  }
  const OutsideInferenceMode normal;
  const auto options = at::TensorOptions(device).dtype(at::kLong);
  first_nonfinites_.push_back(at::full({}, kNoTensor, options));
  return first_nonfinites_.back();
}

std::vector<GradScan> Plan::scan_grads(const OptionalTensor& found_inf,
                                       const OptionalTensor& grad_scale,
                                       const optim::ClippingOptions& options) {
  check_scalar(params_.operation(), "found_inf", found_inf);
  check_scalar(params_.operation(), "grad_scale", grad_scale);
  std::vector<ParamSlot>& slots = params_.slots();
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
    params_.checks().check_grad(slot);
    GradScan& scan = scan_of(scans, slot, found_inf, options);
    slot.see_grad();
    const bool is_dense = slot.grad().is_non_overlapping_and_dense();
    // The slot keeps the dense copy alive until the scan has been launched.
    if (!is_dense) slot.contiguous_copies.push_back({slot.grad(), slot.grad().contiguous(), false});
    const at::Tensor& dense = is_dense ? slot.grad() : slot.contiguous_copies.back().dense;
    scan.all_args.push_back(gradient_args(dense, const_cast<void*>(dense.const_data_ptr()),
                                          static_cast<int64_t>(index)));
  }
  for (GradScan& scan : scans) {
    const GradScanResult& result = scan.result;
    const at::Device device = result.found_inf.device();
    const at::Tensor scale = grad_scale.has_value() ? scalar_on(device, *grad_scale) : at::Tensor();
    // Only scans for a scaler have a found_inf. Its update reads and resets first_nonfinite.
    int64_t* const first_nonfinite =
        found_inf.has_value() ? first_nonfinite_on(device).mutable_data_ptr<int64_t>() : nullptr;
    const GradScanLaunch launch{scan.all_args.data(),   static_cast<int64_t>(scan.all_args.size()),
                                float_data(scale),      result.found_inf.mutable_data_ptr<float>(),
                                first_nonfinite,        double_data(result.sum_of_squares),
                                options.skip_nonfinite, double_data(result.squares_of_params)};
    engine_of(device).scan(device, launch, scratch_);
  }
  for (ParamSlot& slot : slots) slot.contiguous_copies.clear();
  return scans;
}

GradScan& Plan::scan_of(std::vector<GradScan>& scans, const ParamSlot& slot,
                        const OptionalTensor& found_inf,
                        const optim::ClippingOptions& options) const {
  const at::Device device = slot.grad().device();
  for (GradScan& scan : scans) {
    const GradScanResult& result = scan.result;
    if (result.found_inf.device() == device && result.partition == slot.partition) return scan;
  }
  GradScan scan;
  const auto float32 = at::TensorOptions(device).dtype(at::kFloat);
  const auto float64 = float32.dtype(at::kDouble);
  scan.result.partition = slot.partition;
  scan.result.found_inf = found_inf.has_value()
                              ? found_inf->to(device, at::kFloat,
                                              /*non_blocking=*/!device.is_cpu(), /*copy=*/true)
                              : at::zeros({}, float32);
  const StepNorms norms = this->norms(options.max_grad_norm);
  if (norms.wants_total()) scan.result.sum_of_squares = at::zeros({}, float64);
  if (norms.wants_each()) {
    scan.result.squares_of_params = at::full({params_.number_of_params()}, std::nan(""), float64);
  }
  scan.all_args.reserve(params_.slots().size());
  return scans.emplace_back(std::move(scan));
}

// Returns the scans that a step uses: those of scan(), or new ones if it lacks sums, or if it uses
// what scan() found and a gradient has changed since. Sets `is_new` to whether they are new.
// Columns: what the step needs; a norm is "given" if the caller passed its sum of squares. Rows:
// what the last scan() left.
//
//   last scan()               nothing   found_inf   norm, given   norm, not given
//   none                      no        no          no            yes
//   without sums of squares   no        no          no            yes
//   with sums of squares      no        no          no            no
//   a gradient changed since  no        yes         yes           yes
std::vector<GradScan> Plan::scans_for_step(const GradientOptions& options,
                                           bool has_squares_of_params, bool& is_new) {
  const StepNorms norms = this->norms(options.max_grad_norm,
                                      {options.sum_of_squares.has_value(), has_squares_of_params});
  const bool is_out_of_date = !scans_.empty() && !params_.gradients_are_as_seen();
  is_new = is_out_of_date
               ? norms.wants_total() || options.found_inf.has_value()
               : norms.comes_from(NormSource::kNewScan) || norms.comes_from(NormSource::kAllRanks);
  std::vector<GradScan> scans;
  std::swap(scans, scans_);
  if (is_out_of_date) scans.clear();
  if (!is_new) return scans;
  return scan_grads({}, {}, {options.max_grad_norm, options.skip_nonfinite});
}

}  // namespace amp_ext
