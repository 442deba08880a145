// Opens temporary files that are renamed to their targets when complete.
#include "files/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <random>
#include <system_error>

namespace amp_ext {

namespace {

namespace fs = std::filesystem;

constexpr char kEnd[] = ".tmp";
constexpr size_t kDigits = 16;
constexpr size_t kAdded = 1 + kDigits + sizeof kEnd - 1;  // length of a dot, the digits and kEnd
constexpr size_t kLongestName = 255;                      // bytes in a file name

const char* file_type_name(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  return S_ISSOCK(mode) ? "a socket" : "a device";
}

// Returns the path to which symbolic links at `path` lead, even if no file is there.
fs::path end_of_links(fs::path path) {
  constexpr int kMost = 40;  // Linux's limit of links in a path
  std::error_code error;
  for (int i = 0; i < kMost && fs::is_symlink(path, error); ++i) {
    path = path.parent_path() / fs::read_symlink(path, error);
  }
  return path;
}

std::string random_digits() {
  std::random_device source;
  const uint64_t number = uint64_t{source()} << 32 | source();
  char digits[kDigits + 1];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(number));
  return digits;
}

}  // namespace

AtomicFile open_atomic(const std::string& path) {
  AtomicFile file;
  struct stat there;
  const bool is_there = ::stat(path.c_str(), &there) == 0;
  if (!is_there && errno != ENOENT) {
    file.error = errno;
    return file;
  }
  if (is_there && !S_ISREG(there.st_mode)) {
    file.refusal = std::string("path must be of a file, or of nothing yet, got ") +
                   file_type_name(there.st_mode) + ": " + path;
    return file;
  }
  const fs::path target = end_of_links(path);
  const fs::path folder = target.has_parent_path() ? target.parent_path() : fs::path(".");
  const std::string beginning = target.filename().string().substr(0, kLongestName - kAdded) + ".";
  const mode_t mode = is_there ? there.st_mode & 07777 : 0666;
  file.temporary = folder / (beginning + random_digits() + kEnd);
  file.descriptor =
      ::open(file.temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode & 0777);
  if (file.descriptor < 0) {
    file.error = errno;
    file.temporary.clear();
    return file;
  }
  if (is_there) ::fchmod(file.descriptor, mode);  // restores mode bits that the umask removed
  file.target = target;
  return file;
}

}  // namespace amp_ext
