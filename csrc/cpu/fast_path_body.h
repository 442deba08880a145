// The fast path of Adam's step with 16-bit or 8-bit moments, for common options and values (see
// formulas/fast_path.h). It gives the same bits as engine_body.h, which includes this file.
//
// A first loop updates a group of elements in scratch memory. A second loop quantizes and stores
// the results, unless one is unusual (NaN, or a second moment that is negative or nearly infinite):
// then the general code updates the whole group.

namespace amp_ext::cpu::AMP_EXT_ISA {

// Elements of a group. With a quarter as many, steps with 8-bit moments take 10 to 25 % longer.
constexpr int64_t kGroupSize = 16 * kLanes<float>;
static_assert(kChunkSize % kGroupSize == 0 && kGroupSize % (2 * kBlockSize) == 0);

// Bits of KernelTensorArgs::dithered that matter for these formats.
template <typename NumberFormats>
inline constexpr int kMayDitherAmong =
    (NumberFormats::Param::kMayDither ? kDithersParam : 0) |
    (NumberFormats::template Buffer<0>::kMayDither ? kDithersBuffer0 : 0) |
    (NumberFormats::template Buffer<1>::kMayDither ? kDithersBuffer0 << 1 : 0);
// Returns the bits of KernelTensorArgs::dithered that the fast path requires: those of the default
// betas and of all 8-bit buffers.
template <typename NumberFormats>
constexpr int usual_dither() {
  constexpr int kByDefault = dithered_by_default<typename NumberFormats::Hyperparameters>();
  const int codes = (NumberFormats::template kIsRatio<0> ? kDithersBuffer0 : 0) |
                    (NumberFormats::template kIsInBlocks<1> ? kDithersBuffer0 << 1 : 0);
  return kMayDitherAmong<NumberFormats> & (kByDefault | codes);
}
template <typename NumberFormats>
bool has_usual_dither(const KernelTensorArgs& args) {
  return (args.dithered & kMayDitherAmong<NumberFormats>) == usual_dither<NumberFormats>();
}

// True if a functor has a fast path for these number formats. Float32 moments would gain nothing.
template <typename Functor, typename NumberFormats>
inline constexpr bool kHasFastPath = false;
template <typename NumberFormats>
inline constexpr bool kHasFastPath<Adam<float>, NumberFormats> =
    NumberFormats::kBuffers == 2 && NumberFormats::template Buffer<1>::kMayDither &&
    !std::is_same_v<typename NumberFormats::Param::Stored, Half>;

// Dither words, phase + stride * step, of consecutive vectors (see formats/dither.h).
struct Words {
  const uint32_t* phases;
  uint32_t offset;

  AMP_EXT_INLINE Vector<uint32_t> operator[](int index) const {
    return load_bits<Vector<uint32_t>>(phases + index * kLanes<float>) + offset;
  }
};

// Number of vectors that are stored together: their 8-bit codes fill one vector.
constexpr int kTogether = sizeof(FourVectors) / sizeof(Vector<uint32_t>);
constexpr int64_t kElementsTogether = kTogether * kLanes<float>;

AMP_EXT_INLINE Vector<float> vector_at(const float* values, int index) {
  return load<Vector<float>>(values + index * kLanes<float>);
}

AMP_EXT_INLINE void store_upper_bits(BFloat16* to, const FourVectors& words) {
#pragma GCC unroll 4
  for (int k = 0; k < kTogether; k += 2) {
    amp_ext::store_upper_bits(&to[k * kLanes<float>].bits, words[k], words[k + 1]);
  }
}

// Loads a parameter or a moment. A split master may load as NaN after its parameter was set to 0
// from outside; the general code then updates the group.
template <typename NumberFormat>
AMP_EXT_INLINE Vector<float> fast_load(const Numbers<NumberFormat>& numbers, int64_t index) {
  return numbers.template load<Vector<float>>(index);
}
template <int kBits>
AMP_EXT_INLINE Vector<float> fast_load(const Numbers<Split<BFloat16, kBits>>& numbers,
                                       int64_t index) {
  return SplitMaster<BFloat16, kBits>::join_number(load_wide(&numbers.elements[index].bits) << 16,
                                                   load_signed(numbers.masters + index)
                                                       << (16 - kBits));
}

// Stores kTogether vectors that contain no NaN.
template <bool kDithers>
AMP_EXT_INLINE void fast_store(const Numbers<Plain<float>>& numbers, int64_t index,
                               const float* values, const Words& /*words*/) {
#pragma GCC unroll 4
  for (int k = 0; k < kTogether; ++k) {
    store(numbers.elements + index + k * kLanes<float>, vector_at(values, k));
  }
}
template <bool kDithers>
AMP_EXT_INLINE void upper_bits(const float* values, const Words& words, FourVectors& bits) {
#pragma GCC unroll 4
  for (int k = 0; k < kTogether; ++k) {
    const auto value = vector_at(values, k);
    if constexpr (kDithers) {
      bits[k] = dithered_to_upper_bits(value, words[k]);
    } else {
      bits[k] = rounded_to_upper_bits(value);
    }
  }
}
template <bool kDithers>
AMP_EXT_INLINE void fast_store(const Numbers<Plain<BFloat16>>& numbers, int64_t index,
                               const float* values, const Words& words) {
  FourVectors bits;
  upper_bits<kDithers>(values, words, bits);
  store_upper_bits(numbers.elements + index, bits);
}
template <bool kDithers>
AMP_EXT_INLINE void fast_store(const Numbers<Mastered<BFloat16>>& numbers, int64_t index,
                               const float* values, const Words& words) {
  fast_store<false>(Numbers<Plain<float>>{{numbers.masters}}, index, values, words);
  fast_store<false>(Numbers<Plain<BFloat16>>{{numbers.elements}}, index, values, words);
}
template <bool kDithers, int kBits>
AMP_EXT_INLINE void fast_store(const Numbers<Split<BFloat16, kBits>>& numbers, int64_t index,
                               const float* values, const Words& words) {
  FourVectors upper, residual;
#pragma GCC unroll 4
  for (int k = 0; k < kTogether; ++k) {
    auto bits = bits_of(vector_at(values, k));
    if constexpr (kBits == 8) {
      bits += words[k] >> 24;
      residual[k] = (bits >> 8) & 0xffu;
    } else {
      residual[k] = bits;
    }
    upper[k] = bits + 0x8000u;
  }
  store_upper_bits(numbers.elements + index, upper);
  if constexpr (kBits == 8) {
    store_low_bytes(numbers.masters + index, residual);
  } else {
#pragma GCC unroll 4
    for (int k = 0; k < kTogether; k += 2) {
      store_low_bits(numbers.masters + index + k * kLanes<float>, residual[k], residual[k + 1]);
    }
  }
}

// The results of a group before they are stored.
template <typename Arrays>
struct FastGroup {
  using NumberFormats = typename Arrays::NumberFormats;
  using V = Vector<float>;
  using U = Vector<uint32_t>;
  static constexpr bool kHasRoots = NumberFormats::kRoot >= 0;
  static constexpr int kBlocks = kGroupSize / kBlockSize;
  static constexpr int kBlockVectors = kBlockSize / kLanes<float>;
  static constexpr uint32_t kStride0 = NumberFormats::template kStride<0>;
  static constexpr uint32_t kStride1 = NumberFormats::template kStride<1>;
  template <int index>
  static constexpr bool kDithers =
      (usual_dither<NumberFormats>() & (kDithersBuffer0 << index)) != 0;

  alignas(64) float params[kGroupSize];
  alignas(64) float firsts[kGroupSize];
  alignas(64) float seconds[kGroupSize];  // second moments, or their roots if roots are stored
  // For each block, its exponent byte, and the bits of three floats that quantize its roots.
  alignas(64) uint8_t exponents[kLanes<float>];
  alignas(64) uint32_t units[kLanes<float>];
  alignas(64) uint32_t inverses[kLanes<float>];
  alignas(64) uint32_t leasts[kLanes<float>];

  // Updates the group of elements that starts at `first`. Returns true if no element is unusual.
  template <typename Functor>
  AMP_EXT_INLINE bool update(const TensorConstants<Functor, float>& constants, const Arrays& arrays,
                             int64_t first, const uint32_t* phases, bool asks_ahead) {
    const auto& first_moments = entry<0>(arrays.buffers);
    const auto& second_moments = entry<1>(arrays.buffers);
    NanSeen nan;
    U unusual = {};  // not 0 in lanes with an unusual number
    if constexpr (NumberFormats::kHasRatios) {
      // The code of a NaN has low bits 127; adding 1 then sets the upper bit of the byte.
      for (int64_t i = 0; i < kGroupSize; i += sizeof(U)) {
        unusual |= (load_bits<U>(first_moments.elements + first + i) & 0x7f7f7f7fu) + 0x01010101u;
      }
      unusual &= 0x80808080u;
    }
    [[maybe_unused]] U largest_second = {}, signs = {};
    [[maybe_unused]] Vector<int32_t> largest_roots[kBlocks];
    const Words words = {phases, constants.step * kStride1};
    for (int block = 0; block < kBlocks; ++block) {
      const int64_t begin = first + block * kBlockSize;
      if (asks_ahead && block % 2 == 0) arrays.prefetch_ahead(begin, 2 * kBlockSize);
      [[maybe_unused]] V old_unit;
      [[maybe_unused]] U largest_root = {};
      if constexpr (kHasRoots) {
        const uint32_t exponent = second_moments.exponents[begin / kBlockSize];
        old_unit = float_of(U{} + (exponent << 23));
      }
      V updated[kBlockVectors];
#pragma GCC unroll 8
      for (int k = 0; k < kBlockVectors; ++k) {
        const int64_t index = begin + k * kLanes<float>;
        const int place = block * kBlockVectors + k;  // index of the vector in the group
        V first_moment, second_moment;
        [[maybe_unused]] U unit;
        if constexpr (kHasRoots) {
          const U code = load_wide(second_moments.elements + index);
          const V root = RootCode::fast_decode((code << 17) + RootCode::kSixteenth, old_unit);
          second_moment = RootCode::number(root);
          unit = unit_below(bits_of(root));
        } else {
          second_moment = fast_load(second_moments, index);
          if constexpr (NumberFormats::kHasRatios) {
            // Collect signs: a negative second moment has no root.
            signs |= bits_of(second_moment);
            unit = ((bits_of(second_moment) >> 1) + 0x1fc00000u) & 0x7f800000u;
          }
        }
        if constexpr (NumberFormats::kHasRatios) {
          const U code = load_signed(first_moments.elements + index);
          first_moment = RatioCode::decode_number((code & 0x7fu) | RatioCode::kPlaceBits, unit,
                                                  code & 0x80000000u);
        } else {
          first_moment = fast_load(first_moments, index);
        }
        V param = fast_load(arrays.param, index);
        const V grad = arrays.grad.template load<V>(index) * constants.grad_factor;
        const V root = constants.update(grad, param, first_moment, second_moment);
        updated[k] = param;
        store(params + place * kLanes<float>, param);
        store(firsts + place * kLanes<float>, first_moment);
        if constexpr (kHasRoots) {
          store(seconds + place * kLanes<float>, root);
          const U bits = bits_of(RootCode::measured(root));
          largest_root = larger_word(largest_root, RootCode::lifted(bits, true, words[place]));
        } else {
          store(seconds + place * kLanes<float>, second_moment);
          if constexpr (NumberFormats::kHasRatios) {
            largest_second = larger_word(largest_second, bits_of(second_moment));
          }
        }
      }
#pragma GCC unroll 4
      for (int k = 0; k < kBlockVectors; k += 2) nan.add(updated[k], updated[k + 1]);
      if constexpr (kHasRoots) largest_roots[block] = as_signed(largest_root);
    }
    if constexpr (kHasRoots) {
      const auto largest = bit_cast<U>(largest_lanes(largest_roots));
      const U exponent = ((largest + RootCode::kReserve) >> 23) + 1u;
      unusual |= bit_cast<U>(as_signed(exponent) > static_cast<int>(RootCode::kLastUnit));
      store_low_bits(exponents, exponent);
      store_bits(units, exponent << 23);
      store_bits(inverses, (254u - exponent) << 23);
      store_bits(leasts, bits_of(float_of(exponent << 23) * 0x1p-10f));
    } else if constexpr (NumberFormats::kHasRatios) {
      // Above the largest bfloat16, dithering may turn a second moment into inf.
      unusual |= bit_cast<U>(as_signed(largest_second) >= 0x7f7f0000) | (signs & 0x80000000u);
    }
    return !nan.yes() && !any(unusual);
  }

  AMP_EXT_INLINE static V of_block(const uint32_t* words, int block) {
    return float_of(U{} + words[block]);
  }

  // Quantizes the results and stores them as the group that starts at `first`.
  AMP_EXT_INLINE void store_at(const Arrays& arrays, int64_t first, const uint32_t* phases,
                               uint32_t step) const {
    const auto& first_moments = entry<0>(arrays.buffers);
    const auto& second_moments = entry<1>(arrays.buffers);
    if constexpr (kHasRoots) {
      std::memcpy(second_moments.exponents + first / kBlockSize, exponents, kBlocks);
    }
    for (int part = 0; part < kGroupSize / kElementsTogether; ++part) {
      const int64_t offset = part * kElementsTogether;
      const int64_t index = first + offset;
      const auto words = [&](uint32_t stride) { return Words{phases + offset, step * stride}; };
      [[maybe_unused]] FourVectors twice_inverses;
      if constexpr (kHasRoots) {
        const Words own = words(kStride1);
        FourVectors codes;
#pragma GCC unroll 4
        for (int k = 0; k < kTogether; ++k) {
          const int block = part * kTogether / kBlockVectors + k / kBlockVectors;
          const U bits =
              RootCode::fast_encode<0>(vector_at(seconds + offset, k), of_block(leasts, block),
                                       of_block(inverses, block), own[k]);
          codes[k] = (bits - RootCode::kSixteenth) >> 17;
          const V root = RootCode::fast_decode(bits & 0xfffe0000u, of_block(units, block));
          twice_inverses[k] = twice_inverse_unit(bits_of(root));
        }
        store_low_bytes(second_moments.elements + index, codes);
      } else {
        FourVectors bits;
        upper_bits<kDithers<1>>(seconds + offset, words(kStride1), bits);
        store_upper_bits(second_moments.elements + index, bits);
#pragma GCC unroll 4
        for (int k = 0; k < kTogether; ++k) {
          twice_inverses[k] = twice_inverse_unit_below_root(bits[k]);
        }
      }
      if constexpr (NumberFormats::kHasRatios) {
        const Words own = words(kStride0);
        FourVectors places, moments;
#pragma GCC unroll 4
        for (int k = 0; k < kTogether; ++k) {
          const V moment = vector_at(firsts + offset, k);
          places[k] = (RatioCode::encode_number(moment, twice_inverses[k], own[k]) >> 13) & 0x7fu;
          moments[k] = bits_of(moment);
        }
        store_low_bytes(first_moments.elements + index, places, moments);
      } else {
        fast_store<kDithers<0>>(first_moments, index, firsts + offset, words(kStride0));
      }
      fast_store<true>(arrays.param, index, params + offset, words(kParamStride));
    }
  }
};

template <typename Arrays, bool kIsCautious, typename Functor>
void fast_step_tile_with(const TensorConstants<Functor, float>& constants, const Tile& tile) {
  TensorConstants<Functor, float> fast = constants;
  fast.update = constants.update.template usual<kIsCautious>();
  fast.grad_factor = constants.grad_factor * constants.direction;
  const auto step_generally = [&](int64_t begin, int64_t end) {
    step_tile_of<Arrays>(constants,
                         {tile.args, tile.index, tile.index_of_tile, begin, end, tile.end_ahead});
  };
  const Arrays arrays = Arrays::at(tile.args, 0);
  const int64_t end = tile.begin + (tile.end - tile.begin) / kGroupSize * kGroupSize;
  alignas(64) uint32_t room[kChunkSize + kBesidePhases];
  for (int64_t offset = tile.begin; offset < end;) {
    const int64_t count = std::min(end - offset, kChunkSize);
    const uint32_t* phases = fill_phases(tile.args.global_offset + offset, count, room);
    for (int64_t i = 0; i < count; i += kGroupSize) {
      const int64_t first = offset + i;
      const bool asks_ahead = first + kGroupSize + Arrays::kFarthest <= tile.end_ahead;
      FastGroup<Arrays> group;
      if (group.update(fast, arrays, first, phases + i, asks_ahead)) {
        group.store_at(arrays, first, phases + i, fast.step);
      } else {
        step_generally(first, first + kGroupSize);
      }
    }
    offset += count;
  }
  if (end < tile.end) step_generally(end, tile.end);
}

// Updates the elements of a tile. The fast path must support the tensor's options and dithering.
template <typename Arrays, typename Functor>
void fast_step_tile_of(const TensorConstants<Functor, float>& constants, const Tile& tile) {
  if (constants.update.weight_decay.is_cautious()) {
    fast_step_tile_with<Arrays, true>(constants, tile);
  } else {
    fast_step_tile_with<Arrays, false>(constants, tile);
  }
}

}  // namespace amp_ext::cpu::AMP_EXT_ISA
