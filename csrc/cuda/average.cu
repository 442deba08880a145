// The kernel that averages weights.
#include <algorithm>
#include <type_traits>

#include "cuda/engine.h"
#include "cuda/number.cuh"
#include "cuda/tensor_table.cuh"
#include "launches.h"

namespace amp_ext::cuda {

namespace {

// The arrays of one weight tensor and its average.
template <typename WeightFormat, typename AverageFormat>
struct AveragedArrays {
  using Weights = Numbers<WeightFormat>;
  using Averages = Numbers<AverageFormat>;
  static constexpr int kPackSize = 16 / std::min(Weights::kLeastBytes, Averages::kLeastBytes);
  static constexpr int kPointers = Weights::kPointers + 1;
  // Three blocks for float16 with a 16-bit residual, because joining it takes more registers.
  static constexpr int kBlocks = std::is_same_v<WeightFormat, Split<Half, 16>> ? 3 : 4;
  using Shape = cuda::Shape<kThreads, Averages::kMayDither ? 8192 : 4096, kBlocks, 2, 2048>;

  Weights weights;
  Averages averages;
  int64_t global_offset;  // index that the dithering uses for the first element

  // Returns the first index in [begin, end) at which packs can start, or `end`, as in step.cuh.
  __device__ int64_t first_pack(int64_t begin, int64_t end) const {
    const int64_t first = begin + averages.elements_to_boundary(begin);
    const bool aligned =
        first < end && weights.is_at_boundary(first) && averages.is_at_boundary(first);
    return aligned ? first : end;
  }

  template <int kCount>
  struct Values {
    typename Weights::template Values<kCount> weights;
    typename Averages::template Values<kCount> averages;
  };

  // Averages `kPacks` packs that start `stride` elements apart.
  template <int kCount, int kPacks>
  __device__ void update(const AverageStep& step, int64_t first, int64_t stride) const {
    Values<kCount> values[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      values[k] = {weights.template load<kCount>(first + k * stride),
                   averages.template load<kCount>(first + k * stride)};
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      Values<kCount>& pack = values[k];
      const auto place = static_cast<uint64_t>(global_offset + first + k * stride);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        Rounding rounding;
        if constexpr (Averages::kMayDither) {
          rounding = {true, dither_phase(place + i)};
        }
        pack.averages.store(step(pack.averages.load(i), pack.weights.load(i)), i, rounding);
      }
      averages.store(pack.averages, first + k * stride);
    }
  }
};

template <typename Arrays>
struct AverageArguments {
  static constexpr int kOtherBytes = 2 * sizeof(void*);

  TensorTable<Arrays::kPointers, kArgumentBytes - kOtherBytes, Arrays::Averages::kMayDither> table;
  const double* weight;
  const double* number;
};

template <typename Arrays, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    average_kernel(const AverageArguments<Arrays> __grid_constant__ arguments) {
  AMP_EXT_SHARED(AverageStep, shared_step);
  if (threadIdx.x == 0) shared_step = AverageStep::of(*arguments.weight, *arguments.number);
  __syncthreads();
  const AverageStep step = shared_step;
  if (!step.is_taken) return;
  const auto& table = arguments.table;
  const auto tile = static_cast<int32_t>(blockIdx.x);
  const int tensor = table.tensor_of(tile);
  Arrays arrays{Arrays::Weights::at(table.pointers, tensor),
                Arrays::Averages::at(table.pointers + Arrays::Weights::kPointers, tensor), 0};
  if constexpr (Arrays::Averages::kMayDither) {
    arrays.global_offset = step.dither_place(table.dither.global_offset[tensor]);
  }
  const int64_t begin = table.begin_of(tile, tensor);
  const int64_t end = table.end_of(begin, tensor);
  for_each_pack<Shape, Arrays::kPackSize>(begin, arrays.first_pack(begin, end), end,
                                          [&](int64_t index, auto count, auto packs) {
                                            constexpr int kCount = decltype(count)::value;
                                            arrays.template update<kCount, decltype(packs)::value>(
                                                step, index, Shape::kThreads * kCount);
                                          });
}

// Averages the tensors with the number formats of `Arrays`, and counts them in `launched`.
template <typename Arrays, typename HasFormats>
int launch_average(const AverageLaunch& launch_of_all, cudaStream_t stream,
                   const HasFormats& has_formats, int64_t& launched) {
  using Shape = typename Arrays::Shape;
  using Arguments = AverageArguments<Arrays>;
  static_assert(sizeof(Arguments) <= kArgumentBytes);
  Arguments arguments;
  arguments.weight = launch_of_all.weight;
  arguments.number = launch_of_all.number;
  auto& table = arguments.table;
  const auto flush = [&]() -> int {
    launched += table.count;
    const int error =
        launch(average_kernel<Arrays, Shape>, table.blocks(), Shape::kThreads, stream, arguments);
    table.clear(table.tile_size);
    return error;
  };
  int64_t elements = 0;
  for (int64_t i = 0; i < launch_of_all.count; ++i) elements += launch_of_all.all_args[i].numel;
  table.clear(Shape::tile_size_of(elements));
  for (int64_t i = 0; i < launch_of_all.count; ++i) {
    const KernelTensorArgs& args = launch_of_all.all_args[i];
    if (!has_formats(args)) continue;
    if (table.is_full()) {
      if (const int error = flush()) return error;
    }
    const int index = table.add(args, 0);
    table.pointers[0][index] = args.param;
    if (Arrays::Weights::kPointers > 1) table.pointers[1][index] = args.master_param;
    table.pointers[Arrays::Weights::kPointers][index] = args.buffers[0];
  }
  return table.count > 0 ? flush() : 0;
}

}  // namespace

int average(const AverageLaunch& launch, cudaStream_t stream) {
  int64_t launched = 0;
  int error = 0;
  any_formats_of_averages([&](auto weight, auto average) {
    using Weight = decltype(weight);
    using Average = decltype(average);
    error = launch_average<AveragedArrays<Weight, Average>>(
        launch, stream, has_formats_of_average<Weight, Average>, launched);
    return error != 0 || launched == launch.count;
  });
  if (error != 0) return error;
  return launched == launch.count ? 0 : static_cast<int>(cudaErrorInvalidValue);
}

}  // namespace amp_ext::cuda
