// The emulated module has no CPU engine, because the emulated CUDA kernels take CPU tensors.
#include "cpu/engine.h"

const amp_ext::cpu::Engine* amp_ext::cpu::select_engine() { return nullptr; }
