// Every kind of number that the tensors of a step may have, whether a kernel takes them together or
// not.
#pragma once

#include "elements/numbers.h"
#include "elements/storage.h"

inline constexpr amp_ext::DType kDTypes[] = {amp_ext::DType::kFloat32, amp_ext::DType::kFloat64,
                                             amp_ext::DType::kFloat16, amp_ext::DType::kBFloat16};

struct Numbers {
  amp_ext::DType param, grad;
  amp_ext::Master master;
  amp_ext::BufferFormat formats[2];  // of the first buffer, and of those behind it

  // Tensors of such numbers have whole blocks.
  bool have_blocks() const { return formats[1] == amp_ext::BufferFormat::kBlockwise8; }
};

// Calls visit(numbers) for all of them, in which a kernel of that many buffers differs.
template <typename Visit>
void for_each_numbers(int buffers, const Visit& visit) {
  using amp_ext::BufferFormat;
  using amp_ext::Master;
  constexpr Master kMasters[] = {Master::kNone, Master::kFloat32, Master::kLow16, Master::kLow8};
  constexpr BufferFormat kFormats[][2] = {
      {BufferFormat::kFloat32, BufferFormat::kFloat32},
      {BufferFormat::kFloat64, BufferFormat::kFloat64},
      {BufferFormat::kFloat16, BufferFormat::kFloat16},
      {BufferFormat::kBFloat16, BufferFormat::kBFloat16},
      {BufferFormat::kRatio8, BufferFormat::kBFloat16},
      {BufferFormat::kRatio8, BufferFormat::kBlockwise8},
      {BufferFormat::kBlockwise8, BufferFormat::kBlockwise8},
  };
  for (const amp_ext::DType param : kDTypes) {
    for (const amp_ext::DType grad : kDTypes) {
      for (const Master master : kMasters) {
        for (const auto& formats : kFormats) {
          visit(Numbers{param, grad, master, {formats[0], formats[1]}});
          if (buffers == 0) break;  // they'd all be the same
        }
      }
    }
  }
}
