// The kernel that updates the loss scale, and the functions that choose among all kernels.
#include <type_traits>

#include "cuda/engine.h"
#include "cuda/gradients.cuh"
#include "kernels.h"

namespace amp_ext::cuda {

namespace {

struct UpdateArguments {
  OverflowFlag flags[kMaxFlags];
  int32_t count;
  bool is_last;               // true in the last launch of an update
  int32_t* earlier_overflow;  // [1], not 0 if a flag of an earlier launch was set; or null
  ScaleUpdate update;
};
static_assert(sizeof(UpdateArguments) <= kArgumentBytes);

__global__ void __launch_bounds__(kMaxFlags)
    update_scale_kernel(const UpdateArguments __grid_constant__ arguments) {
  const ScaleUpdate& update = arguments.update;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  bool overflow = thread < arguments.count && *arguments.flags[thread].found_inf != 0.0f;
  overflow = __syncthreads_or(overflow);
  if (thread != 0) return;
  if (arguments.earlier_overflow != nullptr) {
    overflow |= *arguments.earlier_overflow != 0;
    *arguments.earlier_overflow = overflow ? 1 : 0;
  }
  for (int32_t i = 0; i < arguments.count && update.counts != nullptr; ++i) {
    const OverflowFlag& flag = arguments.flags[i];
    count_flag(flag, *flag.found_inf != 0.0f, *update.counts);
  }
  if (!arguments.is_last) return;
  update.run(overflow);
}

__global__ void __launch_bounds__(1)
    judge_norm_kernel(const GradientInputs __grid_constant__ inputs, NormJudgement* judgement,
                      float* skips) {
  judge_norm(inputs, *judgement, *skips);
}

// Calls run(element) with a value of each dtype, until a call returns an error.
template <typename Run>
int for_each_dtype(const Run& run) {
  int error = 0;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    for_dtype(dtype, [&](auto element) {
      if (error == 0) error = run(element);
    });
  }
  return error;
}

}  // namespace

// Defined in step.cuh, and instantiated in step_*.cu.
template <typename All>
int step_all(const StepLaunch& launch, int64_t first, uint32_t* block_counter, cudaStream_t stream,
             int64_t& launched);

int step(const StepLaunch& launch, uint32_t* block_counter, cudaStream_t stream) {
  int64_t launched = 0;
  int64_t first = 0;  // the first tensor that is not launched, whose formats select the kernel
  while (launched < launch.count) {
    const int64_t before = launched;
    for (const auto step_of_some :
         {&step_all<CombinationsFor<float>::Type>, &step_all<CombinationsFor<double>::Type>,
          &step_all<WithFloat32<Half>>, &step_all<WithBFloat16<Half>>,
          &step_all<WithOthers<Half>::Type>, &step_all<WithFloat32<BFloat16>>,
          &step_all<WithBFloat16<BFloat16>>, &step_all<WithOthers<BFloat16>::Type>}) {
      if (const int error = step_of_some(launch, first, block_counter, stream, launched)) {
        return error;
      }
      if (launched > before) break;
    }
    // If it was not launched, no kernel is compiled for its combination of dtypes.
    if (launched == before) return static_cast<int>(cudaErrorInvalidValue);
    while (first < launch.count && launch.is_launched[first]) ++first;
  }
  return 0;
}

int driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

int judge_norm(const GradientInputs& inputs, NormJudgement* judgement, float* skips,
               cudaStream_t stream) {
  return launch(judge_norm_kernel, 1, 1, stream, inputs, judgement, skips);
}

int64_t number_of_tiles(const KernelTensorArgs* all_args, int64_t count) {
  int64_t tiles = 1;  // a launch has at least one block
  constexpr int kSize = GradientShape::kTileSize;
  for (int64_t i = 0; i < count; ++i) tiles += (all_args[i].numel + kSize - 1) / kSize;
  return tiles;
}

int scan(const GradScanLaunch& launch_of_all, const SumScratch& scratch, cudaStream_t stream) {
  GradScanArguments arguments;
  arguments.grad_scale = launch_of_all.grad_scale;
  arguments.outputs = {launch_of_all.found_inf, launch_of_all.first_nonfinite};
  arguments.sum_of_squares = launch_of_all.sum_of_squares;
  arguments.scratch = scratch;
  arguments.skip_nonfinite = launch_of_all.skip_nonfinite;
  return for_each_dtype([&](auto element) {
    using Storage = decltype(element);
    const auto kernel = launch_of_all.sum_of_squares != nullptr ? scan_kernel<Storage, true>
                                                                : scan_kernel<Storage, false>;
    return launch_gradients<Storage>(kernel, launch_of_all.all_args, launch_of_all.count, arguments,
                                     stream);
  });
}

int multiply(const KernelTensorArgs* all_args, int64_t count, const MultiplyInputs& inputs,
             float* found_inf, int64_t* first_nonfinite, bool* is_launched, cudaStream_t stream) {
  MultiplyArguments arguments;
  arguments.inputs = inputs;
  arguments.outputs = {found_inf, first_nonfinite};
  return for_each_dtype([&](auto element) {
    using Storage = decltype(element);
    return launch_gradients<Storage>(multiply_kernel<Storage>, all_args, count, arguments, stream,
                                     is_launched);
  });
}

int count_nonfinite(const KernelTensorArgs* all_args, int64_t count, int64_t* counts,
                    cudaStream_t stream) {
  CountArguments arguments;
  arguments.counts = reinterpret_cast<unsigned long long*>(counts);
  return for_each_dtype([&](auto element) {
    using Storage = decltype(element);
    return launch_gradients<Storage>(count_kernel<Storage>, all_args, count, arguments, stream);
  });
}

int update_scale(const ScaleUpdate& update, const OverflowFlag* flags, int64_t count,
                 int32_t* earlier_overflow, cudaStream_t stream) {
  UpdateArguments arguments;
  arguments.earlier_overflow = earlier_overflow;
  arguments.update = update;
  int64_t done = 0;
  do {
    const auto next = static_cast<int32_t>(count - done < kMaxFlags ? count - done : kMaxFlags);
    for (int32_t i = 0; i < next; ++i) arguments.flags[i] = flags[done + i];
    arguments.count = next;
    done += next;
    arguments.is_last = done == count;
    if (const int error = launch(update_scale_kernel, 1, kMaxFlags, stream, arguments)) {
      return error;
    }
  } while (done < count);
  return 0;
}

}  // namespace amp_ext::cuda
