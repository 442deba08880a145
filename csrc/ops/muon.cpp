// Checks the parameters of a step of Muon, and runs its launches and matrix products.
#include "ops/muon.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>

#include "ops/scalars.h"
#include "tensors/tensor_memory.h"

namespace amp_ext {

// The device, group and layout that all matrices of a chunk share.
struct MuonStep::Shape {
  at::Device device;
  int64_t group;
  at::ScalarType dtype;
  int64_t rows, columns;
  int64_t matrices;   // number of matrices in one parameter
  bool is_by_column;  // whether a column is contiguous, not a row

  int64_t least() const { return std::min(rows, columns); }
  int64_t numel() const { return matrices * rows * columns; }
  // Number of bfloat16 that hold one copy of a batch of parameters, in whole cache lines.
  static int64_t aligned(int64_t count) { return (count + 63) / 64 * 64; }
  int64_t matrices_of(int64_t params) const { return std::max<int64_t>(2, params * matrices); }
  // Scratch memory of a batch, in copies of it in bfloat16: two, and two more for the result in
  // float32 that float16 parameters need.
  int64_t copies() const { return dtype == at::kHalf ? 4 : 2; }
  int64_t scratch_of(int64_t params) const {
    const int64_t count = matrices_of(params);
    return copies() * aligned(count * rows * columns) + 2 * aligned(count * least() * least());
  }
  // Returns the largest number of parameters in one chunk.
  int64_t params_in(int64_t bytes) const {
    const int64_t of_param = 2 * matrices * (copies() * rows * columns + 2 * least() * least());
    return std::max<int64_t>(1, bytes / of_param);
  }
  double lr_factor(const MuonOptions& options) const {
    const auto out = static_cast<double>(options.transposed ? columns : rows);
    const auto in = static_cast<double>(options.transposed ? rows : columns);
    switch (options.adjust_lr) {
      case AdjustLr::kOriginal:
        return std::sqrt(std::max(1.0, out / in));
      case AdjustLr::kMatchRmsAdamW:
        return 0.2 * std::sqrt(std::max(out, in));
      case AdjustLr::kSpectralUnclamped:
        return std::sqrt(out / in);
    }
    return 1.0;
  }

  auto key() const {
    return std::make_tuple(device.type(), device.index(), group, dtype, rows, columns, matrices,
                           is_by_column);
  }
  friend bool operator<(const Shape& a, const Shape& b) { return a.key() < b.key(); }
};

void MuonStep::clear() {
  params_.clear();
  chunks_.clear();
}

void MuonStep::prepare(const StepGroups& momentum, const std::vector<MuonOptions>& options) {
  const at::NoGradGuard no_grad;
  std::map<Shape, std::vector<const ParamTensors*>> by_shape;
  for (const ParamTensors& tensors : params_) {
    const at::Tensor& param = tensors[kParam];
    const MuonOptions& own = options[tensors.group];
    const auto check = [&](bool ok, const auto&... message) {
      TORCH_CHECK(ok, operation_, ": ",
                  name_of_tensor(naming_, "param", tensors.group, tensors.index), " must ",
                  message...);
    };
    check(param.scalar_type() != at::kDouble,
          "be Float, Half or BFloat16 for Muon, whose matrix products are in BFloat16, got Double");
    check(param.dim() >= 2, "have two dimensions for Muon, got sizes ", param.sizes(),
          ". Step it with AdamW");
    check(param.dim() == 2 || own.flatten.has_value(), "have two dimensions, got sizes ",
          param.sizes(),
          ". Set flatten to True for one matrix [size(0), rest], or to False for a batch of "
          "matrices");
    if (param.numel() == 0) continue;
    const bool is_flattened = own.flatten.value_or(true);
    const int64_t rows = param.size(is_flattened ? 0 : -2);
    const int64_t matrices = is_flattened ? 1 : param.numel() / (rows * param.size(-1));
    const bool is_by_column =
        param.dim() == 2 && !param.is_contiguous() && param.is_non_overlapping_and_dense();
    by_shape[{param.device(), tensors.group, param.scalar_type(), rows,
              param.numel() / (rows * matrices), matrices, is_by_column}]
        .push_back(&tensors);
  }
  std::vector<Shape> shapes;
  std::map<c10::DeviceIndex, at::Tensor> memories;  // scratch memory by the index of the device
  for (const auto& [shape, params] : by_shape) {
    const MuonOptions& own = options[shape.group];
    const auto count = static_cast<int64_t>(params.size());
    const int64_t most = shape.params_in(own.scratch_bytes);
    const int64_t chunks = (count + most - 1) / most;
    for (int64_t i = 0; i < chunks; ++i) {
      Chunk& chunk = chunks_.emplace_back(operation_, naming_, buffer_name_);
      chunk.options = &own;
      chunk.params.assign(params.begin() + count * i / chunks,
                          params.begin() + count * (i + 1) / chunks);
      shapes.push_back(shape);
      at::Tensor& memory = memories[shape.device.index()];
      const int64_t needed = shape.scratch_of(static_cast<int64_t>(chunk.params.size()));
      if (!memory.defined() || memory.numel() < needed) {
        memory = at::Tensor();  // frees it first
        memory = at::empty({needed}, at::TensorOptions(shape.device).dtype(at::kBFloat16));
      }
    }
  }
  for (size_t i = 0; i < chunks_.size(); ++i) {
    prepare_chunk(chunks_[i], shapes[i], momentum, memories[shapes[i].device.index()]);
  }
}

void MuonStep::prepare_chunk(Chunk& chunk, const Shape& shape, const StepGroups& momentum,
                             at::Tensor& memory) {
  const MuonOptions& options = *chunk.options;
  const auto params = static_cast<int64_t>(chunk.params.size());
  const int64_t count = shape.matrices_of(params), numel = shape.rows * shape.columns;
  int64_t taken = 0;
  const auto take = [&](int64_t size) {
    const at::Tensor part = memory.narrow(0, taken, size);
    taken += Shape::aligned(size);
    return part;
  };
  chunk.is_wide = shape.rows <= shape.columns;
  for (int i = 0; i < 2; ++i) {
    const at::Tensor part = take(count * numel);
    chunk.stored[i] = shape.is_by_column ? part.view({count, shape.columns, shape.rows}).mT()
                                         : part.view({count, shape.rows, shape.columns});
    chunk.wide[i] = part.view({count, shape.least(), numel / shape.least()});
  }
  for (at::Tensor& product : chunk.products) {
    product =
        take(count * shape.least() * shape.least()).view({count, shape.least(), shape.least()});
  }
  // The result is in the copy that the last product writes, unless that is transposed.
  chunk.is_transposed = options.ns_steps > 0 && chunk.is_wide == shape.is_by_column;
  chunk.is_padded = params * shape.matrices < count;
  chunk.result = static_cast<int>((options.ns_steps + (chunk.is_transposed ? 1 : 0)) % 2);
  at::Tensor updates = chunk.stored[chunk.result];
  if (shape.dtype == at::kHalf) {
    updates =
        take(2 * count * numel).view(at::kFloat).as_strided(updates.sizes(), updates.strides());
    chunk.in_float32 = updates;
  }
  const double factor = shape.lr_factor(options);
  const StepGroups::Group& group = momentum.groups[shape.group];
  const auto& own = static_cast<const MuonHyperparameters&>(*group.hyperparameters);
  chunk.hyperparameters.resize(momentum.groups.size());
  SgdHyperparameters& second = chunk.hyperparameters[shape.group];
  second.lr = own.lr * factor;
  second.weight_decay = own.weight_decay / factor;  // decays by the learning rate as it was
  second.decoupled_weight_decay = true;
  second.cautious_weight_decay = own.cautious_weight_decay;
  second.dither = own.dither;
  chunk.update_groups.refer_to(chunk.hyperparameters);
  if (group.lr.has_value()) chunk.update_groups.groups[shape.group].lr = *group.lr * factor;
  TensorList counters;
  for (const ParamTensors* const each : chunk.params) {
    if (each->tensors[kStep] != nullptr) counters.push_back((*each)[kStep].reshape({}));
  }
  if (counters.size() == chunk.params.size()) chunk.steps = at::stack(counters);
  chunk.views.reserve(3 * chunk.params.size());  // the launches refer to the elements
  for (int64_t i = 0; i < params; ++i) {
    const ParamTensors& each = *chunk.params[i];
    const at::Tensor& param = each[kParam];
    // Whether the parameter's elements are in the order of the scratch memory.
    const bool is_flattened = options.flatten.value_or(true) && param.dim() > 2;
    const bool has_order = param.is_non_overlapping_and_dense() &&
                           (param.is_contiguous() || param.dim() == 2 ||
                            (is_flattened && param.stride(0) * param.size(0) == param.numel()));
    const auto view_of = [&](const at::Tensor& batch) -> const at::Tensor& {
      const int64_t offset = batch.storage_offset() + i * shape.numel();
      return chunk.views.emplace_back(
          has_order ? batch.as_strided(param.sizes(), param.strides(), offset)
                    : batch.as_strided({shape.numel()}, {1}, offset).view(param.sizes()));
    };
    ParamTensors first = each;
    first.set(kParam, view_of(chunk.stored[0]));
    first.drop(kMaster);
    if (chunk.steps.defined()) first.set(kStep, chunk.views.emplace_back(chunk.steps[i]));
    chunk.momentum.add(first, momentum);
    ParamTensors last = each;
    last.set(kGrad, view_of(updates));
    last.drop(kExponents);
    last.drop(kBuffer0);
    last.buffer_count = 0;
    chunk.update.add(last, chunk.update_groups);
  }
}

// The iteration of Newton and Schulz, X <- a X + (b G + c G G) X with G = X X^T, moves all singular
// values of X, divided by its norm, towards 1. It is rounded where torch.optim.Muon rounds, because
// on matrices of low rank each rounding decides about the result.
at::Tensor MuonStep::orthogonalize(const Chunk& chunk) {
  const MuonOptions& options = *chunk.options;
  const at::Tensor& stored = chunk.stored[0];
  // Squares must neither overflow nor vanish, so the norm is taken after a division by the power of
  // 2 in the largest element, which changes no rounding. A norm of 0 must not divide.
  const double infinity = std::numeric_limits<double>::infinity();
  const at::Tensor largest = at::linalg_vector_norm(stored, infinity, {{1, 2}}, /*keepdim=*/true);
  const at::Tensor power = largest.to(at::kFloat)
                               .view(at::kInt)
                               .bitwise_and(0x7f800000)
                               .view(at::kFloat)
                               .clamp(FLT_MIN, 0x1p127)
                               .to(at::kBFloat16);
  at::Tensor divided = chunk.stored[1];
  at::div_out(divided, stored, power);
  const at::Tensor norms = at::stack(at::_foreach_norm(divided.unbind())).view({-1, 1, 1});
  const at::Tensor whole = norms.to(at::kDouble) * power.to(at::kDouble) * options.norm_factor;
  const double least = std::max(options.eps, static_cast<double>(FLT_MIN));
  stored.div_(whole.to(at::kBFloat16).clamp_min_(least));
  at::Tensor x = chunk.is_wide ? stored : stored.mT();
  at::Tensor gram = chunk.products[0], polynomial = chunk.products[1];
  for (int64_t step = 0; step < options.ns_steps; ++step) {
    const auto last = static_cast<int64_t>(options.ns_coefficients.size()) - 1;
    const auto [a, b, c] = options.ns_coefficients[std::min(step, last)];
    at::Tensor next = chunk.wide[(step + 1) % 2];
    at::bmm_out(gram, x, x.mT());
    at::baddbmm_out(polynomial, gram, gram, gram, b, c);
    at::baddbmm_out(next, x, polynomial, x, a, 1.0);
    x = next;
  }
  at::Tensor result = chunk.stored[chunk.result];
  if (chunk.is_transposed) result.copy_(chunk.is_wide ? x : x.mT());
  // The sum of a matrix tells whether all elements are finite; `nan` is 0 or NaN.
  const at::Tensor sums = result.sum({1, 2}, /*keepdim=*/true);
  const at::Tensor nan = sums - sums;
  result.add_(nan);
  if (chunk.in_float32.defined()) chunk.in_float32.copy_(result);
  return at::isnan(nan).sum();
}

void MuonStep::run(StepGroups& momentum, const StepInputs& inputs, const OptionalTensor& skipped,
                   StepScratch& scratch, StepProgress& progress) {
  const at::NoGradGuard no_grad;
  progress.params += static_cast<int64_t>(params_.size());
  for (Chunk& chunk : chunks_) {
    const auto count = static_cast<int64_t>(chunk.params.size());
    const at::Device device = chunk.stored[0].device();
    const at::Tensor applied = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
    StepInputs of_momentum = inputs;
    of_momentum.step_applied = applied;
    StepProgress first, second;
    chunk.momentum.run(momentum, of_momentum, scratch, first);
    if (inputs.step_applied.has_value()) inputs.step_applied->copy_(applied, true);
    progress.was_skipped |= first.was_skipped;
    if (first.was_skipped) continue;
    progress.stepped_in_part += count;
    if (chunk.is_padded) chunk.stored[0][1].zero_();
    const at::Tensor not_finite = orthogonalize(chunk);
    if (skipped.has_value()) {
      skipped->add_(to_device(not_finite * applied.to(at::kLong), skipped->device()));
    }
    StepInputs of_update;
    of_update.gradients.found_inf = 1 - applied;
    of_update.gradients.skip_nonfinite = true;
    chunk.update.run(chunk.update_groups, of_update, scratch, second);
    progress.stepped_in_part -= count;
    progress.stepped += count;
  }
}

}  // namespace amp_ext
