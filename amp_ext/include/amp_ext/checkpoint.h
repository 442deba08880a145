// Reads and writes checkpoint files that Python's torch.load reads and torch.save writes.
#pragma once

#include <amp_ext/export.h>

#include <string>
#include <vector>

namespace c10 {
struct IValue;
}  // namespace c10

namespace amp_ext {

// Writes a value made of dicts, lists, tuples, strings, numbers, bools, None and tensors to a file
// that Python reads with torch.load(path, weights_only=True). Tensors are copied to the CPU first,
// so that any machine can load them. The file is written under a temporary name in the same folder
// and renamed when it is on the disk; symbolic links are followed, and the file mode is preserved.
// Throws c10::Error if the value contains another type (the message says where), if `path` is a
// folder, device, pipe or socket, or if the file can't be written.
AMP_EXT_API void save_state(const std::string& path, const c10::IValue& value);

// Reads a file of save_state or of Python's torch.save to the CPU, without running code from the
// file. Dicts must be plain dicts: in Python, save dict(model.state_dict()). Throws c10::Error if
// the file is no checkpoint or contains other types. Like torch.load, does not check the CRC32
// checksums of the file.
AMP_EXT_API c10::IValue load_state(const std::string& path);

// Write and read the format of save_state and load_state as bytes in memory instead of a file.
AMP_EXT_API std::vector<char> state_to_bytes(const c10::IValue& value);
AMP_EXT_API c10::IValue state_from_bytes(const std::vector<char>& bytes);

}  // namespace amp_ext
