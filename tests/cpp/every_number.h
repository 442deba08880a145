// Every kind of number that the tensors of a step may have, whether a kernel takes them together or
// not.
#pragma once

#include <algorithm>
#include <array>
#include <set>

#include "formats/buffer_descriptions.h"
#include "formats/numbers.h"
#include "formats/storage.h"
#include "launches.h"

inline constexpr amp_ext::DType kDTypes[] = {amp_ext::DType::kFloat32, amp_ext::DType::kFloat64,
                                             amp_ext::DType::kFloat16, amp_ext::DType::kBFloat16};

struct Numbers {
  amp_ext::DType param, grad;
  amp_ext::Master master;
  std::array<amp_ext::BufferFormat, amp_ext::kMaxBuffers> formats;  // as many as there are buffers

  // Tensors of such numbers have whole blocks.
  bool have_blocks() const {
    return std::count(formats.begin(), formats.end(), amp_ext::BufferFormat::kBlockwise8) > 0;
  }
};

// The formats in which all buffers may be: of one dtype, and those of each set of codes.
inline auto formats_of(const amp_ext::BufferDescriptions& buffers) {
  using amp_ext::BufferFormat;
  using amp_ext::Codes;
  std::set<decltype(Numbers::formats)> found;
  for (const amp_ext::DType dtype : kDTypes) {
    decltype(Numbers::formats) formats{};
    std::fill_n(formats.begin(), buffers.count, amp_ext::format_of(dtype));
    found.insert(formats);
  }
  for (const Codes codes : {Codes::kAll, Codes::kAllButRoots, Codes::kRatios}) {
    decltype(Numbers::formats) formats{};
    for (int i = 0; i < buffers.count; ++i) {
      const amp_ext::BufferCode code = buffers.each[i].code;
      formats[i] = is_among(code, codes) ? amp_ext::format_of(code) : BufferFormat::kBFloat16;
    }
    found.insert(formats);
  }
  return found;
}

// Calls visit(numbers) for all of them, in which a kernel with these buffers differs.
template <typename Visit>
void for_each_numbers(const amp_ext::BufferDescriptions& buffers, const Visit& visit) {
  using amp_ext::Master;
  constexpr Master kMasters[] = {Master::kNone, Master::kFloat32, Master::kResidual16,
                                 Master::kResidual8};
  for (const amp_ext::DType param : kDTypes) {
    for (const amp_ext::DType grad : kDTypes) {
      for (const Master master : kMasters) {
        for (const auto& formats : formats_of(buffers)) {
          visit(Numbers{param, grad, master, formats});
        }
      }
    }
  }
}
