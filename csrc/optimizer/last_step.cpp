// Finds writes to parameters that version counters miss.
#include "optimizer/last_step.h"

namespace amp_ext {

void LastStep::take_over(const LastStep& before) {
  number_ = before.number_;
  finds_writes_ = before.finds_writes_;
}

// The parameter to compare changes at each step, so that steps stay cheap.
void LastStep::remember(const ParamTable& params) {
  ++number_;
  sample_.reset();
  if (!finds_writes_ || params.slots().empty()) return;
  const size_t index = static_cast<size_t>(number_) % params.slots().size();
  const ParamSlot& slot = params.slots()[index];
  const bool is_comparable = slot.args_are_current && slot.args.master == Master::kFloat32 &&
                             slot.args.numel > 0 && slot.param().is_cpu();
  if (is_comparable) sample_ = {index, version_of(slot.master_param())};
}

std::optional<size_t> LastStep::find_uncounted_write(const ParamTable& params) {
  if (!sample_.has_value() || !finds_writes_) return {};
  const ParamSlot& slot = params.slots()[sample_->slot];
  const bool is_as_the_step_left_it =
      slot.args_are_current && slot.has_current_master() &&
      version_of(slot.master_param()) == sample_->master_version &&
      slot.param().const_data_ptr() == slot.args.param &&
      slot.master_param().const_data_ptr() == slot.args.master_param;
  if (!is_as_the_step_left_it || !slot.differs_from_master(number_)) return {};
  finds_writes_ = false;
  return sample_->slot;
}

std::string warning_of_write(const std::string& optimizer, const std::string& param) {
  return c10::str(
      optimizer, ".step: parameter ", param,
      " was written in a way that torch does not count, such as through .data. The step "
      "goes on from its float32 master and undoes the write. Write it in place without "
      ".data, or call refresh_masters() after the write.");
}

}  // namespace amp_ext
