// Operations on lists of tensors. Bad input makes them throw c10::Error before they write anything.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace amp_ext {

// Sets `found_inf` to 1 if an element of `tensors` is inf or NaN, or if `grad_scale` has no finite
// inverse; otherwise leaves it unchanged. If given, `sum_of_squares` is set, and `first_nonfinite`
// is lowered to the index of the first tensor with inf or NaN. Only reads `tensors`.
AMP_EXT_API void check_finite_(const TensorList& tensors, const at::Tensor& found_inf,
                               const OptionalTensor& grad_scale,
                               const OptionalTensor& sum_of_squares,
                               const OptionalTensor& first_nonfinite);

// Multiplies gradients in place by `inv_scale`. Updates `found_inf` and `first_nonfinite` as
// check_finite_ does, from the values before the multiplication.
AMP_EXT_API void unscale_(const TensorList& grads, const at::Tensor& inv_scale,
                          const at::Tensor& found_inf, const OptionalTensor& first_nonfinite);

// Clips gradients whose norm is `total_norm` to `max_norm`; writes nothing if the norm is small
// enough. The coefficient is float32, or float64 for float64 gradients with a float64 norm.
AMP_EXT_API void clip_grads_(const TensorList& grads, const at::Tensor& total_norm,
                             double max_norm);

// Returns one int64 tensor with the number of inf and NaN elements of each tensor.
AMP_EXT_API at::Tensor count_nonfinite(const TensorList& tensors);

// Tests the square roots, reciprocals and quotients of the fast path on a device. Returns an int64
// tensor with the three numbers of results that are not rounded to nearest, all 0 if the device
// works. Tries every `stride`-th of 2^24 roots, 2^23 reciprocals and 10^8 quotients.
AMP_EXT_API at::Tensor count_division_errors(const at::Device& device, int64_t stride = 1);

// Lowers the scale if a flag in `found_infs` is not 0, and raises it after `growth_interval`
// updates without overflow.
AMP_EXT_API void update_scale_(const at::Tensor& scale, const at::Tensor& growth_tracker,
                               const TensorList& found_infs,
                               const LossScaleHyperparameters& hyperparameters,
                               const OptionalTensor& hysteresis_tracker = {});

// Copies parameters that were changed without their masters into the masters. A master that already
// rounds to its parameter stays unchanged.
AMP_EXT_API void refresh_masters_(const TensorList& params, const TensorList& master_params);

// Updates averages of weights if the step was applied, and counts steps and averages. The first
// average is a copy of the weights; bfloat16 averages are dithered.
AMP_EXT_API void average_weights_(const AverageLists& lists, AverageOptions options = {});

// Returns the residual of a split master whose upper part is the 16-bit `param`: for `low_bits` 16
// as uint8 pairs in an extra last dimension, for 8 as one byte per element. If `master` does not
// round to `param`, the residual is that of `param` itself.
AMP_EXT_API at::Tensor split_fp32(const at::Tensor& param, const at::Tensor& master,
                                  int64_t low_bits);

// Returns the float32 master with the upper part `param` and the given residual.
AMP_EXT_API at::Tensor join_fp32(const at::Tensor& param, const at::Tensor& residual);

// Quantizes first moments to 8 bits, as ratios to the roots of the second moments, rounded to
// nearest. Moments are float32.
AMP_EXT_API at::Tensor quantize_ratios(const at::Tensor& moment, const at::Tensor& second_moment);
AMP_EXT_API at::Tensor dequantize_ratios(const at::Tensor& codes, const at::Tensor& second_moment);

// Quantizes moments to 8 bits with an exponent for each block of 32 elements, rounded to nearest.
// `code` is "q8s" for second moments, "q8m" for momenta. Returns the 8-bit values and exponents.
AMP_EXT_API std::pair<at::Tensor, at::Tensor> quantize_blockwise(const at::Tensor& moment,
                                                                 const std::string& code);
AMP_EXT_API at::Tensor dequantize_blockwise(const at::Tensor& codes, const at::Tensor& exponents,
                                            const std::string& code);

// Runs one step of the optimizer that has these hyperparameters.
template <typename Hyperparameters>
AMP_EXT_API void step_(const StepLists& lists, const Group<Hyperparameters>& options,
                       const GradientOptions& gradient_options,
                       const StepNames& names = names_of<Hyperparameters>());

}  // namespace amp_ext
