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
    } else if constexpr (std::is_same_v<typename ComputeType<Storage>::type, float>) {
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
    if constexpr (!std::is_same_v<Storage, T> &&
                  std::is_same_v<typename ComputeType<Storage>::type, T>) {
      convert(block, stored, count);
    }
  });
}

template <int kBuffers, typename Functor, typename T>
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
    update_element<kBuffers>(constants, grad[i], value, element0, element1, element2);
    param[i] = value;
    if constexpr (kBuffers > 0) buffer0[i] = element0;
    if constexpr (kBuffers > 1) buffer1[i] = element1;
    if constexpr (kBuffers > 2) buffer2[i] = element2;
  }
}

template <int kBuffers, typename Functor, typename T>
void step_tile(const TensorConstants<Functor, T>& constants, const TensorRecord& record,
               int64_t begin, int64_t end) {
  alignas(64) T grad_scratch[kBlockSize];
  alignas(64) T param_scratch[kBlockSize];
  alignas(64) T buffer_scratch[kMaxBuffers][kBlockSize];
  void* computed = record.master_param == nullptr ? record.param : record.master_param;
  const DType computed_dtype =
      record.master_param == nullptr ? record.param_dtype : DType::kFloat32;
  for (int64_t offset = begin; offset < end; offset += kBlockSize) {
    const int64_t count = std::min(kBlockSize, end - offset);
    const T* grad = open_block(record.grad, record.grad_dtype, offset, count, grad_scratch);
    T* param = open_block(computed, computed_dtype, offset, count, param_scratch);
    T* buffers[kMaxBuffers] = {};
    for (int i = 0; i < kBuffers; ++i) {
      buffers[i] =
          open_block(record.buffers[i], record.buffer_dtype, offset, count, buffer_scratch[i]);
    }
    update_block<kBuffers>(constants, grad, param, buffers[0], buffers[1], buffers[2], count);
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

  ConstantsCache(const StepLaunch& launch, float inv_scale)
      : hyperparameters_(
            static_cast<const typename Functor<T>::Hyperparameters*>(launch.hyperparameters)),
        inv_scale_(inv_scale) {}

  const Constants& of(const TensorRecord& record) {
    const float step = record.step == nullptr ? -1.0f : *record.step;
    if (record.group != group_ || step != step_) {
      group_ = record.group;
      step_ = step;
      constants_ = Constants::make(hyperparameters_[group_], record.step, inv_scale_);
    }
    return constants_;
  }

 private:
  const typename Functor<T>::Hyperparameters* hyperparameters_;  // [groups]
  float inv_scale_;
  int32_t group_ = -1;
  float step_ = -1.0f;
  Constants constants_;
};

template <template <typename> class Functor, int kBuffers>
void step_with(const StepLaunch& launch, const TileMap& tiles, float inv_scale, int64_t begin,
               int64_t end) {
  ConstantsCache<Functor, float> in_float(launch, inv_scale);
  ConstantsCache<Functor, double> in_double(launch, inv_scale);
  tiles.for_each_tile(begin, end, [&](const TensorRecord& record, int64_t first, int64_t last) {
    if (record.param_dtype == DType::kFloat64) {
      step_tile<kBuffers>(in_double.of(record), record, first, last);
    } else {
      step_tile<kBuffers>(in_float.of(record), record, first, last);
    }
  });
}

inline void step(const StepLaunch& launch, const TileMap& tiles, float inv_scale, int64_t begin,
                 int64_t end) {
  switch (launch.kernel) {
#define AMP_EXT_CASE(Functor, buffers)       \
  case OptimizerKernel::k##Functor##buffers: \
    return step_with<Functor, buffers>(launch, tiles, inv_scale, begin, end);
    AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_CASE)
#undef AMP_EXT_CASE
  }
}

// True if one of the elements is inf or NaN: if all bits of its exponent are set.
template <typename Storage>
bool any_nonfinite(const Storage* elements, int64_t count) {
  using Bits = typename BitPattern<Storage>::type;
  Bits found = 0;
#pragma omp simd reduction(| : found)
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    memcpy(&bits, elements + i, sizeof bits);
    found |= static_cast<Bits>((bits & kExponentMask<Storage>) == kExponentMask<Storage>);
  }
  return found != 0;
}

inline bool check_finite(const TileMap& tiles, int64_t begin, int64_t end) {
  bool found = false;
  tiles.for_each_tile(begin, end, [&](const TensorRecord& record, int64_t first, int64_t last) {
    for_dtype(record.grad_dtype, [&](auto element) {
      found |= any_nonfinite(static_cast<decltype(element)*>(record.grad) + first, last - first);
    });
  });
  return found;
}

template <typename T>
bool unscale_tile(const TensorRecord& record, T inv_scale, int64_t begin, int64_t end) {
  alignas(64) T scratch[kBlockSize];
  bool found = false;
  for (int64_t offset = begin; offset < end; offset += kBlockSize) {
    const int64_t count = std::min(kBlockSize, end - offset);
    T* grad = open_block(record.grad, record.grad_dtype, offset, count, scratch);
    found |= any_nonfinite(grad, count);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) grad[i] = grad[i] * inv_scale;
    close_block(record.grad, record.grad_dtype, offset, count, grad);
  }
  return found;
}

inline bool unscale(const TileMap& tiles, float inv_scale, int64_t begin, int64_t end) {
  bool found = false;
  tiles.for_each_tile(begin, end, [&](const TensorRecord& record, int64_t first, int64_t last) {
    found |= record.grad_dtype == DType::kFloat64
                 ? unscale_tile<double>(record, inv_scale, first, last)
                 : unscale_tile<float>(record, inv_scale, first, last);
  });
  return found;
}
