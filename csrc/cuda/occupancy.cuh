// Chooses how many blocks of a step kernel must fit into the registers of a multiprocessor (the
// second argument of __launch_bounds__). The numbers are low enough that no loop spills.
#pragma once

#include <type_traits>

#include "cuda/tensor_table.cuh"
#include "kernels.h"

namespace amp_ext::cuda {

// Class of a formula by its registers. scripts/compile_kernels.sh says whether a kernel has enough.
enum class Weight { kUnknown, kLeast, kLight, kMedium, kHeavy };

// The class of a functor with its first kBuffers buffers.
template <template <typename> class Functor, int kBuffers>
inline constexpr Weight kWeight = Weight::kUnknown;
template <>
inline constexpr Weight kWeight<Sgd, 0> = Weight::kLeast;
template <>
inline constexpr Weight kWeight<Sgd, 1> = Weight::kLight;
template <>
inline constexpr Weight kWeight<Lion, 1> = Weight::kLight;
template <>
inline constexpr Weight kWeight<Adam, 2> = Weight::kMedium;
template <>
inline constexpr Weight kWeight<Adam, 3> = Weight::kHeavy;

// Returns the number of blocks for the general kernel. `architecture` is 900 for sm_90.
template <template <typename> class Functor, typename Arrays>
constexpr int blocks_on(int architecture) {
  using NumberFormats = typename Arrays::NumberFormats;
  using Param = typename NumberFormats::Param;
  constexpr Weight kFormula = kWeight<Functor, NumberFormats::kBuffers>;
  constexpr bool kHasLowPrecisionBuffers = Arrays::kHasLowPrecisionBuffers;
  if (sizeof(typename NumberFormats::T) == 8) {
    return kFormula == Weight::kUnknown && architecture >= 1000 ? 1 : 2;
  }
  if (kFormula == Weight::kLeast) return NumberFormats::kHasSplitMaster ? 3 : 4;
  if (Arrays::kPackSize == 4 && kFormula != Weight::kUnknown) {
    return kHasLowPrecisionBuffers && architecture >= 1000 ? 3 : 4;
  }
  if (kFormula == Weight::kHeavy || kFormula == Weight::kUnknown) {
    const bool takes_most = Param::kMaster == Master::kResidual8 ||
                            (Param::kMaster != Master::kNone && kHasLowPrecisionBuffers);
    return takes_most && architecture >= 1000 ? 1 : 2;
  }
  if (kHasLowPrecisionBuffers || Param::kMaster == Master::kResidual8) {
    if (architecture >= 1000 || (Param::kMaster == Master::kFloat32 && !NumberFormats::kHasCodes))
      return 2;
    constexpr bool kHasBoth = NumberFormats::kHasCodes && NumberFormats::kHasSplitMaster;
    if (kFormula == Weight::kLight &&
        (architecture < 900 || Param::kMaster == Master::kResidual8 || kHasBoth)) {
      return 2;
    }
    if (NumberFormats::kRoot >= 0 && std::is_same_v<Param, Split<Half, 8>>) return 2;
    return 3;
  }
  if (kFormula == Weight::kMedium && architecture >= 1000) return 2;
  return kFormula == Weight::kMedium && Param::kMaster == Master::kFloat32 ? 4 : 3;
}

// Returns the number of threads in a block of the fast path.
template <typename Arrays>
constexpr int fast_threads() {
  return sizeof(typename Arrays::NumberFormats::Param::Stored) == 2 ? kThreads / 2 : kThreads;
}

// Returns the number of blocks for the fast path.
template <template <typename> class Functor, typename Arrays>
constexpr int fast_blocks_on(int architecture) {
  constexpr bool kTakesMore =
      std::is_same_v<Functor<float>, Lion<float>> && Arrays::NumberFormats::kHasCodes;
  constexpr int kScale = kThreads / fast_threads<Arrays>();
  if (architecture >= 900 && architecture < 1000) return (kTakesMore ? 3 : 4) * kScale;
  return blocks_on<Functor, Arrays>(architecture) * kScale;
}

}  // namespace amp_ext::cuda
