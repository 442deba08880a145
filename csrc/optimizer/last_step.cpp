// Finds gradients that were used twice, and writes to parameters that version counters miss.
#include "optimizer/last_step.h"

#include <algorithm>

namespace amp_ext {

namespace {

// Returns the first and the last slot that has a gradient; both null if there is none.
std::array<const ParamSlot*, 2> outer_slots_with_grad(const ParamTable& params) {
  const auto has_grad = [](const ParamSlot& slot) { return slot.has_grad(); };
  const auto& slots = params.slots();
  const auto first = std::find_if(slots.begin(), slots.end(), has_grad);
  if (first == slots.end()) return {nullptr, nullptr};
  return {&*first, &*std::find_if(slots.rbegin(), slots.rend(), has_grad)};
}

}  // namespace

void LastStep::take_over(const LastStep& before) {
  number_ = before.number_;
  finds_writes_ = before.finds_writes_;
}

// One gradient is not enough to recognize those of the step, because it may be left over from
// before its parameter was frozen. The parameter to compare changes at each step, so that steps
// stay cheap.
void LastStep::remember(const ParamTable& params) {
  ++number_;
  const std::array<const ParamSlot*, 2> outer = outer_slots_with_grad(params);
  for (size_t i = 0; i < outer.size(); ++i) {
    if (outer[i] == nullptr) {
      stepped_grads_[i].reset();
    } else {
      SeenTensor::remember(stepped_grads_[i], outer[i]->grad(), outer[i]->grad_version());
    }
  }
  sample_.reset();
  if (!finds_writes_ || params.slots().empty()) return;
  const size_t index = static_cast<size_t>(number_) % params.slots().size();
  const ParamSlot& slot = params.slots()[index];
  const bool is_comparable = slot.args_are_current && slot.args.master == Master::kFloat32 &&
                             slot.args.numel > 0 && slot.param().is_cpu();
  if (is_comparable) sample_ = {index, version_of(slot.master_param())};
}

void LastStep::check_is_before_step(const ParamTable& params) const {
  const std::array<const ParamSlot*, 2> outer = outer_slots_with_grad(params);
  TORCH_CHECK(outer[0] != nullptr, params.operation(),
              ".inspect: there are no gradients to inspect. Call inspect() after backward() and "
              "before step(), or call inspect_next() at any time.");
  bool are_new = false;
  for (size_t i = 0; i < outer.size(); ++i) {
    const std::optional<SeenTensor>& stepped = stepped_grads_[i];
    are_new |= !stepped.has_value() || !stepped->is(outer[i]->grad(), outer[i]->grad_version());
  }
  TORCH_CHECK(are_new, params.operation(),
              ".inspect: the last step has already used these gradients. Call inspect() after "
              "backward() and before step(), or call inspect_next() at any time.");
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
