// Runs launches on the engine of a device. The only code that knows threads and streams.
#include "dispatch.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <cstdlib>

#include "cpu/engine.h"

#if defined(AMP_EXT_WITH_CUDA)
#if !defined(AMP_EXT_CUDA_EMULATOR)
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "cuda/engine.h"
#endif

namespace amp_ext {

namespace {

// Below this cost, some 0.1 ms of work, threads are not worth waking: on a busy machine that alone
// may take milliseconds.
constexpr int64_t kSerialCost = 131072;

const cpu::Engine& cpu_engine() {
  static const cpu::Engine* const engine = cpu::select_engine();
  TORCH_CHECK(engine != nullptr,
              "amp_ext: the environment variable AMP_EXT_CPU_ISA must be plain or avx2, on a "
              "processor that has it, got ",
              std::getenv("AMP_EXT_CPU_ISA"));
  return *engine;
}

// One parallel region over the tiles of all tensors. Returns the least of work()'s results.
template <typename Work>
int64_t least_in_parallel(const cpu::TileMap& tiles, const Work& work) {
  std::atomic<int64_t> least{kNoTensor};
  at::parallel_for(0, tiles.total_cost(), kSerialCost, [&](int64_t begin, int64_t end) {
    const int64_t number = work(begin, end);
    int64_t so_far = least.load();
    while (number < so_far && !least.compare_exchange_weak(so_far, number)) {
    }
  });
  return least.load();
}

void lower(int64_t* first_nonfinite, int64_t number) {
  if (first_nonfinite != nullptr && number < *first_nonfinite) *first_nonfinite = number;
}

void step_on_cpu(const StepLaunch& launch) {
  const GradientFactor factor = GradientFactor::read(launch.inputs);
  if (launch.grad_norm != nullptr) *launch.grad_norm = factor.grad_norm;
  if (factor.skip) return;
  const cpu::Engine& engine = cpu_engine();
  const cpu::TileMap tiles(launch.records, launch.count);
  least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
    engine.step(launch, tiles, factor, begin, end);
    return kNoTensor;
  });
  for (int64_t i = 0; i < launch.count; ++i) {
    if (launch.records[i].step != nullptr) *launch.records[i].step += 1.0f;
  }
}

}  // namespace

bool uses_cuda_engine(const at::Device& device) {
#if defined(AMP_EXT_CUDA_EMULATOR)
  return device.is_cpu();
#else
  return device.is_cuda();
#endif
}

#if defined(AMP_EXT_WITH_CUDA)

namespace {

#if defined(AMP_EXT_CUDA_EMULATOR)

struct DeviceGuard {
  explicit DeviceGuard(const at::Device&) {}
};

cudaStream_t current_stream(const at::Device&) { return nullptr; }

void check_launch(int error) { TORCH_CHECK(error == cudaSuccess, "CUDA error ", error); }

#else

using DeviceGuard = c10::cuda::CUDAGuard;

cudaStream_t current_stream(const at::Device& device) {
  return c10::cuda::getCurrentCUDAStream(device.index());
}

void check_launch(int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }

#endif

int look_on_cuda(const at::Device& device, const LookLaunch& launch, StepScratch& scratch,
                 cudaStream_t stream) {
  if (launch.sum_of_squares == nullptr) return cuda::look(launch, {}, stream);
  // Freed before the kernels run, in the order of the stream.
  const int64_t tiles = cuda::number_of_tiles(launch.records, launch.count);
  const at::Tensor tile_sums = at::empty({tiles}, at::TensorOptions(device).dtype(at::kDouble));
  return cuda::look(launch, {tile_sums.mutable_data_ptr<double>(), scratch.block_counter(device)},
                    stream);
}

int update_scale_on_cuda(const at::Device& device, const ScaleUpdate& update,
                         const std::vector<OverflowFlag>& flags, cudaStream_t stream) {
  at::Tensor earlier_overflow;
  if (flags.size() > cuda::kMaxFlags) {
    earlier_overflow = at::zeros({1}, at::TensorOptions(device).dtype(at::kInt));
  }
  return cuda::update_scale(
      update, flags.data(), static_cast<int64_t>(flags.size()),
      earlier_overflow.defined() ? earlier_overflow.mutable_data_ptr<int32_t>() : nullptr, stream);
}

}  // namespace

uint32_t* StepScratch::block_counter(const at::Device& device) {
  auto [counter, is_new] = counters_.try_emplace(device);
  if (is_new) counter->second = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device));
  return reinterpret_cast<uint32_t*>(counter->second.mutable_data_ptr<int32_t>());
}

#define AMP_EXT_RUN_ON_CUDA(device, call)               \
  if (uses_cuda_engine(device)) {                       \
    const DeviceGuard guard(device);                    \
    const cudaStream_t stream = current_stream(device); \
    return check_launch(call);                          \
  }

#else

#define AMP_EXT_RUN_ON_CUDA(device, call) static_cast<void>(device);

#endif

void check_device(const std::string& operation, const std::string& name, const at::Device& device) {
  if (device.is_cpu()) return;
#if defined(AMP_EXT_WITH_CUDA)
  if (device.is_cuda()) return;
#else
  TORCH_CHECK(!device.is_cuda(), operation, ": ", name, " must be on cpu, got ", device,
              ": this amp_ext was built without CUDA. Install a CUDA toolkit of torch's version, "
              "set CUDA_HOME, and rebuild: AMP_EXT_CUDA=1 pip install --no-build-isolation "
              "--force-reinstall --no-deps --no-cache-dir <amp_ext's folder>");
#endif
  TORCH_CHECK(false, operation, ": ", name, " must be on cpu or cuda, got ", device);
}

bool host_knows_of_skip(const at::Device& device, const GradientInputs& inputs) {
  return !uses_cuda_engine(device) && GradientFactor::read(inputs).skip;
}

void run_step(const at::Device& device, const StepLaunch& launch,
              [[maybe_unused]] StepScratch& scratch) {
  AMP_EXT_RUN_ON_CUDA(device, cuda::step(launch, scratch.block_counter(device), stream))
  step_on_cpu(launch);
}

void run_look(const at::Device& device, const LookLaunch& launch,
              [[maybe_unused]] StepScratch& scratch) {
  AMP_EXT_RUN_ON_CUDA(device, look_on_cuda(device, launch, scratch, stream))
  const cpu::Engine& engine = cpu_engine();
  const cpu::TileMap tiles(launch.records, launch.count);
  std::vector<double> sums(launch.sum_of_squares != nullptr ? tiles.number_of_tiles() : 0);
  double* const sums_or_null = launch.sum_of_squares != nullptr ? sums.data() : nullptr;
  const int64_t first = least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
    return engine.look(tiles, sums_or_null, launch.skip_nonfinite, begin, end);
  });
  // In the order of the tiles, however many threads there were.
  for (const double sum : sums) *launch.sum_of_squares += sum;
  if (first != kNoTensor || GradientFactor::read({launch.grad_scale}).skip) {
    *launch.found_inf = 1.0f;
  }
  lower(launch.first_nonfinite, first);
}

void run_multiply(const at::Device& device, const std::vector<TensorRecord>& records,
                  const MultiplyInputs& inputs, float* found_inf, int64_t* first_nonfinite) {
  const auto count = static_cast<int64_t>(records.size());
  AMP_EXT_RUN_ON_CUDA(
      device, cuda::multiply(records.data(), count, inputs, found_inf, first_nonfinite, stream))
  const float factor = inputs.factor();
  const cpu::Engine& engine = cpu_engine();
  const cpu::TileMap tiles(records.data(), count);
  int64_t first = kNoTensor;
  if (factor != 1.0f) {
    first = least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
      return engine.multiply(tiles, factor, begin, end);
    });
  } else if (found_inf != nullptr) {
    first = least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
      return engine.look(tiles, nullptr, false, begin, end);
    });
  }
  if (found_inf != nullptr && (first != kNoTensor || !is_finite(factor))) *found_inf = 1.0f;
  lower(first_nonfinite, first);
}

void run_count_nonfinite(const at::Device& device, const std::vector<TensorRecord>& records,
                         int64_t* counts) {
  const auto count = static_cast<int64_t>(records.size());
  AMP_EXT_RUN_ON_CUDA(device, cuda::count_nonfinite(records.data(), count, counts, stream))
  const cpu::Engine& engine = cpu_engine();
  const cpu::TileMap tiles(records.data(), count);
  std::vector<std::atomic<int64_t>> found(records.size());
  least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
    engine.count_nonfinite(tiles, found.data(), begin, end);
    return kNoTensor;
  });
  for (int64_t i = 0; i < count; ++i) counts[i] += found[i].load();
}

void run_update_scale(const at::Device& device, const ScaleUpdate& update,
                      const std::vector<OverflowFlag>& flags) {
  AMP_EXT_RUN_ON_CUDA(device, update_scale_on_cuda(device, update, flags, stream))
  const ReportMemory& reports = update.reports;
  bool overflow = false;
  for (const OverflowFlag& flag : flags) {
    const bool found = *flag.found_inf != 0.0f;
    overflow |= found;
    if (reports.report != nullptr) {
      report_flag(flag, found, *reports.report, reports.optimizers);
    }
  }
  const float scale_before = *update.state.scale;
  update_loss_scale(update.hyperparameters, overflow, update.state);
  if (reports.report == nullptr) return;
  report_update(overflow, scale_before, *update.state.scale, *reports.report);
  const int64_t number = reports.report->updates;
  __atomic_store_n(&reports.mirror->started, number, __ATOMIC_SEQ_CST);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  reports.copy(0, 1);
  __atomic_store_n(&reports.mirror->finished, number, __ATOMIC_SEQ_CST);
}

const char* cpu_isa() { return cpu_engine().name; }

}  // namespace amp_ext
