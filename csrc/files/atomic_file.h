// A file that takes the place of another in one step: it is written beside it, then renamed.
#pragma once

#include <amp_ext/export.h>

#include <string>

namespace amp_ext {

struct FileBeside {
  std::string refusal;  // why nothing can stand in the place of what is there, if not empty
  int error = 0;  // errno of what failed otherwise; without one and a refusal there is the rest:
  int descriptor = -1;  // open
  std::string temporary, target;
};

// Opens the file that is to be renamed to `path`, or to what links at `path` end at. It has a name
// of its own, and the mode of the file that is there or else of any new one.
AMP_EXT_API FileBeside open_atomic(const std::string& path);

}  // namespace amp_ext
