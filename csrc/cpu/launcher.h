// Launches on the CPU: divides the work into ranges, one per thread, and combines the results.
#pragma once

#include <amp_ext/export.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/engine.h"
#include "launches.h"

namespace amp_ext::cpu {

// Calls run(begin, end) for ranges that make up [0, total). A range is at least `grain` long.
using ParallelFor = void (*)(int64_t total, int64_t grain,
                             const std::function<void(int64_t, int64_t)>& run);

class AMP_EXT_API Launcher {
 public:
  // If `asks_ahead` is true, the kernels prefetch.
  Launcher(const Engine& engine, ParallelFor parallel_for, bool asks_ahead)
      : engine_(engine), parallel_for_(parallel_for), asks_ahead_(asks_ahead) {}

  void step(const StepLaunch& launch) const;
  void scan(const GradScanLaunch& launch) const;
  void multiply(const std::vector<KernelTensorArgs>& all_args, const MultiplyInputs& inputs,
                float* found_inf, int64_t* first_nonfinite) const;
  void count_nonfinite(const std::vector<KernelTensorArgs>& all_args, int64_t* counts) const;
  void average(const AverageLaunch& launch) const;
  static void update_scale(const ScaleUpdate& update, const std::vector<OverflowFlag>& flags);

 private:
  TileMap tiles_of(const KernelTensorArgs* all_args, size_t count) const {
    return {all_args, static_cast<int64_t>(count), asks_ahead_};
  }
  // Runs one parallel region over the tiles of all tensors. Returns the smallest result of work().
  template <typename Work>
  int64_t least_in_parallel(const TileMap& tiles, const Work& work) const;

  const Engine& engine_;
  ParallelFor parallel_for_;
  bool asks_ahead_;
};

}  // namespace amp_ext::cpu
