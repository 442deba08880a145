// Operations on lists of tensors. They check all arguments and throw c10::Error before they write.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace amp_ext {

// Sets `found_inf` to 1 if an element of `tensors` is inf or NaN, or if `grad_scale` has no finite
// inverse; otherwise leaves it unchanged. If given, `sum_of_squares` is set to the sum of the
// squares of all elements, and `first_nonfinite` is lowered to the index of the first tensor with
// inf or NaN. Only reads `tensors`.
AMP_EXT_API void check_finite_(const TensorList& tensors, const at::Tensor& found_inf,
                               const OptionalTensor& grad_scale,
                               const OptionalTensor& sum_of_squares,
                               const OptionalTensor& first_nonfinite);

// Multiplies gradients in place by `inv_scale`. Updates `found_inf` and `first_nonfinite` as
// check_finite_ does, according to the gradients before the multiplication.
AMP_EXT_API void unscale_(const TensorList& grads, const at::Tensor& inv_scale,
                          const at::Tensor& found_inf, const OptionalTensor& first_nonfinite);

// Scales gradients down so that their global norm, which the caller passes as `total_norm`, becomes
// `max_norm`. Writes nothing if the norm is already small enough. The factor is computed in
// float32, or in float64 for float64 gradients with a float64 norm.
AMP_EXT_API void clip_grads_(const TensorList& grads, const at::Tensor& total_norm,
                             double max_norm);

// Returns one int64 tensor with the number of inf and NaN elements of each tensor.
AMP_EXT_API at::Tensor count_nonfinite(const TensorList& tensors);

// Tests the square roots, reciprocals and quotients of the fast path on a device. Returns an int64
// tensor with the numbers of roots, reciprocals and quotients that are not rounded to nearest; all
// are 0 if the device works. Tries every `stride`-th of 2^24 roots, 2^23 reciprocals and 10^8
// quotients.
AMP_EXT_API at::Tensor count_division_errors(const at::Device& device, int64_t stride = 1);

// Lowers the scale if a flag in `found_infs` is not 0, and raises it after `growth_interval`
// updates without overflow.
AMP_EXT_API void update_scale_(const at::Tensor& scale, const at::Tensor& growth_tracker,
                               const TensorList& found_infs,
                               const LossScaleHyperparameters& hyperparameters,
                               const OptionalTensor& hysteresis_tracker = {});

// Copies each parameter into its float32 master weight, for parameters that were changed without
// their master weights. A master weight that already rounds to its parameter stays unchanged.
AMP_EXT_API void refresh_masters_(const TensorList& params, const TensorList& master_params);

// Moves each average towards its parameter: average += weight * (param - average). `weight` is one
// double on the device, such as 1 - decay; 0 (after a skipped step) changes nothing. `number` is
// the number of the average, one double: if it is 1, the average becomes the parameter. Averages
// are float32, or bfloat16 with dithering. Pass float32 masters as `params`. `residuals` has the
// residual of each split master, or an empty tensor. For shards, `global_offsets` has the index of
// the first element in the full tensor.
AMP_EXT_API void average_params_(const TensorList& averages, const TensorList& params,
                                 const at::Tensor& weight, const at::Tensor& number,
                                 const OptionalTensorList& residuals = {},
                                 const std::optional<std::vector<int64_t>>& global_offsets = {});

// Returns the residual of a split master weight: the part of the float32 `master` that the 16-bit
// `param` does not hold. If `low_bits` is 16, the residual has two uint8 per element, in an extra
// last dimension; if it is 8, one uint8 per element. If `master` does not round to `param`, the
// result is the residual of `param` converted to float32.
AMP_EXT_API at::Tensor split_fp32(const at::Tensor& param, const at::Tensor& master,
                                  int64_t low_bits);

// Returns the float32 master weight that consists of the 16-bit `param` and its residual.
AMP_EXT_API at::Tensor join_fp32(const at::Tensor& param, const at::Tensor& residual);

// Quantize float32 first moments to 8 bits and dequantize them. The 8 bits hold the ratio of a
// first moment to the square root of its second moment (float32), rounded to nearest.
AMP_EXT_API at::Tensor quantize_ratios(const at::Tensor& moment, const at::Tensor& second_moment);
AMP_EXT_API at::Tensor dequantize_ratios(const at::Tensor& codes, const at::Tensor& second_moment);

// Quantize moments to 8 bits, and dequantize them. Each block of 32 elements has one exponent, and
// values are rounded to nearest. `code` is the format: "q8s" for second moments, "q8m" for momenta.
// quantize_blockwise returns the 8-bit values and the exponents.
AMP_EXT_API std::pair<at::Tensor, at::Tensor> quantize_blockwise(const at::Tensor& moment,
                                                                 const std::string& code);
AMP_EXT_API at::Tensor dequantize_blockwise(const at::Tensor& codes, const at::Tensor& exponents,
                                            const std::string& code);

// Runs one step of the optimizer that has these hyperparameters.
template <typename Hyperparameters>
AMP_EXT_API void step_(const StepLists& lists, const Group<Hyperparameters>& options,
                       const GradientOptions& gradient_options,
                       const StepNames& names = names_of<Hyperparameters>());

// Runs one step of Muon. Each parameter is a matrix, or more of them (MuonOptions::flatten). A
// matrix whose iteration gives inf or NaN is left as it was, and counted in `skipped_matrices`, one
// int64. `timestep` and `global_offsets` are not supported.
AMP_EXT_API void muon_(const StepLists& lists, const Group<MuonHyperparameters>& options,
                       const MuonOptions& matrix_options, const GradientOptions& gradient_options,
                       const OptionalTensor& skipped_matrices = {},
                       const StepNames& names = names_of<MuonHyperparameters>());

// Runs one step over parameter groups that have options of their own. `max_grad_norm` clips the
// norm over all groups, which may be on several devices. Errors name tensors by their groups:
// "AdamW: exp_avg of group 0, param 3".
template <typename Hyperparameters>
AMP_EXT_API void step_groups_(const std::vector<std::vector<StepParam>>& groups,
                              const std::vector<Group<Hyperparameters>>& options,
                              const GradientOptions& gradient_options,
                              const std::string& operation);

}  // namespace amp_ext
