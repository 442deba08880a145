// Access to autocast's cache of cast weights, which lives until the outermost autocast scope ends.
#pragma once

namespace amp_ext {

// Clears autocast's cache, because cached casts are out of date after parameters were written.
void clear_autocast_cache();

}  // namespace amp_ext
