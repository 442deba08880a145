// Replaces a file atomically: new content goes into a temporary file, which is then renamed.
#pragma once

#include <amp_ext/export.h>

#include <string>

namespace amp_ext {

struct AtomicFile {
  std::string refusal;  // error text if a folder or device is at the path; otherwise empty
  // errno of a failed system call, or 0. The fields below are set if nothing was refused or failed.
  int error = 0;
  int descriptor = -1;  // the temporary file, open for writing
  std::string temporary, target;
};

// Opens a temporary file, which the caller writes and then renames to `target`. `target` is `path`,
// or the file to which a symbolic link at `path` leads. The temporary file has the mode of an
// existing target, otherwise the default mode of a new file.
AMP_EXT_API AtomicFile open_atomic(const std::string& path);

}  // namespace amp_ext
