// The Autocast scope of C++ programs, and autocast's cache of cast weights. This file is separate
// because autocast's header takes long to compile.
#include "tensors/autocast_cache.h"

#include <ATen/autocast_mode.h>
#include <amp_ext/autocast.h>

namespace amp_ext {

void clear_autocast_cache() { at::autocast::clear_cache(); }

Autocast::Autocast(c10::DeviceType device_type, std::optional<c10::ScalarType> dtype, bool enabled,
                   std::optional<bool> cache_enabled)
    : device_type_(device_type) {
  TORCH_CHECK(device_type == at::kCPU || device_type == at::kCUDA,
              "Autocast: device_type must be cpu or cuda, got ", device_type);
  const at::ScalarType wanted = dtype.value_or(at::autocast::get_autocast_dtype(device_type));
  TORCH_CHECK(!enabled || wanted == at::kHalf || wanted == at::kBFloat16,
              "Autocast: dtype must be Half or BFloat16, got ", wanted);
  was_enabled_ = at::autocast::is_autocast_enabled(device_type);
  cache_was_enabled_ = at::autocast::is_autocast_cache_enabled();
  dtype_before_ = at::autocast::get_autocast_dtype(device_type);
  at::autocast::set_autocast_enabled(device_type, enabled);
  at::autocast::set_autocast_dtype(device_type, wanted);
  at::autocast::increment_nesting();
  at::autocast::set_autocast_cache_enabled(cache_enabled.value_or(cache_was_enabled_));
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_type_, was_enabled_);
  at::autocast::set_autocast_dtype(device_type_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(cache_was_enabled_);
}

}  // namespace amp_ext
