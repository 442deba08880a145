// Every kernel: the optimizers, and the dtypes that they are compiled for.
#pragma once

#include <iterator>
#include <optional>
#include <type_traits>

#include "elements/adam.h"
#include "elements/lion.h"
#include "elements/numbers.h"
#include "elements/sgd.h"
#include "elements/storage.h"

// functor.
#define AMP_EXT_FOR_EACH_OPTIMIZER(X) X(Adam) X(Lion) X(Sgd)

// functor, number of buffers: the first ones of those that its hyperparameters describe.
#define AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(X) \
  X(Adam, 2)                                 \
  X(Adam, 3) /* AMSGrad */                   \
  X(Lion, 1)                                 \
  X(Sgd, 0)                                  \
  X(Sgd, 1) /* momentum */

namespace amp_ext {

// The kinds of the numbers of a parameter: its gradient, itself, and its buffers by their roles.
template <typename GradKind, typename ParamKind, typename FirstMomentKind,
          typename SecondMomentKind = FirstMomentKind, typename MaximumKind = SecondMomentKind>
struct Combination {
  using Grad = GradKind;
  using Param = ParamKind;
  using T = typename ComputeType<typename Param::Stored>::type;  // the type that is computed in
  template <BufferRole role>
  using Buffer = std::conditional_t<
      role == BufferRole::kFirstMoment, FirstMomentKind,
      std::conditional_t<role == BufferRole::kSecondMoment, SecondMomentKind, MaximumKind>>;
  using FirstMoment = FirstMomentKind;
  static constexpr bool kHasSplitMaster =
      Param::kMaster == Master::kLow16 || Param::kMaster == Master::kLow8;
  static constexpr bool kHasCodes = is_code(FirstMoment::kFormat);
};

// Whether the first of a number of buffers may be in 8 bits: as a ratio to a second moment beside
// it, or alone.
template <typename Hyperparameters>
constexpr bool takes_format(BufferFormat first, int number_of_buffers) {
  if (first == BufferFormat::kBlockwise8) return number_of_buffers == 1;
  if (first != BufferFormat::kRatio8) return true;
  constexpr bool kHasTwo = std::size(Hyperparameters::kBuffers) > 1;
  constexpr BufferRole kSecond = Hyperparameters::kBuffers[kHasTwo ? 1 : 0].role;
  return number_of_buffers == 2 && kSecond == BufferRole::kSecondMoment;
}

// Whether a kernel is compiled for a combination.
template <typename Combination, typename Hyperparameters, int kBuffers>
constexpr bool is_compiled() {
  using FirstMoment = typename Combination::FirstMoment;
  // Without buffers one combination stands for all that differ in them.
  if (kBuffers == 0) return std::is_same_v<FirstMoment, Plain<typename Combination::T>>;
  return takes_format<Hyperparameters>(FirstMoment::kFormat, kBuffers);
}

template <typename... Each>
struct Combinations {};

template <typename... First, typename... Second>
Combinations<First..., Second...> joined(Combinations<First...>, Combinations<Second...>);

// 16-bit parameters with every master and every dtype of gradients, and buffers of one kind.
template <typename Param, typename Buffers>
struct WithBuffers {
  using Same = Plain<Param>;
  using Float = Plain<float>;
  using Kept = Mastered<Param>;
  using With16 = Split<Param, 16>;
  using With8 = Split<Param, 8>;
  using Whole = Combinations<Combination<Same, Kept, Buffers>, Combination<Float, Kept, Buffers>,
                             Combination<Same, Same, Buffers>, Combination<Float, Same, Buffers>>;
  using Parts =
      Combinations<Combination<Same, With16, Buffers>, Combination<Float, With16, Buffers>,
                   Combination<Same, With8, Buffers>, Combination<Float, With8, Buffers>>;
  using Type = decltype(joined(Whole(), Parts()));
};

// A gradient and a parameter with all moments in 8 bits that are compiled.
template <typename Grad, typename Param>
using WithCodes = Combinations<Combination<Grad, Param, Ratio, Plain<BFloat16>>,
                               Combination<Grad, Param, Ratio, Blockwise<RootCode>>,
                               Combination<Grad, Param, Blockwise<MomentumCode>>>;

// The same for 16-bit parameters with every master, with gradients of their own dtype.
template <typename Param>
struct WithMastersAndCodes {
  using Same = Plain<Param>;
  using Whole = decltype(joined(WithCodes<Same, Same>(), WithCodes<Same, Mastered<Param>>()));
  using Parts =
      decltype(joined(WithCodes<Same, Split<Param, 16>>(), WithCodes<Same, Split<Param, 8>>()));
  using Type = decltype(joined(Whole(), Parts()));
};

// The combinations of 16-bit parameters in parts, for each of which the CUDA engine has a source.
template <typename Param>
using WithFloat32 = typename WithBuffers<Param, Plain<float>>::Type;
template <typename Param>
using WithBFloat16 = typename WithBuffers<Param, Plain<BFloat16>>::Type;
template <typename Param>
struct WithOthers {
  using Type = typename WithMastersAndCodes<Param>::Type;
};
template <>
struct WithOthers<Half> {
  using Type =
      decltype(joined(WithBuffers<Half, Plain<Half>>::Whole(), WithMastersAndCodes<Half>::Type()));
};

// Every combination that the engines are compiled for, by the dtype of the parameter.
template <typename Param>
struct CombinationsFor {
  using Plains = decltype(joined(WithFloat32<Param>(), WithBFloat16<Param>()));
  using Type = decltype(joined(Plains(), typename WithOthers<Param>::Type()));
};
template <>
struct CombinationsFor<float> {
  using Float = Plain<float>;
  using Narrow = Plain<BFloat16>;
  using Plains =
      Combinations<Combination<Float, Float, Float>, Combination<Plain<Half>, Float, Float>,
                   Combination<Narrow, Float, Float>, Combination<Float, Float, Narrow>,
                   Combination<Plain<Half>, Float, Narrow>, Combination<Narrow, Float, Narrow>>;
  using Type = decltype(joined(Plains(), WithCodes<Float, Float>()));
};
template <>
struct CombinationsFor<double> {
  using Double = Plain<double>;
  using Type =
      Combinations<Combination<Double, Double, Double>, Combination<Plain<float>, Double, Double>>;
};

// The kind of buffer number `index` of a kernel; Absent behind its last.
template <typename Combination, typename Hyperparameters, int kBuffers, int index,
          bool is_present = (index < kBuffers)>
struct BufferKind {
  using Type = Absent;
};
template <typename Combination, typename Hyperparameters, int kBuffers, int index>
struct BufferKind<Combination, Hyperparameters, kBuffers, index, true> {
  using Type = typename Combination::template Buffer<Hyperparameters::kBuffers[index].role>;
};

// Names a kernel of the list: kAdam2, kAdam3, kSgd0, ...
enum class OptimizerKernel : int {
#define AMP_EXT_NAME(Functor, buffers) k##Functor##buffers,
  AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_NAME)
#undef AMP_EXT_NAME
};

// The kernel that takes these hyperparameters and this number of buffers, if there is one.
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
                #Functor " describes fewer buffers than its kernel has");
AMP_EXT_FOR_EACH_OPTIMIZER_KERNEL(AMP_EXT_CHECK)
#undef AMP_EXT_CHECK

}  // namespace amp_ext
