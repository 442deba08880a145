// Passes more bytes of arguments than a driver of CUDA 12.0 takes; repaired, as many as it takes.
#include "program.h"

template <int kBytes>
struct Arguments {
  char bytes[kBytes - sizeof(int*)];
  int* launched;
};

template <int kBytes>
__global__ void count_one(const Arguments<kBytes> __grid_constant__ arguments) {
  *arguments.launched += 1;
}

template <bool kRepaired>
bool run() {
  constexpr int kBytes = kRepaired ? 4096 : 4104;
  std::vector<int> launched = {0};
  Arguments<kBytes> arguments = {};
  arguments.launched = launched.data();
  const int error = launch(count_one<kBytes>, 1, 1, nullptr, arguments);
  if (error != cudaSuccess) std::fprintf(stderr, "the launch fails with error %d\n", error);
  return error == cudaSuccess && equal(launched, {1});
}
