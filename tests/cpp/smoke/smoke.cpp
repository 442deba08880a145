// Calls list operations from a program without Python, and catches what they throw.
#include <ATen/ops/full.h>
#include <amp_ext/ops.h>

#include <cstdio>
#include <limits>
#include <string>

namespace {

int failures = 0;

void check(bool holds, const char* what) {
  if (!holds) {
    std::printf("FAILED: %s\n", what);
    ++failures;
  }
}

at::Tensor filled(double value, at::ScalarType dtype = at::kFloat) {
  return at::full({3}, value, at::TensorOptions().dtype(dtype));
}

bool is_filled(const at::Tensor& tensor, double value) {
  return tensor.sub(value).abs().max().item<double>() < 1e-6;
}

}  // namespace

int main() {
  using namespace amp_ext;
  Group<AdamHyperparameters> adam;
  adam.lr = 0.5;
  adam.timestep = 1.0;
  StepLists lists;
  lists.params = {filled(1.0)};
  lists.grads = {filled(1.0)};
  lists.buffers = {TensorList{filled(0.0)}, TensorList{filled(0.0)}, {}};
  step_(lists, adam, {});
  check(is_filled(lists.params[0], 0.5), "the first step of Adam is lr");

  const at::Tensor found_inf = at::full({}, 0.0, at::TensorOptions().dtype(at::kFloat));
  check_finite_(lists.grads, found_inf, {}, {}, {});
  check(found_inf.item<float>() == 0.0f, "finite gradients are finite");
  lists.grads = {filled(std::numeric_limits<double>::infinity())};
  check_finite_(lists.grads, found_inf, {}, {}, {});
  check(found_inf.item<float>() == 1.0f, "inf is found");

  lists.grads = {filled(1.0, at::kLong)};
  try {
    step_(lists, adam, {});
    check(false, "gradients of integers are refused");
  } catch (const c10::Error& error) {
    std::printf("caught: %s\n", error.what_without_backtrace());
  }
  check(is_filled(lists.params[0], 0.5), "nothing is written before an error");
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
