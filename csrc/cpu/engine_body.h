// The kernels of one instruction set, AMP_EXT_ISA. Each engine_*.cpp includes this file once, after
// choosing its instructions, so there is no include guard.
#include "cpu/number.h"
// After cpu/number.h, because the functors use its vectors:
#include "cpu/engine.h"
#include "cpu/tile_map.h"
#include "element.h"
#include "formats/storage.h"
#include "formulas/entries.h"
#include "kernels.h"
#include "launches.h"

namespace amp_ext::cpu::AMP_EXT_ISA {

// Number of elements that are updated before any of them is rounded. If each vector were rounded at
// once, the rounding would wait for the division of the next vector.
constexpr int64_t kChunkSize = 512;

// Prefetch distance in elements. Hardware prefetchers stop at the end of a page.
template <typename T>
constexpr int64_t kAhead = 2048 / sizeof(T);
// Additional prefetch distance of each array, so that not all arrays enter a new page at once.
template <typename T>
constexpr int64_t kApart = 512 / sizeof(T);
// Elements per prefetch: one cache line of each array, which holds twice as many 16-bit elements as
// results of type T.
template <typename T, bool kIsNative>
constexpr int64_t kAskedFor = (kIsNative ? 1 : 2) * kLineSize / static_cast<int64_t>(sizeof(T));

// Computes how the numbers of one tensor are dithered at one step (see formats/dither.h).
class Dither {
 public:
  Dither(const KernelTensorArgs& args, uint32_t step) : args_(args), step_(step) {}

  // Computes the phases of a chunk of `count` elements that starts at `offset`.
  AMP_EXT_INLINE void begin(int64_t offset, int64_t count) {
    if (args_.dithered == 0) return;
    first_phase_ = fill_phases(args_.global_offset + offset, count, phases_);
  }
  AMP_EXT_INLINE Rounding of_param() const { return of(kDithersParam, kParamStride); }
  AMP_EXT_INLINE Rounding of_buffer(int index, uint32_t stride) const {
    return of(kDithersBuffer0 << index, stride);
  }

 private:
  AMP_EXT_INLINE Rounding of(int bit, uint32_t stride) const {
    if ((args_.dithered & bit) == 0) return {};
    return {first_phase_, step_ * stride};
  }

  const KernelTensorArgs& args_;
  uint32_t step_;
  alignas(64) uint32_t phases_[kChunkSize + kBesidePhases];
  const uint32_t* first_phase_ = nullptr;
};

// Rounds the results of a chunk to their stored format. Not inlined: copies in all kernels would be
// a quarter of the engine's code and compile time. Native numbers are stored as computed.
template <typename Stored, typename T, typename... Beside>
__attribute__((noinline)) void round_chunk(Stored stored, const T* results, int64_t count,
                                           Rounding rounding, Beside... beside) {
  stored.round(results, count, rounding, beside...);
}
template <typename T>
AMP_EXT_INLINE void round_chunk(Numbers<Plain<T>> /*native*/, const T* /*results*/,
                                int64_t /*count*/, Rounding /*rounding*/) {}

// The arrays of one tensor (gradient, parameter and buffers), starting at some element.
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

  // True if no array has to be rounded.
  static constexpr bool kIsNative = Grad::template kIsNative<T> && Param::template kIsNative<T> &&
                                    (... && Buffer<index>::template kIsNative<T>);

  Grad grad;
  Param param;
  Entries<Buffer<index>...> buffers;

  AMP_EXT_INLINE static Arrays at(const KernelTensorArgs& args, int64_t offset) {
    return {Grad::at(args.grad, nullptr, offset),
            Param::at(args.param, args.master_param, offset),
            {{Buffer<index>::at(args.buffers[index], args.exponents, offset)}...}};
  }

  template <typename V>
  AMP_EXT_INLINE void load_buffers(int64_t first, V* elements) const {
    ((elements[index] = load_buffer<index, V>(first)), ...);
  }
  // Returns the root of the second moment as it is dequantized from memory.
  template <typename V>
  AMP_EXT_INLINE V stored_root(int64_t first) const {
    return entry<NumberFormats::kRoot>(buffers).root(first);
  }

  // Prefetches `count` elements of each stream, at most kFarthest elements past `first`.
  static constexpr int64_t kFarthest = kAhead<T> + (NumberFormats::kBuffers + 1) * kApart<T>;
  AMP_EXT_INLINE void prefetch_ahead(int64_t first, int64_t count) const {
    first += kAhead<T>;
    grad.prefetch(first, count);
    param.prefetch(first + kApart<T>, count);
    (entry<index>(buffers).prefetch(first + (index + 2) * kApart<T>, count), ...);
  }

  // Sets `results` to the arrays that receive the buffers' results before rounding.
  AMP_EXT_INLINE void results_in(T (*scratch)[kChunkSize], T** results) const {
    ((results[index] = entry<index>(buffers).results_in(scratch[index])), ...);
  }

  // Rounds the buffers' results. Ratios come last, because they refer to the rounded second moment.
  AMP_EXT_INLINE void round_buffers(T* const* results, int64_t count, const Dither& dither) const {
    (round_buffer</*kAreRatios=*/false, index>(results[index], count, dither), ...);
    (round_buffer</*kAreRatios=*/true, index>(results[index], count, dither), ...);
  }

 private:
  template <int buffer, typename V>
  AMP_EXT_INLINE V load_buffer(int64_t first) const {
    if constexpr (NumberFormats::template kIsRatio<buffer>) {
      return entry<buffer>(buffers).load(first, entry<NumberFormats::kSecondMoment>(buffers));
    } else {
      return entry<buffer>(buffers).template load<V>(first);
    }
  }
  template <bool kAreRatios, int buffer>
  AMP_EXT_INLINE void round_buffer(const T* results, int64_t count, const Dither& dither) const {
    if constexpr (NumberFormats::template kIsRatio<buffer> == kAreRatios) {
      const Rounding rounding = dither.of_buffer(buffer, NumberFormats::template kStride<buffer>);
      if constexpr (kAreRatios) {
        const auto& second = entry<NumberFormats::kSecondMoment>(buffers);
        round_chunk(entry<buffer>(buffers), results, count, rounding, second);
      } else {
        round_chunk(entry<buffer>(buffers), results, count, rounding);
      }
    }
  }
};

// Padded copies of a tensor's last elements, which do not fill a vector.
template <typename Arrays>
struct Tail;
template <typename NumberFormats, int... index>
struct Tail<Arrays<NumberFormats, std::integer_sequence<int, index...>>> {
  using Each = Arrays<NumberFormats>;

  typename Each::Grad::Padded grad;
  typename Each::Param::Padded param;
  Entries<typename Each::template Buffer<index>::Padded...> buffers;

  // Returns the arrays of the copies.
  AMP_EXT_INLINE Each open(const Each& arrays, int64_t count) {
    return {grad.open(arrays.grad, count),
            param.open(arrays.param, count),
            {{entry<index>(buffers).open(entry<index>(arrays.buffers), count)}...}};
  }

  AMP_EXT_INLINE void close(int64_t count, bool writes_grad) {
    if (writes_grad) grad.close(count);
    param.close(count);
    (entry<index>(buffers).close(count), ...);
  }
};

// Stores unscaled gradients, rounded. Elements of `stored` that are inf or NaN stay unchanged.
template <typename Storage, typename T>
void round_finite_results(const T* results, int64_t count, Storage* stored) {
  if constexpr (!std::is_same_v<Storage, T>) {
    alignas(64) Storage rounded[kChunkSize];
    round_all(results, count, rounded);
    for (int64_t i = 0; i < count; ++i) {
      stored[i] = is_nonfinite(stored[i]) ? stored[i] : rounded[i];
    }
  }
}

// Whether decay depends on the direction of the update. Muon's first half has no decay.
template <typename Functor>
AMP_EXT_INLINE bool is_cautious(const Functor& update) {
  if constexpr (kWritesUpdate<typename Functor::Hyperparameters>) {
    return false;
  } else {
    return update.weight_decay.is_cautious();
  }
}

// Returns constants of a step without cautious decay, which a compiler can see to be without.
template <typename Functor, typename T>
AMP_EXT_INLINE TensorConstants<Functor, T> without_caution(TensorConstants<Functor, T> constants) {
  if constexpr (!kWritesUpdate<typename Functor::Hyperparameters>) {
    constants.update.weight_decay.other_factor = constants.update.weight_decay.shrink_factor;
  }
  return constants;
}

// Updates `count` elements: whole vectors, at most kChunkSize if an array has to be rounded. May
// prefetch the first `rest` elements.
template <typename Arrays, typename Functor, typename T>
AMP_EXT_INLINE void update_chunk(const TensorConstants<Functor, T>& constants, const Arrays& arrays,
                                 const Dither& dither, int64_t count, int64_t rest) {
  using V = Vector<T>;
  using NumberFormats = typename Arrays::NumberFormats;
  constexpr int kBuffers = NumberFormats::kBuffers;
  alignas(64) T scratch[2 + kBuffers][kChunkSize];
  T* const grads = arrays.grad.results_in(scratch[0]);
  T* const params = arrays.param.results_in(scratch[1]);
  T* buffers[NumberFormats::kArraySize];
  arrays.results_in(scratch + 2, buffers);
  constexpr int64_t kAsked = kAskedFor<T, Arrays::kIsNative>;
  // Two loops, because a test for cautious decay in the loop would take up to 60 % of the time of
  // other steps.
  const auto update_all = [&](auto is_cautious) {
    const auto known = decltype(is_cautious)::value ? constants : without_caution(constants);
    for (int64_t i = 0; i < count; i += kLanes<T>) {
      if (i % kAsked == 0 && i + Arrays::kFarthest < rest) arrays.prefetch_ahead(i, kAsked);
      const V old_grad = arrays.grad.template load<V>(i);
      const V old_param = arrays.param.template load<V>(i);
      V old_elements[NumberFormats::kArraySize];
      arrays.load_buffers(i, old_elements);
      V grad = known.unscale_and_clip(old_grad);
      V param = old_param;
      V elements[NumberFormats::kArraySize];
      for (int k = 0; k < kBuffers; ++k) elements[k] = old_elements[k];
      update_element<NumberFormats::kRoot>(known, grad, param, elements,
                                           typename NumberFormats::Indices());
      if (constants.skip_nonfinite) {
        const auto is_updated = is_finite(old_grad);
        grad = select(is_updated, grad, old_grad);
        param = select(is_updated, param, old_param);
        for (int k = 0; k < kBuffers; ++k) {
          elements[k] = select(is_updated, elements[k], old_elements[k]);
        }
        if constexpr (NumberFormats::kRoot >= 0) {
          V& root = elements[NumberFormats::kRoot];
          root = select(is_updated, root, arrays.template stored_root<V>(i));
        }
      }
      if (constants.write_back_grads) store(grads + i, grad);
      store(params + i, param);
      for (int k = 0; k < kBuffers; ++k) store(buffers[k] + i, elements[k]);
    }
  };
  if (is_cautious(constants.update)) {
    update_all(std::true_type());
  } else {
    update_all(std::false_type());
  }
  if (constants.write_back_grads && constants.skip_nonfinite) {
    round_finite_results(grads, count, arrays.grad.elements);
  } else if (constants.write_back_grads) {
    round_chunk(arrays.grad, grads, count, {});
  }
  round_chunk(arrays.param, params, count, dither.of_param());
  arrays.round_buffers(buffers, count, dither);
}

template <typename Arrays, typename Functor, typename T>
void step_tile_of(const TensorConstants<Functor, T>& tensor_constants, const Tile& tile) {
  const TensorConstants<Functor, T> constants = tensor_constants;  // copied into registers
  Dither dither(tile.args, constants.step);
  for (int64_t offset = tile.begin; offset < tile.end;) {
    const int64_t rest = tile.end - offset;
    Arrays arrays = Arrays::at(tile.args, offset);
    int64_t count = rest / kLanes<T> * kLanes<T>;
    if (!Arrays::kIsNative) count = std::min(count, kChunkSize);
    Tail<Arrays> tail;
    const bool is_tail = count == 0;
    if (is_tail) {
      arrays = tail.open(arrays, rest);
      count = kLanes<T>;
    }
    if (!Arrays::kIsNative) dither.begin(offset, count);
    update_chunk(constants, arrays, dither, count, tile.end_ahead - offset);
    if (is_tail) tail.close(rest, constants.write_back_grads);
    offset += count;
  }
}

}  // namespace amp_ext::cpu::AMP_EXT_ISA

#include "cpu/fast_path_body.h"

namespace amp_ext::cpu::AMP_EXT_ISA {

// Steps a tile with the kernel for the number formats of its tensor. Such a kernel always exists.
template <int kBuffers, typename Functor, typename T, typename... Each>
void step_tile_among(Combinations<Each...>, const TensorConstants<Functor, T>& constants,
                     bool is_usual, const Tile& tile) {
  const auto step_if_matching = [&](auto each) {
    using Combination = decltype(each);
    using Hyperparameters = typename Functor::Hyperparameters;
    if constexpr (!is_compiled<Combination, Hyperparameters, kBuffers>()) {
      return false;
    } else {
      using NumberFormats = FormatsOf<Combination, Hyperparameters, kBuffers>;
      if (!has_formats<NumberFormats>(tile.args)) return false;
      if constexpr (kHasFastPath<Functor, NumberFormats>) {
        if (is_usual && has_usual_dither<NumberFormats>(tile.args)) {
          fast_step_tile_of<Arrays<NumberFormats>>(constants, tile);
          return true;
        }
      }
      step_tile_of<Arrays<NumberFormats>>(constants, tile);
      return true;
    }
  };
  static_cast<void>((step_if_matching(Each()) || ...));
}

// Caches the constants of a tensor, because the next tensor mostly has the same group and step.
template <template <typename> class Functor, typename T>
class ConstantsCache {
 public:
  using Constants = TensorConstants<Functor<T>, T>;

  ConstantsCache(const StepLaunch& launch, const StepDecision& decision)
      : hyperparameters_(
            static_cast<const typename Functor<T>::Hyperparameters*>(launch.hyperparameters)),
        decision_(decision) {}

  const Constants& of(const KernelTensorArgs& args) {
    const float step = args.step == nullptr ? -1.0f : *args.step;
    if (args.group != group_ || step != step_) {
      group_ = args.group;
      step_ = step;
      const auto& group = hyperparameters_[group_];
      constants_ = Constants::make(group, Constants::read_lr(group),
                                   Constants::read_step(group, args.step), decision_);
      is_usual_ = !decision_.skip_nonfinite && Functor<T>::has_fast_path(group);
    }
    return constants_;
  }
  // True if the fast path supports the options of the last tensor.
  bool is_usual() const { return is_usual_; }

 private:
  const typename Functor<T>::Hyperparameters* hyperparameters_;  // [groups]
  StepDecision decision_;
  int32_t group_ = -1;
  float step_ = -1.0f;
  Constants constants_;
  bool is_usual_ = false;
};

template <template <typename> class Functor, int kBuffers>
void step_with(const StepLaunch& launch, const TileMap& tiles, const StepDecision& decision,
               int64_t begin, int64_t end) {
  ConstantsCache<Functor, float> in_float(launch, decision);
  ConstantsCache<Functor, double> in_double(launch, decision);
  tiles.for_each_tile(begin, end, [&](const Tile& tile) {
    for_dtype(tile.args.param_dtype, [&](auto element) {
      using Param = decltype(element);
      using All = typename CombinationsFor<Param>::Type;
      if constexpr (std::is_same_v<Param, double>) {
        step_tile_among<kBuffers>(All(), in_double.of(tile.args), false, tile);
      } else {
        const auto& constants = in_float.of(tile.args);
        step_tile_among<kBuffers>(All(), constants, in_float.is_usual(), tile);
      }
    });
  });
}

inline void step(const StepLaunch& launch, const TileMap& tiles, const StepDecision& decision,
                 int64_t begin, int64_t end) {
  switch (launch.kernel) {
#define AMP_EXT_CASE(Functor, buffers)       \
  case OptimizerKernel::k##Functor##buffers: \
    return step_with<Functor, buffers>(launch, tiles, decision, begin, end);
    AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_CASE)
#undef AMP_EXT_CASE
  }
}

// Calls visit(first, second) for pairs of vectors with the bits of all elements as type T, zeros
// after the last element. Pairs halve the dependency chain of a running result.
template <typename T, typename Storage, typename Visit>
AMP_EXT_INLINE void for_each_pair(const Storage* elements, int64_t count, int64_t rest,
                                  const Visit& visit) {
  using V = Vector<T>;
  static_assert(sizeof(T) == sizeof(Storage));
  constexpr int64_t kPair = 2 * kLanes<T>;
  int64_t i = 0;
  const auto visit_until = [&](int64_t end, int64_t ahead) __attribute__((always_inline)) {
    for (; i + kPair <= end; i += kPair) {
      prefetch(elements, i + ahead, kPair);
      visit(load_bits<V>(elements + i), load_bits<V>(elements + i + kLanes<T>));
    }
  };
  visit_until(std::min(count, rest - kAhead<T>), kAhead<T>);
  visit_until(count, 0);
  if (i == count) return;
  T last[kPair] = {};
  std::memcpy(last, elements + i, (count - i) * sizeof(T));
  visit(load_bits<V>(last), load_bits<V>(last + kLanes<T>));
}

// True if any element is inf or NaN, by a test of the largest exponent.
template <typename Storage>
bool any_nonfinite(const Storage* elements, int64_t count, int64_t rest) {
  using T = typename BitPattern<Storage>::type;
  // Exponents are compared as numbers, since every instruction set has a maximum of floats. They
  // may be inf, but not NaN.
  using Exponents = Vector<std::conditional_t<sizeof(T) == 2, int16_t, Storage>>;
  Exponents largest = {};
  for_each_pair<T>(elements, count, rest, [&](Vector<T> first, Vector<T> second) {
    const auto larger = maximum(bit_cast<Exponents>(first & kExponentMask<Storage>),
                                bit_cast<Exponents>(second & kExponentMask<Storage>));
    largest = maximum(larger, largest);
  });
  return any(bit_cast<Vector<T>>(largest) == kExponentMask<Storage>);
}

// Returns how many elements are inf or NaN. `count` is at most kTileSize, so a lane needs 16 bits.
template <typename Storage>
int64_t number_of_nonfinite(const Storage* elements, int64_t count, int64_t rest) {
  using T = typename BitPattern<Storage>::type;
  static_assert(kTileSize / kLanes<uint16_t> < std::numeric_limits<int16_t>::max());
  Vector<T> found = {};
  for_each_pair<T>(elements, count, rest, [&](Vector<T> first, Vector<T> second) {
    // A comparison gives -1 in the lanes where it is true.
    found -= bit_cast<Vector<T>>((first & kExponentMask<Storage>) == kExponentMask<Storage>);
    found -= bit_cast<Vector<T>>((second & kExponentMask<Storage>) == kExponentMask<Storage>);
  });
  int64_t sum = 0;
  for (int i = 0; i < kLanes<T>; ++i) sum += static_cast<int64_t>(found[i]);
  return sum;
}

AMP_EXT_INLINE double to_double(double value) { return value; }
template <typename Storage>
AMP_EXT_INLINE double to_double(Storage value) {
  return to_float(value);
}

// Number of elements whose squares are summed in float32 before the sum is checked.
constexpr int64_t kSumSize = 1024;

// Returns the sum of squares of up to kSumSize elements, in a fixed order: 32 running sums, added
// in pairs. Prefetches `ahead` elements in advance.
template <typename Storage>
float sum_of_squares_in_float(const Storage* elements, int64_t count, int64_t ahead) {
  using V = Vector<float>;
  constexpr int kSums = 32 / kLanes<float>;
  V sums[kSums] = {};
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    prefetch(elements, i + ahead, 32);
#pragma GCC unroll 8
    for (int k = 0; k < kSums; ++k) {
      const V value = load<V>(elements + i + k * kLanes<float>);
      sums[k] += value * value;
    }
  }
  float rest = 0.0f;
  for (; i < count; ++i) rest += to_float(elements[i]) * to_float(elements[i]);
  alignas(64) float each[32];
  for (int k = 0; k < kSums; ++k) store(each + k * kLanes<float>, sums[k]);
  float sum[8];
  for (int k = 0; k < 8; ++k) sum[k] = (each[k] + each[k + 8]) + (each[k + 16] + each[k + 24]);
  return (((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]))) + rest;
}

// Returns the sum of squares in a fixed order, with 8 running sums in float64.
template <typename Storage>
double sum_of_squares_in_double(const Storage* elements, int64_t count) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int k = 0; k < 8; ++k) {
      const double value = to_double(elements[i + k]);
      sums[k] += value * value;
    }
  }
  for (; i < count; ++i) sums[0] += to_double(elements[i]) * to_double(elements[i]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Sums below this limit may have lost bits of small squares in float32.
constexpr float kSmallSum = 1e-20f;

// Returns the sum of squares in float64: of kSumSize elements at a time in float32, unless their
// squares are too large or too small for float32.
template <typename Storage>
double sum_of_squares(const Storage* elements, int64_t count, int64_t rest) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; i += kSumSize) {
    const int64_t size = std::min(kSumSize, count - i);
    if constexpr (!std::is_same_v<Storage, double>) {
      const int64_t ahead = i + size + kAhead<Storage> <= rest ? kAhead<Storage> : 0;
      const float in_float = sum_of_squares_in_float(elements + i, size, ahead);
      if (in_float >= kSmallSum && is_finite(in_float)) {
        sum += in_float;
        continue;
      }
    }
    sum += sum_of_squares_in_double(elements + i, size);
  }
  return sum;
}

// Returns the sum of the squares of all elements that are neither inf nor NaN.
template <typename Storage>
double sum_of_finite_squares(const Storage* elements, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double value = to_double(elements[i]);
    sum += is_finite(value) ? value * value : 0.0;
  }
  return sum;
}

// Calls visit(grad, count, rest) for the elements of a tile. The first `rest` may be prefetched.
template <typename Visit>
AMP_EXT_INLINE void with_grad(const Tile& tile, const Visit& visit) {
  for_dtype(tile.args.grad_dtype, [&](auto element) {
    visit(static_cast<decltype(element)*>(tile.args.grad) + tile.begin, tile.end - tile.begin,
          tile.end_ahead - tile.begin);
  });
}

inline int64_t scan(const TileMap& tiles, double* sums, bool skip_nonfinite, int64_t begin,
                    int64_t end) {
  int64_t first = kNoTensor;
  tiles.for_each_tile(begin, end, [&](const Tile& tile) {
    with_grad(tile, [&](const auto* grad, int64_t count, int64_t rest) {
      if (sums != nullptr) {
        const double sum = sum_of_squares(grad, count, rest);
        sums[tile.index_of_tile] = sum;
        // A finite sum proves that there is no inf or NaN. An infinite sum may also be an overflow.
        if (is_finite(sum)) return;
      }
      if (!any_nonfinite(grad, count, rest)) return;
      first = std::min<int64_t>(first, tile.args.group);
      if (sums != nullptr && skip_nonfinite)
        sums[tile.index_of_tile] = sum_of_finite_squares(grad, count);
    });
  });
  return first;
}

inline void count_nonfinite(const TileMap& tiles, std::atomic<int64_t>* counts, int64_t begin,
                            int64_t end) {
  tiles.for_each_tile(begin, end, [&](const Tile& tile) {
    with_grad(tile, [&](const auto* grad, int64_t count, int64_t rest) {
      const int64_t found = number_of_nonfinite(grad, count, rest);
      if (found != 0) counts[tile.index].fetch_add(found, std::memory_order_relaxed);
    });
  });
}

// Multiplies elements in place. Returns true if an element was inf or NaN before the call.
template <typename Storage>
bool multiply_elements(Storage* elements, int64_t count, float factor_in_float) {
  using T = typename ComputeType<Storage>::type;
  using V = Vector<T>;
  const T factor = factor_in_float;
  V differences = {};  // value - value: 0 if finite, else NaN
  int64_t whole = count / kLanes<T> * kLanes<T>;
  alignas(64) T scratch[kChunkSize];
  for (int64_t offset = 0; offset < count;) {
    Storage* chunk = elements + offset;
    int64_t size = std::min(kChunkSize, whole - offset);
    PaddedCopy<Storage> tail;
    const bool is_tail = size == 0;
    if (is_tail) {
      chunk = tail.open(chunk, count - offset);
      size = kLanes<T>;
    }
    T* const results = Numbers<Plain<Storage>>{{chunk}}.results_in(scratch);
    for (int64_t i = 0; i < size; i += kLanes<T>) {
      const V value = load<V>(chunk + i);
      differences += value - value;
      store(results + i, value * factor);
    }
    round_results(results, size, chunk);
    if (is_tail) tail.close(count - offset);
    offset += size;
  }
  return any(differences != differences);
}

inline int64_t multiply(const TileMap& tiles, float factor, int64_t begin, int64_t end) {
  int64_t first = kNoTensor;
  tiles.for_each_tile(begin, end, [&](const Tile& tile) {
    with_grad(tile, [&](auto* grad, int64_t count, int64_t /*rest*/) {
      if (multiply_elements(grad, count, factor)) {
        first = std::min<int64_t>(first, tile.args.group);
      }
    });
  });
  return first;
}

// Updates the averages of a tile. The template arguments are the formats of weights and averages.
template <typename WeightFormat, typename AverageFormat>
void average_tile(const AverageStep& tensor_step, const Tile& tile) {
  using V = Vector<float>;
  using Weights = Numbers<WeightFormat>;
  using Averages = Numbers<AverageFormat>;
  constexpr bool kIsNative = Averages::template kIsNative<float>;
  const AverageStep step = tensor_step;  // copied into registers
  KernelTensorArgs args = tile.args;
  args.global_offset = step.dither_place(args.global_offset);
  Dither dither(args, 0);
  alignas(64) float scratch[kChunkSize];
  for (int64_t offset = tile.begin; offset < tile.end;) {
    const int64_t rest = tile.end - offset;
    int64_t count = rest / kLanes<float> * kLanes<float>;
    if (!kIsNative) count = std::min(count, kChunkSize);
    Weights weights = Weights::at(args.param, args.master_param, offset);
    Averages averages = Averages::at(args.buffers[0], nullptr, offset);
    typename Weights::Padded last_weights;
    typename Averages::Padded last_averages;
    const bool is_tail = count == 0;
    if (is_tail) {
      weights = last_weights.open(weights, rest);
      averages = last_averages.open(averages, rest);
      count = kLanes<float>;
    }
    if (!kIsNative) dither.begin(offset, count);
    float* const results = averages.results_in(scratch);
    constexpr int64_t kAsked = 2 * kLineSize / static_cast<int64_t>(sizeof(float));
    for (int64_t i = 0; i < count; i += kLanes<float>) {
      if (i % kAsked == 0 && i + kAhead<float> + kApart<float> + kAsked < tile.end_ahead - offset) {
        weights.prefetch(i + kAhead<float>, kAsked);
        averages.prefetch(i + kAhead<float> + kApart<float>, kAsked);
      }
      const V average = averages.template load<V>(i);
      store(results + i, step(average, weights.template load<V>(i)));
    }
    round_chunk(averages, results, count, dither.of_param());
    if (is_tail) last_averages.close(rest);
    offset += is_tail ? rest : count;
  }
}

inline void average(const TileMap& tiles, const AverageStep& step, int64_t begin, int64_t end) {
  tiles.for_each_tile(begin, end, [&](const Tile& tile) {
    any_formats_of_averages([&](auto weight, auto average) {
      using Weight = decltype(weight);
      using Average = decltype(average);
      if (!has_formats_of_average<Weight, Average>(tile.args)) return false;
      average_tile<Weight, Average>(step, tile);
      return true;
    });
  });
}

#define AMP_EXT_STRING(name) AMP_EXT_STRING_OF(name)
#define AMP_EXT_STRING_OF(name) #name
const Engine kEngine = {
    AMP_EXT_STRING(AMP_EXT_ISA), step, scan, multiply, count_nonfinite, average};

}  // namespace amp_ext::cpu::AMP_EXT_ISA
