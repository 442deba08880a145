// Launches every kernel for every combination of numbers that it is compiled for, on tensors of
// awkward sizes and places, without torch: what ThreadSanitizer is to look at.
#include <algorithm>
#include <cmath>
#include <memory>

#include "../cpp/every_number.h"
#include "cuda/engine.h"
#include "program.h"

using amp_ext::BufferFormat;
using amp_ext::DType;
using amp_ext::kBlockSize;
using amp_ext::KernelTensorArgs;
using amp_ext::Master;
using amp_ext::OptimizerKernel;
using amp_ext::StepLaunch;

constexpr int64_t kSizes[] = {0, 1, 7, 4096, 9001, 300};

size_t size_of(DType dtype) {
  size_t size = 0;
  amp_ext::for_dtype(dtype, [&](auto element) { size = sizeof element; });
  return size;
}

size_t size_of(BufferFormat format) {
  return amp_ext::is_code(format) ? 1 : size_of(static_cast<DType>(format));
}

size_t size_of(Master master) {
  return master == Master::kFloat32 ? sizeof(float) : master == Master::kResidual16 ? 2 : 1;
}

// Memory that all tensors are cut from, filled with zeros.
class Memory {
 public:
  // `misaligned` starts one element behind a boundary of 16 bytes.
  void* tensor(size_t element_size, int64_t numel, bool misaligned) {
    blocks_.emplace_back(numel * element_size / sizeof(Block) + 2);
    return reinterpret_cast<char*>(blocks_.back().data()) + (misaligned ? element_size : 0);
  }

 private:
  struct alignas(16) Block {
    char bytes[16] = {};
  };
  std::vector<std::vector<Block>> blocks_;
};

// The hyperparameters of two groups.
template <typename Hyperparameters>
const Hyperparameters kGroups[2] = {};

// The number of combinations that a kernel is compiled for.
template <template <typename> class Functor, int kBuffers, typename... Each>
int count_compiled(amp_ext::Combinations<Each...>) {
  using Hyperparameters = typename Functor<float>::Hyperparameters;
  return (0 + ... + amp_ext::is_compiled<Each, Hyperparameters, kBuffers>());
}
template <template <typename> class Functor, int kBuffers, typename... Params>
int count_compiled_for() {
  return (0 + ... +
          count_compiled<Functor, kBuffers>(typename amp_ext::CombinationsFor<Params>::Type()));
}

struct Kernel {
  OptimizerKernel kernel;
  amp_ext::BufferDescriptions buffers;
  int combinations;
  const void* groups;
  uint8_t dithered;  // the numbers that are dithered by default
};

// Of the numbers that are dithered by default those that are kept in 16 or 8 bits: the fast path
// takes them.
uint8_t usually_dithered(const Kernel& kernel, const Numbers& numbers) {
  const bool is_short = numbers.param == DType::kFloat16 || numbers.param == DType::kBFloat16;
  const bool may_dither = numbers.master == Master::kNone || numbers.master == Master::kResidual8;
  uint8_t dithered = is_short && may_dither ? amp_ext::kDithersParam : 0;
  for (int i = 0; i < kernel.buffers.count; ++i) {
    const BufferFormat format = numbers.formats[i];
    const uint8_t bit = amp_ext::kDithersBuffer0 << i;
    if (amp_ext::is_code(format)) dithered |= bit;
    if (size_of(format) == 2) dithered |= kernel.dithered & bit;
  }
  return dithered;
}

// Two steps of tensors of all sizes, the second dithered, and a third that is skipped. Returns
// whether the counters of steps have advanced; true if there is no kernel for these numbers.
bool step_twice(const Kernel& kernel, const Numbers& numbers, bool& launched) {
  Memory memory;
  std::vector<KernelTensorArgs> all_args;
  std::vector<float> steps(std::size(kSizes) * 2, 0.0f);
  const bool has_blocks = numbers.have_blocks();
  for (const bool misaligned : {false, true}) {
    for (const int64_t size : kSizes) {
      const int64_t blocks = (size + kBlockSize - 1) / kBlockSize;
      const int64_t numel = has_blocks ? blocks * kBlockSize : size;
      KernelTensorArgs args;
      args.param_dtype = numbers.param;
      args.grad_dtype = numbers.grad;
      args.numel = numel;
      args.param = memory.tensor(size_of(numbers.param), numel, misaligned);
      args.grad = memory.tensor(size_of(numbers.grad), numel, misaligned);
      args.master = numbers.master;
      if (numbers.master != Master::kNone) {
        args.master_param = memory.tensor(size_of(numbers.master), numel, misaligned);
      }
      for (int i = 0; i < kernel.buffers.count; ++i) {
        const BufferFormat format = numbers.formats[i];
        args.buffers[i] = memory.tensor(size_of(format), numel, misaligned);
        args.buffer_formats[i] = format;
        if (format == BufferFormat::kBlockwise8) {
          args.exponents = static_cast<uint8_t*>(memory.tensor(1, blocks, misaligned));
        }
      }
      args.step = &steps[all_args.size()];
      args.group = misaligned ? 1 : 0;
      all_args.push_back(args);
    }
  }
  const float grad_scale = 2.0f;
  float found_inf = 0.0f;
  StepLaunch launch = {};
  launch.kernel = kernel.kernel;
  launch.all_args = all_args.data();
  launch.count = static_cast<int64_t>(all_args.size());
  launch.hyperparameters = kernel.groups;
  launch.inputs.grad_scale = &grad_scale;
  launch.inputs.found_inf = &found_inf;
  const auto is_launched = std::make_unique<bool[]>(all_args.size());
  launch.is_launched = is_launched.get();
  const double sum_of_squares = 1.0;
  const double max_norm = 0.25;
  launch.inputs.sum_of_squares = &sum_of_squares;
  launch.inputs.max_norm = &max_norm;
  uint32_t block_counter = 0;
  const uint8_t usual = usually_dithered(kernel, numbers);
  const uint8_t dithered[] = {usual, 0xff, 0x00};
  for (int i = 0; i < 3; ++i) {
    for (KernelTensorArgs& args : all_args) args.dithered = dithered[i];
    std::fill_n(is_launched.get(), all_args.size(), false);
    found_inf = i == 2 ? 1.0f : 0.0f;
    if (amp_ext::cuda::step(launch, &block_counter, nullptr) != cudaSuccess) return true;
  }
  launched = true;
  return block_counter == 0 && equal(steps, std::vector<float>(steps.size(), 2.0f)) &&
         std::count(is_launched.get(), is_launched.get() + launch.count, true) == launch.count;
}

template <typename Hyperparameters>
uint8_t default_dither() {
  Hyperparameters defaults;
  defaults.dither = true;
  return amp_ext::dithered_numbers(defaults);
}

bool step_all() {
#define AMP_EXT_KERNEL(Functor, buffers)                                        \
  {OptimizerKernel::k##Functor##buffers,                                        \
   amp_ext::BufferDescriptions::of<amp_ext::Functor##Hyperparameters>(buffers), \
   count_compiled_for<amp_ext::Functor, buffers, float, double, amp_ext::Half,  \
                      amp_ext::BFloat16>(),                                     \
   kGroups<amp_ext::Functor##Hyperparameters>,                                  \
   default_dither<amp_ext::Functor##Hyperparameters>()},
  const Kernel kKernels[] = {AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_KERNEL)};
#undef AMP_EXT_KERNEL
  bool right = true;
  for (const Kernel& kernel : kKernels) {
    int combinations = 0;
    for_each_numbers(kernel.buffers, [&](const Numbers& numbers) {
      bool launched = false;
      right &= step_twice(kernel, numbers, launched);
      combinations += launched;
    });
    right &= combinations == kernel.combinations;
  }
  return right;
}

// The last has more than one tile of these kernels.
constexpr int64_t kGradientSizes[] = {0, 1, 7, 4096, 9001, 300, 40000};

// Compares some roots and quotients with those of the CPU.
bool check_division() {
  int64_t wrong[3] = {};
  return amp_ext::cuda::count_division_errors(99'991, wrong, nullptr) == cudaSuccess &&
         equal(std::vector<int64_t>(wrong, wrong + 3), std::vector<int64_t>(3, 0));
}

// The operations on gradients alone, all dtypes in one list.
bool run_gradients() {
  Memory memory;
  std::vector<KernelTensorArgs> all_args;
  for (const DType dtype : kDTypes) {
    for (const bool misaligned : {false, true}) {
      for (const int64_t numel : kGradientSizes) {
        KernelTensorArgs args;
        args.grad_dtype = dtype;
        args.numel = numel;
        args.grad = memory.tensor(size_of(dtype), numel, misaligned);
        args.group = static_cast<int32_t>(all_args.size());
        all_args.push_back(args);
      }
    }
  }
  const auto count = static_cast<int64_t>(all_args.size());
  bool right = true;
  for (const bool overflow : {false, true}) {
    float found_inf = 0.0f;
    double sum_of_squares = 0.0;
    uint32_t block_counter = 0;
    std::vector<double> tile_sums(amp_ext::cuda::number_of_tiles(all_args.data(), count));
    std::vector<int64_t> counts(all_args.size());
    const float one = 1.0f;
    const float half = 0.5f;
    if (overflow) static_cast<float*>(all_args[4].grad)[9000] = INFINITY;
    int64_t first = amp_ext::kNoTensor;
    amp_ext::GradScanLaunch launch = {all_args.data(), count,   &one, &found_inf,
                                      &first,          nullptr, false};
    int error = amp_ext::cuda::scan(launch, {}, nullptr);
    launch.sum_of_squares = &sum_of_squares;
    error |= amp_ext::cuda::scan(launch, {tile_sums.data(), &block_counter}, nullptr);
    double finite_sum_of_squares = 0.0;
    launch.sum_of_squares = &finite_sum_of_squares;
    launch.skip_nonfinite = true;
    error |= amp_ext::cuda::scan(launch, {tile_sums.data(), &block_counter}, nullptr);
    const auto is_launched = std::make_unique<bool[]>(all_args.size());
    error |= amp_ext::cuda::multiply(all_args.data(), count, {&half}, &found_inf, &first,
                                     is_launched.get(), nullptr);
    right &= std::count(is_launched.get(), is_launched.get() + count, true) == count;
    error |= amp_ext::cuda::multiply(all_args.data(), count, {nullptr, &one, 0.5}, nullptr, nullptr,
                                     is_launched.get(), nullptr);
    error |= amp_ext::cuda::count_nonfinite(all_args.data(), count, counts.data(), nullptr);
    right &= error == cudaSuccess && block_counter == 0 && (found_inf == 1.0f) == overflow;
    right &= std::isfinite(sum_of_squares) != overflow && counts[4] == overflow;
    right &= std::isfinite(finite_sum_of_squares) && (first == 4) == overflow;
  }
  return right;
}

// Judges two norms, of which the second is an outlier.
bool judge_norms() {
  amp_ext::NormJudgement known = {};
  known.limit = known.max_norm = 8.0;
  const float grad_scale = 2.0f;
  double sum_of_squares = 4.0;
  float skips = 0.0f;
  bool right = true;
  for (const bool is_outlier : {false, true}) {
    if (is_outlier) sum_of_squares = 1024.0;
    const int error =
        amp_ext::cuda::judge_norm({&grad_scale, nullptr, &sum_of_squares}, &known, &skips, nullptr);
    right &= error == cudaSuccess && (skips == 1.0f) == is_outlier;
  }
  return right && known.norms == 2.0 && known.outliers == 1.0 && known.end == 2.0;
}

bool update_scale() {
  constexpr int kFlags = 200;  // more than one launch takes
  std::vector<float> found_infs(kFlags, 0.0f);
  std::vector<int64_t> first(kFlags, amp_ext::kNoTensor);
  found_infs[4] = 1.0f;
  first[4] = 7;
  amp_ext::ScaleCounts counts{};
  std::vector<amp_ext::OverflowFlag> flags;
  for (int i = 0; i < kFlags; ++i) flags.push_back({&found_infs[i], &first[i], i + 1.0, i == 4});
  float scale = 8.0f;
  int32_t growth_tracker = 3;
  int32_t hysteresis_tracker = 1;
  int32_t earlier_overflow = 0;
  amp_ext::ScaleUpdate update;
  update.state = {&scale, &growth_tracker, &hysteresis_tracker};
  update.counts = &counts;
  const int error =
      amp_ext::cuda::update_scale(update, flags.data(), kFlags, &earlier_overflow, nullptr);
  return error == cudaSuccess && scale == 4.0f && growth_tracker == 0 &&
         first[4] == amp_ext::kNoTensor && counts.updates == 1.0 && counts.skips == 1.0 &&
         counts.scale == 4.0 && counts.largest_scale == 8.0 && counts.nonfinite_key == 5.0 &&
         counts.nonfinite_index == 7.0 && counts.skipped_tensors == 1.0 && counts.end == 1.0;
}

// Averages of all kinds in one launch: a copy, no move, and half a move.
bool run_averages() {
  Memory memory;
  std::vector<KernelTensorArgs> all_args;
  amp_ext::any_formats_of_averages([&](auto weight, auto average) {
    using Weight = decltype(weight);
    using Average = decltype(average);
    using Stored = typename Weight::Stored;
    for (const bool misaligned : {false, true}) {
      for (const int64_t numel : kGradientSizes) {
        KernelTensorArgs args;
        args.numel = numel;
        args.param = memory.tensor(sizeof(Stored), numel, misaligned);
        args.param_dtype = amp_ext::kDType<Stored>;
        args.master = Weight::kMaster;
        if (args.master != amp_ext::Master::kNone) {
          args.master_param = memory.tensor(size_of(args.master), numel, misaligned);
        }
        args.buffers[0] = memory.tensor(size_of(Average::kFormat), numel, misaligned);
        args.buffer_formats[0] = Average::kFormat;
        all_args.push_back(args);
      }
    }
    return false;
  });
  const double moves[][2] = {{1.0, 1.0}, {0.0, 1.0}, {0.5, 2.0}};
  int error = 0;
  for (const auto& [weight, number] : moves) {
    const amp_ext::AverageLaunch launch = {all_args.data(), static_cast<int64_t>(all_args.size()),
                                           &weight, &number};
    error |= amp_ext::cuda::average(launch, nullptr);
  }
  return error == cudaSuccess;
}

template <bool>
bool run() {
  const std::pair<const char*, bool> results[] = {
      {"steps", step_all()},    {"gradients", run_gradients()}, {"scale", update_scale()},
      {"norms", judge_norms()}, {"averages", run_averages()},   {"division", check_division()}};
  std::string text;
  bool all_right = true;
  for (const auto& [name, is_right] : results) {
    text += (text.empty() ? "" : ", ") + std::string(name) + (is_right ? " right" : " wrong");
    all_right &= is_right;
  }
  std::fprintf(all_right ? stdout : stderr, "%s\n", text.c_str());
  return all_right;
}
