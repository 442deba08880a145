// The CPU engine: the kernels of one instruction set, and the choice among the sets built in.
#pragma once

#include <cstdint>

#include "cpu/tile_map.h"
#include "multi_tensor.h"

namespace amp_ext::cpu {

// Kernels work on the tiles that start in [begin, end) of a TileMap's axis of cost.
struct Engine {
  const char* name;
  void (*step)(const StepLaunch& launch, const TileMap& tiles, float inv_scale, int64_t begin,
               int64_t end);
  // Both return whether a gradient is inf or NaN.
  bool (*check_finite)(const TileMap& tiles, int64_t begin, int64_t end);
  bool (*unscale)(const TileMap& tiles, float inv_scale, int64_t begin, int64_t end);
};

extern const Engine kPlainEngine;
#if defined(__x86_64__)
extern const Engine kAvx2Engine;
#endif

// The widest engine that the processor runs, or the one that the environment variable
// AMP_EXT_CPU_ISA names (plain, avx2). Null if the name is unknown or the processor lacks it.
const Engine* select_engine();

}  // namespace amp_ext::cpu
