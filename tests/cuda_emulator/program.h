// The main function of a program that runs a kernel as it is broken, or with the argument
// "repaired" as it should be. It exits with 1 if the emulator reports an error or a result is
// wrong.
#pragma once

#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda/platform.h"

using amp_ext::cuda::launch;

// Runs the kernel. Returns whether the result is right; defined by each program.
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
  const bool repaired = argc > 1 && std::strcmp(argv[1], "repaired") == 0;
  try {
    return (repaired ? run<true>() : run<false>()) ? 0 : 1;
  } catch (const cuda_emulator::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
