// Calls list operations from a program without Python, and catches an error.
#include <ATen/ops/full.h>
#include <amp_ext/ops.h>

#include <cstdio>

int main() {
  using namespace amp_ext;
  const auto filled = [](double value, at::ScalarType dtype) {
    return at::full({3}, value, at::TensorOptions().dtype(dtype));
  };
  Group<AdamHyperparameters> adam;
  adam.lr = 0.5;
  adam.timestep = 1.0;
  StepLists lists;
  lists.params = {filled(1.0, at::kFloat)};
  lists.grads = {filled(1.0, at::kFloat)};
  lists.buffers = {TensorList{filled(0.0, at::kFloat)}, TensorList{filled(0.0, at::kFloat)}, {}};
  step_(lists, adam, {});  // the first step of Adam is lr
  lists.grads = {filled(1.0, at::kLong)};
  try {
    step_(lists, adam, {});
  } catch (const c10::Error& error) {
    std::printf("caught: %s\n", error.what_without_backtrace());
  }
  std::printf("stepped by %g\n", 1.0 - lists.params[0].mean().item<double>());
}
