// Loads and stores numbers of each format with the vectors of one instruction set.
//
// An update writes to `results_in(scratch)`: the array itself if it stores the type of the
// computation, else scratch memory. Then `round` converts the results to the stored format.
#pragma once

#include "cpu/vector.h"
// These headers follow cpu/vector.h, because their functors use its vectors.
#include "formats/dither.h"
#include "formats/moment_codes.h"
#include "formats/numbers.h"
#include "formats/split.h"
#include "formats/storage.h"

namespace amp_ext::cpu::AMP_EXT_ISA {

// Copies a tensor's last elements, which do not fill a vector, padded with zeros. Not inlined:
// every kernel has one for each array, and rarely runs it.
template <typename Storage>
struct PaddedCopy {
  alignas(64) Storage elements[kLanes<float>];
  Storage* origin;

  __attribute__((noinline)) Storage* open(Storage* from, int64_t count) {
    std::memset(elements, 0, sizeof elements);
    std::memcpy(elements, from, count * sizeof(Storage));
    origin = from;
    return elements;
  }
  __attribute__((noinline)) void close(int64_t count) {
    std::memcpy(origin, elements, count * sizeof(Storage));
  }
};

// How results are rounded to 16 or 8 bits.
struct Rounding {
  const uint32_t* phases = nullptr;  // dither phases of a chunk; null to round to nearest
  uint32_t offset = 0;               // step * stride, which is added to each phase

  AMP_EXT_INLINE bool dithers() const { return phases != nullptr; }
  AMP_EXT_INLINE Vector<uint32_t> words(int64_t index) const {
    using U = Vector<uint32_t>;
    return dithers() ? load_bits<U>(phases + index) + offset : U{};
  }
};

AMP_EXT_INLINE void round_dithered(const float* results, int64_t count, BFloat16* stored,
                                   const Rounding& rounding) {
  const auto dithered = [&](Vector<float> value, int64_t index) __attribute__((always_inline)) {
    return dithered_to_upper_bits(value, rounding.words(index));
  };
  round_all_to_upper_bits(results, count, stored, dithered);
}
AMP_EXT_INLINE void round_dithered(const float* results, int64_t count, Half* stored,
                                   const Rounding& rounding) {
  for (int64_t i = 0; i < count; i += kLanes<float>) {
    const auto value = load<Vector<float>>(results + i);
    store_low_bits(&stored[i].bits, dithered_to_half_bits(value, rounding.words(i)));
  }
}

template <typename Storage, typename T>
AMP_EXT_INLINE void round_results(const T* results, int64_t count, Storage* stored,
                                  const Rounding& rounding = {}) {
  if constexpr (sizeof(Storage) == 2) {
    if (rounding.dithers()) return round_dithered(results, count, stored, rounding);
  }
  if constexpr (!std::is_same_v<Storage, T>) round_all(results, count, stored);
}

// Extra room for phases, because fill_phases begins at a multiple of 8 and stores whole vectors.
inline constexpr int64_t kBesidePhases = 8 * kLanes<uint32_t> + 7;

// Computes the dither phases of `count` elements, the first at index `first` of the unsharded
// tensor, into room for count + kBesidePhases numbers. Returns the first element's phase. Inlining
// would slow kernels without dithering by 1 to 4 %.
__attribute__((noinline)) inline const uint32_t* fill_phases(int64_t first, int64_t count,
                                                             uint32_t* phases) {
  using U = Vector<uint32_t>;
  const auto place = static_cast<uint64_t>(first);
  const int64_t before = place % 8;
  const int64_t eights = (before + count + 7) / 8;
  const auto low_word = static_cast<uint32_t>(place / 8);
  const auto high = static_cast<uint32_t>(place / 8 >> 32);
  const U lanes = lane_indices();
  const U begin = lanes + low_word;
  U own = (lanes + static_cast<uint32_t>(place - before)) * kPhaseStride;
  for (int64_t i = 0; i < eights; i += kLanes<uint32_t>) {
    const U number = begin + static_cast<uint32_t>(i);
    // `carry` is -1 where the lower half overflowed.
    const U carry = bit_cast<U>(number < low_word);
    const EightTimes hashes(dither_hash(number, high - carry));
    for (int k = 0; k < 8; ++k) {
      store_bits(phases + i * 8 + k * kLanes<uint32_t>, own + hashes[k]);
      own += kLanes<uint32_t> * kPhaseStride;
    }
  }
  return phases + before;
}

// The numbers of one format in a tensor, from some element on. `Padded` copies the last elements,
// which do not fill a vector. kIsNative is true if the array stores T, so that results need no
// rounding.
template <typename NumberFormat>
struct Numbers;

// Base of the numbers of a format that has one array.
template <typename NumberFormat, typename Element>
struct OneArray {
  template <typename T>
  static constexpr bool kIsNative = false;

  Element* elements;

  AMP_EXT_INLINE static Numbers<NumberFormat> at(void* elements, void* /*unused*/, int64_t offset) {
    return {{static_cast<Element*>(elements) + offset}};
  }
  AMP_EXT_INLINE void prefetch(int64_t index, int64_t count) const {
    amp_ext::prefetch(elements, index, count);
  }
  AMP_EXT_INLINE float* results_in(float* scratch) const { return scratch; }

  struct Padded {
    PaddedCopy<Element> copy;

    AMP_EXT_INLINE Numbers<NumberFormat> open(const OneArray& numbers, int64_t count) {
      return {{copy.open(numbers.elements, count)}};
    }
    AMP_EXT_INLINE void close(int64_t count) { copy.close(count); }
  };
};

// Base of the numbers of a parameter that has float32 masters, or the residuals of split ones.
template <typename NumberFormat, typename Element, typename MasterPart>
struct TwoArrays {
  template <typename T>
  static constexpr bool kIsNative = false;

  Element* elements;
  MasterPart* masters;

  AMP_EXT_INLINE static Numbers<NumberFormat> at(void* elements, void* masters, int64_t offset) {
    return {{static_cast<Element*>(elements) + offset, static_cast<MasterPart*>(masters) + offset}};
  }
  AMP_EXT_INLINE void prefetch(int64_t index, int64_t count) const {
    amp_ext::prefetch(elements, index, count);
    amp_ext::prefetch(masters, index, count);
  }

  struct Padded {
    PaddedCopy<Element> copy;
    PaddedCopy<MasterPart> copy_of_masters;

    AMP_EXT_INLINE Numbers<NumberFormat> open(const TwoArrays& numbers, int64_t count) {
      return {{copy.open(numbers.elements, count), copy_of_masters.open(numbers.masters, count)}};
    }
    AMP_EXT_INLINE void close(int64_t count) {
      copy.close(count);
      copy_of_masters.close(count);
    }
  };
};

template <typename Storage>
struct Numbers<Plain<Storage>> : OneArray<Plain<Storage>, Storage> {
  template <typename T>
  static constexpr bool kIsNative = std::is_same_v<Storage, T>;

  template <typename V>
  AMP_EXT_INLINE V load(int64_t index) const {
    return amp_ext::load<V>(this->elements + index);
  }
  template <typename T>
  AMP_EXT_INLINE T* results_in(T* scratch) const {
    if constexpr (std::is_same_v<Storage, T>) {
      return this->elements;
    } else {
      return scratch;
    }
  }
  template <typename T>
  AMP_EXT_INLINE void round(const T* results, int64_t count, const Rounding& rounding) const {
    round_results(results, count, this->elements, rounding);
  }
  // Returns the units (see RatioCode) of the ratios that belong to these second moments.
  AMP_EXT_INLINE Vector<uint32_t> unit(int64_t index) const {
    return unit_below_root(bits_of(load<Vector<float>>(index)));
  }
};

// The elements are written but never read.
template <typename Storage>
struct Numbers<Mastered<Storage>> : TwoArrays<Mastered<Storage>, Storage, float> {
  template <typename V>
  AMP_EXT_INLINE V load(int64_t index) const {
    return amp_ext::load<V>(this->masters + index);
  }
  AMP_EXT_INLINE float* results_in(float* /*scratch*/) const { return this->masters; }
  AMP_EXT_INLINE void round(const float* results, int64_t count, const Rounding&) const {
    round_results(results, count, this->elements);
  }
};

template <typename Storage, int kBits>
struct Numbers<Split<Storage, kBits>>
    : TwoArrays<Split<Storage, kBits>, Storage, typename Split<Storage, kBits>::Residual> {
  using U = Vector<uint32_t>;
  static constexpr bool kIsDifference = Split<Storage, kBits>::kIsDifference;

  template <typename V>
  AMP_EXT_INLINE V load(int64_t index) const {
    const Storage* const params = this->elements + index;
    const U residual = load_wide(this->masters + index);
    if constexpr (kIsDifference) {
      return SplitHalf16::join(amp_ext::load<V>(params), residual);
    } else {
      return SplitMaster<Storage, kBits>::join(load_wide(&params->bits), residual);
    }
  }
  AMP_EXT_INLINE float* results_in(float* scratch) const { return scratch; }
  AMP_EXT_INLINE void round(const float* results, int64_t count, const Rounding& rounding) const {
    using V = Vector<float>;
    for (int64_t i = 0; i < count; i += kLanes<float>) {
      const V master = amp_ext::load<V>(results + i);
      Storage* const params = this->elements + i;
      U residual;
      if constexpr (kIsDifference) {
        const V limited = SplitHalf16::saturated(master);
        store(params, limited);
        residual = SplitHalf16::residual_of(limited, amp_ext::load<V>(params));
      } else {
        U param;
        SplitMaster<Storage, kBits>::split(master, rounding.dithers(), rounding.words(i), param,
                                           residual);
        store_low_bits(&params->bits, param);
      }
      store_low_bits(this->masters + i, residual);
    }
  }
};

template <>
struct Numbers<Ratio> : OneArray<Ratio, uint8_t> {
  // Dequantizes ratios. `second` holds the stored second moments of the same elements.
  template <typename Second>
  AMP_EXT_INLINE Vector<float> load(int64_t index, const Second& second) const {
    return RatioCode::decode(load_wide(elements + index), second.unit(index));
  }
  template <typename Second>
  AMP_EXT_INLINE void round(const float* results, int64_t count, const Rounding& rounding,
                            const Second& second) const {
    for (int64_t i = 0; i < count; i += kLanes<float>) {
      const auto moment = amp_ext::load<Vector<float>>(results + i);
      store_low_bits(elements + i, RatioCode::encode(moment, second.unit(i), rounding.dithers(),
                                                     rounding.words(i)));
    }
  }
};

template <typename Code>
struct Numbers<Blockwise<Code>> : OneArray<Blockwise<Code>, uint8_t> {
  uint8_t* exponents;

  // `offset` is a multiple of kBlockSize.
  AMP_EXT_INLINE static Numbers at(void* codes, void* exponents, int64_t offset) {
    return {{static_cast<uint8_t*>(codes) + offset},
            static_cast<uint8_t*>(exponents) + offset / kBlockSize};
  }

  template <typename V>
  AMP_EXT_INLINE V load(int64_t index) const {
    return Code::number(root(index));
  }
  AMP_EXT_INLINE Vector<uint32_t> unit(int64_t index) const {
    return unit_below(bits_of(root(index)));
  }
  AMP_EXT_INLINE Vector<float> root(int64_t index) const {
    const BlockUnit unit{exponents[index / kBlockSize]};
    return Code::decode(load_wide(this->elements + index), unit.value());
  }
  AMP_EXT_INLINE void round(const float* results, int64_t count, const Rounding& rounding) const {
    for (int64_t first = 0; first < count; first += kBlockSize) {
      round_block(results + first, first, rounding);
    }
  }

  // Does nothing, because tensors with blockwise moments consist of whole blocks.
  struct Padded {
    AMP_EXT_INLINE Numbers open(const Numbers& numbers, int64_t /*count*/) { return numbers; }
    AMP_EXT_INLINE void close(int64_t /*count*/) {}
  };

 private:
  using V = Vector<float>;

  AMP_EXT_INLINE void round_block(const float* results, int64_t first,
                                  const Rounding& rounding) const {
    constexpr int kVectors = kBlockSize / kLanes<float>;
    V measured[kVectors];
    Vector<int32_t> largest = {};
    for (int k = 0; k < kVectors; ++k) {
      measured[k] = Code::measured(amp_ext::load<V>(results + k * kLanes<float>));
      const auto bits = bits_of(measured[k]) & 0x7fffffffu;
      const auto words = rounding.words(first + k * kLanes<float>);
      const auto lifted = Code::lifted(bits, rounding.dithers(), words);
      // Halve the bits, so that a NaN fits int32. The last bit is not needed.
      largest = maximum(as_signed(lifted >> 1), largest);
    }
    const BlockUnit unit = BlockUnit::above(static_cast<uint32_t>(largest_lane(largest)) << 1,
                                            Code::kLastUnit, Code::kReserve);
    exponents[first / kBlockSize] = static_cast<uint8_t>(unit.byte);
    if (unit.is_nan()) {
      std::memset(this->elements + first, 0, kBlockSize);
      return;
    }
    for (int k = 0; k < kVectors; ++k) {
      const int64_t index = first + k * kLanes<float>;
      store_low_bits(
          this->elements + index,
          Code::encode(measured[k], unit.inverse(), rounding.dithers(), rounding.words(index)));
    }
  }
};

}  // namespace amp_ext::cpu::AMP_EXT_ISA
