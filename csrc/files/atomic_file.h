// Replaces a file atomically: new content goes into a temporary file, which is then renamed.
#pragma once

#include <amp_ext/export.h>

#include <string>

namespace amp_ext {

struct AtomicFile {
  std::string refusal;  // error text if a folder or device is at the path; otherwise empty
  // errno of a failed system call, or 0. The fields below are set if there is no refusal or errno.
  int error = 0;
  int descriptor = -1;  // the temporary file, open for writing
  std::string temporary, target;
};

// Opens a temporary file that the caller writes and renames to `target`: `path`, or the end of its
// symbolic links. Its mode is that of the existing target, or the default mode of a new file.
AMP_EXT_API AtomicFile open_atomic(const std::string& path);

}  // namespace amp_ext
