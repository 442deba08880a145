// Replaces a file atomically: new content goes into a temporary file, which is then renamed.
#pragma once

#include <amp_ext/export.h>

#include <string>

namespace amp_ext {

struct AtomicFile {
  std::string refusal;  // why the path can't be replaced; empty: it can
  // errno of another failure, or 0. Without a refusal and an error, the other fields are set.
  int error = 0;
  int descriptor = -1;  // open for writing
  std::string temporary, target;
};

// Opens a temporary file that the caller renames to `target`: to `path`, or to where its symbolic
// links lead. It has the mode of the existing file, or else the usual mode of new files.
AMP_EXT_API AtomicFile open_atomic(const std::string& path);

}  // namespace amp_ext
