// The launches of the CUDA engine: on torch's current stream, with memory of torch's allocator.
#if defined(AMP_EXT_WITH_CUDA)

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <cstdlib>
#include <string>

#if !defined(AMP_EXT_CUDA_EMULATOR)
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "cuda/engine.h"
#include "devices/dispatch.h"

namespace amp_ext {

namespace {

#if defined(AMP_EXT_CUDA_EMULATOR)

cudaStream_t current_stream(const at::Device&) { return nullptr; }

// Throws the same exception as C10_CUDA_CHECK.
void check_launch(int error) {
  if (error == cudaSuccess) return;
  throw c10::AcceleratorError(
      {__func__, __FILE__, __LINE__}, error,
      c10::str("CUDA error: ", cudaGetErrorString(static_cast<cudaError_t>(error))));
}

#else

cudaStream_t current_stream(const at::Device& device) {
  return c10::cuda::getCurrentCUDAStream(device.index());
}

void check_launch(int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }

#endif

// Calls launch(stream) on the device and checks the error code that it returns.
template <typename Launch>
void on_stream(const at::Device& device, const Launch& launch) {
  const c10::DeviceGuard guard(device);
  check_launch(launch(current_stream(device)));
}

// True if steps may take the fast path. Reads AMP_EXT_CUDA_FAST_PATH once, at the first step.
bool may_take_fast_path() {
  static const bool allowed = [] {
    const char* const value = std::getenv("AMP_EXT_CUDA_FAST_PATH");
    const std::string text = value == nullptr ? "" : value;
    TORCH_CHECK(text.empty() || text == "0" || text == "1",
                "amp_ext: the environment variable AMP_EXT_CUDA_FAST_PATH must be 0 or 1, got ",
                text);
    return text != "0";
  }();
  return allowed;
}

class CudaBackend : public Backend {
 public:
  void step(const at::Device& device, const StepLaunch& launch_of_all,
            StepScratch& scratch) const override {
    StepLaunch launch = launch_of_all;
    launch.may_take_fast_path = may_take_fast_path();
    on_stream(device, [&](cudaStream_t stream) {
      return cuda::step(launch, scratch.block_counter(device), stream);
    });
  }

  void judge_norm(const at::Device& device, const GradientInputs& inputs, NormJudgement* judgement,
                  float* skips) const override {
    on_stream(device, [&](cudaStream_t stream) {
      return cuda::judge_norm(inputs, judgement, skips, stream);
    });
  }

  void scan(const at::Device& device, const GradScanLaunch& launch,
            StepScratch& scratch) const override {
    on_stream(device, [&](cudaStream_t stream) {
      if (launch.sum_of_squares == nullptr) return cuda::scan(launch, {}, stream);
      // tile_sums may be freed before the kernels end: torch's allocator reuses memory in stream
      // order.
      const int64_t tiles = cuda::number_of_tiles(launch.all_args, launch.count);
      const at::Tensor tile_sums = at::empty({tiles}, at::TensorOptions(device).dtype(at::kDouble));
      return cuda::scan(
          launch, {tile_sums.mutable_data_ptr<double>(), scratch.block_counter(device)}, stream);
    });
  }

  void multiply(const at::Device& device, const std::vector<KernelTensorArgs>& all_args,
                const MultiplyInputs& inputs, float* found_inf, int64_t* first_nonfinite,
                bool* is_launched) const override {
    on_stream(device, [&](cudaStream_t stream) {
      return cuda::multiply(all_args.data(), static_cast<int64_t>(all_args.size()), inputs,
                            found_inf, first_nonfinite, is_launched, stream);
    });
  }

  void count_nonfinite(const at::Device& device, const std::vector<KernelTensorArgs>& all_args,
                       int64_t* counts) const override {
    on_stream(device, [&](cudaStream_t stream) {
      return cuda::count_nonfinite(all_args.data(), static_cast<int64_t>(all_args.size()), counts,
                                   stream);
    });
  }

  void count_division_errors(const at::Device& device, int64_t stride,
                             int64_t* wrong) const override {
    on_stream(device, [&](cudaStream_t stream) {
      return cuda::count_division_errors(stride, wrong, stream);
    });
  }

  void average(const at::Device& device, const AverageLaunch& launch) const override {
    on_stream(device, [&](cudaStream_t stream) { return cuda::average(launch, stream); });
  }

  void update_scale(const at::Device& device, const ScaleUpdate& update,
                    const std::vector<OverflowFlag>& flags) const override {
    on_stream(device, [&](cudaStream_t stream) {
      at::Tensor earlier_overflow;
      if (flags.size() > cuda::kMaxFlags) {
        earlier_overflow = at::zeros({1}, at::TensorOptions(device).dtype(at::kInt));
      }
      return cuda::update_scale(
          update, flags.data(), static_cast<int64_t>(flags.size()),
          earlier_overflow.defined() ? earlier_overflow.mutable_data_ptr<int32_t>() : nullptr,
          stream);
    });
  }
};

}  // namespace

uint32_t* StepScratch::block_counter(const at::Device& device) {
  auto counter = counters_.find(device);
  if (counter == counters_.end()) {
    const at::Tensor zero = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device));
    counter = counters_.emplace(device, zero).first;
  }
  return reinterpret_cast<uint32_t*>(counter->second.mutable_data_ptr<int32_t>());
}

void check_driver(const std::string& operation) {
  static const int version = cuda::driver_version();
  TORCH_CHECK(version >= cuda::kLeastDriverVersion, operation,
              ": the GPU's driver is that of CUDA ", version / 1000, ".", version % 1000 / 10,
              ", which is too old. Update it to that of CUDA 12.1 or later.");
}

const Backend& cuda_backend() {
  static const CudaBackend backend;
  return backend;
}

}  // namespace amp_ext

#endif
