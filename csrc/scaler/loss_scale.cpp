// Creates, updates and loads the tensors of a loss scale, scans gradients, and words the messages.
#include "scaler/loss_scale.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <amp_ext/ops.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "devices/dispatch.h"
#include "launches.h"
#include "tensors/tensor_memory.h"
#include "tensors/to_device.h"

namespace amp_ext {

namespace {

// Value of first_nonfinite if ranks have different scales. No parameter has this index.
constexpr int64_t kScalesDiffer = kNoTensor - 1;

// Returns the tensor in the list that is on `device`, or an undefined tensor if there is none.
at::Tensor on_device(const std::vector<at::Tensor>& tensors, const at::Device& device) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.device() == device) return tensor;
  }
  return {};
}

}  // namespace

void LossScale::make(const at::Device& device) {
  const OutsideInferenceMode normal;
  const auto options = at::TensorOptions(device);
  growth_tracker = at::full({}, init_growth_tracker, options.dtype(at::kInt));
  if (hyperparameters.hysteresis != 1) {
    hysteresis_tracker = at::full({}, init_hysteresis_tracker, options.dtype(at::kInt));
  }
  // The scale comes last: callers take a defined scale as a sign that all tensors exist.
  scale = at::full({}, init_scale, options.dtype(at::kFloat));
}

void LossScale::load(const Entry& entry) {
  const auto required = [&](const char* name) { return *entry(name, /*is_required=*/true); };
  const double new_scale = required("scale").toDouble();
  const double growth_factor = required("growth_factor").toDouble();
  const double backoff_factor = required("backoff_factor").toDouble();
  const int64_t growth_interval = required("growth_interval").toLong();
  const int64_t tracker = required("_growth_tracker").toLong();
  // State dicts of torch's scaler have no hysteresis.
  const auto hysteresis = entry("_hysteresis_tracker", /*is_required=*/false);
  const int64_t most = hyperparameters.hysteresis;

  init_scale = new_scale;
  hyperparameters.growth_factor = growth_factor;
  hyperparameters.backoff_factor = backoff_factor;
  hyperparameters.growth_interval = growth_interval;
  init_growth_tracker = tracker;
  init_hysteresis_tracker = hysteresis.has_value() ? std::min(hysteresis->toLong(), most) : most;
  if (scale.defined()) scale.fill_(init_scale);
  if (growth_tracker.defined()) growth_tracker.fill_(init_growth_tracker);
  if (hysteresis_tracker.defined()) hysteresis_tracker.fill_(init_hysteresis_tracker);
}

std::optional<int64_t> LossScale::find_optimizer(const void* key) const {
  for (size_t slot = 0; slot < report_slots_.size(); ++slot) {
    if (report_slots_[slot].key == key && report_slots_[slot].is_alive())
      return static_cast<int64_t>(slot);
  }
  return {};
}

int64_t LossScale::add_optimizer(const void* key, std::function<bool()> is_alive, NameOf name_of,
                                 std::function<bool()> has_withheld) {
  if (const auto known = find_optimizer(key)) return *known;
  report_slots_.push_back({key, std::move(is_alive), std::move(name_of), std::move(has_withheld)});
  return static_cast<int64_t>(report_slots_.size()) - 1;
}

const at::Tensor& LossScale::start_iteration(int64_t slot) {
  ReportSlot& report_slot = report_slot_of(slot);
  if (report_slot.awaits_update) {  // the last iteration ended without an update
    for (const at::Tensor& first : report_slot.first_nonfinites) first.fill_(kNoTensor);
  }
  report_slot.awaits_update = true;
  if (!no_overflow_.defined() || no_overflow_.device() != scale.device()) {
    const OutsideInferenceMode normal;
    no_overflow_ = at::zeros({}, at::TensorOptions(scale.device()).dtype(at::kFloat));
  }
  return no_overflow_;
}

at::Tensor LossScale::scan(int64_t slot, const TensorList& grads, const at::Tensor& found_inf,
                           const OptionalTensor& inv_scale) {
  const at::Device device = grads.at(0).device();
  const auto here = [&](const at::Tensor& number) { return to_device(number, device); };
  const at::Tensor flag = here(found_inf.clone());
  const at::Tensor first = first_nonfinite(slot, device);
  if (inv_scale.has_value()) {
    unscale_(grads, here(*inv_scale), flag, first);
  } else {
    check_finite_(grads, flag, here(scale), {}, first);
  }
  return flag;
}

at::Tensor LossScale::first_nonfinite(int64_t slot, const at::Device& device) {
  ReportSlot& report_slot = report_slot_of(slot);
  at::Tensor first = on_device(report_slot.first_nonfinites, device);
  if (!first.defined()) {
    const OutsideInferenceMode normal;
    first = at::full({}, kNoTensor, at::TensorOptions(device).dtype(at::kLong));
    report_slot.first_nonfinites.push_back(first);
  }
  return first;
}

void LossScale::keep_first_nonfinites(int64_t slot, const std::vector<at::Tensor>& first_nonfinites,
                                      bool counts_tensors) {
  report_slot_of(slot).counts_tensors = counts_tensors;
  std::vector<at::Tensor>& kept = report_slot_of(slot).first_nonfinites;
  for (const at::Tensor& first : first_nonfinites) {
    const auto is_on_same_device = [&](const at::Tensor& each) {
      return each.device() == first.device();
    };
    kept.erase(std::remove_if(kept.begin(), kept.end(), is_on_same_device), kept.end());
    kept.push_back(first);
  }
}

void LossScale::note_different_scales(int64_t slot, const at::Device& device,
                                      const at::Tensor& differ) {
  first_nonfinite(slot, device).masked_fill_(to_device(differ, device), kScalesDiffer);
}

void LossScale::make_room() {
  if (monitor_ == nullptr) monitor_ = std::make_unique<ScalerMonitor>(scale.device());
  while (monitor_->number_of_optimizers() < static_cast<int64_t>(report_slots_.size())) {
    monitor_->add_optimizer();
  }
}

LogMessages LossScale::update(const std::vector<std::pair<int64_t, at::Tensor>>& flags,
                              const std::function<void()>& set) {
  if (!flags.empty()) follow(flags, /*follows=*/set == nullptr);
  if (set != nullptr) set();
  return messages();
}

void LossScale::follow(const std::vector<std::pair<int64_t, at::Tensor>>& flags, bool follows) {
  make_room();
  TensorList elsewhere;
  std::vector<ReportedFlag> reported;
  for (const auto& [slot, found_inf] : flags) {
    at::Tensor first = on_device(report_slot_of(slot).first_nonfinites, found_inf.device());
    if (first.defined() && first.device() != scale.device()) {
      elsewhere.push_back(first);
      first = to_device(first, scale.device());
    }
    reported.push_back(
        {to_device(found_inf, scale.device()), first, slot, report_slot_of(slot).counts_tensors});
  }
  LossScaleHyperparameters rules = hyperparameters;
  rules.dynamic = rules.dynamic && follows;
  ScaleState state = {scale, growth_tracker, {}};
  if (hysteresis_tracker.defined()) state.hysteresis_tracker = hysteresis_tracker;
  update_scale(state, rules, reported, monitor_->memory());
  for (const at::Tensor& first : elsewhere) first.fill_(kNoTensor);  // the update only reset copies
  for (const auto& flag : flags) report_slot_of(flag.first).awaits_update = false;
}

LogMessages LossScale::messages() {
  LogMessages messages;
  if (scale.is_cpu()) messages.scale_is_too_small = must_warn_of(scale.item().toDouble());
  if (monitor_ == nullptr) return messages;
  const ScalerReport report = monitor_->read();
  if (report.consecutive_skips < warn_after) {
    warned_of_.skips = false;
  } else if (!warned_of_.skips) {
    warned_of_.skips = true;
    const bool is_of_these = report.nonfinite_update > report.updates - report.consecutive_skips;
    const std::string name = is_of_these ? name_of_nonfinite(report) : std::string();
    messages.skips =
        c10::str("GradScaler: ", report.consecutive_skips,
                 " updates in a row were skipped, up to update ", report.updates,
                 "; the loss scale is ", report.scale, ". The first bad gradient was that of ",
                 name.empty() ? "a parameter that is not known here" : name,
                 ". Gradients that are inf or NaN at any scale come from the model or the data.");
  }
  return messages;
}

bool LossScale::must_warn_of(double value) {
  if (warned_of_scale || std::abs(value) > 0x1p-128 || std::isnan(value)) return false;
  warned_of_scale = true;
  return true;
}

std::string LossScale::warning_of(const std::string& value) {
  return c10::str("GradScaler: the scale fell to ", value,
                  ", whose inverse is not finite: every step is skipped from here on. The "
                  "gradients are inf or NaN at any scale; look for the cause in the model or the "
                  "data, then set the scale with update(new_scale).");
}

void LossScale::check_scales() {
  if (monitor_ == nullptr) return;
  const ScalerReport report = monitor_->read();
  if (report.nonfinite_index != kScalesDiffer) return;
  if (report.nonfinite_update <= warned_of_.different_scales) return;
  warned_of_.different_scales = report.nonfinite_update;
  TORCH_CHECK(false,
              "GradScaler: the scale differs between the ranks of process_group, so all ranks "
              "skipped their steps; on this rank it is ",
              report.scale, " after update ", report.updates,
              ". Load the scaler's state on every rank.");
}

std::string LossScale::name_of_nonfinite(const ScalerReport& report) const {
  if (report.nonfinite_slot < 0) return {};
  const ReportSlot& report_slot = report_slot_of(report.nonfinite_slot);
  return report_slot.name_of(report.nonfinite_index);
}

std::optional<bool> LossScale::step_skipped(std::optional<int64_t> slot) const {
  if (monitor_ == nullptr) return {};
  if (!slot.has_value()) {
    const ScalerReport report = monitor_->read();
    if (report.updates == 0) return {};
    if (report.consecutive_skips > 0) return true;
    for (int64_t each = 0; each < monitor_->number_of_optimizers(); ++each) {
      const bool took_part = monitor_->read_optimizer(each).update == report.updates;
      if (took_part && report_slot_of(each).has_withheld()) return true;
    }
    return false;
  }
  if (*slot >= monitor_->number_of_optimizers()) return {};
  const OptimizerReport report = monitor_->read_optimizer(*slot);
  if (report.update == 0) return {};
  return report.last_was_skipped != 0 || report_slot_of(*slot).has_withheld();
}

ScalerStats LossScale::stats(double initial_scale) const {
  const ScalerReport report = monitor_ != nullptr ? monitor_->read() : ScalerReport();
  if (report.updates == 0) {
    return {0, 0, 0, 0, initial_scale, initial_scale, initial_scale, {}};
  }
  return {report.updates,        report.updates - report.skips,
          report.skips,          report.consecutive_skips,
          report.scale,          report.smallest_scale,
          report.largest_scale,  name_of_nonfinite(report),
          report.skipped_tensors};
}

}  // namespace amp_ext
