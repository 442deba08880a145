// Runs the kernels of a CPU engine alone, without torch, and prints a hash of what each wrote:
// every kernel for all numbers that it is compiled for, on tensors of awkward sizes. Whatever the
// compiler and the processor, the hashes must be the same (scripts/other_compilers.sh).
//
//   engine_bits ENGINE    as AMP_EXT_CPU_ISA names it; exits with 3 where the processor lacks it
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cpu/engine.h"
#include "cpu/tile_map.h"
#include "element.h"
#include "every_number.h"
#include "formats/storage.h"
#include "kernels.h"
#include "launches.h"

using namespace amp_ext;  // NOLINT(build/namespaces)

// All that vectors take of the C++ library, which is not there for other processors.
void* operator new(std::size_t size) {
  void* memory = std::malloc(size);
  if (memory == nullptr) std::abort();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

constexpr int kSteps = 3;
constexpr int64_t kSizes[] = {1, 7, 300, 9001};

struct Option {
  const char* name;
  bool dither, skip_nonfinite, write_back, is_usual;
};
constexpr Option kOptions[] = {{"", false, false, false, false},
                               {" dithered", true, false, false, false},
                               {" as usual", true, false, false, true},
                               {" writing back", false, false, true, false},
                               {" skipping", true, true, true, false}};

// FNV-1a.
class Hash {
 public:
  void add(uint64_t value) { hash_ = (hash_ ^ value) * 0x100000001b3ull; }
  unsigned long long value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ull;
};

// Numbers of both signs from 2^-24 to 4, and some between them that are special.
float number(int64_t index, uint32_t word, bool is_finite) {
  constexpr float kFinite[] = {0.0f, -0.0f, 1e-41f, 6e-8f, -3e-5f, 65519.0f, 70000.0f, 3e38f};
  constexpr uint32_t kNonfinite[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffffffffu};
  // So far apart that most blocks have one. Rounded like a number, the last NaN would become 0.
  if (!is_finite && index % 1031 == 5) return float_of(kNonfinite[index / 1031 % 4]);
  if (index % 41 == 6) return kFinite[index / 41 % 8];
  return float_of((word & 0x807fffffu) | (127 - 24 + (word >> 23) % 26) << 23);
}

// The numbers of one array of a parameter: of a dtype, or bits that mean nothing alone. They start
// one element behind a boundary of 16 bytes.
class Array {
 public:
  Array(DType dtype, int64_t numel, uint32_t seed, bool is_finite, bool is_positive)
      : dtype_(dtype), numel_(numel) {
    for_dtype(dtype, [&](auto element) {
      using Storage = decltype(element);
      reserve(sizeof(Storage));
      uint64_t state = seed;
      for (int64_t i = 0; i < numel; ++i) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        float value = number(i, static_cast<uint32_t>(state >> 32), is_finite);
        if (is_positive) value = float_of(bits_of(value) & 0x7fffffffu);
        if constexpr (std::is_same_v<Storage, double>) {
          elements<Storage>()[i] = value;
        } else {
          from_float(value, elements<Storage>()[i]);
        }
      }
    });
  }
  Array(size_t size, int64_t numel) : is_bits_(true), numel_(size * numel) { reserve(size); }

  void* data() { return elements<char>(); }

  // A NaN is a NaN, whatever its bits.
  void add_to(Hash& hash) {
    if (is_bits_) {
      for (int64_t i = 0; i < numel_; ++i) hash.add(elements<uint8_t>()[i]);
      return;
    }
    for_dtype(dtype_, [&](auto element) {
      using Storage = decltype(element);
      using Bits = typename BitPattern<Storage>::type;
      for (int64_t i = 0; i < numel_; ++i) {
        const auto bits = std::bit_cast<Bits>(elements<Storage>()[i]);
        const auto magnitude = static_cast<Bits>(bits << 1) >> 1;
        hash.add(magnitude > kExponentMask<Storage> ? kExponentMask<Storage> + 1 : bits);
      }
    });
  }

 private:
  void reserve(size_t size) {
    size_ = size;
    memory_.resize(numel_ * size + size + 16);
  }
  template <typename T>
  T* elements() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return reinterpret_cast<T*>((address + 15) / 16 * 16 + size_);
  }

  DType dtype_ = DType::kFloat32;
  bool is_bits_ = false;
  int64_t numel_;
  size_t size_ = 1;
  std::vector<char> memory_;
};

struct Kernel {
  OptimizerKernel kernel;
  const char* name;
  BufferDescriptions buffers;
  bool (*take_steps)(const cpu::Engine& engine, const Kernel& kernel, const Numbers& numbers,
                     const Option& option, int64_t numel, Hash& hash);
};

// Some steps of one tensor. Returns whether there is a kernel that has taken them.
template <typename Hyperparameters>
bool take_steps(const cpu::Engine& engine, const Kernel& kernel, const Numbers& numbers,
                const Option& option, int64_t numel, Hash& hash) {
  // A NaN of a split master leaves bits that mean nothing.
  const bool is_split =
      numbers.master == Master::kResidual16 || numbers.master == Master::kResidual8;
  std::vector<Array> arrays;
  const auto add = [&](const auto&... of_array) { return arrays.emplace_back(of_array...).data(); };
  KernelTensorArgs args;
  args.grad = add(numbers.grad, numel, 1, is_split && !option.skip_nonfinite, false);
  args.param = add(numbers.param, numel, 2, true, false);
  if (numbers.master == Master::kFloat32) {
    args.master_param = add(DType::kFloat32, numel, 2, true, false);
  }
  if (is_split) args.master_param = add(numbers.master == Master::kResidual16 ? 2 : 1, numel);
  for (int i = 0; i < kernel.buffers.count; ++i) {
    const BufferFormat format = numbers.formats[i];
    args.buffer_formats[i] = format;
    if (is_code(format)) {
      args.buffers[i] = add(1, numel);
      if (option.dither) args.dithered |= kDithersBuffer0 << i;
    } else {
      const BufferRole role = kernel.buffers.each[i].role;
      const bool is_positive = role == BufferRole::kSecondMoment || role == BufferRole::kMaximum;
      args.buffers[i] = add(static_cast<DType>(format), numel, 3 + i, true, is_positive);
    }
    if (format == BufferFormat::kBlockwise8) {
      args.exponents = static_cast<uint8_t*>(add(1, numel / kBlockSize));
    }
  }

  Hyperparameters hyperparameters;
  hyperparameters.lr = 0.01;
  hyperparameters.weight_decay = 0.1;
  if (!option.is_usual) hyperparameters.clip_value = 3.0;
  hyperparameters.decoupled_weight_decay = option.is_usual;
  hyperparameters.dither = option.dither;
  hyperparameters.write_back_grads = option.write_back;
  if constexpr (std::is_same_v<Hyperparameters, SgdHyperparameters>) {
    hyperparameters.momentum = 0.99;
    hyperparameters.nesterov = true;
  }
  float step = 0.0f;
  args.numel = numel;
  args.grad_dtype = numbers.grad;
  args.param_dtype = numbers.param;
  args.master = numbers.master;
  args.dithered |= dithered_numbers(hyperparameters);
  args.step = &step;

  Hash before, after;
  arrays[1].add_to(before);
  const StepLaunch launch{
      kernel.kernel, &args,  1, &hyperparameters, {.skip_nonfinite = option.skip_nonfinite},
      nullptr,       nullptr};
  const cpu::TileMap tiles(&args, 1);
  const StepDecision factor = StepDecision::read(launch.inputs);
  for (; step < kSteps; ++step) engine.step(launch, tiles, factor, 0, tiles.total_cost());
  arrays[1].add_to(after);
  for (Array& array : arrays) array.add_to(hash);
  return before.value() != after.value();
}

#define AMP_EXT_KERNEL(Functor, buffers)                      \
  {OptimizerKernel::k##Functor##buffers, #Functor #buffers,   \
   BufferDescriptions::of<Functor##Hyperparameters>(buffers), \
   take_steps<Functor##Hyperparameters>},
constexpr Kernel kKernels[] = {AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_KERNEL)};
#undef AMP_EXT_KERNEL

void step_all(const cpu::Engine& engine, const Kernel& kernel, const Numbers& numbers) {
  const bool has_blocks = numbers.have_blocks();
  for (const Option& option : kOptions) {
    Hash hash;
    bool is_stepped = false;
    for (const int64_t size : kSizes) {
      const int64_t blocks = (size + kBlockSize - 1) / kBlockSize;
      const int64_t numel = has_blocks ? blocks * kBlockSize : size;
      is_stepped = kernel.take_steps(engine, kernel, numbers, option, numel, hash);
    }
    if (!is_stepped) return;  // by the largest: there is no such kernel
    std::printf("%s param %d grad %d master %d buffers", kernel.name,
                static_cast<int>(numbers.param), static_cast<int>(numbers.grad),
                static_cast<int>(numbers.master));
    for (int i = 0; i < kernel.buffers.count; ++i) {
      std::printf(" %d", static_cast<int>(numbers.formats[i]));
    }
    std::printf("%s: %016llx\n", option.name, hash.value());
  }
}

void scan_and_multiply(const cpu::Engine& engine, DType dtype, bool is_finite) {
  Hash hash;
  for (const int64_t numel : kSizes) {
    Array array(dtype, numel, 1, is_finite, false);
    KernelTensorArgs args;
    args.numel = numel;
    args.grad = array.data();
    args.grad_dtype = dtype;
    const cpu::TileMap tiles(&args, 1);
    const int64_t end = tiles.total_cost();
    std::vector<double> sums(tiles.number_of_tiles());
    std::atomic<int64_t> count{0};
    hash.add(engine.scan(tiles, nullptr, false, 0, end));
    for (const bool skip_nonfinite : {false, true}) {
      hash.add(engine.scan(tiles, sums.data(), skip_nonfinite, 0, end));
      // Sums of what is not finite may be inf or NaN.
      for (const double sum : sums) hash.add(std::isfinite(sum) ? std::bit_cast<uint64_t>(sum) : 1);
    }
    engine.count_nonfinite(tiles, &count, 0, end);
    hash.add(count.load());
    hash.add(engine.multiply(tiles, 0.3f, 0, end));
    array.add_to(hash);
  }
  std::printf("gradients of dtype %d, %s: %016llx\n", static_cast<int>(dtype),
              is_finite ? "finite" : "not finite", hash.value());
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  setenv("AMP_EXT_CPU_ISA", argv[1], 1);
  const cpu::Engine* engine = cpu::select_engine();
  if (engine == nullptr) return 3;
  for (const Kernel& kernel : kKernels) {
    for_each_numbers(kernel.buffers,
                     [&](const Numbers& numbers) { step_all(*engine, kernel, numbers); });
  }
  for (const DType dtype : kDTypes) {
    for (const bool is_finite : {true, false}) scan_and_multiply(*engine, dtype, is_finite);
  }
}
