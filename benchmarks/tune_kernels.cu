// Times the CUDA step and look in many shapes, and says which constants of csrc/cuda a GPU would
// like better. It needs nvcc alone:
//
//   make build/tune_kernels-sm_90 && build/tune_kernels-sm_90
//
// First every shape must give what the present one gives. With "small" for an argument the sizes
// are such that the emulator of CUDA can run it.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/gradients.cuh"
#include "cuda/step.cuh"

namespace amp_ext::cuda {

// Threads, elements of a tile, blocks, packs. A look has twice as many blocks.
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
  X(128, 2048, 8, 1)

#define AMP_EXT_COUNT(...) +1
constexpr int kShapes = 0 AMP_EXT_FOR_EACH_SHAPE(AMP_EXT_COUNT);
#undef AMP_EXT_COUNT

void check(int error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}

// Memory of the GPU.
class Memory {
 public:
  explicit Memory(int64_t bytes, int value = 0) : bytes_(bytes) {
    check(cudaMalloc(&data_, bytes), "cudaMalloc");
    fill(value);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }

  void fill(int value) { check(cudaMemset(data_, value, bytes_), "cudaMemset"); }

  template <typename T>
  T* at(int64_t byte) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + byte);
  }

  // A number at the beginning.
  template <typename T>
  T* holding(T value) {
    check(cudaMemcpy(data_, &value, sizeof value, cudaMemcpyHostToDevice), "cudaMemcpy");
    return at<T>(0);
  }

  template <typename T>
  std::vector<T> read(int64_t count) const {
    std::vector<T> values(count);
    check(cudaMemcpy(values.data(), data_, count * sizeof(T), cudaMemcpyDeviceToHost),
          "cudaMemcpy");
    return values;
  }

 private:
  void* data_ = nullptr;
  int64_t bytes_;
};

// What the kernels read and write beside tensors.
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

// Tensors that share out memory: a stream of it lies in one piece, so does each tensor's part.
struct Tensors {
  std::vector<TensorRecord> records;
  int64_t elements = 0;
};

// `bytes` of an element in each of the streams grad, param, master_param, two buffers.
Tensors cut(const Memory& memory, const std::vector<int64_t>& sizes, const int (&bytes)[5],
            int misalignment, Scratch& scratch) {
  constexpr int64_t kBoundary = 64;  // elements
  int64_t padded = kBoundary;
  for (const int64_t numel : sizes) padded += (numel + misalignment + kBoundary) & -kBoundary;
  Tensors tensors;
  int64_t first = misalignment;
  for (const int64_t numel : sizes) {
    int64_t stream = 0;
    void* places[5] = {};
    for (int i = 0; i < 5; ++i) {
      if (bytes[i] != 0) places[i] = memory.at<char>(stream + first * bytes[i]);
      stream += padded * bytes[i];
    }
    TensorRecord record;
    record.grad = places[0];
    record.param = places[1];
    record.master_param = places[2];
    record.master = bytes[2] == 4   ? Master::kFloat32
                    : bytes[2] == 2 ? Master::kLow16
                                    : Master::kNone;
    for (int i = 0; i < 2; ++i) {
      const bool is_narrow = bytes[3 + i] == 2;
      record.buffers[i] = places[3 + i];
      record.buffer_formats[i] = format_of(is_narrow ? DType::kBFloat16 : DType::kFloat32);
      if (is_narrow) record.dithered |= kDithersBuffer0 << i;
    }
    record.numel = numel;
    record.step = scratch.steps.at<float>(tensors.records.size() * sizeof(float));
    record.group = 0;
    record.grad_dtype = bytes[0] == 2 ? DType::kBFloat16 : DType::kFloat32;
    record.param_dtype = record.grad_dtype;
    tensors.records.push_back(record);
    tensors.elements += numel;
    first += (numel + misalignment + kBoundary) & -kBoundary;
  }
  return tensors;
}

// What differs between shapes.
using Described = std::array<int, 4>;
constexpr const char* kConstants[] = {"kThreads", "kTileSize", "kBlocks", "kPacks"};

template <typename Shape>
constexpr Described described() {
  return {Shape::kThreads, Shape::kTileSize, Shape::kBlocks, Shape::kPacks};
}

std::string text_of(const Described& shape) {
  char text[80];
  std::snprintf(text, sizeof text, "%7d%6d%7d%6d", shape[0], shape[1], shape[2], shape[3]);
  return text;
}

// A kernel in one shape.
struct Variant {
  Described shape;
  int (*run)(const Tensors& tensors, Scratch& scratch);
};

template <typename Combination>
struct Step {
  using Param = typename Combination::Param;
  using Buffer = typename Combination::Buffers::template Kind<BufferCode::kNone>;
  using Each = Streams<KindsOf<Combination, AdamHyperparameters, 2>>;
  using Present = StepShape<Adam, Each>;
  // The host does not know which blocks the GPU's kernel is compiled for.
  static Described present() {
    int device = 0;
    int major = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
          "cudaDeviceGetAttribute");
    Described shape = described<Present>();
    shape[2] = blocks_on<Adam, Each>(100 * major);
    return shape;
  }
  static constexpr const char* kPlace = "StepShape in csrc/cuda/step.cuh";
  static constexpr int kBlocksFactor = 1;
  static constexpr int kParamBytes = sizeof(typename Param::Stored);
  static constexpr int kBufferBytes = sizeof(typename Buffer::Stored);
  static constexpr int kMasterBytes = Param::kMaster == Master::kFloat32 ? 4
                                      : Param::kMaster == Master::kLow16 ? 2
                                                                         : 0;
  static constexpr int kBytes[5] = {kParamBytes, kParamBytes, kMasterBytes, kBufferBytes,
                                    kBufferBytes};
  // Of an element: the gradient is read, and all the rest read and written; a whole master is read
  // for its parameter.
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
    launch.records = tensors.records.data();
    launch.count = static_cast<int64_t>(tensors.records.size());
    const auto is_launched = std::make_unique<bool[]>(tensors.records.size());
    launch.is_launched = is_launched.get();
    launch.hyperparameters = &group;
    launch.inputs.found_inf = scratch.found_inf.at<float>(0);
    launch.inputs.grad_scale = scratch.grad_scale.at<float>(0);
    int64_t launched = 0;
    return launch_step<Adam<float>, Each, Shape>(launch, scratch.block_counter.at<uint32_t>(0),
                                                 nullptr, launched);
  }
};

template <typename Grad, bool kSumSquares>
struct Look {
  using Present = GradientShape<Grad>;
  static Described present() { return described<Present>(); }
  static constexpr const char* kPlace = "GradientShape in csrc/cuda/gradients.cuh";
  static constexpr int kBlocksFactor = 2;
  static constexpr int kBytes[5] = {sizeof(Grad), 0, 0, 0, 0};
  static constexpr int kMoved = sizeof(Grad);

  template <typename Shape>
  static int run(const Tensors& tensors, Scratch& scratch) {
    const LookLaunch launch = {tensors.records.data(),
                               static_cast<int64_t>(tensors.records.size()),
                               scratch.grad_scale.at<float>(0),
                               scratch.found_inf.at<float>(0),
                               scratch.first_nonfinite.at<int64_t>(0),
                               kSumSquares ? scratch.sum_of_squares.at<double>(0) : nullptr,
                               false};
    const SumScratch sums = {scratch.tile_sums.at<double>(0),
                             scratch.block_counter.at<uint32_t>(0)};
    return launch_look<Grad, Shape>(launch, sums, nullptr);
  }
};

// A kernel in all shapes.
struct Kernel {
  const char* name;
  const char* place;  // of the constants
  const int (&bytes)[5];
  int moved;
  int present;  // the number of the present shape, which steps few elements in smaller tiles
  std::vector<Variant> variants;
};

template <typename Of>
Kernel in_all_shapes(const char* name) {
  Kernel kernel = {name, Of::kPlace, Of::kBytes, Of::kMoved, -1, {}};
  const Described present = Of::present();
#define AMP_EXT_ADD(threads, tile, blocks, packs)                                                \
  {                                                                                              \
    using Each = Shape<threads, tile, Of::kBlocksFactor * blocks, packs>;                        \
    if (described<Each>() == present) kernel.present = static_cast<int>(kernel.variants.size()); \
    kernel.variants.push_back({described<Each>(), &Of::template run<Each>});                     \
  }
  AMP_EXT_FOR_EACH_SHAPE(AMP_EXT_ADD)
#undef AMP_EXT_ADD
  if (kernel.present < 0) {
    std::fprintf(stderr, "%s: the present shape is not among those to be timed\n", name);
    std::exit(1);
  }
  kernel.variants[kernel.present].run = &Of::template run<typename Of::Present>;
  return kernel;
}

// Seconds of one call, the least of some rounds. It is repeated within a round for at least
// `round_milliseconds`.
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

// Makes the last element of the last gradient inf.
void spoil(const Tensors& tensors) {
  const TensorRecord& last = tensors.records.back();
  const unsigned char inf[4] = {0, 0, 0x80, 0x7f};  // and of bfloat16 the end of it
  const int64_t bytes = last.grad_dtype == DType::kBFloat16 ? 2 : 4;
  check(cudaMemcpy(static_cast<char*>(last.grad) + (last.numel - 1) * bytes, inf + 4 - bytes, bytes,
                   cudaMemcpyHostToDevice),
        "cudaMemcpy");
}

// Whether every shape leaves the same bits and finds the same. The order of a sum may differ.
bool all_agree(const Kernel& kernel) {
  const std::vector<int64_t> sizes = {0, 1, 7, 4096, 9001, 300, 0, 20000, 1024, 5};
  const int64_t bytes = 16 * (20000 + 9001 + 4096 + 64 * 40);
  bool agree = true;
  for (const int misalignment : {0, 1}) {
    std::vector<char> expected;
    double expected_sum = 0.0;
    for (size_t i = 0; i <= kernel.variants.size(); ++i) {
      const Variant& variant = kernel.variants[i == 0 ? kernel.present : i - 1];
      Memory memory(bytes, 0x3c);
      Scratch scratch(64, static_cast<int64_t>(sizes.size()));
      scratch.grad_scale.holding(2.0f);
      scratch.first_nonfinite.holding(kNoTensor);
      const Tensors tensors = cut(memory, sizes, kernel.bytes, misalignment, scratch);
      if (misalignment != 0) spoil(tensors);
      for (int step = 0; step < 2; ++step) check(variant.run(tensors, scratch), kernel.name);
      check(cudaDeviceSynchronize(), kernel.name);
      std::vector<char> actual = memory.read<char>(bytes);
      const auto add = [&](const std::vector<char>& more) {
        actual.insert(actual.end(), more.begin(), more.end());
      };
      add(scratch.steps.read<char>(static_cast<int64_t>(sizes.size() * sizeof(float))));
      add(scratch.block_counter.read<char>(4));
      add(scratch.found_inf.read<char>(4));
      add(scratch.first_nonfinite.read<char>(8));
      const double sum = scratch.sum_of_squares.read<double>(1)[0];
      if (i == 0) {
        expected = actual;
        expected_sum = sum;
      }
      const bool same_sum = sum == expected_sum || std::abs(sum - expected_sum) < 1e-6 * sum;
      if (actual != expected || !same_sum) {
        std::fprintf(stderr, "%s: another result with threads, tile, blocks, packs %s\n",
                     kernel.name, text_of(variant.shape).c_str());
        agree = false;
      }
    }
  }
  return agree;
}

struct Case {
  int64_t elements;
  int64_t tensors;
};

// Times a kernel in all shapes and prints GB/s. Returns a line of advice.
std::string tune(const Kernel& kernel, const std::vector<Case>& cases, const Memory& memory,
                 float round_milliseconds) {
  std::printf("\n%s, GB/s\n%7s%6s%7s%6s ", kernel.name, "threads", "tile", "blocks", "packs");
  for (const Case& each : cases) {
    std::printf(" %5.0e/%-5lld", static_cast<double>(each.elements),
                static_cast<long long>(each.tensors));
  }
  std::printf("\n");
  std::vector<std::vector<double>> speeds(kernel.variants.size());  // bytes a second
  for (const Case& each : cases) {
    Scratch scratch(each.elements / 1024 + each.tensors + 1, each.tensors);
    scratch.grad_scale.holding(2.0f);
    const std::vector<int64_t> sizes(each.tensors, each.elements / each.tensors);
    const Tensors tensors = cut(memory, sizes, kernel.bytes, 0, scratch);
    for (size_t i = 0; i < kernel.variants.size(); ++i) {
      const double seconds =
          seconds_of([&] { return kernel.variants[i].run(tensors, scratch); }, round_milliseconds);
      speeds[i].push_back(static_cast<double>(tensors.elements * kernel.moved) / seconds);
    }
  }
  // The geometric mean: a percent counts the same wherever it is gained.
  std::vector<double> means;
  for (size_t i = 0; i < kernel.variants.size(); ++i) {
    std::printf("%s%c", text_of(kernel.variants[i].shape).c_str(),
                static_cast<int>(i) == kernel.present ? '*' : ' ');
    double logarithms = 0.0;
    for (const double speed : speeds[i]) {
      std::printf("%12.1f", 1e-9 * speed);
      logarithms += std::log(speed);
    }
    std::printf("\n");
    means.push_back(std::exp(logarithms / static_cast<double>(cases.size())));
  }
  const auto best = std::max_element(means.begin(), means.end()) - means.begin();
  const double gain = means[best] / means[kernel.present] - 1.0;
  if (gain < 0.01) return std::string(kernel.name) + ": leave it, nothing gains 1 %";
  std::string changes;
  for (int i = 0; i < 4; ++i) {
    const int from = kernel.variants[kernel.present].shape[i], to = kernel.variants[best].shape[i];
    if (from == to) continue;
    changes += std::string(changes.empty() ? "" : ", ") + kConstants[i] + " from " +
               std::to_string(from) + " to " + std::to_string(to);
  }
  char line[300];
  std::snprintf(line, sizeof line, "%s: change %s (%s), which gains %.1f %%", kernel.name,
                changes.c_str(), kernel.place, 100.0 * gain);
  return line;
}

int run(bool small) {
  const Kernel kernels[] = {
      in_all_shapes<Step<Combination<Plain<float>, Plain<float>, Uniform<float>>>>("step float32"),
      in_all_shapes<Step<Combination<Plain<BFloat16>, Mastered<BFloat16>, Uniform<float>>>>(
          "step bfloat16 with masters"),
      in_all_shapes<Step<Combination<Plain<BFloat16>, Split<BFloat16, 16>, Uniform<BFloat16>>>>(
          "step bfloat16 with split masters and bfloat16 states"),
      in_all_shapes<Look<float, false>>("look float32"),
      in_all_shapes<Look<BFloat16, false>>("look bfloat16"),
      in_all_shapes<Look<float, true>>("look and sum float32"),
      in_all_shapes<Look<BFloat16, true>>("look and sum bfloat16"),
  };
  bool agree = true;
  for (const Kernel& kernel : kernels) agree &= all_agree(kernel);
  if (!agree) return 1;
  std::printf("%d shapes of %d kernels give the same results\n", kShapes,
              static_cast<int>(std::size(kernels)));

  std::vector<Case> cases = {{10'000, 1},        {1'000'000, 1},      {1'000'000, 100},
                             {10'000'000, 1},    {10'000'000, 300},   {10'000'000, 10'000},
                             {100'000'000, 1},   {100'000'000, 1000}, {100'000'000, 10'000},
                             {1'000'000'000, 1}, {1'000'000'000, 300}};
  if (small) cases = {{5000, 1}, {6000, 30}};
  const float round_milliseconds = small ? 0.0f : 5.0f;
  // 16 bytes of an element are the most, and what lies between tensors.
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

  std::vector<std::string> advice;
  for (const Kernel& kernel : kernels) {
    advice.push_back(tune(kernel, cases, memory, round_milliseconds));
  }
  std::printf("\n* is how it is compiled. What this GPU says:\n");
  for (const std::string& line : advice) std::printf("%s\n", line.c_str());
  return 0;
}

}  // namespace amp_ext::cuda

int main(int argc, char** argv) {
  return amp_ext::cuda::run(argc > 1 && std::string(argv[1]) == "small");
}
