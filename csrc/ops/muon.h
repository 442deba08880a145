// A step of Muon: each matrix is updated by its momentum, made nearly orthogonal.
//
// The step consists of two launches with matrix products between them. The first writes momenta,
// and the update in bfloat16; the second is a step of SGD, whose gradient is the orthogonalized
// update. Matrices of one shape are taken together, as many as the scratch memory holds.
#pragma once

#include <ATen/core/Tensor.h>
#include <amp_ext/export.h>
#include <amp_ext/hyperparameters.h>
#include <amp_ext/options.h>

#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "ops/step.h"

namespace amp_ext {

// One step. An object may be used for many steps, one after another.
class AMP_EXT_API MuonStep {
 public:
  MuonStep(std::string operation, Naming naming, std::string buffer_name)
      : operation_(std::move(operation)), naming_(naming), buffer_name_(std::move(buffer_name)) {}

  void clear();

  // Adds a parameter. The caller keeps the tensors alive until the step ends.
  void add(const ParamTensors& tensors) { params_.push_back(tensors); }

  // Checks all parameters, and allocates all memory that the step needs. `momentum` and `options`
  // have one element for each group, and must outlive the step. Throws if a tensor can't be used.
  void prepare(const StepGroups& momentum, const std::vector<MuonOptions>& options);

  // Updates all parameters. Matrices whose iteration is not finite are counted in `skipped`, one
  // int64 on any device.
  void run(StepGroups& momentum, const StepInputs& inputs, const OptionalTensor& skipped,
           StepScratch& scratch, StepProgress& progress);

 private:
  // Parameters of one group and shape.
  struct Chunk {
    Chunk(const std::string& operation, Naming naming, const std::string& buffer_name)
        : momentum(operation, naming, {buffer_name}), update(operation, naming, {}) {}

    std::vector<const ParamTensors*> params;
    const MuonOptions* options = nullptr;
    // The batch of matrices, [count, rows, columns] in bfloat16, in two copies: products can't
    // write over their input. `wide` are the same two with at most as many rows as columns.
    at::Tensor stored[2], wide[2];
    at::Tensor products[2];  // [count, rows, rows] of `wide`
    at::Tensor in_float32;   // the result for float16 parameters, or undefined
    at::Tensor steps;        // copies of the step counters, for the first launch; or undefined
    // Whether a matrix of 0 was added, because products of one matrix may give other bits.
    bool is_padded = false;
    bool is_wide = false;        // whether the matrices have at most as many rows as columns
    bool is_transposed = false;  // whether the last product gives the transposed result
    int result = 0;              // the copy with the result, for the second launch
    TensorList views;            // the tensors that the launches refer to
    Step momentum, update;       // the two launches
    StepGroups update_groups;
    std::vector<SgdHyperparameters> hyperparameters;  // the hyperparameters of `update`
  };
  struct Shape;

  void prepare_chunk(Chunk& chunk, const Shape& shape, const StepGroups& momentum,
                     at::Tensor& memory);
  // Returns how many matrices of the batch were not finite; their elements become NaN.
  static at::Tensor orthogonalize(const Chunk& chunk);

  std::string operation_;
  Naming naming_;
  std::string buffer_name_;
  std::vector<ParamTensors> params_;
  std::deque<Chunk> chunks_;
};

}  // namespace amp_ext
