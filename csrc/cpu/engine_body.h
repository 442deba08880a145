// The kernels of one instruction set. Included once per set, inside a namespace and a target pragma
// of its own, after all other headers; hence no include guard and no includes.

constexpr int64_t kBlockSize = 1024;
static_assert(kTileSize % kBlockSize == 0);

template <typename From, typename To>
void convert(const From* from, To* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (sizeof(To) == sizeof(uint16_t)) {
      from_float(from[i], to[i]);
    } else if constexpr (sizeof(From) == sizeof(uint16_t)) {
      to[i] = to_float(from[i]);
    } else {
      to[i] = static_cast<To>(from[i]);
    }
  }
}

#if defined(AMP_EXT_ENGINE_HAS_F16C)
inline void convert(const Half* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

inline void convert(const float* from, Half* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  for (; i < count; ++i) from_float(from[i], to[i]);
}
#endif

// A stretch of a tensor in the type it is computed in: the tensor's own memory where it has that
// type, else a converted copy in `scratch`.
template <typename T>
T* open_block(void* tensor, DType dtype, int64_t offset, int64_t count, T* scratch) {
  T* block = scratch;
  for_dtype(dtype, [&](auto element) {
    using Storage = decltype(element);
    Storage* stored = static_cast<Storage*>(tensor) + offset;
    if constexpr (std::is_same_v<Storage, T>) {
      block = stored;
    } else {
      convert(stored, scratch, count);
    }
  });
  return block;
}

// Writes a block back that open_block had to copy; `block` may also be other memory to store from.
template <typename T>
void close_block(void* tensor, DType dtype, int64_t offset, int64_t count, const T* block) {
  for_dtype(dtype, [&](auto element) {
    using Storage = decltype(element);
    Storage* stored = static_cast<Storage*>(tensor) + offset;
    if constexpr (!std::is_same_v<Storage, T>) convert(block, stored, count);
  });
}

// The number of elements that are inf or NaN: all bits of their exponent are set.
template <typename Count, typename Storage>
Count count_nonfinite(const Storage* elements, int64_t count) {
  using Bits = typename BitPattern<Storage>::type;
  Count found = 0;
#pragma omp simd reduction(+ : found)
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    memcpy(&bits, elements + i, sizeof bits);
    found += static_cast<Count>((bits & kExponentMask<Storage>) == kExponentMask<Storage>);
  }
  return found;
}

// `count` up to kTileSize: the narrowest of the counters holds that.
template <typename Storage>
bool any_nonfinite(const Storage* elements, int64_t count) {
  return count_nonfinite<typename BitPattern<Storage>::type>(elements, count) != 0;
}

// Updates a block; with kSkips all but the elements whose gradient is inf or NaN.
template <int kBuffers, bool kSkips, typename Functor, typename T>
void update_block(const TensorConstants<Functor, T>& tensor_constants, const T* __restrict grad,
                  T* __restrict param, T* __restrict buffer0, T* __restrict buffer1,
                  T* __restrict buffer2, int64_t count) {
  const TensorConstants<Functor, T> constants = tensor_constants;  // in registers
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    // Scalars: gcc does not vectorise a loop with an array of its own.
    T value = param[i];
    T element0 = kBuffers > 0 ? buffer0[i] : T();
    T element1 = kBuffers > 1 ? buffer1[i] : T();
    T element2 = kBuffers > 2 ? buffer2[i] : T();
    update_element<kBuffers>(constants, constants.unscale_and_clip(grad[i]), value, element0,
                             element1, element2);
    const bool is_updated = !kSkips || is_finite(grad[i]);
    param[i] = select(is_updated, value, param[i]);
    if constexpr (kBuffers > 0) buffer0[i] = select(is_updated, element0, buffer0[i]);
    if constexpr (kBuffers > 1) buffer1[i] = select(is_updated, element1, buffer1[i]);
    if constexpr (kBuffers > 2) buffer2[i] = select(is_updated, element2, buffer2[i]);
  }
}

// Stores the finite gradients of a block as the optimizer sees them; the others keep their bits.
template <typename Functor, typename T>
void write_back_finite(const TensorConstants<Functor, T>& constants, const T* grad,
                       const TensorRecord& record, int64_t offset, int64_t count) {
  for_dtype(record.grad_dtype, [&](auto element) {
    auto* stored = static_cast<decltype(element)*>(record.grad) + offset;
    for (int64_t i = 0; i < count; ++i) {
      const T seen = constants.unscale_and_clip(grad[i]);
      if (is_finite(grad[i])) convert(&seen, stored + i, 1);
    }
  });
}

// Stores the gradients as the optimizer sees them.
template <typename Functor, typename T>
void write_back_block(const TensorConstants<Functor, T>& tensor_constants, T* grad, int64_t count) {
  const TensorConstants<Functor, T> constants = tensor_constants;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    grad[i] = constants.unscale_and_clip(grad[i]);
  }
}

template <int kBuffers, typename Functor, typename T>
void step_tile(TensorConstants<Functor, T> constants, const Tile& tile) {
  const TensorRecord& record = tile.record;
  const TensorConstants<Functor, T> write_back_constants = constants;
  if (constants.write_back_grads) constants.grad_factor = T(1);  // done before
  // Without anything to convert, the tile is one block.
  const bool all_native = record.param_dtype == kDType<T> && record.grad_dtype == kDType<T> &&
                          record.buffer_dtype == kDType<T>;
  const int64_t block_size = all_native ? kTileSize : kBlockSize;
  alignas(64) T grad_scratch[kBlockSize];
  alignas(64) T param_scratch[kBlockSize];
  alignas(64) T buffer_scratch[kMaxBuffers][kBlockSize];
  void* computed = record.master_param == nullptr ? record.param : record.master_param;
  const DType computed_dtype =
      record.master_param == nullptr ? record.param_dtype : DType::kFloat32;
  for (int64_t offset = tile.begin; offset < tile.end; offset += block_size) {
    const int64_t count = std::min(block_size, tile.end - offset);
    T* grad = open_block(record.grad, record.grad_dtype, offset, count, grad_scratch);
    // Judged as they came: a finite one may be inf once it is unscaled.
    const bool some_are_skipped = constants.skip_nonfinite && any_nonfinite(grad, count);
    if (constants.write_back_grads && !some_are_skipped) {
      write_back_block(write_back_constants, grad, count);
      close_block(record.grad, record.grad_dtype, offset, count, grad);
    }
    T* param = open_block(computed, computed_dtype, offset, count, param_scratch);
    T* buffers[kMaxBuffers] = {};
    for (int i = 0; i < kBuffers; ++i) {
      buffers[i] =
          open_block(record.buffers[i], record.buffer_dtype, offset, count, buffer_scratch[i]);
    }
    if (some_are_skipped) {
      update_block<kBuffers, true>(write_back_constants, grad, param, buffers[0], buffers[1],
                                   buffers[2], count);
      if (constants.write_back_grads) {
        write_back_finite(write_back_constants, grad, record, offset, count);
      }
    } else {
      update_block<kBuffers, false>(constants, grad, param, buffers[0], buffers[1], buffers[2],
                                    count);
    }
    close_block(record.param, record.param_dtype, offset, count, param);
    for (int i = 0; i < kBuffers; ++i) {
      close_block(record.buffers[i], record.buffer_dtype, offset, count, buffers[i]);
    }
  }
}

// The constants of the last tensor seen: neighbours mostly share their group and their step.
template <template <typename> class Functor, typename T>
class ConstantsCache {
 public:
  using Constants = TensorConstants<Functor<T>, T>;

  ConstantsCache(const StepLaunch& launch, const GradientFactor& factor)
      : hyperparameters_(
            static_cast<const typename Functor<T>::Hyperparameters*>(launch.hyperparameters)),
        factor_(factor) {}

  const Constants& of(const TensorRecord& record) {
    const float step = record.step == nullptr ? -1.0f : *record.step;
    if (record.group != group_ || step != step_) {
      group_ = record.group;
      step_ = step;
      constants_ = Constants::make(hyperparameters_[group_], record.step, factor_);
    }
    return constants_;
  }

 private:
  const typename Functor<T>::Hyperparameters* hyperparameters_;  // [groups]
  GradientFactor factor_;
  int32_t group_ = -1;
  float step_ = -1.0f;
  Constants constants_;
};

template <template <typename> class Functor, int kBuffers>
void step_with(const StepLaunch& launch, const TileMap& tiles, const GradientFactor& factor,
               int64_t begin, int64_t end) {
  ConstantsCache<Functor, float> in_float(launch, factor);
  ConstantsCache<Functor, double> in_double(launch, factor);
  tiles.for_each_tile(begin, end, [&](const Tile& tile) {
    if (tile.record.param_dtype == DType::kFloat64) {
      step_tile<kBuffers>(in_double.of(tile.record), tile);
    } else {
      step_tile<kBuffers>(in_float.of(tile.record), tile);
    }
  });
}

inline void step(const StepLaunch& launch, const TileMap& tiles, const GradientFactor& factor,
                 int64_t begin, int64_t end) {
  switch (launch.kernel) {
#define AMP_EXT_CASE(Functor, buffers)       \
  case OptimizerKernel::k##Functor##buffers: \
    return step_with<Functor, buffers>(launch, tiles, factor, begin, end);
    AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_CASE)
#undef AMP_EXT_CASE
  }
}

// Eight numbers anywhere in memory; a narrower instruction set takes them in pieces, with the same
// bits. (Not copied by memcpy: that goes through the stack in halves, ten times slower.)
typedef float FloatVector __attribute__((vector_size(32), aligned(4), may_alias));

// Sums in one fixed order: 32 running sums, then pairwise. `count` up to kBlockSize.
inline float sum_of_squares_of_block(const float* elements, int64_t count) {
  // Four variables: gcc leaves an array of them in memory.
  FloatVector sum0 = {};
  FloatVector sum1 = {};
  FloatVector sum2 = {};
  FloatVector sum3 = {};
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    // The type in full: `auto` would forget that the address may be misaligned.
    const FloatVector* vectors = reinterpret_cast<const FloatVector*>(elements + i);
    sum0 += vectors[0] * vectors[0];
    sum1 += vectors[1] * vectors[1];
    sum2 += vectors[2] * vectors[2];
    sum3 += vectors[3] * vectors[3];
  }
  float rest = 0.0f;
  for (; i < count; ++i) rest += elements[i] * elements[i];
  const FloatVector sum = (sum0 + sum1) + (sum2 + sum3);
  return (((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]))) + rest;
}

template <typename T>
double sum_of_squares_in_double(const T* elements, int64_t count) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int k = 0; k < 8; ++k) {
      const double value = elements[i + k];
      sums[k] += value * value;
    }
  }
  for (; i < count; ++i) sums[0] += static_cast<double>(elements[i]) * elements[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Squares below this lose bits in float32.
constexpr float kSmallSum = 1e-20f;

// Calls visit(grad, count) for each block of elements [begin, end) of a gradient.
template <typename T, typename Visit>
void for_each_block(const TensorRecord& record, int64_t begin, int64_t end, const Visit& visit) {
  alignas(64) T scratch[kBlockSize];
  for (int64_t offset = begin; offset < end; offset += kBlockSize) {
    const int64_t count = std::min(kBlockSize, end - offset);
    visit(open_block(record.grad, record.grad_dtype, offset, count, scratch), count);
  }
}

// The sum of squares of one tile, whose squares may be too large or too small for float32.
template <typename T>
double sum_of_squares(const TensorRecord& record, int64_t begin, int64_t end) {
  double sum = 0.0;
  for_each_block<T>(record, begin, end, [&](const T* grad, int64_t count) {
    if constexpr (std::is_same_v<T, float>) {
      const float in_float = sum_of_squares_of_block(grad, count);
      if (in_float >= kSmallSum && is_finite(in_float)) {
        sum += in_float;
        return;
      }
    }
    sum += sum_of_squares_in_double(grad, count);
  });
  return sum;
}

// The same without the elements that are inf or NaN.
template <typename T>
double sum_of_finite_squares(const TensorRecord& record, int64_t begin, int64_t end) {
  double sum = 0.0;
  for_each_block<T>(record, begin, end, [&](const T* grad, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const double value = grad[i];
      sum += is_finite(value) ? value * value : 0.0;
    }
  });
  return sum;
}

inline int64_t look(const TileMap& tiles, double* sums, bool skip_nonfinite, int64_t begin,
                    int64_t end) {
  int64_t first = kNoTensor;
  tiles.for_each_tile(begin, end, [&](const Tile& tile) {
    const TensorRecord& record = tile.record;
    const bool in_double = record.grad_dtype == DType::kFloat64;
    if (sums != nullptr) {
      const double sum = in_double ? sum_of_squares<double>(record, tile.begin, tile.end)
                                   : sum_of_squares<float>(record, tile.begin, tile.end);
      sums[tile.number] = sum;
      // Any inf or NaN shows in the sum. In float64 so may a square that is too large.
      if (is_finite(sum)) return;
    }
    bool found = false;
    for_dtype(record.grad_dtype, [&](auto element) {
      const auto* grad = static_cast<const decltype(element)*>(record.grad) + tile.begin;
      found = any_nonfinite(grad, tile.end - tile.begin);
    });
    if (!found) return;
    first = std::min<int64_t>(first, record.group);
    if (sums != nullptr && skip_nonfinite) {
      sums[tile.number] = in_double ? sum_of_finite_squares<double>(record, tile.begin, tile.end)
                                    : sum_of_finite_squares<float>(record, tile.begin, tile.end);
    }
  });
  return first;
}

inline void count_nonfinite(const TileMap& tiles, std::atomic<int64_t>* counts, int64_t begin,
                            int64_t end) {
  tiles.for_each_tile(begin, end, [&](const Tile& tile) {
    for_dtype(tile.record.grad_dtype, [&](auto element) {
      using Storage = decltype(element);
      using Count = typename BitPattern<Storage>::type;  // a tile has fewer elements
      const auto* grad = static_cast<const Storage*>(tile.record.grad) + tile.begin;
      const auto count = count_nonfinite<Count>(grad, tile.end - tile.begin);
      if (count != 0) counts[tile.index].fetch_add(count, std::memory_order_relaxed);
    });
  });
}

template <typename T>
bool multiply_tile(const Tile& tile, T factor) {
  const TensorRecord& record = tile.record;
  alignas(64) T scratch[kBlockSize];
  bool found = false;
  for (int64_t offset = tile.begin; offset < tile.end; offset += kBlockSize) {
    const int64_t count = std::min(kBlockSize, tile.end - offset);
    T* grad = open_block(record.grad, record.grad_dtype, offset, count, scratch);
    found |= any_nonfinite(grad, count);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) grad[i] = grad[i] * factor;
    close_block(record.grad, record.grad_dtype, offset, count, grad);
  }
  return found;
}

inline int64_t multiply(const TileMap& tiles, float factor, int64_t begin, int64_t end) {
  int64_t first = kNoTensor;
  tiles.for_each_tile(begin, end, [&](const Tile& tile) {
    const bool found = tile.record.grad_dtype == DType::kFloat64
                           ? multiply_tile<double>(tile, factor)
                           : multiply_tile<float>(tile, factor);
    if (found) first = std::min<int64_t>(first, tile.record.group);
  });
  return first;
}
