// A minimal tuple: one value for each buffer of a kernel, each of its own type. An aggregate, which
// the compiler keeps in registers.
#pragma once

#include <utility>

#include "numeric.h"

namespace amp_ext {

template <int index, typename T>
struct Entry {
  T value;
};

template <typename Indices, typename... T>
struct EntriesAt;
template <int... index, typename... T>
struct EntriesAt<std::integer_sequence<int, index...>, T...> : Entry<index, T>... {};

template <typename... T>
using Entries = EntriesAt<std::make_integer_sequence<int, sizeof...(T)>, T...>;

// Returns the value at an index.
template <int index, typename T>
AMP_EXT_INLINE T& entry(Entry<index, T>& entries) {
  return entries.value;
}
template <int index, typename T>
AMP_EXT_INLINE const T& entry(const Entry<index, T>& entries) {
  return entries.value;
}

}  // namespace amp_ext
