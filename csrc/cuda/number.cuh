// Loads and stores consecutive numbers of each format.
#pragma once

#include "cuda/tensor_table.cuh"
#include "formats/dither.h"
#include "formats/moment_codes.h"
#include "formats/numbers.h"
#include "formats/split.h"

namespace amp_ext::cuda {

// How an element is rounded to 16 or 8 bits.
struct Rounding {
  bool dithers = false;  // false: round to nearest
  uint32_t word = 0;
};

__device__ __forceinline__ void store_dithered(float value, uint32_t word, BFloat16& stored) {
  const uint32_t bits = value != value ? 0x7fc00000u : dithered_to_upper_bits(value, word);
  stored.bits = static_cast<uint16_t>(bits >> 16);
}
__device__ __forceinline__ void store_dithered(float value, uint32_t word, Half& stored) {
  stored.bits = static_cast<uint16_t>(dithered_to_half_bits(value, word));
}

template <typename Element, int kCount>
__device__ __forceinline__ void store_pack(const Pack<Element, kCount>& pack, Element* elements,
                                           int64_t index) {
  pack_at<kCount>(elements, index) = pack;
}

// The numbers of one format in a tensor. `Values` holds numbers that a thread has loaded. A pack
// has 16 / kLeastBytes elements.
template <typename NumberFormat>
struct Numbers;

// Base of the numbers of a format that has one array.
template <typename NumberFormat, typename Element>
struct OneArray {
  static constexpr int kPointers = 1;
  static constexpr bool kMayDither = NumberFormat::kMayDither;

  Element* elements;

  // `pointers` are the columns of a TensorTable, starting with the one for these numbers.
  template <int kCapacity>
  __device__ static Numbers<NumberFormat> at(void* const (*pointers)[kCapacity], int tensor) {
    return {{static_cast<Element*>(pointers[0][tensor])}};
  }

  __device__ int64_t elements_to_boundary(int64_t index) const {
    return cuda::elements_to_boundary(elements + index);
  }
  __device__ bool is_at_boundary(int64_t index) const {
    return cuda::is_at_boundary(elements + index);
  }

  template <int kAhead>
  __device__ void prefetch(int64_t index, bool there) const {
    cuda::prefetch<kAhead>(elements + index, there);
  }

  template <int kCount>
  __device__ auto load(int64_t index) const {
    using Values = typename Numbers<NumberFormat>::template Values<kCount>;
    return Values{pack_at<kCount>(elements, index)};
  }
  template <typename Values>
  __device__ void store(const Values& values, int64_t index) const {
    store_pack(values.pack, elements, index);
  }
};

// Base of the numbers of a parameter that has float32 masters, or the residuals of split ones.
template <typename NumberFormat, typename Element, typename MasterPart>
struct TwoArrays {
  static constexpr int kPointers = 2;
  static constexpr bool kMayDither = NumberFormat::kMayDither;
  static constexpr int kLeastBytes = sizeof(Element);  // with 1, packs of 16 elements would spill

  Element* elements;
  MasterPart* masters;

  template <int kCapacity>
  __device__ static Numbers<NumberFormat> at(void* const (*pointers)[kCapacity], int tensor) {
    return {{static_cast<Element*>(pointers[0][tensor]),
             static_cast<MasterPart*>(pointers[1][tensor])}};
  }

  __device__ bool is_at_boundary(int64_t index) const {
    return cuda::is_at_boundary(elements + index) && cuda::is_at_boundary(masters + index);
  }
};

template <typename Storage>
struct Numbers<Plain<Storage>> : OneArray<Plain<Storage>, Storage> {
  static constexpr int kLeastBytes = sizeof(Storage);

  template <int kCount>
  struct Values {
    Pack<Storage, kCount> pack;

    __device__ auto load(int i) const { return cuda::load(pack.values[i]); }
    // Returns the unit (see RatioCode) of the ratio that belongs to second moment i.
    __device__ uint32_t unit(int i) const { return unit_below_root(bits_of(load(i))); }
    template <typename T>
    __device__ void store(T value, int i, const Rounding& rounding) {
      if constexpr (Plain<Storage>::kMayDither) {
        if (rounding.dithers) return store_dithered(value, rounding.word, pack.values[i]);
      }
      cuda::store(static_cast<typename ComputeType<Storage>::type>(value), pack.values[i]);
    }
  };
};

// The elements are written but never read.
template <typename Storage>
struct Numbers<Mastered<Storage>> : TwoArrays<Mastered<Storage>, Storage, float> {
  __device__ int64_t elements_to_boundary(int64_t index) const {
    return cuda::elements_to_boundary(this->elements + index);
  }

  template <int kAhead>
  __device__ void prefetch(int64_t index, bool there) const {
    cuda::prefetch<kAhead>(this->masters + index, there);
  }

  template <int kCount>
  struct Values {
    Pack<float, kCount> pack;
    Pack<Storage, kCount> rounded;

    __device__ float load(int i) const { return pack.values[i]; }
    __device__ void store(float value, int i, const Rounding& /*rounding*/) {
      pack.values[i] = value;
      cuda::store(value, rounded.values[i]);
    }
  };
  template <int kCount>
  __device__ Values<kCount> load(int64_t index) const {
    return {pack_at<kCount>(this->masters, index), {}};
  }
  template <int kCount>
  __device__ void store(const Values<kCount>& values, int64_t index) const {
    store_pack(values.pack, this->masters, index);
    store_pack(values.rounded, this->elements, index);
  }
};

template <typename Storage, int kBits>
struct Numbers<Split<Storage, kBits>>
    : TwoArrays<Split<Storage, kBits>, Storage, typename Split<Storage, kBits>::Residual> {
  using Residual = typename Split<Storage, kBits>::Residual;
  static constexpr bool kIsDifference = Split<Storage, kBits>::kIsDifference;

  __device__ int64_t elements_to_boundary(int64_t index) const {
    return cuda::elements_to_boundary(this->masters + index);
  }

  template <int kAhead>
  __device__ void prefetch(int64_t index, bool there) const {
    cuda::prefetch<kAhead>(this->elements + index, there);
    cuda::prefetch<kAhead>(this->masters + index, there);
  }

  template <int kCount>
  struct Values {
    Pack<Storage, kCount> pack;
    Pack<Residual, kCount> residuals;

    __device__ float load(int i) const {
      const uint32_t residual = residuals.values[i];
      if constexpr (kIsDifference) {
        return SplitHalf16::join(cuda::load(pack.values[i]), residual);
      } else {
        const uint32_t param = pack.values[i].bits;
        return SplitMaster<Storage, kBits>::join(param, residual);
      }
    }
    __device__ void store(float value, int i, const Rounding& rounding) {
      uint32_t residual;
      if constexpr (kIsDifference) {
        const float limited = SplitHalf16::saturated(value);
        cuda::store(limited, pack.values[i]);
        residual = SplitHalf16::residual_of(limited, cuda::load(pack.values[i]));
      } else {
        uint32_t param;
        SplitMaster<Storage, kBits>::split(value, rounding.dithers, rounding.word, param, residual);
        pack.values[i].bits = static_cast<uint16_t>(param);
      }
      residuals.values[i] = static_cast<Residual>(residual);
    }
  };
  template <int kCount>
  __device__ Values<kCount> load(int64_t index) const {
    return {pack_at<kCount>(this->elements, index), pack_at<kCount>(this->masters, index)};
  }
  template <int kCount>
  __device__ void store(const Values<kCount>& values, int64_t index) const {
    store_pack(values.pack, this->elements, index);
    store_pack(values.residuals, this->masters, index);
  }
};

template <>
struct Numbers<Ratio> : OneArray<Ratio, uint8_t> {
  static constexpr int kLeastBytes = sizeof(float);  // with 1, packs of 16 elements would spill

  // `unit` is the unit of the stored second moment of the same element.
  template <int kCount>
  struct Values {
    Pack<uint8_t, kCount> pack;

    __device__ float load(int i, uint32_t unit) const {
      return RatioCode::decode(uint32_t{pack.values[i]}, unit);
    }
    __device__ void store(float value, int i, const Rounding& rounding, uint32_t unit) {
      pack.values[i] =
          static_cast<uint8_t>(RatioCode::encode(value, unit, rounding.dithers, rounding.word));
    }
  };
};

// Numbers in blocks. Neighbouring threads load and store the elements of a block together.
template <typename Code>
struct Numbers<Blockwise<Code>> : OneArray<Blockwise<Code>, uint8_t> {
  static constexpr int kPointers = 2;
  static constexpr int kLeastBytes = sizeof(float);

  uint8_t* exponents;

  template <int kCapacity>
  __device__ static Numbers at(void* const (*pointers)[kCapacity], int tensor) {
    return {{static_cast<uint8_t*>(pointers[0][tensor])},
            static_cast<uint8_t*>(pointers[1][tensor])};
  }

  template <int kCount>
  struct Values {
    Pack<uint8_t, kCount> pack;
    BlockUnit block;

    __device__ float root(int i) const {
      return Code::decode(uint32_t{pack.values[i]}, block.value());
    }
    __device__ uint32_t unit(int i) const { return unit_below(bits_of(root(i))); }
    __device__ float load(int i) const { return Code::number(root(i)); }

    // Chooses the unit of 32 elements before any of them is stored. All threads that hold some of
    // these elements must call this function. rounding_of(i) returns the rounding of moment i.
    template <typename RoundingOf>
    __device__ void choose_unit(const float (&moments)[kCount], const RoundingOf& rounding_of) {
      constexpr int kThreads = kBlockSize / kCount;
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const uint32_t bits = bits_of(Code::measured(moments[i])) & 0x7fffffffu;
        const Rounding rounding = rounding_of(i);
        largest = max(largest, Code::lifted(bits, rounding.dithers, rounding.word));
      }
      const unsigned first = threadIdx.x % warpSize / kThreads * kThreads;
      const unsigned mask = (0xffffffffu >> (32 - kThreads)) << first;
      // All threads load the old exponent before one stores a new one. Shuffles do not order
      // memory.
      __syncwarp(mask);
#pragma unroll
      for (int distance = kThreads / 2; distance > 0; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(mask, largest, distance));
      }
      block = BlockUnit::above(largest, Code::kLastUnit, Code::kReserve);
    }
    __device__ void store(float value, int i, const Rounding& rounding) {
      const uint32_t code =
          Code::encode(Code::measured(value), block.inverse(), rounding.dithers, rounding.word);
      pack.values[i] = static_cast<uint8_t>(code);
    }
  };
  template <int kCount>
  __device__ Values<kCount> load(int64_t index) const {
    return {pack_at<kCount>(this->elements, index), {exponents[index / kBlockSize]}};
  }
  template <int kCount>
  __device__ void store(const Values<kCount>& values, int64_t index) const {
    Pack<uint8_t, kCount> zeros{};
    store_pack(values.block.is_nan() ? zeros : values.pack, this->elements, index);
    if (index % kBlockSize == 0) {
      exponents[index / kBlockSize] = static_cast<uint8_t>(values.block.byte);
    }
  }
};

}  // namespace amp_ext::cuda
