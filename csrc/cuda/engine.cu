// The kernels that look at gradients and follow the loss scale, and the choice among step kernels.
#include <type_traits>

#include "cuda/engine.h"
#include "cuda/tensor_table.cuh"

namespace amp_ext::cuda {

namespace {

template <typename Storage>
inline constexpr int kPackSize = 16 / static_cast<int>(sizeof(Storage));

// Elements from `begin` to the first 16-byte boundary, or `end` if there is none before.
template <typename Storage>
__device__ int64_t first_pack(const Storage* grad, int64_t begin, int64_t end) {
  const int64_t first = begin + elements_to_boundary(grad + begin);
  return first < end ? first : end;
}

template <typename Storage>
__device__ bool is_nonfinite(Storage value) {
  typename BitPattern<Storage>::type bits;
  memcpy(&bits, &value, sizeof bits);
  return (bits & kExponentMask<Storage>) == kExponentMask<Storage>;
}

using LookTable = TensorTable<1, kLargeArguments - 64>;
using SmallLookTable = TensorTable<1, kSmallArguments - 64>;

template <typename Table>
struct GradientArguments {
  Table table;
  const float* scale;  // of check_finite: the loss scale, or null; of unscale: its inverse
  float* found_inf;
};

__device__ void report(bool found, float* found_inf) {
  if (__syncthreads_or(found) && threadIdx.x == 0) atomicExch(found_inf, 1.0f);
}

template <typename Storage, typename Table>
__global__ void __launch_bounds__(kThreads)
    check_finite_kernel(const GradientArguments<Table> __grid_constant__ arguments) {
  const Table& table = arguments.table;
  const auto tile = static_cast<int32_t>(blockIdx.x);
  const int tensor = table.tensor_of(tile);
  Storage* const grad = static_cast<Storage*>(table.pointers[0][tensor]);
  const int64_t begin = static_cast<int64_t>(tile - table.first_tile[tensor]) * kTileSize;
  const int64_t end = min(begin + kTileSize, table.numel[tensor]);
  bool found = tile == 0 && GradientGate::read(arguments.scale, nullptr).skip;
  for_each_pack<kPackSize<Storage>>(
      begin, first_pack(grad, begin, end), end, [&](int64_t index, auto count) {
        const auto values = pack_at<decltype(count)::value>(grad, index);
#pragma unroll
        for (int i = 0; i < decltype(count)::value; ++i) found |= is_nonfinite(values.values[i]);
      });
  report(found, arguments.found_inf);
}

template <typename Storage, typename Table>
__global__ void __launch_bounds__(kThreads)
    unscale_kernel(const GradientArguments<Table> __grid_constant__ arguments) {
  using T = typename ComputeType<Storage>::type;
  const Table& table = arguments.table;
  const auto tile = static_cast<int32_t>(blockIdx.x);
  const int tensor = table.tensor_of(tile);
  Storage* const grad = static_cast<Storage*>(table.pointers[0][tensor]);
  const int64_t begin = static_cast<int64_t>(tile - table.first_tile[tensor]) * kTileSize;
  const int64_t end = min(begin + kTileSize, table.numel[tensor]);
  const T inv_scale = *arguments.scale;
  bool found = tile == 0 && !is_finite(inv_scale);
  for_each_pack<kPackSize<Storage>>(begin, first_pack(grad, begin, end), end,
                                    [&](int64_t index, auto count) {
                                      auto& in_place = pack_at<decltype(count)::value>(grad, index);
                                      auto values = in_place;
#pragma unroll
                                      for (int i = 0; i < decltype(count)::value; ++i) {
                                        found |= is_nonfinite(values.values[i]);
                                        store(load(values.values[i]) * inv_scale, values.values[i]);
                                      }
                                      in_place = values;
                                    });
  report(found, arguments.found_inf);
}

// Flags that one launch looks at: one for each optimizer and device.
constexpr int kMaxFlags = 256;

struct UpdateArguments {
  const float* found_infs[kMaxFlags];
  int32_t count;
  LossScaleHyperparameters hyperparameters;
  float* scale;
  int32_t* growth_tracker;
};

__global__ void update_scale_kernel(const UpdateArguments __grid_constant__ arguments) {
  const auto flag = static_cast<int32_t>(threadIdx.x);
  const bool overflow =
      __syncthreads_or(flag < arguments.count && *arguments.found_infs[flag] != 0.0f);
  if (threadIdx.x == 0) {
    update_loss_scale(arguments.hyperparameters, overflow, *arguments.scale,
                      *arguments.growth_tracker);
  }
}

enum class GradientKernel { kCheckFinite, kUnscale };

template <typename Storage, typename Table>
int launch_gradients(GradientKernel kernel, const TensorRecord* records, int64_t count,
                     const float* scale, float* found_inf, cudaStream_t stream) {
  static_assert(sizeof(GradientArguments<Table>) <= kLargeArguments);
  GradientArguments<Table> arguments;
  arguments.scale = scale;
  arguments.found_inf = found_inf;
  arguments.table.count = 0;
  arguments.table.tiles = 0;
  const auto flush = [&]() -> int {
    const auto function = kernel == GradientKernel::kUnscale ? unscale_kernel<Storage, Table>
                                                             : check_finite_kernel<Storage, Table>;
    const int error = launch(function, arguments.table.blocks(), kThreads, stream, arguments);
    arguments.table.count = 0;
    arguments.table.tiles = 0;
    return error;
  };
  for (int64_t i = 0; i < count; ++i) {
    if (records[i].grad_dtype != kDType<Storage>) continue;
    if (arguments.table.is_full()) {
      if (const int error = flush()) return error;
    }
    arguments.table.pointers[0][arguments.table.add(records[i], 0)] = records[i].grad;
  }
  return arguments.table.count > 0 ? flush() : 0;
}

int run_gradients(GradientKernel kernel, const TensorRecord* records, int64_t count,
                  const float* scale, float* found_inf, cudaStream_t stream) {
  int error = 0;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    for_dtype(dtype, [&](auto element) {
      using Storage = decltype(element);
      if (error != 0) return;
      error = driver_takes_large_arguments()
                  ? launch_gradients<Storage, LookTable>(kernel, records, count, scale, found_inf,
                                                         stream)
                  : launch_gradients<Storage, SmallLookTable>(kernel, records, count, scale,
                                                              found_inf, stream);
    });
  }
  return error;
}

}  // namespace

template <typename Param>
int step_params(const StepLaunch& launch, uint32_t* block_counter, cudaStream_t stream,
                int64_t& launched);

int step(const StepLaunch& launch, uint32_t* block_counter, cudaStream_t stream) {
  int64_t launched = 0;
  for (const auto step_of_dtype :
       {&step_params<float>, &step_params<double>, &step_params<Half>, &step_params<BFloat16>}) {
    if (const int error = step_of_dtype(launch, block_counter, stream, launched)) return error;
  }
  // A combination of dtypes that no kernel was compiled for.
  return launched == launch.count ? 0 : static_cast<int>(cudaErrorInvalidValue);
}

int check_finite(const TensorRecord* records, int64_t count, const float* grad_scale,
                 float* found_inf, cudaStream_t stream) {
  return run_gradients(GradientKernel::kCheckFinite, records, count, grad_scale, found_inf, stream);
}

int unscale(const TensorRecord* records, int64_t count, const float* inv_scale, float* found_inf,
            cudaStream_t stream) {
  return run_gradients(GradientKernel::kUnscale, records, count, inv_scale, found_inf, stream);
}

int update_scale(const LossScaleHyperparameters& hyperparameters, const float* const* found_infs,
                 int64_t count, float* scale, int32_t* growth_tracker, cudaStream_t stream) {
  if (count > kMaxFlags) return static_cast<int>(cudaErrorInvalidValue);
  UpdateArguments arguments;
  arguments.count = static_cast<int32_t>(count);
  for (int64_t i = 0; i < count; ++i) arguments.found_infs[i] = found_infs[i];
  arguments.hyperparameters = hyperparameters;
  arguments.scale = scale;
  arguments.growth_tracker = growth_tracker;
  return launch(update_scale_kernel, 1, kMaxFlags, stream, arguments);
}

}  // namespace amp_ext::cuda
