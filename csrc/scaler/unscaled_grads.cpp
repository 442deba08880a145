// Which gradients a scaler has unscaled, told from those that may still carry the scale.
#include "scaler/unscaled_grads.h"

#include <cstddef>
#include <utility>

namespace amp_ext {

UnscaledGrads::UnscaledGrads(const std::vector<ParamGrad>& params) {
  for (const ParamGrad& each : params) {
    if (each.grad.defined()) entries_[each.param].see(each);
  }
}

void UnscaledGrads::note_scale(const std::vector<ParamGrad>& params, bool has_stepped) {
  if (has_stepped) entries_.clear();
  if (loss_was_scaled_) return;
  loss_was_scaled_ = true;
  std::unordered_map<const void*, Entry> now;
  for (const ParamGrad& each : params) {
    if (entries_.count(each.param) != 0) now[each.param].see(each);
  }
  entries_ = std::move(now);
}

template <typename Predicate>
std::optional<int64_t> UnscaledGrads::first(const std::vector<ParamGrad>& params,
                                            const Predicate& predicate) const {
  for (size_t index = 0; index < params.size(); ++index) {
    if (!params[index].grad.defined()) continue;
    const auto found = entries_.find(params[index].param);
    const Entry* const entry = found == entries_.end() ? nullptr : &found->second;
    if (predicate(entry, params[index])) return static_cast<int64_t>(index);
  }
  return {};
}

std::optional<int64_t> UnscaledGrads::first_late(const std::vector<ParamGrad>& params) const {
  return first(params, [](const Entry* entry, const ParamGrad&) { return entry == nullptr; });
}

std::optional<int64_t> UnscaledGrads::first_written(const std::vector<ParamGrad>& params) const {
  if (!loss_was_scaled_) return {};
  return first(params, [](const Entry* entry, const ParamGrad& each) {
    return entry != nullptr && each.grad.has_storage() && !entry->is(each);
  });
}

std::optional<int64_t> UnscaledGrads::first_unscaled(const std::vector<ParamGrad>& params) const {
  return first(params, [&](const Entry* entry, const ParamGrad& each) {
    return entry != nullptr && (loss_was_scaled_ ? entry->is(each) : entry->has_place_of(each));
  });
}

void UnscaledGrads::Entry::see(const ParamGrad& each) {
  if (!each.grad.defined() || !each.grad.has_storage()) return;
  SeenTensor::remember(grad, each.grad, each.version);
  offset = each.grad.storage_offset();
}

bool UnscaledGrads::Entry::has_place_of(const ParamGrad& each) const {
  return grad.has_value() && each.grad.has_storage() && offset == each.grad.storage_offset() &&
         grad->storage._unsafe_get_target() == storage_of(each.grad);
}

bool UnscaledGrads::Entry::is(const ParamGrad& each) const {
  return has_place_of(each) && grad->version == each.version;
}

}  // namespace amp_ext
