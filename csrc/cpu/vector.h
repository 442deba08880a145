// Vectors as wide as the registers of the instruction set that this file is compiled for
// (AMP_EXT_ISA, AMP_EXT_VECTOR_BYTES), and functions for what the compiler's operators cannot do.
//
// Include it before the functors: vectors have no namespace, so a functor finds only functions that
// were declared before it. All intrinsics are in this file, for AVX2, AVX-512 and 64-bit Arm. On
// other processors plain code computes the same bits.
#pragma once

#include "formats/storage.h"
#include "numeric.h"

#if defined(__x86_64__) && AMP_EXT_VECTOR_BYTES > 16
#define AMP_EXT_VECTOR_X86 AMP_EXT_VECTOR_BYTES
#else
#define AMP_EXT_VECTOR_X86 0
#endif

namespace amp_ext {
inline namespace AMP_EXT_ISA {

template <typename T, int kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};

// A register of float, double, int32_t, uint32_t, ... Operators work lane by lane and broadcast
// scalars. A comparison gives a vector of integers: -1 where it is true, else 0.
template <typename T>
using Vector = typename VectorOf<T, AMP_EXT_VECTOR_BYTES>::type;
template <typename T>
constexpr int kLanes = AMP_EXT_VECTOR_BYTES / static_cast<int>(sizeof(T));

constexpr int64_t kLineSize = 64;  // bytes of a cache line

// A vector of To with as many lanes as a Vector<From>.
template <typename To, typename From>
using Converted = typename VectorOf<To, kLanes<From>* static_cast<int>(sizeof(To))>::type;

template <typename To, typename From>
AMP_EXT_INLINE To bit_cast(From bits) {
  static_assert(sizeof(To) == sizeof(From));
  return (To)bits;
}

template <typename V>
AMP_EXT_INLINE V load_bits(const void* from) {
  typedef V Anywhere __attribute__((aligned(1), may_alias));
  return *static_cast<const Anywhere*>(from);
}

template <typename V>
AMP_EXT_INLINE void store_bits(void* to, V value) {
  typedef V Anywhere __attribute__((aligned(1), may_alias));
  *static_cast<Anywhere*>(to) = value;
}

// Prefetches the elements [begin, begin + count); some may lie past the end of the array.
template <typename T>
AMP_EXT_INLINE void prefetch(const T* elements, int64_t begin, int64_t count) {
  const auto first = reinterpret_cast<uintptr_t>(elements) + begin * sizeof(T);
  const auto bytes = static_cast<int64_t>(count * sizeof(T));
  for (int64_t line = 0; line < bytes; line += kLineSize) {
    __builtin_prefetch(reinterpret_cast<const void*>(first + line));
  }
}

// Returns 0, 1, 2, ...
AMP_EXT_INLINE Vector<uint32_t> lane_indices() {
  alignas(64) static constexpr uint32_t kIndices[] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                      8, 9, 10, 11, 12, 13, 14, 15};
  return load_bits<Vector<uint32_t>>(kIndices);
}

// Eight vectors that together repeat each lane of one vector eight times.
class EightTimes {
 public:
  explicit AMP_EXT_INLINE EightTimes(Vector<uint32_t> lanes) : lanes_(lanes) {}

  AMP_EXT_INLINE Vector<uint32_t> operator[](int index) const {
#if AMP_EXT_VECTOR_X86 == 64
    const auto which = (lane_indices() >> 3) + 2 * static_cast<uint32_t>(index);
    return (Vector<uint32_t>)_mm512_maskz_permutexvar_epi32(0xffff, (__m512i)which,
                                                            (__m512i)lanes_);
#else
    return Vector<uint32_t>{} + lanes_[index * kLanes<uint32_t> / 8];
#endif
  }

 private:
  Vector<uint32_t> lanes_;
};

// Return the smaller and the larger of two values, or the second value if either is NaN.
template <typename V>
AMP_EXT_INLINE V minimum(V first, V second) {
  return first < second ? first : second;
}
template <typename V>
AMP_EXT_INLINE V maximum(V first, V second) {
  return first > second ? first : second;
}
#if AMP_EXT_VECTOR_X86 == 64  // gcc uses max instructions only for narrower vectors
AMP_EXT_INLINE Vector<float> maximum(Vector<float> first, Vector<float> second) {
  return _mm512_maskz_max_ps(0xffff, first, second);
}
#endif

// Vector versions of the functions in storage.h and numeric.h.
AMP_EXT_INLINE Vector<uint32_t> smaller_word(Vector<uint32_t> a, Vector<uint32_t> b) {
#if AMP_EXT_VECTOR_X86 == 64
  return (Vector<uint32_t>)_mm512_maskz_min_epi32(0xffff, (__m512i)a, (__m512i)b);
#else
  using Signed = Vector<int32_t>;  // signed comparisons exist in every instruction set
  return bit_cast<Vector<uint32_t>>(minimum(bit_cast<Signed>(a), bit_cast<Signed>(b)));
#endif
}
AMP_EXT_INLINE Vector<uint32_t> larger_word(Vector<uint32_t> a, Vector<uint32_t> b) {
#if AMP_EXT_VECTOR_X86 == 64
  return (Vector<uint32_t>)_mm512_maskz_max_epi32(0xffff, (__m512i)a, (__m512i)b);
#else
  using Signed = Vector<int32_t>;
  return bit_cast<Vector<uint32_t>>(maximum(bit_cast<Signed>(a), bit_cast<Signed>(b)));
#endif
}
AMP_EXT_INLINE Vector<float> magnitude_of(Vector<float> value) {
  return bit_cast<Vector<float>>(bit_cast<Vector<uint32_t>>(value) & 0x7fffffffu);
}
AMP_EXT_INLINE Vector<float> fused_multiply_add(Vector<float> a, Vector<float> b, Vector<float> c) {
#if AMP_EXT_VECTOR_X86 == 64
  return _mm512_maskz_fmadd_ps(0xffff, a, b, c);
#elif AMP_EXT_VECTOR_X86 == 32
  return _mm256_fmadd_ps(a, b, c);
#else
  for (int i = 0; i < kLanes<float>; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
#endif
}
AMP_EXT_INLINE Vector<float> add_exact_product(Vector<float> a, Vector<float> b, Vector<float> c) {
#if AMP_EXT_VECTOR_X86 == 64 || AMP_EXT_VECTOR_X86 == 32
  return fused_multiply_add(a, b, c);
#else
  return a * b + c;
#endif
}

// True if a comparison is true in any lane.
template <typename Mask>
AMP_EXT_INLINE bool any(Mask mask) {
  const auto words = bit_cast<Vector<int64_t>>(mask);
  int64_t found = 0;
  for (int i = 0; i < kLanes<int64_t>; ++i) found |= words[i];
  return found != 0;
}

// Returns the largest lane, by halving the vector repeatedly.
template <int kBytes = AMP_EXT_VECTOR_BYTES>
AMP_EXT_INLINE int32_t largest_lane(typename VectorOf<int32_t, kBytes>::type value) {
  if constexpr (kBytes > 8) {
    typename VectorOf<int32_t, kBytes / 2>::type halves[2];
    std::memcpy(halves, &value, sizeof halves);
    return largest_lane<kBytes / 2>(maximum(halves[0], halves[1]));
  } else {
    return value[0] > value[1] ? value[0] : value[1];
  }
}

#if AMP_EXT_VECTOR_X86 == 64
// Returns the maxima of pairs of lanes, alternately of `a` and of `b`.
AMP_EXT_INLINE __m512i fold_lanes(__m512i a, __m512i b) {
  return _mm512_maskz_max_epi32(0xffff, _mm512_maskz_unpacklo_epi32(0xffff, a, b),
                                _mm512_maskz_unpackhi_epi32(0xffff, a, b));
}
#elif AMP_EXT_VECTOR_X86 == 32
AMP_EXT_INLINE __m256i fold_lanes(__m256i a, __m256i b) {
  return _mm256_max_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}
#endif
// Returns the largest lane of values[i] in lane i. The remaining lanes repeat these or are 0.
AMP_EXT_INLINE Vector<int32_t> largest_lanes(const Vector<int32_t> (&values)[kLanes<float> / 2]) {
#if AMP_EXT_VECTOR_X86 == 64
  const auto* const v = reinterpret_cast<const __m512i*>(values);
  const __m512i low = fold_lanes(fold_lanes(v[0], v[2]), fold_lanes(v[1], v[3]));
  const __m512i high = fold_lanes(fold_lanes(v[4], v[6]), fold_lanes(v[5], v[7]));
  const __m512i all =
      _mm512_maskz_max_epi32(0xffff, _mm512_maskz_shuffle_i64x2(0xff, low, high, 0x44),
                             _mm512_maskz_shuffle_i64x2(0xff, low, high, 0xee));
  return (Vector<int32_t>)_mm512_maskz_max_epi32(0xffff,
                                                 _mm512_maskz_shuffle_i64x2(0xff, all, all, 0x88),
                                                 _mm512_maskz_shuffle_i64x2(0xff, all, all, 0xdd));
#elif AMP_EXT_VECTOR_X86 == 32
  const auto* const v = reinterpret_cast<const __m256i*>(values);
  const __m256i all = fold_lanes(fold_lanes(v[0], v[2]), fold_lanes(v[1], v[3]));
  return (Vector<int32_t>)_mm256_max_epi32(all, _mm256_permute2x128_si256(all, all, 1));
#else
  Vector<int32_t> largest = {};
  for (int i = 0; i < kLanes<float> / 2; ++i) largest[i] = largest_lane(values[i]);
  return largest;
#endif
}

// Compilers make one instruction of each loop.
AMP_EXT_INLINE Vector<float> square_root(Vector<float> value) {
  for (int i = 0; i < kLanes<float>; ++i) value[i] = std::sqrt(value[i]);
  return value;
}
AMP_EXT_INLINE Vector<double> square_root(Vector<double> value) {
  for (int i = 0; i < kLanes<double>; ++i) value[i] = std::sqrt(value[i]);
  return value;
}

// Vector versions of the scalar functions in storage.h.
AMP_EXT_INLINE Vector<uint32_t> bits_of(Vector<float> value) {
  return bit_cast<Vector<uint32_t>>(value);
}
AMP_EXT_INLINE Vector<float> float_of(Vector<uint32_t> bits) {
  return bit_cast<Vector<float>>(bits);
}
AMP_EXT_INLINE Vector<int32_t> as_signed(Vector<uint32_t> bits) {
  return bit_cast<Vector<int32_t>>(bits);
}
AMP_EXT_INLINE Vector<uint32_t> to_integer(Vector<float> value) {  // values below 2^31
  return bit_cast<Vector<uint32_t>>(__builtin_convertvector(value, Vector<int32_t>));
}
AMP_EXT_INLINE Vector<float> to_number(Vector<uint32_t> integer) {  // reads `integer` as int32
  return __builtin_convertvector(bit_cast<Vector<int32_t>>(integer), Vector<float>);
}

// Stores the low 16 or 8 bits of each lane.
AMP_EXT_INLINE void store_low_bits(uint16_t* to, Vector<uint32_t> value) {
#if AMP_EXT_VECTOR_X86 == 64
  store_bits(to, _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)value));
#elif AMP_EXT_VECTOR_X86 == 32
  const auto low = (__m256i)(value & 0xffffu);
  store_bits(to, _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
#else
  store_bits(to, __builtin_convertvector(value, Converted<uint16_t, uint32_t>));
#endif
}
AMP_EXT_INLINE void store_low_bits(uint8_t* to, Vector<uint32_t> value) {
#if AMP_EXT_VECTOR_X86 == 64
  store_bits(to, _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)value));
#elif AMP_EXT_VECTOR_X86 == 32
  const auto low = (__m256i)(value & 0xffu);
  const __m128i words =
      _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i_u*>(to), _mm_packus_epi16(words, words));
#elif defined(__AARCH64EL__)
  const uint16x4_t words = vmovn_u32((uint32x4_t)value);
  store_bits(to, vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0));
#else
  store_bits(to, __builtin_convertvector(value, Converted<uint8_t, uint32_t>));
#endif
}

// Stores the low 16 bits of each lane of two vectors.
AMP_EXT_INLINE void store_low_bits(uint16_t* to, Vector<uint32_t> first, Vector<uint32_t> second) {
#if AMP_EXT_VECTOR_X86 == 32
  const auto low = (__m256i)(first & 0xffffu), high = (__m256i)(second & 0xffffu);
  store_bits(to, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
#else
  store_low_bits(to, first);
  store_low_bits(to + kLanes<uint32_t>, second);
#endif
}

// Four consecutive vectors.
using FourVectors = Vector<uint32_t>[4];

#if AMP_EXT_VECTOR_X86 == 64
// Pack four vectors of 32-bit lanes into one vector of bytes. The instructions work within 128-bit
// parts, whose order store_packed restores. packed_signs keeps each lane's sign bit.
AMP_EXT_INLINE __m512i packed_bytes(const FourVectors& v) {
  return _mm512_packus_epi16(_mm512_packus_epi32((__m512i)v[0], (__m512i)v[1]),
                             _mm512_packus_epi32((__m512i)v[2], (__m512i)v[3]));
}
AMP_EXT_INLINE __m512i packed_signs(const FourVectors& v) {
  return _mm512_packs_epi16(_mm512_packs_epi32((__m512i)v[0], (__m512i)v[1]),
                            _mm512_packs_epi32((__m512i)v[2], (__m512i)v[3]));
}
AMP_EXT_INLINE void store_packed(uint8_t* to, __m512i bytes) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  store_bits(to, _mm512_maskz_permutexvar_epi32(0xffff, order, bytes));
}
#elif AMP_EXT_VECTOR_X86 == 32
AMP_EXT_INLINE __m256i packed_bytes(const FourVectors& v) {
  return _mm256_packus_epi16(_mm256_packus_epi32((__m256i)v[0], (__m256i)v[1]),
                             _mm256_packus_epi32((__m256i)v[2], (__m256i)v[3]));
}
AMP_EXT_INLINE __m256i packed_signs(const FourVectors& v) {
  return _mm256_packs_epi16(_mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]),
                            _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]));
}
AMP_EXT_INLINE void store_packed(uint8_t* to, __m256i bytes) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  store_bits(to, _mm256_permutevar8x32_epi32(bytes, order));
}
#endif

// Stores the low 8 bits of each lane of four vectors. The other bits must be 0.
AMP_EXT_INLINE void store_low_bytes(uint8_t* to, const FourVectors& values) {
#if AMP_EXT_VECTOR_X86 != 0
  store_packed(to, packed_bytes(values));
#else
  for (int k = 0; k < 4; ++k) store_low_bits(to + k * kLanes<uint32_t>, values[k]);
#endif
}
// Stores a byte for each lane of four vectors: the low 7 bits of `values`, with the sign bit of
// `signs` above them.
AMP_EXT_INLINE void store_low_bytes(uint8_t* to, const FourVectors& values,
                                    const FourVectors& signs) {
#if AMP_EXT_VECTOR_X86 != 0
  using Bytes = decltype(packed_bytes(values));
  const auto upper = (Bytes)(Vector<uint32_t>{} + 0x80808080u);
  store_packed(to, packed_bytes(values) | (packed_signs(signs) & upper));
#else
  for (int k = 0; k < 4; ++k) {
    store_low_bits(to + k * kLanes<uint32_t>, values[k] | (signs[k] >> 24 & 0x80u));
  }
#endif
}

// Loads elements of 16 or 8 bits, zero-extended to 32 bits.
AMP_EXT_INLINE Vector<uint32_t> load_wide(const uint8_t* from) {
#if AMP_EXT_VECTOR_X86 == 64
  return (Vector<uint32_t>)_mm512_maskz_cvtepu8_epi32(0xffff, load_bits<__m128i>(from));
#elif AMP_EXT_VECTOR_X86 == 32
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i_u*>(from));
  return (Vector<uint32_t>)_mm256_cvtepu8_epi32(bytes);
#elif defined(__AARCH64EL__)
  const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(load_bits<uint32_t>(from)));
  return (Vector<uint32_t>)vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
#else
  return __builtin_convertvector(load_bits<Converted<uint8_t, uint32_t>>(from), Vector<uint32_t>);
#endif
}
AMP_EXT_INLINE Vector<uint32_t> load_wide(const uint16_t* from) {
#if AMP_EXT_VECTOR_X86 == 64
  return (Vector<uint32_t>)_mm512_maskz_cvtepu16_epi32(0xffff, load_bits<__m256i>(from));
#elif AMP_EXT_VECTOR_X86 == 32
  return (Vector<uint32_t>)_mm256_cvtepu16_epi32(load_bits<__m128i>(from));
#elif defined(__AARCH64EL__)
  return (Vector<uint32_t>)vmovl_u16(vld1_u16(from));
#else
  return __builtin_convertvector(load_bits<Converted<uint16_t, uint32_t>>(from), Vector<uint32_t>);
#endif
}

// Loads elements of 16 or 8 bits, sign-extended to 32 bits.
AMP_EXT_INLINE Vector<uint32_t> load_signed(const uint8_t* from) {
#if AMP_EXT_VECTOR_X86 == 64
  return (Vector<uint32_t>)_mm512_maskz_cvtepi8_epi32(0xffff, load_bits<__m128i>(from));
#elif AMP_EXT_VECTOR_X86 == 32
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i_u*>(from));
  return (Vector<uint32_t>)_mm256_cvtepi8_epi32(bytes);
#else
  return (Vector<uint32_t>)((Vector<int32_t>)(load_wide(from) << 24) >> 24);
#endif
}
AMP_EXT_INLINE Vector<uint32_t> load_signed(const uint16_t* from) {
#if AMP_EXT_VECTOR_X86 == 64
  return (Vector<uint32_t>)_mm512_maskz_cvtepi16_epi32(0xffff, load_bits<__m256i>(from));
#elif AMP_EXT_VECTOR_X86 == 32
  return (Vector<uint32_t>)_mm256_cvtepi16_epi32(load_bits<__m128i>(from));
#else
  return (Vector<uint32_t>)((Vector<int32_t>)(load_wide(from) << 16) >> 16);
#endif
}

// Loads as many elements as V has lanes and converts them to V, a Vector of float or double.
template <typename V>
AMP_EXT_INLINE V load(const float* from) {
  if constexpr (std::is_same_v<V, Vector<double>>) {
    return __builtin_convertvector(load_bits<Converted<float, double>>(from), V);
  } else {
    return load_bits<V>(from);
  }
}
template <typename V>
AMP_EXT_INLINE V load(const double* from) {
  return load_bits<V>(from);
}
template <typename V>
AMP_EXT_INLINE V load(const BFloat16* from) {
  return bit_cast<V>(load_wide(&from->bits) << 16);
}
template <typename V>
AMP_EXT_INLINE V load(const Half* from) {
#if AMP_EXT_VECTOR_X86 == 64
  return _mm512_maskz_cvtph_ps(0xffff, load_bits<__m256i>(from));
#elif AMP_EXT_VECTOR_X86 == 32
  return _mm256_cvtph_ps(load_bits<__m128i>(from));
#elif defined(__AARCH64EL__)
  return (V)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits)));
#else
  V numbers = {};
  for (int i = 0; i < kLanes<float>; ++i) numbers[i] = to_float(from[i]);
  return numbers;
#endif
}

// Rounds each lane to bfloat16, in the upper 16 bits of the lane. The result is wrong for NaN.
AMP_EXT_INLINE Vector<uint32_t> rounded_to_upper_bits(Vector<float> value) {
  const auto bits = bit_cast<Vector<uint32_t>>(value);
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

// Stores the elements of a vector, rounded to nearest even.
AMP_EXT_INLINE void store(float* to, Vector<float> value) { store_bits(to, value); }
AMP_EXT_INLINE void store(double* to, Vector<double> value) { store_bits(to, value); }
AMP_EXT_INLINE void store(float* to, Vector<double> value) {
  store_bits(to, __builtin_convertvector(value, Converted<float, double>));
}
// Stores the upper 16 bits of `upper_bits`, or a NaN where `value` is NaN.
AMP_EXT_INLINE void store_unless_nan(BFloat16* to, Vector<float> value,
                                     Vector<uint32_t> upper_bits) {
  const Vector<uint32_t> nan = Vector<uint32_t>{} + 0x7fc00000u;
  store_low_bits(&to->bits, select(value != value, nan, upper_bits) >> 16);
}
AMP_EXT_INLINE void store(BFloat16* to, Vector<float> value) {
  store_unless_nan(to, value, rounded_to_upper_bits(value));
}
AMP_EXT_INLINE void store(Half* to, Vector<float> value) {
#if AMP_EXT_VECTOR_X86 == 64
  store_bits(to, _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT));
#elif AMP_EXT_VECTOR_X86 == 32
  store_bits(to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AARCH64EL__)
  vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)value)));
#else
  for (int i = 0; i < kLanes<float>; ++i) from_float(value[i], to[i]);
#endif
}

// Rounds and stores `count` elements. `count` must be a multiple of the number of lanes.
template <typename T, typename Storage>
AMP_EXT_INLINE void round_all(const T* from, int64_t count, Storage* to) {
  for (int64_t i = 0; i < count; i += kLanes<T>) store(to + i, load<Vector<T>>(from + i));
}

// Stores the upper 16 bits of each lane of two vectors.
AMP_EXT_INLINE void store_upper_bits(uint16_t* to, Vector<uint32_t> first,
                                     Vector<uint32_t> second) {
#if AMP_EXT_VECTOR_X86 == 64
  alignas(64) static constexpr uint16_t kUpper[] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                    23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                    45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  store_bits(
      to, _mm512_permutex2var_epi16((__m512i)first, load_bits<__m512i>(kUpper), (__m512i)second));
#elif AMP_EXT_VECTOR_X86 == 32
  const __m256i packed = _mm256_packus_epi32((__m256i)(first >> 16), (__m256i)(second >> 16));
  store_bits(to, _mm256_permute4x64_epi64(packed, 0xd8));
#elif defined(__AARCH64EL__)
  vst1q_u16(to, vuzp2q_u16((uint16x8_t)first, (uint16x8_t)second));
#else
  store_low_bits(to, first >> 16);
  store_low_bits(to + kLanes<uint32_t>, second >> 16);
#endif
}

// Remembers whether any vector contained a NaN.
struct NanSeen {
#if AMP_EXT_VECTOR_X86 == 64
  __mmask16 lanes = 0;
  AMP_EXT_INLINE void add(Vector<float> first, Vector<float> second) {
    lanes |= _mm512_cmp_ps_mask(first, second, _CMP_UNORD_Q);
  }
  AMP_EXT_INLINE bool yes() const { return lanes != 0; }
#elif AMP_EXT_VECTOR_X86 == 32
  __m256 lanes = {};
  AMP_EXT_INLINE void add(Vector<float> first, Vector<float> second) {
    lanes = _mm256_or_ps(lanes, _mm256_cmp_ps(first, second, _CMP_UNORD_Q));
  }
  AMP_EXT_INLINE bool yes() const { return _mm256_movemask_ps(lanes) != 0; }
#else
  Vector<int32_t> lanes = {};
  AMP_EXT_INLINE void add(Vector<float> first, Vector<float> second) {
    lanes |= (first != first) | (second != second);
  }
  AMP_EXT_INLINE bool yes() const { return any(lanes); }
#endif
};

// Stores the upper 16 bits of upper_bits(value, index) for `count` elements, a multiple of the
// number of lanes. The first loop only detects NaN, because replacing NaN costs twice as much.
// After a NaN, a second loop rounds all elements again.
template <typename UpperBits>
AMP_EXT_INLINE void round_all_to_upper_bits(const float* from, int64_t count, BFloat16* to,
                                            const UpperBits& upper_bits) {
  int64_t i = 0;
  constexpr int64_t kPair = 2 * kLanes<float>;
  NanSeen nan;
  for (; i + kPair <= count; i += kPair) {
    const auto first = load<Vector<float>>(from + i);
    const auto second = load<Vector<float>>(from + i + kLanes<float>);
    nan.add(first, second);
    store_upper_bits(&to[i].bits, upper_bits(first, i), upper_bits(second, i + kLanes<float>));
  }
  if (nan.yes()) i = 0;
  for (; i < count; i += kLanes<float>) {
    const auto value = load<Vector<float>>(from + i);
    store_unless_nan(to + i, value, upper_bits(value, i));
  }
}
AMP_EXT_INLINE void round_all(const float* from, int64_t count, BFloat16* to) {
  const auto rounded = [&](Vector<float> value, int64_t /*index*/)
                           __attribute__((always_inline)) { return rounded_to_upper_bits(value); };
  round_all_to_upper_bits(from, count, to, rounded);
}

}  // namespace AMP_EXT_ISA
}  // namespace amp_ext
