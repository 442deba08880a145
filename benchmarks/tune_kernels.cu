// Times the CUDA step and gradient scan in many shapes, which StepShape of csrc/cuda/step.cuh and
// GradientShape of csrc/cuda/gradients.cuh choose for a GPU. It needs only nvcc:
//
//   make build/tune_kernels-sm_90 && build/tune_kernels-sm_90
//
// The argument "small" selects sizes that the CUDA emulator can run.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "cuda/gradients.cuh"
#include "cuda/step.cuh"

namespace amp_ext::cuda {

// Shapes to time: kThreads, kTileSize, kBlocks, kPacks. Gradient scans have twice as many blocks.
#define AMP_EXT_FOR_EACH_SHAPE(X) \
  X(256, 2048, 4, 1)              \
  X(256, 2048, 3, 1)              \
  X(256, 2048, 2, 1)              \
  X(256, 1024, 4, 1)              \
  X(256, 4096, 4, 1)              \
  X(256, 4096, 3, 1)              \
  X(256, 4096, 4, 2)              \
  X(256, 4096, 2, 2)              \
  X(256, 8192, 4, 1)              \
  X(256, 8192, 3, 1)              \
  X(256, 8192, 2, 1)              \
  X(256, 8192, 3, 2)              \
  X(256, 8192, 2, 4)              \
  X(256, 16384, 3, 2)             \
  X(256, 16384, 2, 4)             \
  X(512, 4096, 2, 1)              \
  X(128, 2048, 8, 1)              \
  X(128, 4096, 8, 1)              \
  X(128, 8192, 8, 1)              \
  X(128, 4096, 6, 1)              \
  X(128, 8192, 6, 1)

void check(int error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}

// An allocation on the GPU.
class Memory {
 public:
  explicit Memory(int64_t bytes, int value = 0) : bytes_(bytes), value_(value) {
    check(cudaMalloc(&data_, bytes), "cudaMalloc");
    fill();
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }

  template <typename T>
  T* at(int64_t byte) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + byte);
  }

  // Resets all bytes, because NaN left by another kernel would slow this one.
  void fill() const { check(cudaMemset(data_, value_, bytes_), "cudaMemset"); }

  // Stores a number at the beginning.
  void hold(float value) {
    check(cudaMemcpy(data_, &value, sizeof value, cudaMemcpyHostToDevice), "cudaMemcpy");
  }

 private:
  int64_t bytes_;
  int value_;
  void* data_ = nullptr;
};

// Device memory that the kernels need besides the tensors.
struct Scratch {
  explicit Scratch(int64_t tiles, int64_t tensors)
      : steps(tensors * sizeof(float)), tile_sums(tiles * sizeof(double)) {}

  Memory steps;
  Memory tile_sums;
  Memory block_counter{4};
  Memory found_inf{4};
  Memory grad_scale{4};
  Memory first_nonfinite{8};
  Memory sum_of_squares{8};
};

struct Case {
  int64_t elements;  // total of all tensors
  int64_t tensors;
};

// Tensors cut from one allocation. Each stream (all gradients, all parameters, ...) is contiguous,
// and so is each tensor within it.
struct Tensors {
  std::vector<KernelTensorArgs> all_args;
  int64_t elements = 0;
};

// Cuts tensors from memory. `bytes` holds the bytes per element of grad, param, master_param and
// two buffers.
Tensors cut(const Memory& memory, const Case& sizes, const int (&bytes)[5], Scratch& scratch) {
  constexpr int64_t kBoundary = 64;                      // alignment in elements
  const int64_t whole = bytes[3] == 1 ? kBlockSize : 1;  // 8-bit states consist of whole blocks
  const int64_t numel = sizes.elements / sizes.tensors / whole * whole;
  const int64_t padded = (numel + kBoundary) & -kBoundary;
  Tensors tensors;
  for (int64_t first = 0; first < sizes.tensors * padded; first += padded) {
    int64_t stream = 0;
    void* places[5] = {};
    for (int i = 0; i < 5; ++i) {
      if (bytes[i] != 0) places[i] = memory.at<char>(stream + first * bytes[i]);
      stream += sizes.tensors * padded * bytes[i];
    }
    KernelTensorArgs args;
    args.grad = places[0];
    args.param = places[1];
    args.master_param = places[2];
    constexpr Master kMasters[] = {Master::kNone, Master::kResidual8, Master::kResidual16,
                                   Master::kNone, Master::kFloat32};
    args.master = kMasters[bytes[2]];
    if (bytes[2] == 1) args.dithered |= kDithersParam;
    constexpr BufferFormat kCodes[] = {BufferFormat::kRatio8, BufferFormat::kBlockwise8};
    for (int i = 0; i < 2; ++i) {
      args.buffers[i] = places[3 + i];
      args.buffer_formats[i] = bytes[3 + i] == 1   ? kCodes[i]
                               : bytes[3 + i] == 2 ? BufferFormat::kBFloat16
                                                   : BufferFormat::kFloat32;
      // First moments in bfloat16 are rounded to nearest by default.
      if (bytes[3 + i] == 1 || (bytes[3 + i] == 2 && i == 1)) {
        args.dithered |= kDithersBuffer0 << i;
      }
    }
    args.exponents = memory.at<uint8_t>(stream + first / kBlockSize);
    args.numel = numel;
    args.step = scratch.steps.at<float>(tensors.all_args.size() * sizeof(float));
    args.group = 0;
    args.grad_dtype = bytes[0] == 2 ? DType::kBFloat16 : DType::kFloat32;
    args.param_dtype = args.grad_dtype;
    tensors.all_args.push_back(args);
    tensors.elements += numel;
  }
  return tensors;
}

// A kernel compiled in one shape.
struct Variant {
  int threads, tile, blocks, packs;
  int (*run)(const Tensors& tensors, Scratch& scratch);
};

template <typename Combination>
struct Step {
  using Param = typename Combination::Param;
  using Each = Streams<FormatsOf<Combination, AdamHyperparameters, 2>>;
  static constexpr bool kFast = kHasFastPath<Adam<float>, Each>;
  static constexpr int kBlocksFactor = 1;
  static constexpr int kParamBytes = sizeof(typename Param::Stored);
  static constexpr BufferFormat kFormat = Each::NumberFormats::template Buffer<0>::kFormat;
  static constexpr int kBufferBytes = is_code(kFormat)                     ? 1
                                      : kFormat == BufferFormat::kBFloat16 ? 2
                                                                           : 4;
  static constexpr int kMasterBytes = Param::kMaster == Master::kFloat32      ? 4
                                      : Param::kMaster == Master::kResidual16 ? 2
                                      : Param::kMaster == Master::kResidual8  ? 1
                                                                              : 0;
  static constexpr int kBytes[5] = {kParamBytes, kParamBytes, kMasterBytes, kBufferBytes,
                                    kBufferBytes};
  // Bytes moved per element: the gradient is read, all others are read and written, except that a
  // parameter with a float32 master is only written.
  static constexpr int kMoved =
      kParamBytes * (kMasterBytes == 4 ? 2 : 3) + 2 * kMasterBytes + 4 * kBufferBytes;

  template <typename Shape>
  static int run(const Tensors& tensors, Scratch& scratch) {
    AdamHyperparameters group;
    group.lr = 1e-3;
    group.weight_decay = 0.01;
    group.decoupled_weight_decay = true;
    StepLaunch launch = {};
    launch.kernel = OptimizerKernel::kAdam2;
    launch.all_args = tensors.all_args.data();
    launch.count = static_cast<int64_t>(tensors.all_args.size());
    const auto is_launched = std::make_unique<bool[]>(tensors.all_args.size());
    launch.is_launched = is_launched.get();
    launch.hyperparameters = &group;
    launch.inputs.found_inf = scratch.found_inf.at<float>(0);
    launch.inputs.grad_scale = scratch.grad_scale.at<float>(0);
    int64_t launched = 0;
    int64_t had = 0;
    return launch_step<Adam<float>, Each, Shape, kFast>(
        launch, scratch.block_counter.at<uint32_t>(0), nullptr, launched, had);
  }
};

template <typename Grad, bool kSumSquares>
struct GradScan {
  static constexpr int kBlocksFactor = 2;
  static constexpr int kBytes[5] = {sizeof(Grad), 0, 0, 0, 0};
  static constexpr int kMoved = sizeof(Grad);

  template <typename Shape>
  static int run(const Tensors& tensors, Scratch& scratch) {
    const GradScanLaunch launch = {tensors.all_args.data(),
                                   static_cast<int64_t>(tensors.all_args.size()),
                                   scratch.grad_scale.at<float>(0),
                                   scratch.found_inf.at<float>(0),
                                   scratch.first_nonfinite.at<int64_t>(0),
                                   kSumSquares ? scratch.sum_of_squares.at<double>(0) : nullptr,
                                   false};
    const SumScratch sums = {scratch.tile_sums.at<double>(0),
                             scratch.block_counter.at<uint32_t>(0)};
    return launch_scan<Grad, Shape>(launch, sums, nullptr);
  }
};

// A kernel in all shapes.
struct Kernel {
  const char* name;
  const int (&bytes)[5];
  int moved;
  std::vector<Variant> variants;
};

template <typename Of>
Kernel in_all_shapes(const char* name) {
  Kernel kernel = {name, Of::kBytes, Of::kMoved, {}};
#define AMP_EXT_ADD(threads, tile, blocks, packs) \
  kernel.variants.push_back(                      \
      {threads, tile, blocks, packs,              \
       &Of::template run<Shape<threads, tile, Of::kBlocksFactor * blocks, packs>>});
  AMP_EXT_FOR_EACH_SHAPE(AMP_EXT_ADD)
#undef AMP_EXT_ADD
  return kernel;
}

// Returns the seconds of one call, the minimum over some rounds. A round repeats the call for at
// least `round_milliseconds`.
template <typename Run>
double seconds_of(const Run& run, float round_milliseconds) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  const auto milliseconds = [&](int calls) {
    float elapsed = 0.0f;
    check(cudaEventRecord(begin, nullptr), "cudaEventRecord");
    for (int i = 0; i < calls; ++i) check(run(), "launch");
    check(cudaEventRecord(end, nullptr), "cudaEventRecord");
    check(cudaEventSynchronize(end), "a kernel");
    check(cudaEventElapsedTime(&elapsed, begin, end), "cudaEventElapsedTime");
    return std::max(elapsed, 1e-4f);
  };
  milliseconds(1);
  const float once = milliseconds(1);
  const int calls = static_cast<int>(std::clamp(round_milliseconds / once, 1.0f, 1000.0f));
  float least = once;
  for (int round = 0; round < 3; ++round) least = std::min(least, milliseconds(calls) / calls);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return least / 1e3;
}

// Times a kernel in all shapes and prints GB/s, in the last column the geometric mean of the cases,
// in which a percent counts the same in every case.
void tune(const Kernel& kernel, const std::vector<Case>& cases, const Memory& memory,
          float round_milliseconds) {
  std::printf("\n%s, GB/s\nthreads  tile blocks packs", kernel.name);
  for (const Case& each : cases) {
    std::printf(" %5.0e/%-5lld", static_cast<double>(each.elements),
                static_cast<long long>(each.tensors));
  }
  std::printf("        mean\n");
  for (const Variant& variant : kernel.variants) {
    std::printf("%7d%6d%7d%6d", variant.threads, variant.tile, variant.blocks, variant.packs);
    double logarithms = 0.0;
    for (const Case& each : cases) {
      Scratch scratch(each.elements / 1024 + each.tensors + 1, each.tensors);
      scratch.grad_scale.hold(2.0f);
      const Tensors tensors = cut(memory, each, kernel.bytes, scratch);
      memory.fill();
      const double seconds =
          seconds_of([&] { return variant.run(tensors, scratch); }, round_milliseconds);
      const double speed = 1e-9 * static_cast<double>(tensors.elements * kernel.moved) / seconds;
      std::printf("%12.1f", speed);
      logarithms += std::log(speed);
    }
    std::printf("%12.1f\n", std::exp(logarithms / static_cast<double>(cases.size())));
  }
}

int run(bool small) {
  const Kernel kernels[] = {
      in_all_shapes<Step<Combination<Plain<float>, Plain<float>, Uniform<float>>>>("step float32"),
      in_all_shapes<Step<Combination<Plain<BFloat16>, Mastered<BFloat16>, Uniform<float>>>>(
          "step bfloat16 with masters"),
      in_all_shapes<Step<Combination<Plain<BFloat16>, Split<BFloat16, 16>, Uniform<BFloat16>>>>(
          "step bfloat16 with split masters and bfloat16 states"),
      in_all_shapes<Step<Combination<Plain<BFloat16>, Split<BFloat16, 8>, Coded<Codes::kAll>>>>(
          "step bfloat16 with split masters and states of 8 bits"),
      in_all_shapes<Step<Combination<Plain<float>, Plain<float>, Coded<Codes::kAll>>>>(
          "step float32 with states of 8 bits"),
      in_all_shapes<GradScan<float, false>>("scan float32"),
      in_all_shapes<GradScan<BFloat16, false>>("scan bfloat16"),
      in_all_shapes<GradScan<float, true>>("scan and sum float32"),
      in_all_shapes<GradScan<BFloat16, true>>("scan and sum bfloat16"),
  };
  std::vector<Case> cases = {{10'000, 1},        {1'000'000, 1},      {1'000'000, 100},
                             {10'000'000, 1},    {10'000'000, 300},   {10'000'000, 10'000},
                             {100'000'000, 1},   {100'000'000, 1000}, {100'000'000, 10'000},
                             {1'000'000'000, 1}, {1'000'000'000, 300}};
  if (small) cases = {{5000, 1}, {6000, 30}};
  const float round_milliseconds = small ? 0.0f : 5.0f;
  // An element has at most 16 bytes, and tensors have gaps between them.
  const auto bytes_for = [](const Case& each) {
    return 16 * (each.elements + 128 * (each.tensors + 1));
  };
  size_t free_bytes = 0;
  size_t all_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &all_bytes), "cudaMemGetInfo");
  while (bytes_for(cases.back()) > static_cast<int64_t>(free_bytes / 10 * 9)) {
    std::printf("%lld elements do not fit into memory\n",
                static_cast<long long>(cases.back().elements));
    cases.pop_back();
  }
  int64_t bytes = 0;
  for (const Case& each : cases) bytes = std::max(bytes, bytes_for(each));
  const Memory memory(bytes, 0x3c);

  for (const Kernel& kernel : kernels) tune(kernel, cases, memory, round_milliseconds);
  return 0;
}

}  // namespace amp_ext::cuda

int main(int argc, char** argv) {
  return amp_ext::cuda::run(argc > 1 && std::string(argv[1]) == "small");
}
