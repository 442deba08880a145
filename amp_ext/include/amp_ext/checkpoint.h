// Files that torch.save writes and torch.load reads in Python.
#pragma once

#include <amp_ext/export.h>

#include <string>
#include <vector>

namespace c10 {
struct IValue;
}  // namespace c10

namespace amp_ext {

// Writes a value of dicts, lists, tuples, strings, numbers, bools, None and tensors: Python reads
// it by torch.load(path, weights_only=True). Tensors are copied to the CPU first, so that any
// machine can read them. Written beside the file, or beside what links at the path end at, under a
// name of its own, and renamed when it is on the disk. The mode of the file stays. Throws
// c10::Error on a value of another kind, naming where it is, on a path of a folder, a device, a
// pipe or a socket, and on a file that can't be written.
AMP_EXT_API void save_state(const std::string& path, const c10::IValue& value);

// Reads what save_state or Python's torch.save wrote, on the CPU; runs no code of the file. Dicts
// must be plain ones: in Python write dict(model.state_dict()). Throws c10::Error on a file that is
// none, holds something else, or was damaged: what its CRCs tell. A file that Python wrote under
// torch.serialization.set_crc32_options(False) has none, and is taken as it is.
AMP_EXT_API c10::IValue load_state(const std::string& path);

// As the two above, in memory.
AMP_EXT_API std::vector<char> state_to_bytes(const c10::IValue& value);
AMP_EXT_API c10::IValue state_from_bytes(const std::vector<char>& bytes);

}  // namespace amp_ext
