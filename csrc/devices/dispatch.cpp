// Selects the engine of a device, and runs launches on the CPU: divides the work into ranges, one
// per thread of torch, and combines the results.
#include "devices/dispatch.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>

#include "cpu/engine.h"
#include "cpu/processor.h"
#include "devices/torch_version.h"
#include "element.h"

namespace amp_ext {

namespace {

const cpu::Engine& selected_engine() {
  static const cpu::Engine* const engine = cpu::select_engine();
  TORCH_CHECK(
      engine != nullptr,
      "amp_ext: the environment variable AMP_EXT_CPU_ISA must be plain, avx2 or avx512, on a "
      "processor that has it, got ",
      std::getenv("AMP_EXT_CPU_ISA"));
  return *engine;
}

bool asks_ahead() {
  static const std::optional<bool> asks =
      cpu::asks_ahead(cpu::processor_vendor(), std::getenv("AMP_EXT_CPU_PREFETCH"));
  TORCH_CHECK(asks.has_value(),
              "amp_ext: the environment variable AMP_EXT_CPU_PREFETCH must be 0 or 1, got ",
              std::getenv("AMP_EXT_CPU_PREFETCH"));
  return *asks;
}

#if !defined(AMP_EXT_WITH_CUDA)
// Returns the lines that setup.py and amp_ext.info print, too.
std::string how_to_build_cuda() {
  const auto version = at::globalContext().hasCUDART() ? at::globalContext().versionCUDART() : 0;
  const std::string release = c10::str(version / 1000, ".", version % 1000 / 10);  // 13020 is 13.2
  const std::string install =
      version < 13000
          ? "Install the toolkit of CUDA " + release + ", and set CUDA_HOME to its folder."
          : "To install nvcc: pip install 'cuda-toolkit[nvcc,nvvm,cccl]==" + release + ".*'";
  return install +
         "\nTo rebuild amp_ext: AMP_EXT_CUDA=1 pip install --no-build-isolation --force-reinstall "
         "--no-deps --no-cache-dir <amp_ext's folder>";
}
#endif

// Cost (see cpu::TileMap) below which work stays in the calling thread: about 0.1 ms. Waking
// threads may take milliseconds.
constexpr int64_t kSerialCost = 131072;

// Calls work(begin, end) for ranges of the tiles in parallel, and returns its smallest result.
template <typename Work>
int64_t least_in_parallel(const cpu::TileMap& tiles, const Work& work) {
  std::atomic<int64_t> least{kNoTensor};
  at::parallel_for(0, tiles.total_cost(), kSerialCost, [&](int64_t begin, int64_t end) {
    const int64_t index = work(begin, end);
    int64_t so_far = least.load();
    while (index < so_far && !least.compare_exchange_weak(so_far, index)) {
    }
  });
  return least.load();
}

void lower(int64_t* first_nonfinite, int64_t index) {
  if (first_nonfinite != nullptr && index < *first_nonfinite) *first_nonfinite = index;
}

class CpuBackend : public Backend {
 public:
  // Step::run() launches nothing on a CPU if the step is skipped.
  void step(const at::Device&, const StepLaunch& launch, StepScratch&) const override {
    const StepDecision decision = StepDecision::read(launch.inputs);
    if (launch.grad_norm != nullptr) *launch.grad_norm = decision.grad_norm;
    if (launch.step_applied != nullptr) *launch.step_applied = decision.step_applied();
    const cpu::TileMap tiles(launch.all_args, launch.count, asks_ahead());
    least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
      selected_engine().step(launch, tiles, decision, begin, end);
      return kNoTensor;
    });
    for (int64_t i = 0; i < launch.count; ++i) {
      float* const step = launch.all_args[i].step;
      if (step != nullptr) *step = next_counter(*step);
    }
    std::fill_n(launch.is_launched, launch.count, true);
  }

  void judge_norm(const at::Device&, const GradientInputs& inputs, NormJudgement* judgement,
                  float* skips) const override {
    amp_ext::judge_norm(inputs, *judgement, *skips);
  }

  void scan(const at::Device&, const GradScanLaunch& launch, StepScratch&) const override {
    const cpu::TileMap tiles(launch.all_args, launch.count, asks_ahead());
    std::vector<double> sums(launch.sum_of_squares != nullptr ? tiles.number_of_tiles() : 0);
    double* const sums_or_null = launch.sum_of_squares != nullptr ? sums.data() : nullptr;
    const int64_t first = least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
      return selected_engine().scan(tiles, sums_or_null, launch.skip_nonfinite, begin, end);
    });
    // Add in the order of the tiles, so that the result does not depend on the number of threads.
    for (const double sum : sums) *launch.sum_of_squares += sum;
    if (first != kNoTensor || StepDecision::read({launch.grad_scale}).skip) {
      *launch.found_inf = 1.0f;
    }
    lower(launch.first_nonfinite, first);
  }

  void multiply(const at::Device&, const std::vector<KernelTensorArgs>& all_args,
                const MultiplyInputs& inputs, float* found_inf, int64_t* first_nonfinite,
                bool* is_launched) const override {
    const float factor = inputs.factor();
    const cpu::TileMap tiles(all_args.data(), all_args.size(), asks_ahead());
    int64_t first = kNoTensor;
    if (factor != 1.0f || found_inf != nullptr) {
      first = least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
        return factor != 1.0f ? selected_engine().multiply(tiles, factor, begin, end)
                              : selected_engine().scan(tiles, nullptr, false, begin, end);
      });
    }
    if (found_inf != nullptr && (first != kNoTensor || !is_finite(factor))) *found_inf = 1.0f;
    lower(first_nonfinite, first);
    std::fill_n(is_launched, all_args.size(), true);
  }

  void count_nonfinite(const at::Device&, const std::vector<KernelTensorArgs>& all_args,
                       int64_t* counts) const override {
    const cpu::TileMap tiles(all_args.data(), all_args.size(), asks_ahead());
    std::vector<std::atomic<int64_t>> found(all_args.size());
    least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
      selected_engine().count_nonfinite(tiles, found.data(), begin, end);
      return kNoTensor;
    });
    for (size_t i = 0; i < found.size(); ++i) counts[i] += found[i].load();
  }

  void average(const at::Device&, const AverageLaunch& launch) const override {
    const AverageStep step = AverageStep::of(*launch.weight, *launch.number);
    if (!step.is_taken) return;
    const cpu::TileMap tiles(launch.all_args, launch.count, asks_ahead());
    least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
      selected_engine().average(tiles, step, begin, end);
      return kNoTensor;
    });
  }

  void update_scale(const at::Device&, const ScaleUpdate& update,
                    const std::vector<OverflowFlag>& flags) const override {
    bool overflow = false;
    for (const OverflowFlag& flag : flags) {
      const bool found = *flag.found_inf != 0.0f;
      overflow |= found;
      if (update.counts != nullptr) count_flag(flag, found, *update.counts);
    }
    update.run(overflow);
  }
};

}  // namespace

bool uses_cuda(const at::Device& device) {
#if defined(AMP_EXT_CUDA_EMULATOR)
  return device.is_cpu();
#else
  return device.is_cuda();
#endif
}

void StepScratch::make_room(const at::Device& device) {
#if defined(AMP_EXT_WITH_CUDA)
  if (uses_cuda(device)) block_counter(device);
#endif
  static_cast<void>(device);
}

const Backend& backend_of(const at::Device& device) {
#if defined(AMP_EXT_WITH_CUDA)
  if (uses_cuda(device)) return cuda_backend();
#endif
  static_cast<void>(device);
  static const CpuBackend backend;
  return backend;
}

void check_device(const std::string& operation, const std::string& name, const at::Device& device) {
  check_torch_version(operation);
#if defined(AMP_EXT_WITH_CUDA)
  if (uses_cuda(device)) return check_driver(operation);
#endif
  if (device.is_cpu()) return;
#if !defined(AMP_EXT_WITH_CUDA)
  TORCH_CHECK(!device.is_cuda(), operation, ": ", name, " must be on cpu, got ", device,
              ": this amp_ext was built without CUDA.\n", how_to_build_cuda());
#endif
  TORCH_CHECK(false, operation, ": ", name, " must be on cpu or cuda, got ", device);
}

bool host_knows_of_skip(const at::Device& device, const GradientInputs& inputs) {
  return !uses_cuda(device) && StepDecision::read(inputs).skip;
}

const char* cpu_isa() { return selected_engine().name; }

}  // namespace amp_ext
