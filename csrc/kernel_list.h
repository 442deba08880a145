// Every kernel: the optimizers, and the dtypes that they are compiled for.
#pragma once

#include <iterator>
#include <optional>
#include <type_traits>

#include "functors/adam.h"
#include "functors/lion.h"
#include "functors/sgd.h"
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

// The dtypes of a gradient and of the buffers beside a parameter, which may have a float32 master.
template <typename GradType, typename BufferType, bool kMaster>
struct Combination {
  using Grad = GradType;
  using Buffer = BufferType;
  static constexpr bool kHasMaster = kMaster;
};

template <typename... Each>
struct Combinations {};

// Every combination that the engines are compiled for, by the dtype of the parameter.
template <typename Param>
struct CombinationsFor {  // Half and BFloat16
  using type = Combinations<Combination<Param, float, true>, Combination<float, float, true>,
                            Combination<Param, Param, true>, Combination<float, Param, true>,
                            Combination<Param, float, false>, Combination<float, float, false>,
                            Combination<Param, Param, false>, Combination<float, Param, false>>;
};
template <>
struct CombinationsFor<float> {
  using type = Combinations<Combination<float, float, false>, Combination<Half, float, false>,
                            Combination<BFloat16, float, false>>;
};
template <>
struct CombinationsFor<double> {
  using type = Combinations<Combination<double, double, false>, Combination<float, double, false>>;
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
