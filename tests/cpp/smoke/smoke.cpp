// Calls list operations from a program without Python, and catches an error.
#include <ATen/ATen.h>
#include <amp_ext/ops.h>

#include <cstdio>

int main() {
  using namespace amp_ext;
  const at::Tensor ones = at::ones({3});
  Group<AdamHyperparameters> adam;
  adam.lr = 0.5;
  adam.timestep = 1.0;
  StepLists lists;
  lists.params = {ones.clone()};
  lists.grads = {ones};
  lists.buffers = {TensorList{at::zeros({3})}, TensorList{at::zeros({3})}, {}};
  step_(lists, adam, {});  // the first step of Adam is lr
  lists.grads = {ones.to(at::kLong)};
  try {
    step_(lists, adam, {});
  } catch (const c10::Error& error) {
    std::printf("caught: %s\n", error.what_without_backtrace());
  }
  std::printf("stepped by %g\n", 1.0 - lists.params[0].mean().item<double>());
}
