// The operations over lists of tensors. They throw c10::Error on bad input, before anything is
// written.
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

// Sets found_inf to 1 if an element of `tensors` is inf or NaN, or if grad_scale has no finite
// inverse; otherwise leaves it. Sets sum_of_squares, if given, and lowers first_nonfinite, if
// given, to the index of the first such tensor. Only reads the tensors.
AMP_EXT_API void check_finite_(const TensorList& tensors, const at::Tensor& found_inf,
                               const OptionalTensor& grad_scale,
                               const OptionalTensor& sum_of_squares,
                               const OptionalTensor& first_nonfinite);

// Multiplies gradients by inv_scale in place; found_inf and first_nonfinite as above, of the values
// before.
AMP_EXT_API void unscale_(const TensorList& grads, const at::Tensor& inv_scale,
                          const at::Tensor& found_inf, const OptionalTensor& first_nonfinite);

// Multiplies gradients of this norm by the coefficient that brings it down to max_norm: in float32,
// but float64 ones by a float64 norm in float64. Writes nothing where it is small enough.
AMP_EXT_API void clip_grads_(const TensorList& grads, const at::Tensor& total_norm,
                             double max_norm);

// The number of infs and NaNs of each tensor, in one int64 tensor.
AMP_EXT_API at::Tensor count_nonfinite(const TensorList& tensors);

// How many square roots, reciprocals and quotients of the fast path of steps are not rounded to
// nearest on a device, in one int64 tensor of three. Every `stride`-th of 2^24 roots, 2^23
// reciprocals and 10^8 quotients is tried. None is wrong on a device that works.
AMP_EXT_API at::Tensor count_division_errors(const at::Device& device, int64_t stride = 1);

// Backs the scale off if one of the flags is not 0, and grows it after an interval of clean steps.
AMP_EXT_API void update_scale_(const at::Tensor& scale, const at::Tensor& growth_tracker,
                               const TensorList& found_infs,
                               const LossScaleHyperparameters& hyperparameters,
                               const OptionalTensor& hysteresis_tracker = {});

// Takes parameters that were changed behind their masters over into them. A master that rounds to
// its parameter is left as it is.
AMP_EXT_API void refresh_masters_(const TensorList& params, const TensorList& master_params);

// Averages weights over the steps that have landed, and counts both. The first average is a copy;
// those in bfloat16 are dithered.
AMP_EXT_API void average_weights_(const AverageLists& lists, AverageOptions options = {});

// The lower part of a master whose upper part is a 16-bit parameter: of 16 bits, as bytes in a last
// dimension of two, or of 8. Where the master does not round to the parameter, it is the
// parameter's own.
AMP_EXT_API at::Tensor split_fp32(const at::Tensor& param, const at::Tensor& master,
                                  int64_t low_bits);

// The float32 master of which these are the parts.
AMP_EXT_API at::Tensor join_fp32(const at::Tensor& param, const at::Tensor& residual);

// First moments in 8 bits, as ratios to the roots of second moments, rounded to nearest; all but
// the codes are float32.
AMP_EXT_API at::Tensor quantize_ratios(const at::Tensor& moment, const at::Tensor& second_moment);
AMP_EXT_API at::Tensor dequantize_ratios(const at::Tensor& codes, const at::Tensor& second_moment);

// Moments in 8 bits with an exponent for each block of 32 elements, rounded to nearest: second
// moments are "q8s", momenta "q8m".
AMP_EXT_API std::pair<at::Tensor, at::Tensor> quantize_blockwise(const at::Tensor& moment,
                                                                 const std::string& code);
AMP_EXT_API at::Tensor dequantize_blockwise(const at::Tensor& codes, const at::Tensor& exponents,
                                            const std::string& code);

// One step of the optimizer that has these hyperparameters.
template <typename Hyperparameters>
AMP_EXT_API void step_(const StepLists& lists, const Group<Hyperparameters>& options,
                       const GradientOptions& gradient_options,
                       const StepNames& names = names_of<Hyperparameters>());

}  // namespace amp_ext
