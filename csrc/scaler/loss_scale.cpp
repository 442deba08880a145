// The tensors of a loss scale, what looks and updates do to them, and the words of its reports.
#include "scaler/loss_scale.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <amp_ext/ops.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tensors/tensor_memory.h"

namespace amp_ext {

namespace {

// Stands where a look writes the index of the first bad gradient, if ranks have different scales.
constexpr int64_t kScalesDiffer = kNoTensor - 1;  // of no parameter

// Undefined if there is none.
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
  scale = at::full({}, init_scale, options.dtype(at::kFloat));  // last: it tells that all is there
}

void LossScale::load(const LossScaleEntries& entries) {
  const int64_t hysteresis = hyperparameters.hysteresis;
  const int64_t left = std::min(entries.hysteresis_tracker.value_or(hysteresis), hysteresis);
  if (scale.defined()) scale.fill_(entries.scale);
  if (growth_tracker.defined()) growth_tracker.fill_(entries.growth_tracker);
  if (hysteresis_tracker.defined()) hysteresis_tracker.fill_(left);
  init_scale = entries.scale;
  init_growth_tracker = entries.growth_tracker;
  init_hysteresis_tracker = left;
  hyperparameters.growth_factor = entries.growth_factor;
  hyperparameters.backoff_factor = entries.backoff_factor;
  hyperparameters.growth_interval = entries.growth_interval;
}

int64_t LossScale::add_optimizer(GroupsOf groups_of) {
  records_.push_back({std::move(groups_of)});
  return static_cast<int64_t>(records_.size()) - 1;
}

const at::Tensor& LossScale::begin_look(int64_t slot) {
  std::vector<at::Tensor>& of_last_look = records_.at(static_cast<size_t>(slot)).of_last_look;
  for (const at::Tensor& first : of_last_look) first.fill_(kNoTensor);
  of_last_look.clear();
  if (!no_overflow_.defined() || no_overflow_.device() != scale.device()) {
    const OutsideInferenceMode normal;
    no_overflow_ = at::zeros({}, at::TensorOptions(scale.device()).dtype(at::kFloat));
  }
  return no_overflow_;
}

at::Tensor LossScale::first_nonfinite(int64_t slot, const at::Device& device) {
  Record& record = records_.at(static_cast<size_t>(slot));
  at::Tensor first = on_device(record.of_last_look, device);
  if (first.defined()) return first;
  first = on_device(record.first_nonfinites, device);
  if (!first.defined()) {
    const OutsideInferenceMode normal;
    first = at::full({}, kNoTensor, at::TensorOptions(device).dtype(at::kLong));
    record.first_nonfinites.push_back(first);
  }
  record.of_last_look.push_back(first);
  return first;
}

void LossScale::keep_first_nonfinites(int64_t slot, std::vector<at::Tensor> first_nonfinites) {
  records_.at(static_cast<size_t>(slot)).of_last_look = std::move(first_nonfinites);
}

void LossScale::note_different_scales(int64_t slot, const at::Device& device,
                                      const at::Tensor& differ) {
  first_nonfinite(slot, device)
      .masked_fill_(differ.to(device, /*non_blocking=*/true), kScalesDiffer);
}

void LossScale::make_room() {
  if (monitor_ == nullptr) monitor_ = std::make_unique<ScalerMonitor>(scale.device());
  while (monitor_->number_of_optimizers() < static_cast<int64_t>(records_.size())) {
    monitor_->add_optimizer();
  }
}

void LossScale::update(const std::vector<LookFlag>& flags, bool follows) {
  make_room();
  TensorList found_infs, elsewhere;
  std::vector<OptionalTensor> first_nonfinites;
  std::vector<int64_t> slots;
  for (const LookFlag& flag : flags) {
    const Record& record = records_.at(static_cast<size_t>(flag.slot));
    at::Tensor first = on_device(record.of_last_look, flag.found_inf.device());
    if (first.defined() && first.device() != scale.device()) {
      elsewhere.push_back(first);
      first = first.to(scale.device(), /*non_blocking=*/true);
    }
    found_infs.push_back(flag.found_inf.to(scale.device(), /*non_blocking=*/true));
    first_nonfinites.push_back(first.defined() ? OptionalTensor(first) : OptionalTensor());
    slots.push_back(flag.slot);
  }
  LossScaleHyperparameters rules = hyperparameters;
  rules.dynamic = rules.dynamic && follows;
  OptionalTensor hysteresis;
  if (hysteresis_tracker.defined()) hysteresis = hysteresis_tracker;
  update_scale_(scale, growth_tracker, found_infs, first_nonfinites, slots, rules, hysteresis,
                monitor_.get());
  for (const at::Tensor& first : elsewhere) first.fill_(kNoTensor);  // a copy of it was reset
  for (const LookFlag& flag : flags) {
    std::vector<at::Tensor>& looked_at = records_[static_cast<size_t>(flag.slot)].of_last_look;
    const auto is_read = [&](const at::Tensor& first) {
      return first.device() == flag.found_inf.device();
    };
    looked_at.erase(std::remove_if(looked_at.begin(), looked_at.end(), is_read), looked_at.end());
  }
}

ScalerNews LossScale::news() {
  ScalerNews news;
  if (scale.is_cpu()) news.scale_is_too_small = must_warn_of(scale.item().toDouble());
  if (monitor_ == nullptr) return news;
  const ScalerSummary report = monitor_->read();
  if (!told_of_settling_ && report.settled_after >= 0) {
    told_of_settling_ = true;
    news.settled = c10::str("GradScaler: the loss scale settled at ", report.settled_scale,
                            " after ", report.settled_after, " skipped updates");
  }
  if (report.consecutive_skips < warn_after) {
    told_of_skips_ = false;
  } else if (!told_of_skips_) {
    told_of_skips_ = true;
    const bool is_of_these = report.nonfinite_update > report.updates - report.consecutive_skips;
    const std::string name = is_of_these ? name_of_nonfinite(report) : std::string();
    news.skips =
        c10::str("GradScaler: ", report.consecutive_skips,
                 " updates in a row were skipped, up to update ", report.updates,
                 "; the loss scale is ", report.scale, ". The first bad gradient was that of ",
                 name.empty() ? "a parameter that is not known here" : name,
                 ". Gradients that are inf or NaN at any scale come from the model or the data.");
  }
  return news;
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
  const ScalerSummary report = monitor_->read();
  if (report.nonfinite_index != kScalesDiffer) return;
  if (report.nonfinite_update <= told_of_different_scales_) return;
  told_of_different_scales_ = report.nonfinite_update;
  TORCH_CHECK(false,
              "GradScaler: the scale must be the same on all ranks of process_group, got others; "
              "here it is ",
              report.scale, " after update ", report.updates,
              ". All ranks have skipped their steps: load the scaler's state on every one of them");
}

std::string LossScale::name_of_nonfinite(const ScalerSummary& report) const {
  if (report.nonfinite_slot < 0) return {};
  const Record& record = records_.at(static_cast<size_t>(report.nonfinite_slot));
  return name_of_param(record.groups_of(), report.nonfinite_index);
}

std::optional<bool> LossScale::step_skipped(std::optional<int64_t> slot) const {
  if (monitor_ == nullptr) return {};
  if (!slot.has_value()) {
    const ScalerSummary report = monitor_->read();
    if (report.updates == 0) return {};
    return report.consecutive_skips > 0;
  }
  if (*slot >= monitor_->number_of_optimizers()) return {};
  const OptimizerReport report = monitor_->read_optimizer(*slot);
  if (report.update == 0) return {};
  return report.last_was_skipped != 0;
}

ScalerStats LossScale::stats(double initial_scale) const {
  const ScalerSummary report = monitor_ != nullptr ? monitor_->read() : ScalerSummary();
  if (report.updates == 0) {
    return {0, 0, 0, 0, initial_scale, initial_scale, initial_scale, {}};
  }
  return {report.updates,       report.updates - report.skips,
          report.skips,         report.consecutive_skips,
          report.scale,         report.smallest_scale,
          report.largest_scale, name_of_nonfinite(report)};
}

ScaleHistory LossScale::history() const {
  return monitor_ != nullptr ? monitor_->history() : ScaleHistory{1, {}, {}};
}

}  // namespace amp_ext
