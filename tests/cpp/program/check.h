// What every check of the program uses.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <functional>
#include <map>
#include <stdexcept>
#include <string>

using Checks = std::map<std::string, std::function<void()>>;

inline Checks& all_checks() {
  static Checks checks;
  return checks;
}

// Begins a check, which `program check NAME` runs.
#define AMP_EXT_CHECK(name)                                          \
  void name();                                                       \
  const bool has_##name = all_checks().emplace(#name, &name).second; \
  void name()

// Fails the check that it stands in.
#define CHECK_THAT(condition)                                                           \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      throw std::runtime_error(std::string(__FILE__) + ":" + std::to_string(__LINE__) + \
                               ": " #condition);                                        \
    }                                                                                   \
  } while (false)

// The text of the error that a call throws; empty if it throws none.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return {};
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Fails it if a call does not throw, or an error without these words.
#define CHECK_REFUSED(call, words)                            \
  do {                                                        \
    const std::string refusal = error_of([&] { call; });      \
    CHECK_THAT(!refusal.empty() && contains(refusal, words)); \
  } while (false)

using Dict = c10::impl::GenericDict;

inline Dict new_dict() { return Dict(c10::AnyType::get(), c10::AnyType::get()); }
inline c10::impl::GenericList new_list() { return c10::impl::GenericList(c10::AnyType::get()); }
