// Reads and writes torch.save's files without Python, and archives that contain such files.
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <amp_ext/checkpoint.h>
#include <amp_ext/grad_scaler.h>
#include <amp_ext/optim.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <fcntl.h>
#include <torch/csrc/jit/serialization/import_read.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/serialize/archive.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <system_error>
#include <utility>

#include "files/atomic_file.h"
#include "libtorch/optimizer_impl.h"
#include "libtorch/values.h"

namespace amp_ext {

namespace {

// True if the pickle format has a storage class for the dtype. LibTorch writes no other dtypes.
bool is_portable(at::ScalarType dtype) {
  constexpr at::ScalarType kPortable[] = {
      at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong,         at::kInt,
      at::kShort, at::kChar,   at::kByte, at::kBool,     at::kComplexFloat, at::kComplexDouble};
  return std::find(std::begin(kPortable), std::end(kPortable), dtype) != std::end(kPortable);
}

// Returns a copy of `value` whose tensors are on the CPU and whose dicts and lists are plain, so
// that Python can read the copy without TorchScript's types. Throws if Python can't read a part of
// `value`. `where` is the name of `value` in errors, for example "value['state'][0]".
c10::IValue portable(const std::string& operation, const c10::IValue& value,
                     const std::string& where) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    TORCH_CHECK(tensor.defined() && tensor.layout() == at::kStrided, operation, ": ", where,
                " must be a dense tensor, got ",
                tensor.defined() ? c10::str(tensor.layout()) : "an undefined one");
    TORCH_CHECK(is_portable(tensor.scalar_type()), operation, ": ", where,
                " must be of a dtype that torch.load reads with weights_only=True, got ",
                tensor.scalar_type());
    const at::Tensor copy = tensor.detach().cpu();
    // Clones a view, because saving a view would save all of its storage.
    const bool is_whole = copy.storage().nbytes() == copy.nbytes();
    return is_whole ? copy : copy.clone();
  }
  if (value.isNone() || value.isBool() || value.isInt() || value.isDouble() || value.isString()) {
    return value;
  }
  if (value.isGenericDict()) {
    auto copy = new_dict();
    for (const auto& entry : value.toGenericDict()) {
      TORCH_CHECK(entry.key().isString() || entry.key().isInt(), operation, ": keys of ", where,
                  " must be strings or ints, got ", shown(entry.key()));
      copy.insert(entry.key(),
                  portable(operation, entry.value(), where + "[" + shown(entry.key()) + "]"));
    }
    return copy;
  }
  TORCH_CHECK(value.isList() || value.isTuple(), operation, ": ", where,
              " must be a dict, list, tuple, string, number, bool, None or tensor, got ",
              shown(value));
  const auto elements = elements_of(value);
  std::vector<c10::IValue> copies;
  for (size_t i = 0; i < elements.size(); ++i) {
    copies.push_back(portable(operation, elements[i], c10::str(where, "[", i, "]")));
  }
  if (value.isTuple()) return c10::ivalue::Tuple::create(std::move(copies));
  auto list = new_list();
  for (auto& copy : copies) list.push_back(std::move(copy));
  return list;
}

// Lets torch's reader read bytes in memory, and never more than there are, as a damaged file may
// ask.
class BytesReader : public caffe2::serialize::ReadAdapterInterface {
 public:
  BytesReader(const char* bytes, size_t size) : bytes_(bytes), size_(size) {}

  size_t size() const override { return size_; }
  size_t read(uint64_t position, void* buffer, size_t count, const char*) const override {
    const uint64_t begin = std::min<uint64_t>(position, size_);
    count = std::min<size_t>(count, size_ - begin);
    if (count > 0) std::memcpy(buffer, bytes_ + begin, count);
    return count;
  }

 private:
  const char* const bytes_;
  const size_t size_;
};

// Returns call(), and converts all exceptions to c10::Errors that name the operation.
template <typename Call>
auto with_errors_of(const std::string& operation, const Call& call) {
  try {
    return call();
  } catch (c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    if (text.compare(0, operation.size(), operation) != 0) error.add_context(operation);
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, operation, ": ", error.what());
  }
}

std::vector<char> bytes_of(const std::string& operation, const c10::IValue& value) {
  std::vector<char> data;
  torch::jit::Pickler pickler(
      [&](const char* bytes, size_t size) { data.insert(data.end(), bytes, bytes + size); },
      /*tensor_table=*/nullptr, /*type_renamer=*/nullptr, /*memoized_class_types=*/nullptr,
      /*get_tensor_id=*/nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(portable(operation, value, "value"));
  pickler.stop();
  std::vector<char> file;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* bytes, size_t size) {
    const char* const begin = static_cast<const char*>(bytes);
    file.insert(file.end(), begin, begin + size);
    return size;
  });
  writer.writeRecord("data.pkl", data.data(), data.size());
  int64_t number = 0;
  for (const at::Tensor& tensor : pickler.tensorData()) {
    writer.writeRecord("data/" + std::to_string(number++), tensor.storage().data(),
                       tensor.storage().nbytes());
  }
  writer.writeEndOfFile();
  return file;
}

// Returns the value of a checkpoint. `source` is the path of a file or a BytesReader.
template <typename Source>
c10::IValue value_of(const std::string& operation, const Source& source) {
  try {
    caffe2::serialize::PyTorchStreamReader reader(source);
    // Loads all tensors to the CPU, whatever device they were saved from.
    return torch::jit::readArchiveAndTensors("data", "", "", std::nullopt, std::nullopt, at::kCPU,
                                             reader);
  } catch (const std::exception& error) {  // damaged sizes cause exceptions such as bad_alloc
    const auto* const of_torch = dynamic_cast<const c10::Error*>(&error);
    const std::string reason =
        of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
    TORCH_CHECK(reason.find("Expected GenericDict") == std::string::npos, operation,
                ": the file contains an OrderedDict, as model.state_dict() returns it, which "
                "load_state() can't read. Write the file in Python with "
                "torch.save(dict(model.state_dict()), path).");
    TORCH_CHECK(false, operation,
                ": the file is damaged, or torch.save did not write it from plain dicts, lists, "
                "numbers and tensors. Load another file. The reader found: ",
                reason.substr(0, reason.find('\n')));
  }
}

// Writes, syncs and renames the temporary file. Returns the errno of the call that failed, or 0.
int written_in_place(const AtomicFile& file, const std::vector<char>& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t size = ::write(file.descriptor, bytes.data() + done, bytes.size() - done);
    if (size < 0 && errno != EINTR) return errno;
    if (size > 0) done += size;
  }
  if (::fsync(file.descriptor) != 0) return errno;
  if (std::rename(file.temporary.c_str(), file.target.c_str()) != 0) return errno;
  // Syncs the folder, so that the new name survives a power failure.
  const auto folder = std::filesystem::path(file.temporary).parent_path();
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_CLOEXEC);
  ::fsync(descriptor);
  ::close(descriptor);
  return 0;
}

}  // namespace

std::vector<char> state_to_bytes(const c10::IValue& value) {
  return with_errors_of("state_to_bytes", [&] { return bytes_of("state_to_bytes", value); });
}

c10::IValue state_from_bytes(const std::vector<char>& bytes) {
  return value_of("state_from_bytes", std::make_shared<BytesReader>(bytes.data(), bytes.size()));
}

void save_state(const std::string& path, const c10::IValue& value) {
  const std::string operation = "save_state of " + path;
  const std::vector<char> bytes =
      with_errors_of(operation, [&] { return bytes_of(operation, value); });
  const AtomicFile file = with_errors_of(operation, [&] { return open_atomic(path); });
  TORCH_CHECK(file.refusal.empty(), "save_state: ", file.refusal);
  int error = file.error;
  if (error == 0) {
    error = written_in_place(file, bytes);
    if (error != 0) ::unlink(file.temporary.c_str());
    ::close(file.descriptor);
  }
  TORCH_CHECK(error == 0, "save_state: path must be of a file that can be written, got ", path,
              ": ", std::strerror(error));
}

c10::IValue load_state(const std::string& path) {
  std::error_code error;
  TORCH_CHECK(std::filesystem::is_regular_file(path, error) && std::ifstream(path).good(),
              "load_state: path must be of a file that can be read, got ", path);
  return value_of("load_state of " + path, path);
}

// Archives of torch::save.

namespace {

constexpr const char* kKey = "amp_ext_state_dict";

void write(torch::serialize::OutputArchive& archive, const c10::IValue& state_dict) {
  const std::vector<char> bytes = state_to_bytes(state_dict);
  const at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  archive.write(kKey, tensor, /*is_buffer=*/true);
}

c10::IValue read(torch::serialize::InputArchive& archive, const char* operation) {
  at::Tensor tensor;
  TORCH_CHECK(
      archive.try_read(kKey, tensor, /*is_buffer=*/true), operation,
      ": the archive does not contain the state of this class. Load an archive that torch::save "
      "wrote of the same class. If it is of torch::optim, load it with torch's class, and pass the "
      "moments to load_state_dict().");
  const at::Tensor bytes = tensor.cpu().contiguous();
  const auto size = static_cast<size_t>(bytes.numel());
  return value_of(operation, std::make_shared<BytesReader>(
                                 static_cast<const char*>(bytes.const_data_ptr()), size));
}

}  // namespace

namespace optim {

void FusedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  write(archive, state_dict());
}

void FusedOptimizer::load(torch::serialize::InputArchive& archive) {
  load_state_dict(read(archive, "torch::load of an optimizer"));
}

}  // namespace optim

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const GradScaler& scaler) {
  write(archive, scaler.state_dict());
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           GradScaler& scaler) {
  scaler.load_state_dict(read(archive, "torch::load of a GradScaler"));
  return archive;
}

}  // namespace amp_ext
