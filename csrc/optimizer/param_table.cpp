// Registers the parameters of an optimizer, and recognizes tensors that changed between its steps.
#include "optimizer/param_table.h"

#include <algorithm>
#include <utility>

namespace amp_ext {

void ParamTable::register_params(std::vector<optim::StateSpec> specs,
                                 const std::vector<Param>& params) {
  const auto keeps_more = [](const optim::StateSpec& a, const optim::StateSpec& b) {
    return a.buffer_count < b.buffer_count;
  };
  const auto most = std::max_element(specs.begin(), specs.end(), keeps_more);
  if (most != specs.end()) {
    checks_.buffer_names.clear();
    for (int i = 0; i < most->buffer_count; ++i)
      checks_.buffer_names.emplace_back(most->buffers[i].name);
  }
  specs_ = std::move(specs);
  slots_.reserve(params.size());
  has_dtensors_ = is_partitioned_ = false;
  for (const Param& param : params) {
    ParamSlot& slot = slots_.emplace_back();
    slot.group = param.group;
    slot.index_in_group = param.index_in_group;
    slot.object = param.object;
    slot.is_sharded = param.partition.has_value();
    slot.partition = param.partition.value_or(0);
    slot.global_offset = slot.args.global_offset = param.global_offset;
    has_dtensors_ |= slot.is_sharded;
    is_partitioned_ |= slot.partition != 0;
    const auto found = remembered_.find(slot.object);
    if (found == remembered_.end()) continue;
    slot.param_of_master = found->second.param_of_master;
    slot.fingerprints[kParam] = found->second.fingerprint;
    slot.seen_grad = found->second.scaled_grad;
    slot.seen_grad_data = found->second.scaled_grad_data;
    slot.seen_grad_is_scaled = slot.seen_grad.has_value();
  }
}

void ParamTable::drop_slots() {
  remembered_ = remembered();
  specs_.clear();
  slots_.clear();
  is_partitioned_ = false;
}

std::unordered_map<const void*, ParamTable::Remembered> ParamTable::remembered() const {
  if (slots_.empty()) return remembered_;
  std::unordered_map<const void*, Remembered> all;
  for (const ParamSlot& slot : slots_) {
    Remembered& one = all[slot.object];
    one.param_of_master = slot.param_of_master;
    if (slot.param_of_master.has_value()) one.fingerprint = slot.fingerprints[kParam];
    if (!slot.seen_grad_is_scaled) continue;
    one.scaled_grad = slot.seen_grad;
    one.scaled_grad_data = slot.seen_grad_data;
  }
  return all;
}

void ParamTable::inherit_scaled_grads(const ParamTable& before) {
  remembered_ = before.remembered();
  for (auto& [object, one] : remembered_) {
    one.param_of_master.reset();
    one.fingerprint = {};
  }
}

bool ParamTable::take_param(size_t index, const at::Tensor& param) {
  ParamSlot& slot = slots_[index];
  if (slot.was_contiguous.has_value() && *slot.was_contiguous != param.is_contiguous())
    return false;
  if (slot.is_sharded) {
    slot.shard_of = c10::MaybeOwned<at::Tensor>::borrowed(param);
  } else {
    slot.current_param = c10::MaybeOwned<at::Tensor>::borrowed(param);
    slot.owned[kGrad] = param.unsafeGetTensorImpl()->grad();
  }
  return true;
}

void ParamTable::set_shard(int64_t index, at::Tensor param, at::Tensor grad) {
  ParamSlot& slot = slots_.at(index);
  slot.current_param = c10::MaybeOwned<at::Tensor>::owned(std::move(param));
  slot.owned[kGrad] = std::move(grad);
}

void ParamTable::set_state(int64_t index, ParamState state) {
  ParamSlot& slot = slots_.at(index);
  slot.number_of_buffers = static_cast<int>(state.buffers.size());
  TORCH_CHECK(slot.number_of_buffers <= kMaxBuffers, checks_.operation, ": ",
              checks_.name_of(slot, kParam), " must have up to ", kMaxBuffers, " buffers, got ",
              slot.number_of_buffers);
  if (state.master_param.defined() && state.master_param.scalar_type() != at::kFloat) {
    check_is_residual(checks_.operation, checks_.name_of(slot, kMaster), state.master_param,
                      slot.param());
    state.master_param = residual_elements(state.master_param);
  }
  for (int i = 0; i < kMaxBuffers; ++i) {
    slot.owned[kBuffer0 + i] = i < slot.number_of_buffers ? state.buffers[i] : at::Tensor();
  }
  slot.owned[kMaster] = std::move(state.master_param);
  slot.owned[kStep] = std::move(state.step);
  slot.owned[kExponents] = std::move(state.exponents);
  slot.state_dtype = slot.param().scalar_type();
  slot.state_device = slot.param().device();
  slot.kernel.reset();
  slot.args_are_current = false;
  slot.was_contiguous.reset();
  const size_t group = slot.group;
  if (group < specs_.size() && specs_[group].state_dtype.is_coded()) {
    slot.was_contiguous = (slot.is_sharded ? *slot.shard_of : slot.param()).is_contiguous();
  }
}

void ParamTable::release_params() {
  for (ParamSlot& slot : slots_) {
    slot.current_param = c10::MaybeOwned<at::Tensor>();
    slot.shard_of = c10::MaybeOwned<at::Tensor>();
    slot.owned[kGrad].reset();
    slot.contiguous_copies.clear();
    slot.refreshed_master.reset();
  }
}

void ParamTable::check_for_step(Slots slots, const GroupTable& table, bool allows_scaled_grads) {
  checks_.described = table.buffers;
  for (size_t i = 0; i < slots.count; ++i) {
    if (i + kTensorsAhead < slots.count) slots[i + kTensorsAhead].prefetch_tensors();
    if (i + kStoragesAhead < slots.count) slots[i + kStoragesAhead].prefetch_storages();
    ParamSlot& slot = slots[i];
    if (slot.has_grad()) {
      check_slot(slot, table);
      if (!allows_scaled_grads) checks_.check_carries_no_scale(slot);
    }
    slot.master_is_current = slot.has_current_master();
  }
}

OptimizerKernel ParamTable::kernel_of(const ParamSlot& slot, const GroupTable& table) const {
  const auto kernel = table.kernel(slot.number_of_buffers);
  TORCH_CHECK(slot.state_dtype == slot.param().scalar_type() && kernel.has_value(),
              checks_.operation, ": ", checks_.name_of(slot, kParam),
              " has a state that fits no kernel, with ", slot.number_of_buffers,
              " buffers. Remove what you added to its state, and call optimizer.rebuild().");
  return *kernel;
}

void ParamTable::check_slot(ParamSlot& slot, const GroupTable& table) {
  const bool writes_grad = table.groups[slot.group].common->write_back_grads;
  if (slot.writes_grad != writes_grad) slot.fingerprints[kGrad] = {};  // forces new checks
  slot.writes_grad = writes_grad;
  if (!slot.kernel.has_value()) slot.kernel = kernel_of(slot, table);
  if (slot.take_fingerprint(kGrad)) slot.grad_is_current = false;
  for (int list = 0; list < kSlotTensors; ++list) {
    if (list == kGrad) continue;
    if (!slot.take_fingerprint(list)) continue;
    slot.args_are_current = false;
    // param_of_master alone would not notice another view of the same storage.
    if (list == kParam) slot.param_of_master.reset();
  }
  if (slot.args_are_current && (slot.grad_is_current || slot.take_new_grad())) return;
  slot.args_are_current = false;
  checks_.check_grad(slot);
  checks_.check_tensors(slot);
}

bool ParamTable::gradients_are_as_seen() const {
  return std::all_of(slots_.begin(), slots_.end(), [](const ParamSlot& slot) {
    return slot.has_grad() ? slot.grad_is_as_seen() : !slot.seen_grad.has_value();
  });
}

bool ParamTable::gradients_were_written() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const ParamSlot& slot) {
    return slot.has_grad() && slot.seen_grad.has_value() && !slot.grad_is_as_seen();
  });
}

// Runs after all launches, because parameters that are views of one tensor share its version
// counter, which each of them increments. A skipped step leaves gradients scaled that it should
// have written back, but only the device knows of it, so they count as unscaled.
void ParamTable::remember_step(Slots slots, bool had_scale, bool are_as_seen) {
  for (ParamSlot& slot : slots) {
    if (slot.master_is_current && slot.master() == Master::kFloat32) {
      SeenTensor::remember(slot.param_of_master, slot.param(), slot.version());
    }
    if (!had_scale || !slot.has_grad()) continue;
    if (!are_as_seen) slot.see_grad();
    slot.seen_grad_is_scaled = !slot.writes_grad;
  }
}

void ParamTable::forget_writes(const std::unordered_map<uintptr_t, int64_t>& writes) {
  const auto forget = [&](const void* object, SeenTensor& seen) {
    const auto written = writes.find(reinterpret_cast<uintptr_t>(object));
    if (written != writes.end()) seen.version += written->second;
  };
  for (ParamSlot& slot : slots_) {
    if (slot.param_of_master.has_value()) forget(slot.object, *slot.param_of_master);
  }
  for (auto& [object, one] : remembered_) {
    if (one.param_of_master.has_value()) forget(object, *one.param_of_master);
  }
}

}  // namespace amp_ext
