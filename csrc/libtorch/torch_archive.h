// Archives that torch::save wrote of optimizers of torch::optim.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <optional>
#include <string>
#include <vector>

namespace amp_ext::optim {

// The state dict of such an archive for the class of this name and its groups; none if the archive
// is of something else, or torch has no such class. Throws where torch's class can't read it.
std::optional<c10::IValue> read_torch_archive(
    const std::string& name, torch::serialize::InputArchive& archive,
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups);

}  // namespace amp_ext::optim
