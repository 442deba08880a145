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

void UnscaledGrads::check_unscaled(const std::vector<ParamGrad>& params,
                                   const NameOf& name_of) const {
  const auto late =
      first(params, [](const Entry* entry, const ParamGrad&) { return entry == nullptr; });
  TORCH_CHECK(!late.has_value(), "GradScaler: the gradient of ", name_of(*late),
              " must be there when unscale_() is called, got it later: it may still be scaled");
  if (!loss_was_scaled_) return;
  const auto written = first(params, [](const Entry* entry, const ParamGrad& each) {
    return entry != nullptr && each.grad.has_storage() && !entry->is(each);
  });
  TORCH_CHECK(!written.has_value(), "GradScaler: the gradient of ", name_of(*written),
              " must be as unscale_() left it when the next loss is scaled, got one that was "
              "written or replaced since: it may carry the scale; call optimizer.zero_grad() and "
              "update(), and backward anew");
}

void UnscaledGrads::check_still_scaled(const std::string& operation,
                                       const std::vector<ParamGrad>& params,
                                       const NameOf& name_of) const {
  const auto index = first(params, [&](const Entry* entry, const ParamGrad& each) {
    return entry != nullptr && (loss_was_scaled_ ? entry->is(each) : entry->has_place_of(each));
  });
  TORCH_CHECK(!index.has_value(), "GradScaler.", operation, ": the gradient of ", name_of(*index),
              " must carry the scale, got one that was unscaled with another optimizer, which has "
              "this parameter too: give each parameter to one optimizer");
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
