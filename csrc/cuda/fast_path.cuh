// The fast path of a step, for packs with common values only (see formulas/fast_path.h). A warp
// votes before it stores: if one element is unusual, the general code updates the whole warp.
#pragma once

#include <utility>

#include "cuda/number.cuh"
#include "cuda/tensor_table.cuh"
#include "formats/dither.h"
#include "formulas/entries.h"
#include "formulas/fast_path.h"
#include "kernels.h"

namespace amp_ext::cuda {

// Returns the bfloat16 with this index in words that hold two bfloat16 each.
template <int kWords>
__device__ __forceinline__ float bfloat16_at(const Pack<uint32_t, kWords>& words, int index) {
  const uint32_t word = words.values[index / 2];
  return float_of(index % 2 == 0 ? word << 16 : word & 0xffff0000u);
}
// Returns the upper halves of two words in one word, in which the lower half comes from `first`.
__device__ __forceinline__ uint32_t upper_halves(uint32_t first, uint32_t second) {
  return select_bytes(first, second, 0x7632);
}
// Returns byte kByte of each of four words, packed into one word.
template <int kByte>
__device__ __forceinline__ uint32_t bytes_of(const uint32_t* words) {
  constexpr uint32_t kOfTwo = kByte | ((kByte + 4) << 4);
  return select_bytes(select_bytes(words[0], words[1], kOfTwo),
                      select_bytes(words[2], words[3], kOfTwo), 0x5410);
}
template <int kWords, typename Element>
__device__ __forceinline__ Pack<uint32_t, kWords>& words_at(Element* elements, int64_t index) {
  return *reinterpret_cast<Pack<uint32_t, kWords>*>(elements + index);
}

// A pack of kCount consecutive numbers of one format, in registers. `set` quantizes finite values.
// If kDithers, `word` is the dither word of the first number (see formats/dither.h).
template <typename NumberFormat, int kCount>
struct FastPack {
  typename Numbers<NumberFormat>::template Values<kCount> own;

  __device__ void load(const Numbers<NumberFormat>& numbers, int64_t index) {
    own = numbers.template load<kCount>(index);
  }
  __device__ float get(int i) const { return own.load(i); }
  template <bool kDithers>
  __device__ void set(const float (&values)[kCount], uint32_t word) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) own.store(values[i], i, {kDithers, word + i * kPhaseStride});
  }
  __device__ void store(const Numbers<NumberFormat>& numbers, int64_t index) const {
    numbers.store(own, index);
  }
};

template <int kCount>
struct FastPack<Plain<BFloat16>, kCount> {
  Pack<uint32_t, kCount / 2> words;

  __device__ void load(const Numbers<Plain<BFloat16>>& numbers, int64_t index) {
    words = words_at<kCount / 2>(numbers.elements, index);
  }
  __device__ float get(int i) const { return bfloat16_at(words, i); }
  // Returns the unit (see RatioCode) of the ratio that belongs to second moment i.
  __device__ uint32_t unit(int i) const { return unit_below_root(bits_of(get(i))); }
  __device__ uint32_t twice_inverse_unit(int i) const {
    return twice_inverse_unit_below_root(bits_of(get(i)));
  }
  // Returns 0 if no second moment is negative, which would give a wrong unit.
  __device__ uint32_t negative() const {
    uint32_t signs = 0;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) signs |= words.values[i];
    return signs & 0x80008000u;
  }
  template <bool kDithers>
  __device__ void set(const float (&values)[kCount], uint32_t word) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      if constexpr (kDithers) {
        words.values[i / 2] =
            upper_halves(dithered_to_upper_bits(values[i], word + i * kPhaseStride),
                         dithered_to_upper_bits(values[i + 1], word + (i + 1) * kPhaseStride));
      } else {
        words.values[i / 2] = two_bfloat16(values[i], values[i + 1]);
      }
    }
  }
  __device__ void store(const Numbers<Plain<BFloat16>>& numbers, int64_t index) const {
    words_at<kCount / 2>(numbers.elements, index) = words;
  }
};

template <int kCount>
struct FastPack<Mastered<BFloat16>, kCount> {
  Pack<float, kCount> masters;

  __device__ void load(const Numbers<Mastered<BFloat16>>& numbers, int64_t index) {
    masters = pack_at<kCount>(numbers.masters, index);
  }
  __device__ float get(int i) const { return masters.values[i]; }
  template <bool kDithers>
  __device__ void set(const float (&values)[kCount], uint32_t /*word*/) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) masters.values[i] = values[i];
  }
  __device__ void store(const Numbers<Mastered<BFloat16>>& numbers, int64_t index) const {
    Pack<uint32_t, kCount / 2> rounded;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      rounded.values[i / 2] = two_bfloat16(masters.values[i], masters.values[i + 1]);
    }
    pack_at<kCount>(numbers.masters, index) = masters;
    words_at<kCount / 2>(numbers.elements, index) = rounded;
  }
};

template <int kBits, int kCount>
struct FastPack<Split<BFloat16, kBits>, kCount> {
  static constexpr int kLowWords = kCount * kBits / 32;

  Pack<uint32_t, kCount / 2> words;
  Pack<uint32_t, kLowWords> residuals;

  __device__ void load(const Numbers<Split<BFloat16, kBits>>& numbers, int64_t index) {
    words = words_at<kCount / 2>(numbers.elements, index);
    residuals = words_at<kLowWords>(numbers.masters, index);
  }
  __device__ float get(int i) const {
    // Move the residual below the parameter's bits and extend its sign.
    uint32_t residual;
    if constexpr (kBits == 16) {
      residual = select_bytes(residuals.values[i / 2], 0, i % 2 == 0 ? 0x9910 : 0xbb32);
    } else {
      const uint32_t byte = i % 4;
      const uint32_t sign = byte | 8;
      residual = select_bytes(residuals.values[i / 4], 0, 4 | byte << 4 | sign << 8 | sign << 12);
    }
    return SplitMaster<BFloat16, kBits>::join_number(bits_of(bfloat16_at(words, i)), residual);
  }
  template <bool kDithers>
  __device__ void set(const float (&values)[kCount], uint32_t word) {
    uint32_t bits[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      bits[i] = bits_of(values[i]);
      if constexpr (kBits == 8) bits[i] += (word + i * kPhaseStride) >> 24;
    }
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      words.values[i / 2] = upper_halves(bits[i] + 0x8000u, bits[i + 1] + 0x8000u);
      if constexpr (kBits == 16)
        residuals.values[i / 2] = select_bytes(bits[i], bits[i + 1], 0x5410);
    }
    if constexpr (kBits == 8) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) residuals.values[i / 4] = bytes_of<1>(bits + i);
    }
  }
  __device__ void store(const Numbers<Split<BFloat16, kBits>>& numbers, int64_t index) const {
    words_at<kCount / 2>(numbers.elements, index) = words;
    words_at<kLowWords>(numbers.masters, index) = residuals;
  }
};

template <int kCount>
struct FastPack<Ratio, kCount> {
  Pack<uint32_t, kCount / 4> words;

  __device__ void load(const Numbers<Ratio>& numbers, int64_t index) {
    words = words_at<kCount / 4>(numbers.elements, index);
  }
  // Returns a word in which the upper bit of a byte is set if its code is NaN.
  __device__ uint32_t nan_codes() const {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) found |= (words.values[i] & 0x7f7f7f7fu) + 0x01010101u;
    return found;
  }
  __device__ float get(int i, uint32_t unit, uint32_t place_bits) const {
    const uint32_t word = words.values[i / 4];
    const uint32_t place = select_bytes(word & 0x7f7f7f7fu, place_bits, 0x7440 | (i % 4));
    return RatioCode::decode_number(place, unit, (word << (24 - 8 * (i % 4))) & 0x80000000u);
  }
  __device__ void set(const float (&values)[kCount], const uint32_t (&inverses)[kCount],
                      uint32_t word) {
    uint32_t places[kCount];
    uint32_t signs[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // Move bits 13 to 19, which hold the index of the ratio, to byte 2.
      places[i] = RatioCode::encode_number(values[i], inverses[i], word + i * kPhaseStride) << 3;
      signs[i] = bits_of(values[i]);
    }
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      words.values[i / 4] =
          (bytes_of<2>(places + i) & 0x7f7f7f7fu) | (bytes_of<3>(signs + i) & 0x80808080u);
    }
  }
  __device__ void store(const Numbers<Ratio>& numbers, int64_t index) const {
    words_at<kCount / 4>(numbers.elements, index) = words;
  }
};

// Returns the largest bit pattern of a block of 32 elements after their dither was added. No
// element may be negative. All threads of a warp must call this function.
template <typename Code, int kCount>
__device__ __forceinline__ uint32_t largest_of_block(const float (&values)[kCount], uint32_t word) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    largest = max(largest, Code::lifted(bits_of(values[i]), true, word + i * kPhaseStride));
  }
#pragma unroll
  for (int distance = kBlockSize / kCount / 2; distance > 0; distance /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  return largest;
}

// Base of packs of 8-bit moments in blocks.
template <typename Code, int kCount>
struct FastPackOfBlock {
  Pack<uint32_t, kCount / 4> words;
  uint32_t exponent;

  __device__ void load(const Numbers<Blockwise<Code>>& numbers, int64_t index) {
    words = words_at<kCount / 4>(numbers.elements, index);
    exponent = numbers.exponents[index / kBlockSize];
  }
  __device__ uint32_t code(int i) const {
    return select_bytes(words.values[i / 4], 0, 0x4440 | (i % 4));
  }
  __device__ void store(const Numbers<Blockwise<Code>>& numbers, int64_t index) const {
    words_at<kCount / 4>(numbers.elements, index) = words;
    if (index % kBlockSize == 0) {
      numbers.exponents[index / kBlockSize] = static_cast<uint8_t>(exponent);
    }
  }
};

// Second moments as 8-bit roots. `roots` comes from fast_update, which multiplies roots by 2^32.
template <int kCount>
struct FastPack<Blockwise<RootCode>, kCount> : FastPackOfBlock<RootCode, kCount> {
  using FastPackOfBlock<RootCode, kCount>::exponent;

  __device__ float old_root(int i) const {
    const uint32_t bits = (this->code(i) << 17) + RootCode::kSixteenth;
    return RootCode::fast_decode(bits, float_of(exponent << 23));
  }
  __device__ uint32_t unit(int i) const { return unit_below(bits_of(old_root(i))); }
  __device__ float get(int i) const { return RootCode::number(old_root(i)); }

  // Chooses the exponent that 32 elements share; returns true if an element is unusual. All threads
  // that hold some of these elements must call this function.
  __device__ bool choose_unit(const float (&roots)[kCount], uint32_t word) {
    const uint32_t largest = largest_of_block<RootCode>(roots, word);
    exponent = RootCode::fast_unit(largest);
    return RootCode::is_unusual(largest);
  }
  // Quantizes the roots. Sets `inverses` to the bits of 2 / unit of each stored root.
  __device__ void set(const float (&roots)[kCount], uint32_t word, uint32_t (&inverses)[kCount]) {
    const float unit = float_of(exponent << 23);
    const uint32_t scaled = exponent + RootCode::kFastExponent;
    const float least = float_of((scaled - 10) << 23);
    const float inverse = float_of((254 - scaled) << 23);
    uint32_t codes[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t bits =
          RootCode::fast_encode(roots[i], least, inverse, word + i * kPhaseStride);
      codes[i] = (bits - RootCode::kSixteenth) << 7;  // the code is in byte 3
      inverses[i] = twice_inverse_unit(bits_of(RootCode::fast_decode(bits & 0xfffe0000u, unit)));
    }
#pragma unroll
    for (int i = 0; i < kCount; i += 4) this->words.values[i / 4] = bytes_of<3>(codes + i);
  }
};

template <int kCount>
struct FastPack<Blockwise<MomentumCode>, kCount> : FastPackOfBlock<MomentumCode, kCount> {
  __device__ float get(int i) const {
    return MomentumCode::decode(this->code(i), BlockUnit{this->exponent}.value());
  }
  __device__ bool choose_unit(const float (&values)[kCount], uint32_t word) {
    float magnitudes[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) magnitudes[i] = std::fabs(values[i]);
    const uint32_t largest = largest_of_block<MomentumCode>(magnitudes, word);
    const auto block = BlockUnit::above(largest, MomentumCode::kLastUnit, MomentumCode::kReserve);
    this->exponent = block.byte;
    return block.is_nan();
  }
  template <bool kDithers>
  __device__ void set(const float (&values)[kCount], uint32_t word) {
    const float inverse = BlockUnit{this->exponent}.inverse();
    uint32_t codes[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      codes[i] = MomentumCode::encode(values[i], inverse, kDithers, word + i * kPhaseStride);
    }
#pragma unroll
    for (int i = 0; i < kCount; i += 4) this->words.values[i / 4] = bytes_of<0>(codes + i);
  }
};

// The constants of a step for one tensor in the fast path.
template <typename Functor>
struct FastConstants {
  Functor update;
  float grad_factor;  // TensorConstants::grad_factor * direction
  uint32_t step;
  uint32_t place_bits;  // RatioCode::kPlaceBits, hidden from the compiler (see BlockState)

  template <bool kIsCautious, typename Constants>
  __device__ static FastConstants of(const Constants& general, uint32_t place_bits) {
    return {general.update.template usual<kIsCautious>(), general.grad_factor * general.direction,
            general.step, place_bits};
  }
};

template <typename Functor, typename Arrays,
          typename Indices = typename Arrays::NumberFormats::Indices>
struct FastPath;
template <typename Functor, typename Arrays, int... index>
struct FastPath<Functor, Arrays, std::integer_sequence<int, index...>> {
  using NumberFormats = typename Arrays::NumberFormats;
  static constexpr int kCount = NumberFormats::kHasCodes ? 8 : Arrays::kPackSize;
  static constexpr bool kDivides = NumberFormats::kSecondMoment >= 0;
  static_assert(!Arrays::kMayDither || kCount == 8, "the dithered phases of a pack have one hash");

  // KernelTensorArgs::dithered for default options; 8-bit buffers are always dithered.
  static constexpr uint8_t kByDefault =
      dithered_by_default<typename NumberFormats::Hyperparameters>();
  template <int buffer>
  static constexpr bool kDithers = Arrays::template kDithers<buffer> &&
                                   ((kByDefault & (kDithersBuffer0 << buffer)) != 0 ||
                                    is_code(NumberFormats::template Buffer<buffer>::kFormat));
  static constexpr uint8_t kDithered = ((Arrays::Param::kMayDither ? kDithersParam : 0) | ... |
                                        (kDithers<index> ? kDithersBuffer0 << index : 0));

  // True if the fast path supports the alignment and the dithering of a tensor.
  static bool takes(const KernelTensorArgs& args) {
    const auto is_aligned = [](const void* memory) {
      return reinterpret_cast<uintptr_t>(memory) % 16 == 0;
    };
    return args.dithered == kDithered && is_aligned(args.grad) && is_aligned(args.param) &&
           is_aligned(args.master_param) && (... && is_aligned(args.buffers[index])) &&
           (!Arrays::kMayDither || args.global_offset % 8 == 0);
  }

  struct Packs {
    FastPack<typename NumberFormats::Grad, kCount> grad;
    FastPack<typename NumberFormats::Param, kCount> param;
    Entries<FastPack<typename NumberFormats::template Buffer<index>, kCount>...> buffers;
  };

  // Prefetches the pack kAhead elements after `first` in all input arrays, if `there` is true.
  template <int kAhead>
  static __device__ __forceinline__ void prefetch(const Arrays& arrays, int64_t first, bool there) {
    arrays.grad.template prefetch<kAhead>(first, there);
    arrays.param.template prefetch<kAhead>(first, there);
    (entry<index>(arrays.buffers).template prefetch<kAhead>(first, there), ...);
  }

  // Updates the pack at `first` and returns true, unless a pack of the warp has an unusual number.
  // All threads of a warp must call this function. A thread that is not `inside` only votes.
  template <Division kDivision>
  static __device__ __forceinline__ bool update(const FastConstants<Functor>& constants,
                                                const Arrays& arrays, int64_t first, bool inside) {
    Packs packs;
    packs.grad.load(arrays.grad, first);
    packs.param.load(arrays.param, first);
    (entry<index>(packs.buffers).load(entry<index>(arrays.buffers), first), ...);

    const auto phase =
        Arrays::kMayDither ? dither_phase(static_cast<uint64_t>(arrays.global_offset + first)) : 0u;
    Unusual unusual;
    (note_codes<index>(packs, unusual), ...);
    float params[kCount];
    float buffers[NumberFormats::kArraySize][kCount];
    [[maybe_unused]] float roots[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      params[i] = packs.param.get(i);
      ((buffers[index][i] = get_buffer<index>(packs, i, constants.place_bits)), ...);
      const float grad = packs.grad.get(i) * constants.grad_factor;
      if constexpr (NumberFormats::kRoot >= 0) {
        roots[i] = constants.update.template fast_update<Seeds, kDivision>(
            grad, params[i], buffers[index][i]..., unusual);
      } else {
        constants.update.template fast_update<Seeds, kDivision>(grad, params[i],
                                                                buffers[index][i]..., unusual);
      }
    }
    const auto word_of = [&](uint32_t stride) { return phase + constants.step * stride; };
    bool is_unusual = unusual.is_found();
    ((is_unusual |=
      choose_unit<index>(packs, index == NumberFormats::kRoot ? roots : buffers[index], word_of)),
     ...);
    // Wait until all threads have loaded, because they share exponents, and a thread that is not
    // `inside` reads another thread's pack. The vote below does not order memory accesses.
    __syncwarp();
    if (__any_sync(0xffffffffu, is_unusual)) return false;

    packs.param.template set<Arrays::Param::kMayDither>(params, word_of(kParamStride));
    [[maybe_unused]] uint32_t inverses[kCount];
    (set_buffer<index, /*kIsRatio=*/false>(
         packs, index == NumberFormats::kRoot ? roots : buffers[index], inverses, word_of),
     ...);
    (set_buffer<index, /*kIsRatio=*/true>(packs, buffers[index], inverses, word_of), ...);
    if (!inside) return true;
    packs.param.store(arrays.param, first);
    (entry<index>(packs.buffers).store(entry<index>(arrays.buffers), first), ...);
    return true;
  }

 private:
  template <int buffer>
  static __device__ __forceinline__ void note_codes(const Packs& packs, Unusual& unusual) {
    if constexpr (NumberFormats::template kIsRatio<buffer>) {
      unusual.codes |= entry<buffer>(packs.buffers).nan_codes();
    } else if constexpr (NumberFormats::kHasRatios && NumberFormats::kRoot < 0 &&
                         buffer == NumberFormats::kSecondMoment) {
      unusual.codes |= entry<buffer>(packs.buffers).negative();
    }
  }

  template <int buffer>
  static __device__ __forceinline__ float get_buffer(const Packs& packs, int i,
                                                     [[maybe_unused]] uint32_t place_bits) {
    const auto& own = entry<buffer>(packs.buffers);
    if constexpr (NumberFormats::template kIsRatio<buffer>) {
      return own.get(i, entry<NumberFormats::kSecondMoment>(packs.buffers).unit(i), place_bits);
    } else {
      return own.get(i);
    }
  }

  template <int buffer, typename WordOf>
  static __device__ __forceinline__ bool choose_unit(Packs& packs, const float (&values)[kCount],
                                                     const WordOf& word_of) {
    if constexpr (NumberFormats::template kIsInBlocks<buffer>) {
      return entry<buffer>(packs.buffers)
          .choose_unit(values, word_of(NumberFormats::template kStride<buffer>));
    } else {
      return false;
    }
  }

  // Quantizes a buffer of ratios if kIsRatio is true, otherwise any other buffer.
  template <int buffer, bool kIsRatio, typename WordOf>
  static __device__ __forceinline__ void set_buffer(Packs& packs, const float (&values)[kCount],
                                                    uint32_t (&inverses)[kCount],
                                                    const WordOf& word_of) {
    if constexpr (NumberFormats::template kIsRatio<buffer> == kIsRatio) {
      auto& own = entry<buffer>(packs.buffers);
      const uint32_t word = word_of(NumberFormats::template kStride<buffer>);
      if constexpr (kIsRatio) {
        own.set(values, inverses, word);
      } else if constexpr (buffer == NumberFormats::kRoot) {
        own.set(values, word, inverses);
      } else {
        own.template set<kDithers<buffer>>(values, word);
        if constexpr (NumberFormats::kHasRatios && buffer == NumberFormats::kSecondMoment) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) inverses[i] = own.twice_inverse_unit(i);
        }
      }
    }
  }
};

// True if a functor has a fast path for these number formats. With 32-bit buffers, a step waits for
// memory, and the general kernel takes as long.
template <typename Functor, typename Arrays>
inline constexpr bool kHasFastPath = false;
template <typename Arrays>
inline constexpr bool kHasFastPath<Adam<float>, Arrays> =
    Arrays::kHasLowPrecisionBuffers && Arrays::NumberFormats::kBuffers == 2;
template <typename Arrays>
inline constexpr bool kHasFastPath<Lion<float>, Arrays> = Arrays::kHasLowPrecisionBuffers;
template <typename Arrays>
inline constexpr bool kHasFastPath<Sgd<float>, Arrays> = Arrays::kHasLowPrecisionBuffers;

}  // namespace amp_ext::cuda
