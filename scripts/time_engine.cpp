// Times the CPU engine in cache, for scripts/time_engine.py.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu/engine.h"
#include "cpu/tile_map.h"
#include "element.h"
#include "kernels.h"
#include "launches.h"
#include "elements/storage.h"

namespace {

using namespace amp_ext;  // NOLINT(build/namespaces)

// A stream of numbers between a half and one, of any dtype.
class Stream {
 public:
  Stream(DType dtype, int64_t count, float factor) : dtype_(dtype) {
    for_dtype(dtype, [&](auto element) {
      using Storage = decltype(element);
      memory_.resize(count * sizeof(Storage) + 64);
      std::mt19937 random(count);
      for (int64_t i = 0; i < count; ++i) {
        const auto value = factor * (0.5f + static_cast<float>(random() % 4096) / 8192.0f);
        if constexpr (std::is_same_v<Storage, double>) {
          data<Storage>()[i] = value;
        } else {
          from_float(value, data<Storage>()[i]);
        }
      }
    });
  }

  // Codes of nothing yet.
  explicit Stream(int64_t count) : dtype_(DType::kFloat32), memory_(count + 64) {}

  // At a multiple of 64 bytes.
  template <typename Storage = char>
  Storage* data() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return reinterpret_cast<Storage*>((address + 63) / 64 * 64);
  }
  DType dtype() const { return dtype_; }

 private:
  DType dtype_;
  std::vector<char> memory_;
};

DType dtype_named(const std::string& name) {
  if (name == "float64") return DType::kFloat64;
  if (name == "float16") return DType::kFloat16;
  if (name == "bfloat16") return DType::kBFloat16;
  return DType::kFloat32;
}

Master master_named(const std::string& name) {
  if (name == "float32") return Master::kFloat32;
  if (name == "low16") return Master::kLow16;
  return name == "low8" ? Master::kLow8 : Master::kNone;
}

// As the optimizers keep them under that `state_dtype`.
BufferFormat format_named(const std::string& name, const std::string& operation, int index) {
  const bool is_adam = operation.rfind("Adam", 0) == 0;
  if (name == "8bit-bf16" && is_adam && index > 0) return BufferFormat::kBFloat16;
  if (name.rfind("8bit", 0) != 0) return format_of(dtype_named(name));
  return is_adam && index == 0 ? BufferFormat::kRatio8 : BufferFormat::kBlockwise8;
}

template <typename Run>
double seconds_of(int64_t calls, const Run& run) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <typename Hyperparameters>
double seconds_of_steps(const cpu::Engine& engine, OptimizerKernel kernel, TensorRecord record,
                        Hyperparameters hyperparameters, const std::string& option, int64_t calls) {
  hyperparameters.lr = 1e-6;
  hyperparameters.timestep = 100;
  hyperparameters.write_back_grads = option == "write-back";
  hyperparameters.dither = option == "dither";
  record.dithered = dithered_numbers(hyperparameters);
  StepLaunch launch{kernel, &record, 1, &hyperparameters, {}, nullptr};
  launch.inputs.skip_nonfinite = option == "skip-nonfinite";
  const cpu::TileMap tiles(&record, 1);
  const GradientFactor factor = GradientFactor::read(launch.inputs);
  return seconds_of(calls, [&] { engine.step(launch, tiles, factor, 0, tiles.total_cost()); });
}

}  // namespace

// Runs an operation `calls` times over one tensor. Returns the seconds, or -1 where the processor
// lacks the instructions.
//
// `operation` is a name of OptimizerKernel without its k, look, look-sums, count or multiply;
// `buffer` a dtype, 8bit-bf16 or 8bit; `master` float32, low16, low8 or empty; `option` write-back,
// skip-nonfinite, dither or empty.
extern "C" __attribute__((visibility("default"))) double time_engine(
    const char* isa, const char* operation, const char* param, const char* grad, const char* buffer,
    const char* master, const char* option, int64_t numel, int64_t calls) {
  setenv("AMP_EXT_CPU_ISA", isa, 1);
  const cpu::Engine* engine = cpu::select_engine();
  if (engine == nullptr) return -1.0;
  Stream params(dtype_named(param), numel, 1.0f);
  Stream grads(dtype_named(grad), numel, 0.125f);
  Stream masters(DType::kFloat32, numel, 1.0f);
  std::vector<Stream> buffers;
  std::vector<uint8_t> exponents(numel / kBlockSize, 127);
  TensorRecord record;
  record.numel = numel;
  record.grad = grads.data();
  record.grad_dtype = grads.dtype();
  record.param = params.data();
  record.param_dtype = params.dtype();
  record.master = master_named(master);
  if (record.master != Master::kNone) record.master_param = masters.data();
  record.exponents = exponents.data();
  for (int i = 0; i < kMaxBuffers; ++i) {
    const BufferFormat format = format_named(buffer, operation, i);
    record.buffer_formats[i] = format;
    buffers.push_back(is_code(format) ? Stream(numel)
                                      : Stream(static_cast<DType>(format), numel, 0.125f));
    record.buffers[i] = buffers[i].data();
  }

  const std::string name = operation;
#define AMP_EXT_CASE(Functor, number)                                             \
  if (name == #Functor #number) {                                                 \
    return seconds_of_steps(*engine, OptimizerKernel::k##Functor##number, record, \
                            Functor##Hyperparameters(), option, calls);           \
  }
  AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_CASE)
#undef AMP_EXT_CASE
  const cpu::TileMap tiles(&record, 1);
  std::vector<double> sums(tiles.number_of_tiles());
  std::atomic<int64_t> number{0};
  const int64_t end = tiles.total_cost();
  return seconds_of(calls, [&] {
    if (name == "look") engine->look(tiles, nullptr, false, 0, end);
    if (name == "look-sums") engine->look(tiles, sums.data(), false, 0, end);
    if (name == "count") engine->count_nonfinite(tiles, &number, 0, end);
    if (name == "multiply") engine->multiply(tiles, -1.0f, 0, end);
  });
}
