// The optimizer step of any functor, for parameters of one dtype.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "cuda/engine.h"
#include "cuda/fast_path.cuh"
#include "cuda/number.cuh"
#include "cuda/occupancy.cuh"
#include "cuda/tensor_table.cuh"
#include "element.h"
#include "formats/storage.h"
#include "formulas/entries.h"
#include "kernels.h"
#include "launches.h"

namespace amp_ext::cuda {

// Largest number of hyperparameter groups in one launch.
inline constexpr int kMaxGroups = 16;

// The numbers of a tensor that a loop dithers: none, those in KernelTensorArgs::dithered, or all.
enum class Dithers { kNone, kSome, kAll };

// The arrays of one tensor: gradient, parameter, master weight and buffers.
template <typename FormatsOfKernel, typename Indices = typename FormatsOfKernel::Indices>
struct Arrays;
template <typename FormatsOfKernel, int... index>
struct Arrays<FormatsOfKernel, std::integer_sequence<int, index...>> {
  using NumberFormats = FormatsOfKernel;
  using Grad = Numbers<typename NumberFormats::Grad>;
  using Param = Numbers<typename NumberFormats::Param>;
  template <int buffer>
  using Buffer = Numbers<typename NumberFormats::template Buffer<buffer>>;
  using T = typename NumberFormats::T;
  static constexpr int kPointers =
      ((Grad::kPointers + Param::kPointers) + ... + Buffer<index>::kPointers);

  // Number of elements that fill 16 bytes of the array with the smallest elements.
  static constexpr int kPackSize =
      16 / std::min({Grad::kLeastBytes, Param::kLeastBytes, Buffer<index>::kLeastBytes...});

  static constexpr bool kHasLowPrecisionBuffers = (Buffer<index>::kMayDither || ...);

  // Elements per tile. Each tile computes the constants of its tensor: with low-precision buffers,
  // tiles of 2048 take up to 1.4 times as long on an H100. Other kernels get at least two packs per
  // thread: one pack takes 1.09 times as long on an H200.
  static constexpr int kTileSize = kHasLowPrecisionBuffers ? 8192 : sizeof(T) == 8 ? 2048 : 4096;

  // True if a buffer may be dithered.
  template <int buffer>
  static constexpr bool kDithers =
      Buffer<buffer>::kMayDither && NumberFormats::template kStride<buffer> != 0;
  static constexpr bool kMayDither = (Param::kMayDither || ... || kDithers<index>);

  // 8-bit kernels usually dither every number that can be dithered, so their usual loop has no
  // test.
  static constexpr bool kUsuallyAll = NumberFormats::kHasRatios;
  static constexpr Dithers kUsually = kUsuallyAll ? Dithers::kAll : Dithers::kSome;
  static constexpr Dithers kElse = kUsuallyAll ? Dithers::kSome : Dithers::kNone;
  static constexpr int kAllDithered = ((Param::kMayDither ? kDithersParam : 0) | ... |
                                       (kDithers<index> ? kDithersBuffer0 << index : 0));
  static __device__ bool has_usual_dither(int32_t dithered) {
    return kUsuallyAll ? dithered == kAllDithered : dithered != 0;
  }

  Grad grad;
  Param param;
  Entries<Buffer<index>...> buffers;
  int64_t global_offset;  // index of the first element in the unsharded tensor
  int32_t dithered;       // KernelTensorArgs::dithered

  template <typename Table>
  static void add(Table& table, const KernelTensorArgs& args, int32_t group) {
    const int tensor = table.add(args, group);
    int pointer = 0;
    table.pointers[pointer++][tensor] = args.grad;
    table.pointers[pointer++][tensor] = args.param;
    if (Param::kPointers > 1) table.pointers[pointer++][tensor] = args.master_param;
    constexpr int kPointersOf[] = {Buffer<index>::kPointers..., 0};
    for (int i = 0; i < NumberFormats::kBuffers; ++i) {
      table.pointers[pointer++][tensor] = args.buffers[i];
      if (kPointersOf[i] > 1) table.pointers[pointer++][tensor] = args.exponents;
    }
  }

  template <typename Table>
  __device__ static Arrays at(const Table& table, int tensor) {
    Arrays arrays{Grad::at(table.pointers, tensor),
                  Param::at(table.pointers + Grad::kPointers, tensor),
                  {{Buffer<index>::at(table.pointers + kFirstPointer<index>, tensor)}...},
                  0,
                  0};
    if constexpr (kMayDither) {
      arrays.global_offset = table.dither.global_offset[tensor];
      arrays.dithered = table.dither.dithered[tensor];
    }
    return arrays;
  }

  // Returns the first index in [begin, end) at which packs can start, or `end` if there is none.
  // Packs start at a 16-byte boundary of all arrays; with blockwise formats only at `begin`.
  __device__ int64_t first_pack(int64_t begin, int64_t end) const {
    const int64_t first = begin + param.elements_to_boundary(begin);
    const bool aligned = first < end && (!NumberFormats::kHasBlocks || first == begin) &&
                         param.is_at_boundary(first) && grad.is_at_boundary(first) &&
                         (... && entry<index>(buffers).is_at_boundary(first));
    return aligned ? first : end;
  }

  // Consecutive elements of all arrays.
  template <int kCount>
  struct Values {
    typename Grad::template Values<kCount> grad;
    typename Param::template Values<kCount> param;
    Entries<typename Buffer<index>::template Values<kCount>...> buffers;
  };

  // Updates kPacks packs of kCount elements that start `stride` elements apart.
  template <int kCount, int kPacks, Dithers kWhich, typename Constants>
  __device__ void update(const Constants& constants, int64_t first, int stride) const {
    Values<kCount> values[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) values[i] = load_values<kCount>(first + i * stride);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      update_values<kWhich>(constants, values[i], first + i * stride);
    }
  }

 private:
  // Returns the index of a buffer's first column in the table of pointers.
  static constexpr int first_pointer_of(int buffer) {
    constexpr int kCounts[] = {Buffer<index>::kPointers..., 0};
    int first = Grad::kPointers + Param::kPointers;
    for (int i = 0; i < buffer; ++i) first += kCounts[i];
    return first;
  }
  template <int buffer>
  static constexpr int kFirstPointer = first_pointer_of(buffer);

  template <int kCount>
  __device__ Values<kCount> load_values(int64_t first) const {
    return {grad.template load<kCount>(first),
            param.template load<kCount>(first),
            {{entry<index>(buffers).template load<kCount>(first)}...}};
  }

  template <Dithers kWhich, int kCount, typename Constants>
  __device__ void update_values(const Constants& constants, Values<kCount>& values,
                                int64_t first) const {
    [[maybe_unused]] T moments[NumberFormats::kArraySize][kCount];
    const Words<kWhich, kCount> all_words = words_from<kWhich, kCount>(constants.step, first);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      T value = values.param.load(i);
      T elements[NumberFormats::kArraySize] = {load_buffer<index>(values, i)...};
      const T scaled_grad = static_cast<T>(values.grad.load(i));
      if (constants.skips(scaled_grad)) {
        if constexpr (NumberFormats::kRoot >= 0) {
          elements[NumberFormats::kRoot] = entry<NumberFormats::kRoot>(values.buffers).root(i);
        }
      } else {
        const T unscaled = constants.unscale_and_clip(scaled_grad);
        update_element<NumberFormats::kRoot>(constants, unscaled, value, elements,
                                             typename NumberFormats::Indices());
        if (constants.write_back_grads) values.grad.store(unscaled, i, {});
      }
      const auto words = all_words.at(i);
      values.param.store(value, i, words.of(kDithersParam, kParamStride));
      if constexpr (NumberFormats::kHasBlocks) {
        ((moments[index][i] = elements[index]), ...);
      } else {
        store_elements(values, elements, i, words);
      }
    }
    if constexpr (NumberFormats::kHasBlocks) {
      (choose_unit<index>(values, moments[index], all_words), ...);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const T elements[NumberFormats::kArraySize] = {moments[index][i]...};
        store_elements(values, elements, i, all_words.at(i));
      }
    }
    if (constants.write_back_grads) grad.store(values.grad, first);
    param.store(values.param, first);
    (entry<index>(buffers).store(entry<index>(values.buffers), first), ...);
  }

  // The dithering of one element at one step.
  template <Dithers kWhich>
  struct WordsOfElement {
    uint32_t phase;
    uint32_t step;
    int32_t dithered;

    __device__ Rounding of(int bit, uint32_t stride) const {
      const bool dithers =
          kWhich == Dithers::kAll || (kWhich == Dithers::kSome && (dithered & bit) != 0);
      return {dithers, phase + step * stride};
    }
    template <int buffer>
    __device__ Rounding of_buffer() const {
      if constexpr (kDithers<buffer>) {
        return of(kDithersBuffer0 << buffer, NumberFormats::template kStride<buffer>);
      } else {
        return {};
      }
    }
  };
  // The dithering of up to eight consecutive elements. Eight elements share a hash, which 8-bit
  // kernels compute only once. Other kernels lack registers for that.
  static constexpr bool kShares = NumberFormats::kHasCodes;
  template <Dithers kWhich, int kCount>
  struct Words {
    uint64_t place;
    uint32_t phases[kShares ? kCount : 1];
    uint32_t step;
    int32_t dithered;

    __device__ WordsOfElement<kWhich> at(int i) const {
      return {kShares ? phases[i] : dither_phase(place + i), step, dithered};
    }
  };
  template <Dithers kWhich, int kCount>
  __device__ Words<kWhich, kCount> words_from(uint32_t step, int64_t first) const {
    static_assert(kCount <= 8);
    Words<kWhich, kCount> words;
    words.place = static_cast<uint64_t>(global_offset + first);
    words.step = step;
    words.dithered = dithered;
    if constexpr (kShares && kWhich != Dithers::kNone) {
      const uint32_t phase = dither_phase(words.place);
#pragma unroll
      for (int i = 0; i < kCount; ++i) words.phases[i] = phase + i * kPhaseStride;
      const int before = 8 - static_cast<int>(words.place % 8);
      if (before < kCount) {  // the elements from `before` on have the next hash
        const uint32_t change = dither_phase(words.place + 8) - 8 * kPhaseStride - phase;
#pragma unroll
        for (int i = 0; i < kCount; ++i) words.phases[i] += i < before ? 0 : change;
      }
    }
    return words;
  }

  template <int buffer, int kCount>
  __device__ T load_buffer(const Values<kCount>& values, int i) const {
    const auto& own = entry<buffer>(values.buffers);
    if constexpr (NumberFormats::template kIsRatio<buffer>) {
      return own.load(i, entry<NumberFormats::kSecondMoment>(values.buffers).unit(i));
    } else {
      return own.load(i);
    }
  }

  template <int buffer, int kCount, typename Words>
  __device__ void choose_unit(Values<kCount>& values, const T (&moments)[kCount],
                              const Words& words) const {
    if constexpr (NumberFormats::template kIsInBlocks<buffer>) {
      entry<buffer>(values.buffers).choose_unit(moments, [&](int i) {
        return words.at(i).template of_buffer<buffer>();
      });
    }
  }

  // Stores the buffers of one element. Ratios come last: they need the stored second moment.
  template <int kCount, typename Words>
  __device__ void store_elements(Values<kCount>& values,
                                 const T (&elements)[NumberFormats::kArraySize], int i,
                                 const Words& words) const {
    const Rounding roundings[NumberFormats::kArraySize] = {words.template of_buffer<index>()...};
    (store_buffer</*kIsRatio=*/false, index>(values, elements[index], i, roundings[index]), ...);
    (store_buffer</*kIsRatio=*/true, index>(values, elements[index], i, roundings[index]), ...);
  }
  template <bool kIsRatio, int buffer, int kCount>
  __device__ void store_buffer(Values<kCount>& values, T element, int i,
                               const Rounding& rounding) const {
    if constexpr (NumberFormats::template kIsRatio<buffer> == kIsRatio) {
      auto& own = entry<buffer>(values.buffers);
      if constexpr (kIsRatio) {
        own.store(element, i, rounding,
                  entry<NumberFormats::kSecondMoment>(values.buffers).unit(i));
      } else {
        own.store(element, i, rounding);
      }
    }
  }
};

// The architecture for which this code is compiled: 900 for sm_90, and 0 in host code.
#if defined(__CUDA_ARCH__)
inline constexpr int kArchitecture = __CUDA_ARCH__;
#else
inline constexpr int kArchitecture = 0;
#endif

// StepShape is a class: an alias would be different types in host code and in code for sm_100.
template <template <typename> class Functor, typename Arrays>
struct StepShape
    : Shape<kThreads, Arrays::kTileSize, blocks_on<Functor, Arrays>(kArchitecture), 1, 2048> {};

// Shape of the fast path. Its small blocks of 128 threads prefetch, which keeps memory busy while
// other blocks compute. For float32 parameters, 128 took 8 % longer than 256 with 8-bit states on
// an H200.
template <template <typename> class Functor, typename Arrays>
struct FastShape : Shape<fast_threads<Arrays>(), Arrays::NumberFormats::kHasCodes ? 8192 : 4096,
                         fast_blocks_on<Functor, Arrays>(kArchitecture), 1, 2048> {};

template <typename Functor, typename Arrays, typename Shape>
struct StepArguments {
  using Hyperparameters = typename Functor::Hyperparameters;
  static constexpr int kOtherBytes = kMaxGroups * sizeof(Hyperparameters) + sizeof(int64_t) +
                                     sizeof(GradientInputs) + 3 * sizeof(void*);

  TensorTable<Arrays::kPointers, kArgumentBytes - kOtherBytes, Arrays::kMayDither> table;
  Hyperparameters groups[kMaxGroups];
  int32_t number_of_groups;
  GradientInputs inputs;
  float* grad_norm;         // [1], receives the norm; or null
  float* step_applied;      // [1], receives 1 or 0; or null
  uint32_t* block_counter;  // null if the kernel has no step to count
};

// The code that updates a tensor: for all options and values, or for usual ones. Cautious decay has
// a fast path of its own, because its comparison would cost other steps time and registers.
enum class StepPath { kGeneral, kFast, kFastCautious };

// Updates the elements [begin, end) of a tensor by the fast path; each warp has its own packs. The
// general code then updates the packs with unusual numbers, and up to 31 elements after the last
// multiple of 32.
template <typename Functor, typename Shape, bool kIsCautious, typename Arrays, typename Constants>
__device__ __forceinline__ void update_by_fast_path(const Arrays& arrays,
                                                    const Constants& constants, uint32_t place_bits,
                                                    int64_t begin, int64_t end) {
  using Path = FastPath<Functor, Arrays>;
  constexpr int kOfWarp = 32 * Path::kCount;
  constexpr int kStride = Shape::kThreads * Path::kCount;
  static_assert(Shape::kTileSize / kStride <= 32, "a bit for each pack of a thread");
  const auto fast = FastConstants<Functor>::template of<kIsCautious>(constants, place_bits);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const auto first = static_cast<int32_t>(threadIdx.x / 32) * kOfWarp;
  const auto count = static_cast<int32_t>(end - begin);
  const int32_t whole = count / 32 * 32;
  uint32_t left = 0;  // one bit for each pack of this thread that still needs an update
#pragma unroll 1
  for (int32_t i = first; i < whole; i += kStride) {
    const int32_t own = i + lane * Path::kCount;
    const bool inside = own < whole;
    const int64_t index = begin + (inside ? own : i);
    if constexpr (Shape::kThreads < kThreads) {
      Path::template prefetch<kStride>(arrays, index, own + kStride < whole);
    }
    if (!Path::template update<Division::kFast>(fast, arrays, index, inside)) {
      left |= 1u << i / kStride;
    }
  }
  if constexpr (Path::kDivides) {
    // Retry with exact division, because updates of pruned weights, for example, are subnormal.
#pragma unroll 1
    for (int32_t i = first; left != 0 && i < whole; i += kStride) {
      if ((left >> i / kStride & 1) == 0) continue;
      const int32_t own = i + lane * Path::kCount;
      const bool inside = own < whole;
      const int64_t index = begin + (inside ? own : i);
      if (Path::template update<Division::kExact>(fast, arrays, index, inside)) {
        left &= ~(1u << i / kStride);
      }
    }
  }
#pragma unroll 1
  for (int32_t i = first; i < count; i += kStride) {
    const int32_t last = min(i + kOfWarp, count);
    const bool is_left = (left >> i / kStride & 1) != 0;
#pragma unroll 1
    for (int32_t k = (is_left ? i : max(i, whole)) + lane; k < last; k += 32) {
      arrays.template update<1, 1, Arrays::kUsually>(constants, begin + k, 0);
    }
  }
}

// Values that thread 0 computes for its block.
template <typename Constants>
struct BlockState {
  Constants constants;
  // RatioCode::kPlaceBits as a variable, so that it does not take the room of another constant in
  // an instruction.
  uint32_t place_bits;
  bool skip;
};

template <typename Functor, typename Arrays, typename Shape, StepPath kPath>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    step_kernel(const StepArguments<Functor, Arrays, Shape> __grid_constant__ arguments) {
  using Constants = TensorConstants<Functor, typename Arrays::T>;
  AMP_EXT_SHARED(BlockState<Constants>, block);
  const auto& table = arguments.table;
  const auto tile = static_cast<int32_t>(blockIdx.x);
  const int tensor = table.tensor_of(tile);
  if (threadIdx.x == 0) {
    // Issue all loads from device memory before using the first result.
    const auto& group = arguments.groups[table.group[tensor]];
    const double step = Constants::read_step(group, table.step[tensor]);
    const double lr = Constants::read_lr(group);
    const StepDecision decision = StepDecision::read(arguments.inputs);
    if (tile == 0 && arguments.grad_norm != nullptr) *arguments.grad_norm = decision.grad_norm;
    if (tile == 0 && arguments.step_applied != nullptr)
      *arguments.step_applied = decision.step_applied();
    block.skip = decision.skip;
    if (!decision.skip) block.constants = Constants::make(group, lr, step, decision);
    if constexpr (kPath != StepPath::kGeneral) block.place_bits = RatioCode::kPlaceBits;
  }
  __syncthreads();
  if (block.skip) return;
  uint32_t blocks_before = 0;
  if (threadIdx.x == 0 && arguments.block_counter != nullptr) {
    // This block has read its step counter, so the last one to be counted may write the counters,
    // also while others still update. The atomicInc runs during the update, after which its result
    // is needed; for an atomicAdd, nvcc would wait here.
    blocks_before = count_block(arguments.block_counter);
  }

  const Arrays arrays = Arrays::at(table, tensor);
  const Constants& constants = block.constants;  // a copy in registers would be spilled
  const int64_t begin = table.begin_of(tile, tensor);
  const int64_t end = table.end_of(begin, tensor);
  [[maybe_unused]] const auto update_all = [&](auto dithers) {
    for_each_pack<Shape, Arrays::kPackSize>(
        begin, arrays.first_pack(begin, end), end, [&](int64_t index, auto count, auto packs) {
          constexpr int kCount = decltype(count)::value;
          arrays.template update<kCount, decltype(packs)::value, decltype(dithers)::value>(
              constants, index, Shape::kThreads * kCount);
        });
  };
  if constexpr (kPath != StepPath::kGeneral) {
    update_by_fast_path<Functor, Shape, kPath == StepPath::kFastCautious>(
        arrays, constants, block.place_bits, begin, end);
  } else if constexpr (Arrays::kMayDither) {
    if (Arrays::has_usual_dither(arrays.dithered)) {
      update_all(std::integral_constant<Dithers, Arrays::kUsually>());
    } else {
      update_all(std::integral_constant<Dithers, Arrays::kElse>());
    }
  } else {
    update_all(std::integral_constant<Dithers, Dithers::kNone>());
  }

  if (arguments.block_counter == nullptr) return;
  if (!__syncthreads_or(threadIdx.x == 0 && blocks_before == gridDim.x - 1)) return;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < table.count; i += Shape::kThreads) {
    if (table.step[i] != nullptr) *table.step[i] = next_counter(*table.step[i]);
  }
}

// Steps tensors that have these number formats: those that a fast path supports, or generally
// those that are not launched yet. Returns an error code. Adds the number of tensors with
// these formats to `had`, and the number of stepped tensors to `launched`.
template <typename Functor, typename Arrays, typename Shape, StepPath kPath>
int launch_step(const StepLaunch& launch_of_all, uint32_t* block_counter, cudaStream_t stream,
                int64_t& launched, int64_t& had) {
  using Arguments = StepArguments<Functor, Arrays, Shape>;
  static_assert(sizeof(Arguments) <= kArgumentBytes);
  const auto* hyperparameters =
      static_cast<const typename Functor::Hyperparameters*>(launch_of_all.hyperparameters);
  Arguments arguments;
  int64_t in_table[decltype(arguments.table)::kCapacity];  // index of each tensor in all_args
  int32_t tile_size = 0;                                   // 0 until a tensor to step is found
  const auto clear = [&] {
    arguments.table.clear(tile_size);
    arguments.number_of_groups = 0;
    arguments.inputs = launch_of_all.inputs;
    arguments.grad_norm = launch_of_all.grad_norm;
    arguments.step_applied = launch_of_all.step_applied;
    arguments.block_counter = nullptr;
  };
  const auto flush = [&]() -> int {
    const int error = launch(step_kernel<Functor, Arrays, Shape, kPath>, arguments.table.blocks(),
                             Shape::kThreads, stream, arguments);
    if (error != 0) return error;
    for (int k = 0; k < arguments.table.count; ++k) launch_of_all.is_launched[in_table[k]] = true;
    clear();
    return 0;
  };
  clear();
  int32_t last_group = -1;
  for (int64_t i = 0; i < launch_of_all.count; ++i) {
    const KernelTensorArgs& args = launch_of_all.all_args[i];
    if (!has_formats<typename Arrays::NumberFormats>(args)) continue;
    ++had;
    if constexpr (kPath != StepPath::kGeneral) {
      const auto& group = hyperparameters[args.group];
      if (group.cautious_weight_decay != (kPath == StepPath::kFastCautious)) continue;
      if (!Functor::has_fast_path(group)) continue;
      if (!FastPath<Functor, Arrays>::takes(args)) continue;
    } else if (launch_of_all.is_launched[i]) {
      continue;
    }
    if (tile_size == 0) {
      int64_t elements = 0;  // includes tensors with other formats, which are rare
      for (int64_t k = i; k < launch_of_all.count; ++k) elements += launch_of_all.all_args[k].numel;
      tile_size = Shape::tile_size_of(elements);
      clear();
    }
    const bool new_group = arguments.number_of_groups == 0 || args.group != last_group;
    if (arguments.table.is_full() || (new_group && arguments.number_of_groups == kMaxGroups)) {
      if (const int error = flush()) return error;
    }
    if (arguments.number_of_groups == 0 || args.group != last_group) {
      arguments.groups[arguments.number_of_groups++] = hyperparameters[args.group];
      last_group = args.group;
    }
    in_table[arguments.table.count] = i;
    Arrays::add(arguments.table, args, arguments.number_of_groups - 1);
    if (args.step != nullptr) arguments.block_counter = block_counter;
    ++launched;
  }
  return arguments.table.count > 0 ? flush() : 0;
}

// Steps the tensors that have the number formats of one combination, if the tensor with index
// `first` has them.
template <template <typename> class Functor, int kBuffers, typename Combination>
int step_combination(const StepLaunch& launch, int64_t first, uint32_t* block_counter,
                     cudaStream_t stream, int64_t& launched) {
  using Hyperparameters = typename Functor<typename Combination::T>::Hyperparameters;
  if constexpr (!is_compiled<Combination, Hyperparameters, kBuffers>()) {
    return 0;
  } else {
    using T = typename Combination::T;
    using Each = Arrays<FormatsOf<Combination, Hyperparameters, kBuffers>>;
    using Shape = StepShape<Functor, Each>;
    if (!has_formats<typename Each::NumberFormats>(launch.all_args[first])) return 0;
    int64_t had = 0;
    if constexpr (kHasFastPath<Functor<T>, Each>) {
      const int64_t before = launched;
      using Fast = FastShape<Functor, Each>;
      if (launch.may_take_fast_path && !launch.inputs.skip_nonfinite) {
        for (const auto step_fast :
             {launch_step<Functor<T>, Each, Fast, StepPath::kFast>,
              launch_step<Functor<T>, Each, Fast, StepPath::kFastCautious>}) {
          had = 0;
          const int error = step_fast(launch, block_counter, stream, launched, had);
          if (error != 0 || launched - before == had) return error;
        }
      }
    }
    return launch_step<Functor<T>, Each, Shape, StepPath::kGeneral>(launch, block_counter, stream,
                                                                    launched, had);
  }
}

template <template <typename> class Functor, int kBuffers, typename... Each>
int step_combinations(Combinations<Each...>, const StepLaunch& launch, int64_t first,
                      uint32_t* block_counter, cudaStream_t stream, int64_t& launched) {
  int error = 0;
  ((error = error != 0 ? error
                       : step_combination<Functor, kBuffers, Each>(launch, first, block_counter,
                                                                   stream, launched)),
   ...);
  return error;
}

// Steps the tensors that have the formats of the tensor with index `first`, if these are one of the
// combinations. Counts the stepped tensors in `launched`.
template <typename All>
int step_all(const StepLaunch& launch, int64_t first, uint32_t* block_counter, cudaStream_t stream,
             int64_t& launched) {
  switch (launch.kernel) {
#define AMP_EXT_CASE(Functor, buffers)                                                      \
  case OptimizerKernel::k##Functor##buffers:                                                \
    return step_combinations<Functor, buffers>(All(), launch, first, block_counter, stream, \
                                               launched);
    AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_CASE)
#undef AMP_EXT_CASE
  }
  return static_cast<int>(cudaErrorInvalidValue);
}

}  // namespace amp_ext::cuda
