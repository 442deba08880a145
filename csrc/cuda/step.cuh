// The optimizer step of any functor, for parameters of one dtype.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/engine.h"
#include "cuda/tensor_table.cuh"
#include "element.h"
#include "kernel_list.h"
#include "launches.h"
#include "storage.h"

namespace amp_ext::cuda {

// Groups of hyperparameters in one launch.
inline constexpr int kMaxGroups = 16;

// The memory of one tensor. With a master, `param` is only written.
template <typename ParamType, typename Combination, int kNumberOfBuffers>
struct Streams {
  using Param = ParamType;
  using Grad = typename Combination::Grad;
  using Buffer = typename Combination::Buffer;
  using T = typename ComputeType<Param>::type;
  static constexpr bool kHasMaster = Combination::kHasMaster;
  static constexpr int kBuffers = kNumberOfBuffers;
  static constexpr int kPointers = 2 + kHasMaster + kBuffers;
  using Computed = std::conditional_t<kHasMaster, T, Param>;  // what is read and updated

  // Elements that fill 16 bytes of the narrowest stream.
  static constexpr int kPackSize =
      16 / static_cast<int>(std::min({sizeof(Grad), sizeof(Param), sizeof(Buffer)}));

  Grad* grad;
  Param* param;
  Computed* computed;
  Buffer* buffers[kBuffers > 0 ? kBuffers : 1];

  static bool match(const TensorRecord& record) {
    return record.param_dtype == kDType<Param> && record.grad_dtype == kDType<Grad> &&
           record.buffer_dtype == kDType<Buffer> && (record.master_param != nullptr) == kHasMaster;
  }

  template <typename Table>
  static void add(Table& table, const TensorRecord& record, int32_t group) {
    const int index = table.add(record, group);
    int pointer = 0;
    table.pointers[pointer++][index] = record.grad;
    table.pointers[pointer++][index] = record.param;
    if constexpr (kHasMaster) table.pointers[pointer++][index] = record.master_param;
    for (int i = 0; i < kBuffers; ++i) table.pointers[pointer++][index] = record.buffers[i];
  }

  template <typename Table>
  __device__ static Streams at(const Table& table, int tensor) {
    Streams streams;
    int pointer = 0;
    streams.grad = static_cast<Grad*>(table.pointers[pointer++][tensor]);
    streams.param = static_cast<Param*>(table.pointers[pointer++][tensor]);
    if constexpr (kHasMaster) {
      streams.computed = static_cast<Computed*>(table.pointers[pointer++][tensor]);
    } else {
      streams.computed = streams.param;
    }
    for (int i = 0; i < kBuffers; ++i) {
      streams.buffers[i] = static_cast<Buffer*>(table.pointers[pointer++][tensor]);
    }
    return streams;
  }

  // Where packs can start in [begin, end): at the next 16-byte boundary of all streams, or nowhere.
  __device__ int64_t first_pack(int64_t begin, int64_t end) const {
    const int64_t first = begin + elements_to_boundary(param + begin);
    bool aligned = first < end && is_at_boundary(param + first) && is_at_boundary(grad + first) &&
                   is_at_boundary(computed + first);
    for (int i = 0; i < kBuffers; ++i) aligned = aligned && is_at_boundary(buffers[i] + first);
    return aligned ? first : end;
  }

  template <int kCount, typename Constants>
  __device__ void update(const Constants& constants, int64_t index) const {
    // All loads before the first use of one.
    auto grads = pack_at<kCount>(grad, index);
    auto computed_values = pack_at<kCount>(computed, index);
    Pack<Buffer, kCount> buffer_values[kBuffers > 0 ? kBuffers : 1];
#pragma unroll
    for (int k = 0; k < kBuffers; ++k) buffer_values[k] = pack_at<kCount>(buffers[k], index);
    Pack<Param, kCount> params;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      T value = load(computed_values.values[i]);
      T elements[kMaxBuffers];
#pragma unroll
      for (int k = 0; k < kBuffers; ++k) elements[k] = load(buffer_values[k].values[i]);
      const T scaled_grad = static_cast<T>(load(grads.values[i]));
      if (!constants.skips(scaled_grad)) {
        const T grad = constants.unscale_and_clip(scaled_grad);
        update_element<kBuffers>(constants, grad, value, elements[0], elements[1], elements[2]);
        if (constants.write_back_grads)
          store(static_cast<typename ComputeType<Grad>::type>(grad), grads.values[i]);
      }
      store(value, computed_values.values[i]);
      if constexpr (kHasMaster) store(value, params.values[i]);
#pragma unroll
      for (int k = 0; k < kBuffers; ++k) store(elements[k], buffer_values[k].values[i]);
    }
    if (constants.write_back_grads) pack_at<kCount>(grad, index) = grads;
    pack_at<kCount>(computed, index) = computed_values;
    if constexpr (kHasMaster) pack_at<kCount>(param, index) = params;
#pragma unroll
    for (int k = 0; k < kBuffers; ++k) pack_at<kCount>(buffers[k], index) = buffer_values[k];
  }
};

template <typename Functor, typename Streams, int kBytes>
struct StepArguments {
  using Hyperparameters = typename Functor::Hyperparameters;
  static constexpr int kOtherBytes = kMaxGroups * sizeof(Hyperparameters) + sizeof(int64_t) +
                                     sizeof(GradientInputs) + 2 * sizeof(void*);

  TensorTable<Streams::kPointers, kBytes - kOtherBytes> table;
  Hyperparameters groups[kMaxGroups];
  int32_t number_of_groups;
  GradientInputs inputs;
  float* grad_norm;         // [1], written with the norm, or null
  uint32_t* block_counter;  // null: no tensor has a step
};

// What one thread of a block finds out for all.
template <typename Constants>
struct BlockState {
  Constants constants;
  bool skip;
  bool is_last;
};

// Two blocks on a multiprocessor keep enough loads under way; for more of them the compiler spills.
template <typename Functor, typename Streams, int kBytes>
__global__ void __launch_bounds__(kThreads, 2)
    step_kernel(const StepArguments<Functor, Streams, kBytes> __grid_constant__ arguments) {
  using Constants = TensorConstants<Functor, typename Streams::T>;
  AMP_EXT_SHARED(BlockState<Constants>, block);
  const auto& table = arguments.table;
  const auto tile = static_cast<int32_t>(blockIdx.x);
  const int tensor = table.tensor_of(tile);

  if (threadIdx.x == 0) {
    const GradientFactor factor = GradientFactor::read(arguments.inputs);
    if (tile == 0 && arguments.grad_norm != nullptr) *arguments.grad_norm = factor.grad_norm;
    block.skip = factor.skip;
    block.is_last = false;
    if (!factor.skip) {
      block.constants =
          Constants::make(arguments.groups[table.group[tensor]], table.step[tensor], factor);
      if (arguments.block_counter != nullptr) {
        // Whoever comes last knows that every block has read its step.
        __threadfence();
        block.is_last = atomicAdd(arguments.block_counter, 1u) == gridDim.x - 1;
      }
    }
  }
  __syncthreads();
  if (block.skip) return;
  if (block.is_last) {
    for (int i = static_cast<int>(threadIdx.x); i < table.count; i += kThreads) {
      if (table.step[i] != nullptr) *table.step[i] += 1.0f;
    }
    if (threadIdx.x == 0) *arguments.block_counter = 0;
  }

  const Streams streams = Streams::at(table, tensor);
  const Constants& constants = block.constants;  // a copy of it would be spilled
  const int64_t begin = static_cast<int64_t>(tile - table.first_tile[tensor]) * kTileSize;
  const int64_t end = min(begin + kTileSize, table.numel[tensor]);
  for_each_pack<Streams::kPackSize>(
      begin, streams.first_pack(begin, end), end, [&](int64_t index, auto count) {
        streams.template update<decltype(count)::value>(constants, index);
      });
}

template <typename Functor, typename Streams, int kBytes>
int launch_step(const StepLaunch& launch_of_all, uint32_t* block_counter, cudaStream_t stream,
                int64_t& launched) {
  using Arguments = StepArguments<Functor, Streams, kBytes>;
  static_assert(sizeof(Arguments) <= kBytes);
  const auto* hyperparameters =
      static_cast<const typename Functor::Hyperparameters*>(launch_of_all.hyperparameters);
  Arguments arguments;
  int64_t in_table[decltype(arguments.table)::kCapacity];  // the numbers of its records
  const auto clear = [&] {
    arguments.table.clear();
    arguments.number_of_groups = 0;
    arguments.inputs = launch_of_all.inputs;
    arguments.grad_norm = launch_of_all.grad_norm;
    arguments.block_counter = nullptr;
  };
  const auto flush = [&]() -> int {
    const int error = launch(step_kernel<Functor, Streams, kBytes>, arguments.table.blocks(),
                             kThreads, stream, arguments);
    if (error != 0) return error;
    for (int k = 0; k < arguments.table.count; ++k) launch_of_all.is_launched[in_table[k]] = true;
    clear();
    return 0;
  };
  clear();
  int32_t last_group = -1;
  for (int64_t i = 0; i < launch_of_all.count; ++i) {
    const TensorRecord& record = launch_of_all.records[i];
    if (!Streams::match(record)) continue;
    ++launched;
    const bool new_group = arguments.number_of_groups == 0 || record.group != last_group;
    if (arguments.table.is_full() || (new_group && arguments.number_of_groups == kMaxGroups)) {
      if (const int error = flush()) return error;
    }
    if (arguments.number_of_groups == 0 || record.group != last_group) {
      arguments.groups[arguments.number_of_groups++] = hyperparameters[record.group];
      last_group = record.group;
    }
    in_table[arguments.table.count] = i;
    Streams::add(arguments.table, record, arguments.number_of_groups - 1);
    if (record.step != nullptr) arguments.block_counter = block_counter;
  }
  return arguments.table.count > 0 ? flush() : 0;
}

// Steps the records that have the dtypes of one combination.
template <template <typename> class Functor, int kBuffers, typename Param, typename Combination>
int step_combination(const StepLaunch& launch, uint32_t* block_counter, cudaStream_t stream,
                     int64_t& launched) {
  using Each = Streams<Param, Combination, kBuffers>;
  using T = typename Each::T;
  if constexpr (kBuffers == 0 && !std::is_same_v<typename Each::Buffer, T>) {
    return 0;  // the dtype of no buffers is the computed one
  } else {
    return driver_takes_large_arguments() ? launch_step<Functor<T>, Each, kLargeArguments>(
                                                launch, block_counter, stream, launched)
                                          : launch_step<Functor<T>, Each, kSmallArguments>(
                                                launch, block_counter, stream, launched);
  }
}

template <template <typename> class Functor, int kBuffers, typename Param, typename... Each>
int step_combinations(Combinations<Each...>, const StepLaunch& launch, uint32_t* block_counter,
                      cudaStream_t stream, int64_t& launched) {
  int error = 0;
  ((error = error != 0 ? error
                       : step_combination<Functor, kBuffers, Param, Each>(launch, block_counter,
                                                                          stream, launched)),
   ...);
  return error;
}

// Steps the records whose parameter has this dtype and adds their number to `launched`.
template <typename Param>
int step_params(const StepLaunch& launch, uint32_t* block_counter, cudaStream_t stream,
                int64_t& launched) {
  using All = typename CombinationsFor<Param>::type;
  switch (launch.kernel) {
#define AMP_EXT_CASE(Functor, buffers)                                                      \
  case OptimizerKernel::k##Functor##buffers:                                                \
    return step_combinations<Functor, buffers, Param>(All(), launch, block_counter, stream, \
                                                      launched);
    AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_CASE)
#undef AMP_EXT_CASE
  }
  return static_cast<int>(cudaErrorInvalidValue);
}

}  // namespace amp_ext::cuda
