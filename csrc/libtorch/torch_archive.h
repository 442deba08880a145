// Reads the archives that torch::save writes for the optimizers of torch::optim.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <optional>
#include <string>
#include <vector>

namespace amp_ext::optim {

// Reads an archive of torch::optim's class `name`, and returns its state dict for `param_groups`.
// Returns nullopt if the archive holds something else or torch has no such class. Throws if torch's
// class can't read the archive.
std::optional<c10::IValue> read_torch_archive(
    const std::string& name, torch::serialize::InputArchive& archive,
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups);

}  // namespace amp_ext::optim
