// Every kernel: the optimizers, and the dtypes that they are compiled for.
#pragma once

#include <iterator>
#include <optional>
#include <type_traits>

#include "functors/adam.h"
#include "functors/lion.h"
#include "functors/sgd.h"
#include "numbers.h"
#include "storage.h"

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
  // Kernels without buffers are compiled for the combinations with these alone.
  static constexpr bool kHasComputedBuffers = std::is_same_v<FirstMomentKind, Plain<T>>;
  static constexpr bool kHasSplitMaster =
      Param::kMaster == Master::kLow16 || Param::kMaster == Master::kLow8;
};

template <typename... Each>
struct Combinations {};

// Every combination that the engines are compiled for, by the dtype of the parameter.
template <typename Param>
struct CombinationsFor;
template <>
struct CombinationsFor<Half> {
  using Same = Plain<Half>;
  using Float = Plain<float>;
  using Narrow = Plain<BFloat16>;
  using Kept = Mastered<Half>;
  using With16 = Split<Half, 16>;
  using With8 = Split<Half, 8>;
  using Type = Combinations<Combination<Same, Kept, Float>, Combination<Float, Kept, Float>,
                            Combination<Same, Kept, Same>, Combination<Float, Kept, Same>,
                            Combination<Same, Kept, Narrow>, Combination<Float, Kept, Narrow>,
                            Combination<Same, Same, Float>, Combination<Float, Same, Float>,
                            Combination<Same, Same, Same>, Combination<Float, Same, Same>,
                            Combination<Same, Same, Narrow>, Combination<Float, Same, Narrow>,
                            Combination<Same, With16, Float>, Combination<Float, With16, Float>,
                            Combination<Same, With16, Narrow>, Combination<Float, With16, Narrow>,
                            Combination<Same, With8, Float>, Combination<Float, With8, Float>,
                            Combination<Same, With8, Narrow>, Combination<Float, With8, Narrow>>;
};
template <>
struct CombinationsFor<BFloat16> {
  using Same = Plain<BFloat16>;
  using Float = Plain<float>;
  using Kept = Mastered<BFloat16>;
  using With16 = Split<BFloat16, 16>;
  using With8 = Split<BFloat16, 8>;
  using Type = Combinations<Combination<Same, Kept, Float>, Combination<Float, Kept, Float>,
                            Combination<Same, Kept, Same>, Combination<Float, Kept, Same>,
                            Combination<Same, Same, Float>, Combination<Float, Same, Float>,
                            Combination<Same, Same, Same>, Combination<Float, Same, Same>,
                            Combination<Same, With16, Float>, Combination<Float, With16, Float>,
                            Combination<Same, With16, Same>, Combination<Float, With16, Same>,
                            Combination<Same, With8, Float>, Combination<Float, With8, Float>,
                            Combination<Same, With8, Same>, Combination<Float, With8, Same>>;
};
template <>
struct CombinationsFor<float> {
  using Float = Plain<float>;
  using Narrow = Plain<BFloat16>;
  using Type =
      Combinations<Combination<Float, Float, Float>, Combination<Plain<Half>, Float, Float>,
                   Combination<Narrow, Float, Float>, Combination<Float, Float, Narrow>,
                   Combination<Plain<Half>, Float, Narrow>, Combination<Narrow, Float, Narrow>>;
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
