// The CPU engine: the kernels of one instruction set, and the choice of the set.
#pragma once

#include <amp_ext/export.h>

#include <atomic>
#include <cstdint>

#include "cpu/tile_map.h"
#include "element.h"
#include "launches.h"

namespace amp_ext::cpu {

// The kernels of one instruction set. Each kernel works on the tiles that start in [begin, end) of
// the cost axis of a TileMap.
struct Engine {
  const char* name;
  void (*step)(const StepLaunch& launch, const TileMap& tiles, const StepDecision& decision,
               int64_t begin, int64_t end);
  // Returns the lowest index (KernelTensorArgs::group) of a gradient with inf or NaN, or kNoTensor.
  // If `sums` is not null, sums[tiles.number_of_tiles()] receives each tile's sum of squares,
  // without inf and NaN if skip_nonfinite is true.
  int64_t (*scan)(const TileMap& tiles, double* sums, bool skip_nonfinite, int64_t begin,
                  int64_t end);
  // Multiplies gradients in place. Returns the lowest index of a gradient that had inf or NaN
  // before, or kNoTensor.
  int64_t (*multiply)(const TileMap& tiles, float factor, int64_t begin, int64_t end);
  // Adds the number of infs and NaNs in tensor i of `tiles` to counts[i].
  void (*count_nonfinite)(const TileMap& tiles, std::atomic<int64_t>* counts, int64_t begin,
                          int64_t end);
  // Updates the averages in AverageLaunch::all_args by one move.
  void (*average)(const TileMap& tiles, const AverageStep& step, int64_t begin, int64_t end);
};

// The engines, one for each source that includes cpu/engine_body.h.
namespace plain {
extern const Engine kEngine;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Engine kEngine;
}
namespace avx512 {
extern const Engine kEngine;
}
#endif

// Returns the widest engine for the processor, or the one that the environment variable
// AMP_EXT_CPU_ISA names (plain, avx2, avx512); null if that engine is unknown or can't run.
AMP_EXT_API const Engine* select_engine();

}  // namespace amp_ext::cpu
