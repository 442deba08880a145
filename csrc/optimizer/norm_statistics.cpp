// Allocates, moves and loads the statistics, and reads their copy in host memory.
#include "optimizer/norm_statistics.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tensors/tensor_memory.h"
#include "tensors/to_device.h"

namespace amp_ext {

NormStatistics::NormStatistics(const NormGuardHyperparameters& its_hyperparameters)
    : hyperparameters(its_hyperparameters) {
  allocate(at::kCPU);
  load({});
}

NormStatistics::~NormStatistics() { wait_before_end(device()); }

void NormStatistics::allocate(const at::Device& device) {
  const OutsideInferenceMode normal;
  bytes_ = bytes_on_device(device, sizeof(NormGuardMemory));
  mirror_ = bytes_on_host(device, sizeof(NormGuardMemory));
}

void NormStatistics::fill(NormGuardMemory memory) {
  const OutsideInferenceMode normal;
  memory.hyperparameters = hyperparameters;
  memory.mirror = as<NormGuardMemory>(mirror_);
  *memory.mirror = memory;
  bytes_.copy_(mirror_);
}

void NormStatistics::move_to(const at::Device& device) {
  if (bytes_.device() == device) return;
  synchronize(bytes_.device());
  const at::Tensor before = mirror_;
  retired_.push_back(bytes_);  // captured CUDA graphs still write both tensors when replayed
  retired_.push_back(before);
  allocate(device);
  fill(*as<NormGuardMemory>(before));
}

void NormStatistics::load(const NormSummary& summary) {
  NormGuardMemory memory;
  NormSummary::for_each_field(
      [&](const char* /*name*/, auto field) { memory.*field = summary.*field; });
  memory.limit = next_limit(memory, hyperparameters);
  first_norm_ = memory.norms;
  synchronize(device());
  fill(memory);
}

at::Tensor NormStatistics::bytes_on(const at::Device& device) const {
  if (bytes_.device() == device) return bytes_;
  const int64_t size = sizeof(NormGuardMemory) - sizeof(NormGuardMemory::history);
  return to_device(bytes_.narrow(0, 0, size), device);
}

NormSummary NormStatistics::read(bool wait) const {
  if (wait) synchronize(device());
  const auto& mirror = *as<NormGuardMemory>(mirror_);
  NormSummary summary;
  read_consistently(mirror, [&] { summary = mirror; });
  return summary;
}

NormHistory NormStatistics::history(bool wait) const {
  if (wait) synchronize(device());
  const auto& mirror = *as<NormGuardMemory>(mirror_);
  NormGuardMemory memory;
  read_consistently(mirror,
                    [&] { std::memcpy(static_cast<void*>(&memory), &mirror, sizeof memory); });
  const int64_t first = std::max<int64_t>(first_norm_, memory.norms - kHistory);
  SignedHistory history(memory.history, first, memory.norms);
  return {first + 1, std::move(history.numbers), std::move(history.have_sign)};
}

bool NormStatistics::must_warn() {
  if (has_warned_) return false;
  has_warned_ = read(/*wait=*/false).similar_norms >= kManySimilarNorms;
  return has_warned_;
}

const char* NormStatistics::warning() {
  return "NormGuard: 64 norms in a row lie within 1e-4 of one value. The gradients were probably "
         "clipped before the optimizer, which hides outliers from the guard. Clip with "
         "max_grad_norm of the optimizer, and turn off the clipping of the trainer.";
}

}  // namespace amp_ext
