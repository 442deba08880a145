// The CPU engine: the kernels of one instruction set, and the choice among the sets built in.
#pragma once

#include <atomic>
#include <cstdint>

#include "cpu/tile_map.h"
#include "element.h"
#include "launches.h"

namespace amp_ext::cpu {

// Kernels work on the tiles that start in [begin, end) of a TileMap's axis of cost.
struct Engine {
  const char* name;
  void (*step)(const StepLaunch& launch, const TileMap& tiles, const StepDecision& factor,
               int64_t begin, int64_t end);
  // Returns the least number of a gradient that is inf or NaN, or kNoTensor. Fills
  // sums[tiles.number_of_tiles()], unless null, with the sums of squares of its tiles: inf or NaN
  // where a gradient is, unless those are left out.
  int64_t (*scan)(const TileMap& tiles, double* sums, bool skip_nonfinite, int64_t begin,
                  int64_t end);
  // Multiplies gradients in place. Returns the least number of one that was inf or NaN before.
  int64_t (*multiply)(const TileMap& tiles, float factor, int64_t begin, int64_t end);
  // Adds the numbers of infs and NaNs to counts[records].
  void (*count_nonfinite)(const TileMap& tiles, std::atomic<int64_t>* counts, int64_t begin,
                          int64_t end);
  // One step of averages, as an AverageLaunch has them.
  void (*average)(const TileMap& tiles, const AverageStep& step, int64_t begin, int64_t end);
};

// One for each source that includes cpu/engine_body.h.
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

// The widest engine that the processor runs, or the one that the environment variable
// AMP_EXT_CPU_ISA names (plain, avx2, avx512). Null if the name is unknown or the processor lacks
// it.
const Engine* select_engine();

}  // namespace amp_ext::cpu
