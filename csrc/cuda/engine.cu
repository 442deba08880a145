// The kernels that look at gradients and follow the loss scale, and the choice among step kernels.
#include <type_traits>

#include "cuda/engine.h"
#include "cuda/tensor_table.cuh"
#include "element.h"

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

// Bytes of a kernel's arguments beside the table.
constexpr int kOtherBytes = 80;
using LargeTable = TensorTable<1, kLargeArguments - kOtherBytes>;
using SmallTable = TensorTable<1, kSmallArguments - kOtherBytes>;

// The gradient that a block works on, and its part of it.
template <typename Storage>
struct GradientTile {
  Storage* grad;
  int tensor;
  int64_t begin;
  int64_t end;

  template <typename Table>
  __device__ explicit GradientTile(const Table& table) {
    const auto tile = static_cast<int32_t>(blockIdx.x);
    tensor = table.tensor_of(tile);
    grad = static_cast<Storage*>(table.pointers[0][tensor]);
    begin = static_cast<int64_t>(tile - table.first_tile[tensor]) * kTileSize;
    end = min(begin + kTileSize, table.numel[tensor]);
  }

  // Calls visit(pack, index) for all elements, some at a time.
  template <typename Visit>
  __device__ void for_each(const Visit& visit) const {
    for_each_pack<kPackSize<Storage>>(begin, first_pack(grad, begin, end), end,
                                      [&](int64_t index, auto count) {
                                        visit(pack_at<decltype(count)::value>(grad, index), count);
                                      });
  }
};

// Where a block says that it found inf or NaN.
struct LookOutputs {
  float* found_inf;          // [1], or null: nothing is said
  int64_t* first_nonfinite;  // [1], or null
};

// Says whether a thread found one in tensor `number`.
__device__ void report(bool found, int32_t number, const LookOutputs& outputs) {
  if (!__syncthreads_or(found) || threadIdx.x != 0) return;
  atomicExch(outputs.found_inf, 1.0f);
  if (outputs.first_nonfinite == nullptr) return;
  atomicMin(reinterpret_cast<long long*>(outputs.first_nonfinite), static_cast<long long>(number));
}

constexpr int kWarps = kThreads / 32;

template <typename T>
struct WarpValues {
  T values[kWarps];
};

// The sum over the threads of a block, known to all of them. In a fixed order.
template <typename T>
__device__ T block_sum(T value) {
  AMP_EXT_SHARED(WarpValues<T>, warp_sums);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_down_sync(0xffffffffu, value, offset);
  __syncthreads();  // an earlier sum may still be read
  if (threadIdx.x % 32 == 0) warp_sums.values[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = warp_sums.values[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) sum += warp_sums.values[warp];
  return sum;
}

template <typename Table>
struct LookArguments {
  Table table;
  const float* grad_scale;
  LookOutputs outputs;
  double* sum_of_squares;
  SumScratch scratch;
  bool skip_nonfinite;
};

// The sum of squares of a tile. Squares too large or too small for float32 are summed in double.
template <typename T, typename Storage>
__device__ T tile_sum_of_squares(const GradientTile<Storage>& tile, bool skip_nonfinite = false) {
  T sum = 0;
  tile.for_each([&](const auto& pack, auto count) {
#pragma unroll
    for (int i = 0; i < decltype(count)::value; ++i) {
      const T value = load(pack.values[i]);
      sum += skip_nonfinite && !is_finite(value) ? T(0) : value * value;
    }
  });
  return block_sum(sum);
}

template <typename Storage>
__device__ double careful_sum_of_squares(const GradientTile<Storage>& tile) {
  if constexpr (!std::is_same_v<Storage, double>) {
    const float sum = tile_sum_of_squares<float>(tile);
    if (sum >= 1e-20f && is_finite(sum)) return sum;
  }
  return tile_sum_of_squares<double>(tile);
}

template <typename Storage, typename Table, bool kSumSquares>
__global__ void __launch_bounds__(kThreads)
    look_kernel(const LookArguments<Table> __grid_constant__ arguments) {
  const GradientTile<Storage> tile(arguments.table);
  const int32_t number = arguments.table.group[tile.tensor];
  if (blockIdx.x == 0 && threadIdx.x == 0 && GradientFactor::read({arguments.grad_scale}).skip) {
    atomicExch(arguments.outputs.found_inf, 1.0f);
  }
  bool found = false;
  if constexpr (kSumSquares) {
    AMP_EXT_SHARED(bool, is_last);
    const SumScratch& scratch = arguments.scratch;
    const double sum = careful_sum_of_squares(tile);
    const bool is_usual = is_finite(sum);  // of all threads alike
    const double counted = is_usual || !arguments.skip_nonfinite
                               ? sum
                               : static_cast<double>(tile_sum_of_squares<double>(tile, true));
    if (threadIdx.x == 0) {
      scratch.tile_sums[blockIdx.x] = counted;
      __threadfence();
      is_last = atomicAdd(scratch.block_counter, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (is_last) {
      __threadfence();
      double total = 0.0;
      for (unsigned i = threadIdx.x; i < gridDim.x; i += kThreads) {
        total += *static_cast<volatile double*>(scratch.tile_sums + i);
      }
      total = block_sum(total);
      if (threadIdx.x == 0) {
        *arguments.sum_of_squares += total;
        *scratch.block_counter = 0;
      }
    }
    // Any inf or NaN shows in the sum. In float64 so may a square that is too large.
    if (is_usual) return;
  }
  tile.for_each([&](const auto& pack, auto count) {
#pragma unroll
    for (int i = 0; i < decltype(count)::value; ++i) found |= is_nonfinite(pack.values[i]);
  });
  report(found, number, arguments.outputs);
}

template <typename Table>
struct MultiplyArguments {
  Table table;
  MultiplyInputs inputs;
  LookOutputs outputs;
};

template <typename Storage, typename Table>
__global__ void __launch_bounds__(kThreads)
    multiply_kernel(const MultiplyArguments<Table> __grid_constant__ arguments) {
  using T = typename ComputeType<Storage>::type;
  const float factor = arguments.inputs.factor();
  const LookOutputs& outputs = arguments.outputs;
  if (factor == 1.0f && outputs.found_inf == nullptr) return;
  const GradientTile<Storage> tile(arguments.table);
  const bool bad_factor = blockIdx.x == 0 && threadIdx.x == 0 && !is_finite(factor);
  if (bad_factor && outputs.found_inf != nullptr) atomicExch(outputs.found_inf, 1.0f);
  bool found = false;
  tile.for_each([&](auto& in_place, auto count) {
    auto pack = in_place;
#pragma unroll
    for (int i = 0; i < decltype(count)::value; ++i) {
      found |= is_nonfinite(pack.values[i]);
      store(load(pack.values[i]) * static_cast<T>(factor), pack.values[i]);
    }
    if (factor != 1.0f) in_place = pack;
  });
  if (outputs.found_inf != nullptr) {
    report(found, arguments.table.group[tile.tensor], outputs);
  }
}

template <typename Table>
struct CountArguments {
  Table table;
  unsigned long long* counts;  // by the numbers of the tensors
};

template <typename Storage, typename Table>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const CountArguments<Table> __grid_constant__ arguments) {
  const GradientTile<Storage> tile(arguments.table);
  unsigned found = 0;
  tile.for_each([&](const auto& pack, auto count) {
#pragma unroll
    for (int i = 0; i < decltype(count)::value; ++i) found += is_nonfinite(pack.values[i]) ? 1 : 0;
  });
  const unsigned sum = block_sum(found);
  if (threadIdx.x == 0 && sum != 0) {
    atomicAdd(arguments.counts + arguments.table.group[tile.tensor],
              static_cast<unsigned long long>(sum));
  }
}

struct UpdateArguments {
  OverflowFlag flags[kMaxFlags];
  int32_t count;
  bool is_last;               // of the launches of one update
  int32_t* earlier_overflow;  // [1], of the launches before, or null
  ScaleUpdate update;
};
static_assert(sizeof(UpdateArguments) <= kSmallArguments);

struct FoundFlags {
  bool values[kMaxFlags];
};

__global__ void __launch_bounds__(kMaxFlags)
    update_scale_kernel(const UpdateArguments __grid_constant__ arguments) {
  AMP_EXT_SHARED(FoundFlags, found);
  const ScaleUpdate& update = arguments.update;
  const ReportMemory& reports = update.reports;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  found.values[thread] = thread < arguments.count && *arguments.flags[thread].found_inf != 0.0f;
  const bool found_any = __syncthreads_or(found.values[thread]);
  if (thread == 0) {
    bool overflow = found_any;
    if (arguments.earlier_overflow != nullptr) {
      overflow |= *arguments.earlier_overflow != 0;
      *arguments.earlier_overflow = overflow ? 1 : 0;
    }
    if (reports.report != nullptr) {
      for (int32_t i = 0; i < arguments.count; ++i) {
        report_flag(arguments.flags[i], found.values[i], *reports.report, reports.optimizers);
      }
    }
    if (arguments.is_last) {
      const float scale_before = *update.state.scale;
      update_loss_scale(update.hyperparameters, overflow, update.state);
      if (reports.report != nullptr) {
        report_update(overflow, scale_before, *update.state.scale, *reports.report);
        *static_cast<volatile int64_t*>(&reports.mirror->started) = reports.report->updates;
        __threadfence_system();
      }
    }
  }
  if (!arguments.is_last || reports.report == nullptr) return;
  __syncthreads();
  reports.copy(thread, kMaxFlags);
  __threadfence_system();
  __syncthreads();
  if (thread == 0) {
    *static_cast<volatile int64_t*>(&reports.mirror->finished) = reports.report->updates;
  }
}

template <typename TableOfSize>
struct TableType {
  using Table = TableOfSize;
};

// Launches a kernel over the gradients of one dtype, in as many pieces as its arguments need. All
// of `arguments` but its table is set. Sets is_launched[count], unless null, as a StepLaunch does.
template <typename Storage, typename Kernel, typename Arguments>
int launch_gradients(Kernel kernel, const TensorRecord* records, int64_t count,
                     Arguments& arguments, cudaStream_t stream, bool* is_launched = nullptr) {
  static_assert(sizeof(Arguments) <= kLargeArguments);
  auto& table = arguments.table;
  int64_t in_table[std::decay_t<decltype(table)>::kCapacity];  // the numbers of its records
  const auto flush = [&]() -> int {
    const int error = launch(kernel, table.blocks(), kThreads, stream, arguments);
    if (error != 0) return error;
    for (int k = 0; is_launched != nullptr && k < table.count; ++k) is_launched[in_table[k]] = true;
    table.clear();
    return 0;
  };
  table.clear();
  for (int64_t i = 0; i < count; ++i) {
    if (records[i].grad_dtype != kDType<Storage>) continue;
    if (table.is_full()) {
      if (const int error = flush()) return error;
    }
    in_table[table.count] = i;
    table.pointers[0][table.add(records[i], records[i].group)] = records[i].grad;
  }
  return table.count > 0 ? flush() : 0;
}

// Calls run(element, table) with a value of each dtype and a table of the size that the driver
// takes, until one returns an error.
template <typename Run>
int for_each_dtype(const Run& run) {
  int error = 0;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    for_dtype(dtype, [&](auto element) {
      if (error != 0) return;
      error = driver_takes_large_arguments() ? run(element, TableType<LargeTable>())
                                             : run(element, TableType<SmallTable>());
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

int64_t number_of_tiles(const TensorRecord* records, int64_t count) {
  int64_t tiles = 1;  // a launch has a block at least
  for (int64_t i = 0; i < count; ++i) tiles += (records[i].numel + kTileSize - 1) / kTileSize;
  return tiles;
}

int look(const LookLaunch& launch_of_all, const SumScratch& scratch, cudaStream_t stream) {
  return for_each_dtype([&](auto element, auto table_type) {
    using Storage = decltype(element);
    using Table = typename decltype(table_type)::Table;
    LookArguments<Table> arguments;
    arguments.grad_scale = launch_of_all.grad_scale;
    arguments.outputs = {launch_of_all.found_inf, launch_of_all.first_nonfinite};
    arguments.sum_of_squares = launch_of_all.sum_of_squares;
    arguments.scratch = scratch;
    arguments.skip_nonfinite = launch_of_all.skip_nonfinite;
    const auto kernel = launch_of_all.sum_of_squares != nullptr
                            ? look_kernel<Storage, Table, true>
                            : look_kernel<Storage, Table, false>;
    return launch_gradients<Storage>(kernel, launch_of_all.records, launch_of_all.count, arguments,
                                     stream);
  });
}

int multiply(const TensorRecord* records, int64_t count, const MultiplyInputs& inputs,
             float* found_inf, int64_t* first_nonfinite, bool* is_launched, cudaStream_t stream) {
  return for_each_dtype([&](auto element, auto table_type) {
    using Storage = decltype(element);
    using Table = typename decltype(table_type)::Table;
    MultiplyArguments<Table> arguments;
    arguments.inputs = inputs;
    arguments.outputs = {found_inf, first_nonfinite};
    return launch_gradients<Storage>(multiply_kernel<Storage, Table>, records, count, arguments,
                                     stream, is_launched);
  });
}

int count_nonfinite(const TensorRecord* records, int64_t count, int64_t* counts,
                    cudaStream_t stream) {
  return for_each_dtype([&](auto element, auto table_type) {
    using Storage = decltype(element);
    using Table = typename decltype(table_type)::Table;
    CountArguments<Table> arguments;
    arguments.counts = reinterpret_cast<unsigned long long*>(counts);
    return launch_gradients<Storage>(count_kernel<Storage, Table>, records, count, arguments,
                                     stream);
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
