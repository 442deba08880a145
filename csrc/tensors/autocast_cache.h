// The weights that autocast has cast and keeps until the end of its outermost scope.
#pragma once

namespace amp_ext {

// Drops them all: they are stale once parameters were written. One map for the process.
void clear_autocast_cache();

}  // namespace amp_ext
