// The main function of a program that runs kernels. The arguments of one that holds broken kernels
// name one of them and, to run it as it should be, "repaired". It exits with 1 if the emulator
// reports an error or a result is wrong.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "cuda/platform.h"

using amp_ext::cuda::launch;

inline std::string kernel;  // that is to run

// Runs it. Returns whether the result is right; defined by each program.
template <bool kRepaired>
bool run();

// Whether the numbers are as they should be; says so if not.
template <typename T>
bool equal(const std::vector<T>& actual, const std::vector<T>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (actual[i] == expected[i]) continue;
    std::fprintf(stderr, "wrong result at %zu: %g, not %g\n", i, static_cast<double>(actual[i]),
                 static_cast<double>(expected[i]));
    return false;
  }
  return true;
}

// 0, 1, 2, ... times `factor`.
inline std::vector<float> multiples(size_t count, float factor) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = factor * static_cast<float>(i);
  return values;
}

int main(int argc, char** argv) {
  if (argc > 1) kernel = argv[1];
  try {
    return (argc > 2 ? run<true>() : run<false>()) ? 0 : 1;
  } catch (const cuda_emulator::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
