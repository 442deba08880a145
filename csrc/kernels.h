// List of all kernels: the optimizers, and the number formats for which they are compiled.
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "formats/buffer_descriptions.h"
#include "formats/numbers.h"
#include "formats/storage.h"
#include "formulas/adam.h"
#include "formulas/lion.h"
#include "formulas/muon.h"
#include "formulas/sgd.h"

// Calls X(functor) for each optimizer whose step is one launch.
#define AMP_EXT_FOR_EACH_OPTIMIZER(X) X(Adam) X(Lion) X(Sgd)

// Calls X(functor, n) for each kernel, which uses the first n buffers of Hyperparameters::kBuffers.
#define AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(X) \
  X(Adam, 2)                                 \
  X(Adam, 3) /* AMSGrad */                   \
  X(Lion, 1)                                 \
  X(Muon, 1) /* its update */                \
  X(Sgd, 0)                                  \
  X(Sgd, 1) /* momentum */

namespace amp_ext {

#define AMP_EXT_COUNT(Functor, buffers) buffers,
// Largest number of buffers of a kernel.
inline constexpr int kMaxBuffers = std::max({AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_COUNT)});
#undef AMP_EXT_COUNT
static_assert(kMaxBuffers <= 7, "the bits of `dithered` in a record tell up to 7 buffers apart");

// True for the kernel that writes an update in place of the parameter.
template <typename Hyperparameters>
inline constexpr bool kWritesUpdate = std::is_same_v<Hyperparameters, MuonHyperparameters>;

// Formats of a gradient, its parameter, and the parameter's buffers (Uniform or Coded).
template <typename GradFormat, typename ParamFormat, typename BuffersOfParam>
struct Combination {
  using Grad = GradFormat;
  using Param = ParamFormat;
  using Buffers = BuffersOfParam;
  using T = typename ComputeType<typename Param::Stored>::type;  // type of the computation
  static constexpr bool kParamIsUpdate = false;
};

// Formats of a gradient and a momentum with which a bfloat16 update is written.
template <typename GradFormat, typename BuffersOfParam>
struct UpdateCombination : Combination<GradFormat, Plain<BFloat16>, BuffersOfParam> {
  static constexpr bool kParamIsUpdate = true;
};

// Formats of all arrays of one kernel. Its buffers are the first ones of Hyperparameters::kBuffers.
template <typename OwnHyperparameters, typename GradFormat, typename ParamFormat,
          typename... BufferFormatTypes>
struct NumberFormats {
  using Hyperparameters = OwnHyperparameters;
  using Grad = GradFormat;
  using Param = ParamFormat;
  template <int index>
  using Buffer = std::tuple_element_t<index, std::tuple<BufferFormatTypes...>>;
  using T = typename ComputeType<typename Param::Stored>::type;

  static constexpr int kBuffers = sizeof...(BufferFormatTypes);
  using Indices = std::make_integer_sequence<int, kBuffers>;      // indices of the buffers
  static constexpr int kArraySize = kBuffers > 0 ? kBuffers : 1;  // size of arrays, at least 1

  static constexpr bool kHasSplitMaster =
      Param::kMaster == Master::kResidual16 || Param::kMaster == Master::kResidual8;
  static constexpr bool kHasCodes = (is_code(BufferFormatTypes::kFormat) || ...);
  template <int index>
  static constexpr bool kIsRatio = Buffer<index>::kFormat == BufferFormat::kRatio8;
  template <int index>
  static constexpr bool kIsInBlocks = Buffer<index>::kFormat == BufferFormat::kBlockwise8;
  static constexpr bool kHasRatios = (std::is_same_v<BufferFormatTypes, Ratio> || ...);
  static constexpr bool kHasBlocks =
      ((BufferFormatTypes::kFormat == BufferFormat::kBlockwise8) || ...);
  static constexpr int kSecondMoment =
      BufferDescriptions::of<Hyperparameters>(kBuffers).second_moment();
  // Index of the buffer whose square root the functor returns; -1 if no format needs the root.
  static constexpr int kRoot =
      (std::is_same_v<BufferFormatTypes, Blockwise<RootCode>> || ...) ? kSecondMoment : -1;

  template <int index>
  static constexpr uint32_t kStride = Hyperparameters::kBuffers[index].dither_stride;
};

template <typename Combination, typename Hyperparameters, typename Indices>
struct FormatsAt;
template <typename Combination, typename Hyperparameters, int... index>
struct FormatsAt<Combination, Hyperparameters, std::integer_sequence<int, index...>> {
  using Type =
      NumberFormats<Hyperparameters, typename Combination::Grad, typename Combination::Param,
                    typename Combination::Buffers::template NumberFormat<
                        Hyperparameters::kBuffers[index].code>...>;
};
template <typename Combination, typename Hyperparameters, int kBuffers>
using FormatsOf = typename FormatsAt<Combination, Hyperparameters,
                                     std::make_integer_sequence<int, kBuffers>>::Type;

// True if a kernel is compiled for this combination.
template <typename Combination, typename Hyperparameters, int kBuffers>
constexpr bool is_compiled() {
  using Buffers = typename Combination::Buffers;
  if constexpr (Combination::kParamIsUpdate != kWritesUpdate<Hyperparameters>) {
    return false;
  } else if constexpr (Buffers::kAreCoded) {
    return BufferDescriptions::of<Hyperparameters>(kBuffers).are_taken_in(Buffers::kCodes);
  } else {
    // Without buffers, all Uniform formats would give the same kernel.
    return kBuffers > 0 || std::is_same_v<Buffers, Uniform<typename Combination::T>>;
  }
}

template <typename... Each>
struct Combinations {};

template <typename... First, typename... Second>
Combinations<First..., Second...> joined(Combinations<First...>, Combinations<Second...>);

// Combinations of 16-bit parameters with every kind of master and gradient dtype, and with buffers
// stored as `Buffers`.
template <typename Param, typename Buffers>
struct WithBuffers {
  using Same = Plain<Param>;
  using Float = Plain<float>;
  using WithMaster = Mastered<Param>;
  using WithResidual16 = Split<Param, 16>;
  using WithResidual8 = Split<Param, 8>;
  using WithoutSplitMasters =
      Combinations<Combination<Same, WithMaster, Buffers>, Combination<Float, WithMaster, Buffers>,
                   Combination<Same, Same, Buffers>, Combination<Float, Same, Buffers>>;
  using WithSplitMasters = Combinations<
      Combination<Same, WithResidual16, Buffers>, Combination<Float, WithResidual16, Buffers>,
      Combination<Same, WithResidual8, Buffers>, Combination<Float, WithResidual8, Buffers>>;
  using Type = decltype(joined(WithoutSplitMasters(), WithSplitMasters()));
};

// Combinations of one gradient format and one parameter format with every set of 8-bit formats.
template <typename Grad, typename Param>
using WithCodes = Combinations<Combination<Grad, Param, Coded<Codes::kAll>>,
                               Combination<Grad, Param, Coded<Codes::kAllButRoots>>>;

// Combinations of 16-bit parameters and gradients with every kind of master and 8-bit moments.
template <typename Param>
struct WithMastersAndCodes {
  using Same = Plain<Param>;
  using WithoutSplitMasters =
      decltype(joined(WithCodes<Same, Same>(), WithCodes<Same, Mastered<Param>>()));
  using WithSplitMasters =
      decltype(joined(WithCodes<Same, Split<Param, 16>>(), WithCodes<Same, Split<Param, 8>>()));
  using Type = decltype(joined(WithoutSplitMasters(), WithSplitMasters()));
};

// Combinations of 16-bit parameters in three parts, one per source of the CUDA engine.
template <typename Param>
using WithFloat32 = typename WithBuffers<Param, Uniform<float>>::Type;
template <typename Param>
using WithBFloat16 = typename WithBuffers<Param, Uniform<BFloat16>>::Type;
template <typename Param>
struct WithOthers;
template <>
struct WithOthers<BFloat16> {
  template <typename Buffers>
  using Updates = Combinations<UpdateCombination<Plain<float>, Buffers>,
                               UpdateCombination<Plain<Half>, Buffers>,
                               UpdateCombination<Plain<BFloat16>, Buffers>>;
  using AllUpdates =
      decltype(joined(joined(Updates<Uniform<float>>(), Updates<Uniform<BFloat16>>()),
                      Updates<Coded<Codes::kAll>>()));
  using Type = decltype(joined(WithMastersAndCodes<BFloat16>::Type(), AllUpdates()));
};
template <>
struct WithOthers<Half> {
  using Type = decltype(joined(WithBuffers<Half, Uniform<Half>>::WithoutSplitMasters(),
                               WithMastersAndCodes<Half>::Type()));
};

// All combinations for which the engines are compiled, by the dtype of the parameter.
template <typename Param>
struct CombinationsFor {
  using Plains = decltype(joined(WithFloat32<Param>(), WithBFloat16<Param>()));
  using Type = decltype(joined(Plains(), typename WithOthers<Param>::Type()));
};
template <>
struct CombinationsFor<float> {
  using Float = Plain<float>;
  template <typename Buffers>
  using WithGrads =
      Combinations<Combination<Float, Float, Buffers>, Combination<Plain<Half>, Float, Buffers>,
                   Combination<Plain<BFloat16>, Float, Buffers>>;
  using Plains = decltype(joined(WithGrads<Uniform<float>>(), WithGrads<Uniform<BFloat16>>()));
  using Type = decltype(joined(Plains(), WithCodes<Float, Float>()));
};
template <>
struct CombinationsFor<double> {
  using Double = Plain<double>;
  using Type = Combinations<Combination<Double, Double, Uniform<double>>,
                            Combination<Plain<float>, Double, Uniform<double>>>;
};

// Kernels, named by their functor and their number of buffers: kAdam2, kAdam3, kSgd0, ...
enum class OptimizerKernel : int {
#define AMP_EXT_NAME(Functor, buffers) k##Functor##buffers,
  AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_NAME)
#undef AMP_EXT_NAME
};

// Returns the kernel with these hyperparameters and this number of buffers, or nullopt.
template <typename Hyperparameters>
std::optional<OptimizerKernel> kernel_for(int number_of_buffers) {
#define AMP_EXT_MATCH(Functor, buffers)                                   \
  if (std::is_same_v<Functor<float>::Hyperparameters, Hyperparameters> && \
      number_of_buffers == buffers) {                                     \
    return OptimizerKernel::k##Functor##buffers;                          \
  }
  AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_MATCH)
#undef AMP_EXT_MATCH
  return std::nullopt;
}

#define AMP_EXT_CHECK(Functor, buffers)                                                     \
  static_assert(buffers <= static_cast<int>(std::size(Functor##Hyperparameters::kBuffers)), \
                #Functor " describes fewer buffers than its kernel has");                   \
  static_assert(BufferDescriptions::of<Functor##Hyperparameters>(buffers).fit_together(),   \
                #Functor " describes codes that do not fit together");
AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_CHECK)
#undef AMP_EXT_CHECK

}  // namespace amp_ext
