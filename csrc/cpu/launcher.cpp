// Launches on the CPU.
#include "cpu/launcher.h"

#include <atomic>

#include "element.h"

namespace amp_ext::cpu {

namespace {

// Cost (see TileMap) below which work stays in the calling thread: about 0.1 ms. Waking threads may
// take milliseconds.
constexpr int64_t kSerialCost = 131072;

void lower(int64_t* first_nonfinite, int64_t index) {
  if (first_nonfinite != nullptr && index < *first_nonfinite) *first_nonfinite = index;
}

}  // namespace

template <typename Work>
int64_t Launcher::least_in_parallel(const TileMap& tiles, const Work& work) const {
  std::atomic<int64_t> least{kNoTensor};
  parallel_for_(tiles.total_cost(), kSerialCost, [&](int64_t begin, int64_t end) {
    const int64_t index = work(begin, end);
    int64_t so_far = least.load();
    while (index < so_far && !least.compare_exchange_weak(so_far, index)) {
    }
  });
  return least.load();
}

void Launcher::step(const StepLaunch& launch) const {
  const StepDecision decision = StepDecision::read(launch.inputs);
  if (launch.grad_norm != nullptr) *launch.grad_norm = decision.grad_norm;
  if (launch.step_applied != nullptr) *launch.step_applied = decision.step_applied();
  if (decision.skip) return;
  const TileMap tiles = tiles_of(launch.all_args, launch.count);
  least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
    engine_.step(launch, tiles, decision, begin, end);
    return kNoTensor;
  });
  for (int64_t i = 0; i < launch.count; ++i) {
    float* const step = launch.all_args[i].step;
    if (step != nullptr) *step = next_counter(*step);
  }
}

void Launcher::scan(const GradScanLaunch& launch) const {
  const TileMap tiles = tiles_of(launch.all_args, launch.count);
  std::vector<double> sums(launch.sum_of_squares != nullptr ? tiles.number_of_tiles() : 0);
  double* const sums_or_null = launch.sum_of_squares != nullptr ? sums.data() : nullptr;
  const int64_t first = least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
    return engine_.scan(tiles, sums_or_null, launch.skip_nonfinite, begin, end);
  });
  // Add in the order of the tiles, so that the result does not depend on the number of threads.
  for (const double sum : sums) *launch.sum_of_squares += sum;
  if (first != kNoTensor || StepDecision::read({launch.grad_scale}).skip) {
    *launch.found_inf = 1.0f;
  }
  lower(launch.first_nonfinite, first);
}

void Launcher::multiply(const std::vector<KernelTensorArgs>& all_args, const MultiplyInputs& inputs,
                        float* found_inf, int64_t* first_nonfinite) const {
  const float factor = inputs.factor();
  const TileMap tiles = tiles_of(all_args.data(), all_args.size());
  int64_t first = kNoTensor;
  if (factor != 1.0f) {
    first = least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
      return engine_.multiply(tiles, factor, begin, end);
    });
  } else if (found_inf != nullptr) {
    first = least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
      return engine_.scan(tiles, nullptr, false, begin, end);
    });
  }
  if (found_inf != nullptr && (first != kNoTensor || !is_finite(factor))) *found_inf = 1.0f;
  lower(first_nonfinite, first);
}

void Launcher::count_nonfinite(const std::vector<KernelTensorArgs>& all_args,
                               int64_t* counts) const {
  const TileMap tiles = tiles_of(all_args.data(), all_args.size());
  std::vector<std::atomic<int64_t>> found(all_args.size());
  least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
    engine_.count_nonfinite(tiles, found.data(), begin, end);
    return kNoTensor;
  });
  for (size_t i = 0; i < found.size(); ++i) counts[i] += found[i].load();
}

void Launcher::average(const AverageLaunch& launch) const {
  const AverageStep step = AverageStep::of(*launch.weight, *launch.number);
  if (!step.is_taken) return;
  const TileMap tiles = tiles_of(launch.all_args, launch.count);
  least_in_parallel(tiles, [&](int64_t begin, int64_t end) {
    engine_.average(tiles, step, begin, end);
    return kNoTensor;
  });
}

void Launcher::update_scale(const ScaleUpdate& update, const std::vector<OverflowFlag>& flags) {
  bool overflow = false;
  for (const OverflowFlag& flag : flags) {
    const bool found = *flag.found_inf != 0.0f;
    overflow |= found;
    if (update.counts != nullptr) count_flag(flag, found, *update.counts);
  }
  const float scale_before = *update.state.scale;
  update_loss_scale(update.hyperparameters, overflow, update.state);
  if (update.counts != nullptr) {
    count_update(overflow, scale_before, *update.state.scale, *update.counts);
  }
}

}  // namespace amp_ext::cpu
